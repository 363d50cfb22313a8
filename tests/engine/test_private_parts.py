"""A Triton, torch or Python without a private part that the suite uses: a run goes on."""

import sys
from types import SimpleNamespace

import pytest
import torch

from conformance import private_parts
from conformance.engine.child.compiling import hash_callees_first, kernels_of
from conformance.engine.options import Options
from conformance.engine.run.session import judge
from conformance.engine.run.verdict import Verdict
from conformance.private_parts import PARTS, available, missing
from conformance.report.terminal import lines
from tests.common.fast import interpreted

# without its own parts the interpreter runs no kernel
DELETED = [part for part in PARTS.values() if part.module in ("triton.runtime.jit", "triton.runtime.build")]


@pytest.mark.parametrize("name", PARTS)
def test_the_installed_versions_have_each_part(name):
    __import__(PARTS[name].module)
    assert available(name) is not None
    assert missing() == []


@pytest.mark.parametrize("name", PARTS)
def test_permute_is_conformant_with_the_part_under_another_name(name, tmp_path, monkeypatch):
    (tmp_path / "without.py").write_text(
        "from dataclasses import replace\n"
        "import multiprocessing.forkserver, torch.utils._python_dispatch\n"
        "import torch.testing._internal.distributed.fake_pg\n"
        "from conformance.private_parts import PARTS\n"
        "from moe_ref import permute\n"
        f"PARTS[{name!r}] = replace(PARTS[{name!r}], path='renamed')\n"
    )
    monkeypatch.chdir(tmp_path)
    verdict = judge(Options("without", profile="smoke", device="cpu", jobs=1, function="permute"))
    assert verdict.verdict == "CONFORMANT", lines(verdict)
    if not name.startswith("triton."):  # the reference loads no Triton
        (sentence,) = verdict.missing_parts
        assert f" has no {PARTS[name].module}.renamed: " in sentence


def test_a_version_that_nobody_has_tried_switches_the_part_off(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.0.1+cpu")
    sentences = missing()
    assert available("torch._neg_view") is None
    assert (
        "torch 9.0.1+cpu is not known to have the same torch._neg_view: "
        "inputs of the layout 'negated' are plain tensors" in sentences
    )


@interpreted
@pytest.mark.parametrize("part", DELETED, ids=lambda part: part.path)
def test_permute_is_conformant_without_it(part, tmp_path, monkeypatch):
    owner, _, name = part.path.rpartition(".")
    path = f"sys.modules[{part.module!r}]" + (f".{owner}" if owner else "")
    (tmp_path / "renamed.py").write_text(
        "import sys\n"
        "from moe_fast import permute\n"
        f"import {part.module}\n"
        f"for owner in getattr({path}, '__mro__', [{path}]):\n"
        f"    if {name!r} in vars(owner):\n"
        f"        delattr(owner, {name!r})\n"
    )
    monkeypatch.chdir(tmp_path)
    verdict = judge(Options("renamed", profile="smoke", device="cpu", jobs=1, function="permute"))
    assert verdict.verdict == "CONFORMANT", lines(verdict)


def test_a_part_that_is_missing_is_named_in_the_head(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=SimpleNamespace(parse=1)))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.8"))
    sentences = [x for x in private_parts.missing() if "triton.runtime.jit" in x]
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "Triton 3.8 has no triton.runtime.jit.DependenciesFinder._update_hash",
        "Triton 3.8 has no triton.runtime.jit.KernelInterface",
    ]
    assert kernels_of("moe_fast") == []
    hash_callees_first(SimpleNamespace())
    verdict = Verdict("CONFORMANT", 0, "moe_fast", "smoke", 0, 1.0, 1, missing_parts=sentences)
    assert lines(verdict)[1:3] == sentences


def test_a_child_that_cannot_start_says_where_it_failed(tmp_path, monkeypatch):
    (tmp_path / "without_knobs.py").write_text(
        "import sys\nfrom types import SimpleNamespace\nfrom moe_ref import permute\n"
        "sys.modules['triton'] = SimpleNamespace(__version__='9.9')\n"
    )
    monkeypatch.chdir(tmp_path)
    verdict = judge(Options("without_knobs", profile="smoke", device="cpu", jobs=1, function="permute"))
    assert verdict.verdict == "HARNESS ERROR"
    error = "exit code 1: AttributeError: 'types.SimpleNamespace' object has no attribute 'knobs' (compiling.py:"
    assert any(error in problem for problem in verdict.problems)
    assert any("Traceback (most recent call last):" in problem for problem in verdict.problems)
    assert any('runtime = sys.modules["triton"].knobs.runtime' in problem for problem in verdict.problems)
