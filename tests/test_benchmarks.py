"""Every benchmark imports without a GPU; its `--quick` checks tiny shapes."""

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_a_benchmark_imports_without_a_gpu(name):
    importlib.import_module(f"benchmarks.{name}")
