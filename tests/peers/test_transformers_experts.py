"""The experts' implementations of Hugging Face transformers, through their adapter."""

import importlib
from importlib.util import find_spec

import pytest
import torch

import moe_ref
from tests.common.fast import normal
from tests.te.judging import NOTHING_WRONG, judged

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
COUNTS = torch.tensor([2, 0, 3])
ROWS, HIDDEN, WIDTH = 5, 8, 4
SETTINGS = {
    "swiglu": {},
    "bounded": {"clamp": 1.0},
    "gpt-oss": {"kind": "quick_geglu", "clamp": 1.0, "offset": 1.0, "interleave": 1},
    "MiniMax": {"clamp": 1.0, "offset": 1.0, "alpha": 1.3},
    "no gate": {"kind": "squared_relu"},
}


@pytest.fixture
def adapter():
    return importlib.import_module("conformance.peers.transformers")


def call(settings, transposed=False, biased=False):
    """The arguments of grouped_mlp."""
    fc1 = WIDTH if "squared_relu" in settings.values() else 2 * WIDTH
    weights = [normal(len(COUNTS), fc1, HIDDEN, seed=1), normal(len(COUNTS), HIDDEN, WIDTH, seed=2)]
    weights = [x.mT.contiguous().mT for x in weights] if transposed else weights
    biases = {"fc1_bias": weights[0][:, :, 0].clone(), "fc2_bias": weights[1][:, :, 0].clone()} if biased else {}
    return (normal(ROWS, HIDDEN), COUNTS, *weights), settings | biases | {"probs": normal(ROWS, seed=3).abs()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["eager", "batched_mm", "grouped_mm", "moe_fast"])
def test_an_implementation_computes_the_reference_s_experts(name, settings, transposed, adapter):
    entry, (arguments, settings) = getattr(adapter, name), call(settings, transposed, biased=name != "eager")
    tensors = dict(zip(("rows", "tokens_per_expert", "fc1_weight", "fc2_weight"), arguments, strict=True))
    reason = entry.supports("grouped_mlp", **tensors, **settings)
    assert (reason is None) == (name != "eager" or settings.get("interleave") is None), reason
    if reason is None:
        out, expected = (implementation.grouped_mlp(*arguments, **settings) for implementation in (entry, moe_ref))
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(out[:5], expected[:5].flip(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"offset": 0.5}, {"alpha": 2.0}, {"interleave": 2}, {"offset": 1.0}], ids=str)
def test_a_gate_that_no_model_has_is_declared_unsupported(settings, adapter):
    arguments, settings = call(settings)
    tensors = dict(zip(("rows", "tokens_per_expert", "fc1_weight", "fc2_weight"), arguments, strict=True))
    assert "gate" in adapter.batched_mm.supports("grouped_mlp", **tensors, **settings)


def test_moe_fast_passes_the_gate_s_first_cases(adapter):
    outcomes = judged(adapter.moe_fast, ["grouped_mlp"], most=12, only=lambda case: case.dtype != "float64")
    assert {outcome.status for _, outcome in outcomes} <= {*NOTHING_WRONG, "NOT_OFFERED"}
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) >= 3


@pytest.mark.parametrize("name", ["eager", "batched_mm", "grouped_mm", "moe_fast"])
def test_a_row_of_another_rank_reaches_its_result_in_batched_mm_alone(name, adapter):
    (rows, *weights), _ = call({})
    rows = torch.cat([rows, torch.full((2, HIDDEN), torch.nan)])
    out = getattr(adapter, name).grouped_mlp(rows, *weights)
    assert out[:ROWS].isfinite().all()
    assert bool(out[ROWS:].isnan().any()) == (name == "batched_mm")


def test_eager_experts_without_a_gate_have_no_other_rank(adapter):
    (rows, *weights), settings = call({"kind": "squared_relu"})
    settings["probs"] = torch.cat([settings["probs"], torch.zeros(2)])
    with pytest.raises(IndexError):
        adapter.eager.grouped_mlp(torch.cat([rows, rows[:2]]), *weights, **settings)


def test_an_unknown_name_is_told_the_known_ones(adapter):
    with pytest.raises(AttributeError, match=r"no experts implementation 'fastest', only batched_mm, .*eager"):
        adapter.fastest  # noqa: B018
