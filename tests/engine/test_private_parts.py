"""A Triton without a part that the suite reads or replaces: a run goes on, and says so."""

import sys
from types import SimpleNamespace

import pytest

from conformance.engine.child import private_parts
from conformance.engine.child.compiling import hash_callees_first, kernels_of
from conformance.engine.child.private_parts import PARTS, attribute, missing
from conformance.engine.options import Options
from conformance.engine.run.session import judge
from conformance.engine.run.verdict import Verdict
from conformance.report.terminal import lines
from tests.common.fast import interpreted

RENAMED = [part for part in PARTS if part.module.startswith("triton.runtime")]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.path)
def test_the_installed_triton_has_each_part(part):
    __import__(part.module)
    assert attribute(part) is not None
    assert missing() == []


@interpreted
@pytest.mark.parametrize("part", RENAMED, ids=lambda part: part.path)
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
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9"))
    sentences = private_parts.missing()
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "Triton 9.9 has no triton.runtime.jit.DependenciesFinder._update_hash",
        "Triton 9.9 has no triton.runtime.jit.KernelInterface",
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
