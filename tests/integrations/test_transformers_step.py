"""The benchmark of a training step with transformers: its check of tiny models."""

import pytest
import torch

from benchmarks import transformers_step as benchmark
from tests.common.fast import interpreted

registry = pytest.importorskip("transformers.integrations.moe")

pytestmark = interpreted
TOKENS = torch.arange(14).view(2, 7)


def tiny(name):
    family, settings = benchmark.MODELS[name]
    return benchmark.model_of(family, settings | benchmark.TINY, torch.float32)


def test_implementations_are_compared_before_they_are_timed():
    benchmark.check(tiny("gpt-oss-20b"), TOKENS)


def test_an_implementation_that_differs_is_found(monkeypatch):
    def wrong(*arguments):
        return 1.01 * registry.batched_mm_experts_forward(*arguments)

    monkeypatch.setitem(registry.ALL_EXPERTS_FUNCTIONS, "grouped_mm", wrong)
    with pytest.raises(AssertionError, match="not close"):
        benchmark.check(tiny("Qwen3-30B-A3B"), TOKENS)


def test_a_version_that_cannot_run_is_left_out_with_its_reason(monkeypatch, capsys):
    def failing(*arguments):
        raise RuntimeError("no such kernel\nat line 1")

    monkeypatch.setitem(registry.ALL_EXPERTS_FUNCTIONS, "batched_mm", failing)
    steps = benchmark.versions(tiny("Qwen3-30B-A3B"), TOKENS, compiled=False)
    assert list(steps) == ["moe_fast, eager", "grouped_mm, eager"]
    assert capsys.readouterr().out == "batched_mm, eager is left out: no such kernel\n"
