"""Every benchmark imports without a GPU; its `--quick` checks tiny shapes."""

import importlib
import math
import pkgutil

import pytest

import benchmarks
from benchmarks.honest import Counts, sweep
from conformance.engine.choose.profiles import PROFILES


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_a_benchmark_imports_without_a_gpu(name):
    importlib.import_module(f"benchmarks.{name}")


def test_a_sweep_of_an_honest_implementation_judges_its_cases():
    counts = Counts()
    sweep(counts, "moe_ref", 1, PROFILES["smoke"], 1, ["attach_loss"], math.inf)
    assert counts.seeds == 1 and counts.statuses["PASS"] > 0
    assert not counts.rejected
