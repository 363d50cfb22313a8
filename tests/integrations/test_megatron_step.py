"""The benchmark of a training step of Megatron's layer: its check of tiny layers."""

import pytest

pytest.importorskip("megatron.core")
from benchmarks import megatron_step as benchmark
from tests.common.fast import interpreted

pytestmark = [interpreted, pytest.mark.usefixtures("megatron_world")]


@pytest.mark.parametrize("name", benchmark.MODELS)
def test_versions_are_compared_before_they_are_timed(name):
    benchmark.check(name)


def test_a_version_that_differs_is_found(monkeypatch):
    product = benchmark.torch_gmm
    monkeypatch.setattr(benchmark, "torch_gmm", lambda *arguments, **settings: 1.01 * product(*arguments, **settings))
    with pytest.raises(AssertionError):
        benchmark.check("Qwen3-30B-A3B")


def test_a_version_that_a_release_lacks_is_left_out_with_its_reason(monkeypatch, capsys):
    from megatron.core.transformer.moe import experts

    monkeypatch.delattr(experts, "GroupedMLP")
    assert list(benchmark.layers(benchmark.MODELS["Qwen3-30B-A3B"] | benchmark.TINY)) == ["moe_fast", "sequential"]
    assert capsys.readouterr().out == "grouped_gemm is left out: this release of megatron-core has no GroupedMLP\n"
