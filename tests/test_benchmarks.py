"""Every benchmark imports without a GPU; its `--quick` checks tiny shapes."""

import importlib
import math
import pkgutil
from types import SimpleNamespace

import pytest
import torch

import benchmarks
import moe_ref
from benchmarks import exhaustive
from benchmarks.honest import Counts, sweep
from conformance.engine.choose.profiles import PROFILES
from conformance.interface import Implementation


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_a_benchmark_imports_without_a_gpu(name):
    importlib.import_module(f"benchmarks.{name}")


def one_gate_wrong(h, **settings):
    """The gate of one bit pattern, a little too large."""
    out = moe_ref.glu(h, **settings)
    return torch.where(h[:, : out.shape[1]].view(torch.int16) == 0x1234, out * 1.0625 + 1e-30, out)


def found_in(glu, monkeypatch):
    """What an exhaustive check of one kind, dtype and setting finds."""
    monkeypatch.setattr(exhaustive, "SETTINGS", ({},))
    return exhaustive.judge(Implementation(SimpleNamespace(glu=glu), "planted"), "glu", "swiglu", 1, "cpu")


def test_one_wrong_number_of_all_is_found(monkeypatch):
    assert found_in(moe_ref.glu, monkeypatch) == []
    findings = found_in(one_gate_wrong, monkeypatch)
    assert len(findings) == 2 and all("FAIL: out [bound]" in finding for finding in findings)


def test_every_activation_has_cases():
    for function, kinds in exhaustive.KINDS.items():
        for kind in kinds:
            settings = {(case.dtype, case.clamp, case.probs) for case in exhaustive.cases(function, kind, 1)}
            assert {dtype for dtype, *_ in settings} == {"bfloat16", "float16"}
            assert len(settings) == 2 * (4 if function == "glu" else 3)


def test_a_sweep_of_an_honest_implementation_judges_its_cases():
    counts = Counts()
    sweep(counts, "moe_ref", 1, PROFILES["smoke"], 1, ["attach_loss"], math.inf)
    assert counts.seeds == 1 and counts.statuses["PASS"] > 0
    assert not counts.rejected
