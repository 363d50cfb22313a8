"""The experts through Transformer Engine's operation fuser, of every release that has it."""

import pytest
import torch
from torch.func import functional_call

import moe_ref
from conformance.peers.te import Adapter, activations, mlp
from conformance.peers.te.mlp import Mlp
from tests.common.fast import normal
from tests.te.standin import standin

COUNTS = torch.tensor([2, 0, 3])
FUSED = "GroupedLinear of ops, then {}, then GroupedLinear of ops, then Sequential"


def call(implementation, gated=True, **settings):
    width = 16 if gated else 8
    layers = normal(3, width, 4, seed=1), normal(3, 4, 8, seed=2)
    arguments = {"probs": normal(5, seed=3), "fc1_bias": normal(3, width, seed=4), "fc2_bias": normal(3, 4, seed=5)}
    return implementation.grouped_mlp(normal(5, 4), COUNTS, *layers, **arguments | settings)


def test_a_release_without_the_fuser_does_not_offer_it():
    assert "grouped_mlp" not in Adapter(standin("2.6")).offered
    adapter = Adapter(standin("2.6"), moe_ref)
    assert torch.equal(call(adapter), call(moe_ref))
    assert adapter.path["grouped_mlp"] == "ours: Transformer Engine lacks ops_grouped_linear, scaled_swiglu"


@pytest.mark.parametrize(
    ("bucket", "settings", "path"),
    [
        ("2.20", {}, FUSED.format("ScaledSwiGLU")),
        ("2.20", {"interleave": 4, "probs": None}, FUSED.format("ScaledSwiGLU")),
        ("2.20", {"kind": "quick_geglu", "offset": 1.0, "clamp": 0.5}, FUSED.format("ScaledClampedQGeGLU")),
        ("2.20", {"kind": "squared_relu", "gated": False}, FUSED.format("ScaledSReLU")),
        ("2.12", {"fc2_bias": None}, FUSED.format("ScaledSwiGLU")),
        ("2.12", {}, "ours: grouped_mlp with probs and fc2_bias: Transformer Engine lacks ops_scale_bias"),
        ("2.20", {"kind": "geglu"}, "ours: grouped_mlp of kind geglu, offset 0.0, clamp None, alpha None"),
    ],
)
def test_each_kind_takes_its_operations_or_ours(bucket, settings, path):
    adapter = Adapter(standin(bucket), moe_ref)
    assert torch.allclose(call(adapter, **settings), call(moe_ref, **settings), rtol=1e-5, atol=1e-5)
    assert adapter.path["grouped_mlp"] == path


def test_align_pads_rows_and_scales_by_expert():
    adapter = Adapter(standin("2.20"))
    assert torch.allclose(call(adapter, align=4), call(moe_ref), rtol=1e-5, atol=1e-5)
    assert adapter.path["grouped_mlp"] == f"Fp8Padding, then {FUSED.format('ScaledSwiGLU')}, then Fp8Unpadding"


def test_sixteen_bits_with_a_weighted_bias_are_declared():
    rows, fc1, fc2 = (x.bfloat16() for x in (normal(5, 4), normal(3, 16, 4), normal(3, 4, 8)))
    arguments = {"rows": rows, "tokens_per_expert": COUNTS, "fc1_weight": fc1, "fc2_weight": fc2}
    arguments |= {"probs": normal(5).bfloat16(), "fc2_bias": normal(3, 4).bfloat16()}
    reason = "grouped_mlp of bfloat16 with probs and fc2_bias: it rounds their product"
    assert Adapter(standin("2.20")).supports("grouped_mlp", **arguments) == reason


def test_parameters_are_there_in_the_backward(monkeypatch):
    rows = normal(5, 4).requires_grad_()

    def gradient():
        layers = normal(3, 16, 4, seed=1), normal(3, 4, 8, seed=2)
        out = Adapter(standin("2.20")).grouped_mlp(rows, COUNTS, *layers)
        return torch.autograd.grad(out.sum(), rows)[0]

    assert gradient().all()
    monkeypatch.setattr(
        mlp, "with_parameters", lambda module, weights: lambda *args: functional_call(module, weights, args)
    )
    with pytest.raises(RuntimeError, match="a parameter has no memory in the backward"):
        gradient()


def _layer_without_scale(self, weight, bias, scaled):
    return layer(self, weight, bias, False)


def _layers_turned(self, rows, scales, counts, layers, weighted, activation):
    return layers_of_the_adapter(self, rows, scales.flip(0), counts, layers, weighted, activation)


layer, layers_of_the_adapter, scaled = Mlp._layer, Mlp._layers, activations.scaled
TWINS = {
    "bias_not_scaled": (Mlp, "_layer", _layer_without_scale),
    "scales_of_other_rows": (Mlp, "_layers", _layers_turned),
    "not_interleaved": (mlp, "scaled", lambda gate: scaled(gate._replace(interleave=None))),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_wrong_mapping_differs(monkeypatch, twin):
    monkeypatch.setattr(*TWINS[twin])
    adapter = Adapter(standin("2.20"))
    out = call(adapter, interleave=4)
    assert not torch.allclose(out, call(moe_ref, interleave=4), rtol=1e-5, atol=1e-5)
