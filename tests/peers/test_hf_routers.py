"""Routers of Hugging Face transformers through their adapters; they need the package."""

from importlib.util import find_spec

import pytest
import torch

import moe_ref
from tests.te.judging import NOTHING_WRONG, judged

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
LOGITS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
GROUPED = {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}
CALLS = {
    "Mixtral": {"topk": 2},
    "Qwen3": {"topk": 2, "pre_softmax": True},
    "GptOss": {"topk": 3},
    "DeepseekV3": {"topk": 4, "expert_bias": torch.linspace(-1, 1, 8), **GROUPED},
}


@pytest.fixture
def routers():
    from conformance.peers import hf_deepseek, hf_routers

    return {name: getattr(hf_routers, name) for name in ("Mixtral", "Qwen3", "GptOss")} | {
        "DeepseekV3": hf_deepseek.DeepseekV3
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_router_chooses_and_weighs_as_the_reference(routers, name):
    got, expected = (implementation.topk_routing(LOGITS, **CALLS[name]) for implementation in (routers[name], moe_ref))
    assert torch.equal(got.routing_map, expected.routing_map)
    assert torch.allclose(got.probs, expected.probs, rtol=1e-6)
    assert not torch.allclose(got.probs, moe_ref.topk_routing(LOGITS, topk=1).probs, rtol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_the_gate_s_first_cases_pass(routers, name):
    outcomes = judged(routers[name], ["topk_routing"], most=20)
    assert {outcome.status for _, outcome in outcomes} <= {*NOTHING_WRONG, "NOT_OFFERED"}
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) >= 3


def test_a_router_that_does_not_normalise_is_found(routers, monkeypatch):
    from conformance.peers import hf_routers

    routed = hf_routers.routed
    monkeypatch.setattr(
        hf_routers, "routed", lambda *args, **config: routed(*args, **config | {"norm_topk_prob": False})
    )
    outcomes = judged(routers["Qwen3"], ["topk_routing"], most=20)
    assert "FAIL" in {outcome.status for _, outcome in outcomes}


def test_what_deepseek_cannot_do_is_declared(routers):
    supports = routers["DeepseekV3"].supports
    call = {"logits": LOGITS, "topk": 4, **GROUPED}
    assert supports("topk_routing", **call) is None
    assert supports("topk_routing", **call | {"topk": 2}).startswith("topk_routing of 1 experts a group")
    assert supports("topk_routing", logits=LOGITS, topk=2) == "topk_routing by softmax"
