"""Grouped linear layers and scaled activations through every release of Transformer Engine."""

from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.core.tensors import laid_out
from conformance.peers.te import Adapter
from moe_ref.config import Recipe
from tests.common.fast import normal
from tests.te.standin import standin
from tests.te.standin.experts import _Activation

FUNCTIONS = ("grouped_linear", "glu", "activation")
COUNTS = torch.tensor([2, 0, 3])
EXACT = Recipe("current", power_of_two_scales=True)


LIST, TENSOR = "GroupedLinear with a list of splits", "GroupedLinear with a tensor of splits"
BOTH = "GroupedLinear with a list and a tensor of splits"
BY_TRITON, BY_CUTLASS = "NVTE_USE_GROUPED_GEMM_TRITON", "NVTE_USE_CUTLASS_GROUPED_GEMM"
SPLITS = [
    ("1.11", (), LIST),
    ("2.15", (), TENSOR),
    ("2.12", (BY_TRITON,), LIST),
    ("rocm", (), LIST),
    ("rocm", (BY_TRITON,), f"{BOTH} [{BY_TRITON}=1]"),
    ("2.20", (BY_CUTLASS,), f"{TENSOR} [{BY_CUTLASS}=1]"),
]


@pytest.mark.parametrize(("bucket", "variables", "path"), SPLITS)
def test_splits_go_to_the_device_where_the_release_takes_them_there(monkeypatch, bucket, variables, path):
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    adapter = Adapter(standin(bucket), ours=moe_ref)
    out = adapter.grouped_linear(normal(5, 4), normal(3, 6, 4, seed=1), COUNTS)
    assert adapter.path["grouped_linear"] == path
    assert torch.equal(out, moe_ref.grouped_linear(normal(5, 4), normal(3, 6, 4, seed=1), COUNTS))


def test_a_release_whose_splits_have_no_annotation_gets_the_list():
    te = standin("2.20", changed={"GroupedLinear.forward": "inp, m_splits, is_first_microbatch=None"})
    adapter = Adapter(te)
    adapter.grouped_linear(normal(5, 4), normal(3, 6, 4, seed=1), COUNTS)
    assert adapter.path["grouped_linear"] == LIST


def test_a_bias_gets_its_gradient_where_the_weight_wants_none():
    rows, weight, bias = normal(5, 4).requires_grad_(), normal(3, 6, 4, seed=1), normal(3, 6, seed=2).requires_grad_()
    gradients = {}
    for name, adapter in {"alone": Adapter(standin("2.20")), "completed": Adapter(standin("2.20"), moe_ref)}.items():
        out = adapter.grouped_linear(rows, weight, COUNTS, bias=bias)
        gradients[name] = torch.autograd.grad(out.sum(), bias)[0]
    assert not gradients["alone"].any()
    assert torch.equal(gradients["completed"], COUNTS[:, None].expand(3, 6).float())


def whole(*shape, seed):
    """Small integers, whose products have exact sums under EXACT."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def test_a_recipe_that_the_device_refuses_is_not_entered():
    te = standin("2.20")
    te.pytorch.fp8.FP8GlobalStateManager = SimpleNamespace(is_nvfp4_available=lambda: (False, "no such units"))
    adapter = Adapter(te)
    rows, weight, counts = whole(32, 32, seed=0), whole(1, 32, 32, seed=1), torch.tensor([32])
    with pytest.raises(ValueError, match="it must be one that the device runs: nvfp4 is refused"):
        adapter.grouped_linear(rows, weight, counts, recipe=Recipe("nvfp4"))
    assert "autocast" not in te.calls


@pytest.mark.parametrize("width", [20, 32])
def test_under_a_recipe_columns_are_cut_after_the_rows_are_unpadded(width):
    rows, weight = whole(5, 24, seed=0), whole(3, width, 24, seed=1)
    expected = moe_ref.grouped_linear(rows, weight, COUNTS, recipe=EXACT)
    for adapter in (Adapter(standin("2.20")), Adapter(standin("2.6"))):
        assert torch.equal(adapter.grouped_linear(rows, weight, COUNTS, recipe=EXACT), expected)
        assert adapter.path["grouped_linear"].endswith("Fp8Unpadding")


def test_strided_rows_are_padded_in_order_where_the_adapter_is_complete():
    rows, weight = whole(5, 48, seed=0)[:, ::2], whole(3, 16, 24, seed=1)
    expected = moe_ref.grouped_linear(rows, weight, COUNTS, recipe=EXACT)
    for adapter, same in {Adapter(standin("2.20")): False, Adapter(standin("2.20"), ours=moe_ref): True}.items():
        assert torch.equal(adapter.grouped_linear(rows, weight, COUNTS, recipe=EXACT), expected) is same


@pytest.mark.parametrize(("bucket", "twice"), [("2.12", True), ("2.15", True), ("2.19", False), ("2.20", False)])
def test_a_scaled_activation_is_used_for_the_rounding_that_it_has(bucket, twice):
    adapter = Adapter(standin(bucket), ours=moe_ref)
    h, probs = normal(64, 32, dtype=torch.bfloat16), normal(64, seed=3, dtype=torch.bfloat16)
    assert adapter.probes.rounds_once is not twice
    outputs = {}
    for rounding in (False, True):
        outputs[rounding] = adapter.glu(h, probs=probs, round_before_probs=rounding)
        assert adapter.path["glu"].startswith("ScaledSwiGLU" if rounding == twice else "ours: glu with round_before")
    assert not torch.equal(outputs[False], outputs[True])


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "ScaledSwiGLU"),
        ({"interleave": 4}, "ScaledSwiGLU"),
        ({"kind": "quick_geglu", "offset": 1.0, "clamp": 7.0}, "ScaledClampedQGeGLU"),
        ({"kind": "quick_geglu", "offset": 1.0, "clamp": 0.5, "alpha": 2.0}, "ScaledClampedQGeGLU"),
        ({"kind": "quick_geglu", "clamp": 7.0}, "ours: glu of kind quick_geglu, offset 0.0, clamp 7.0, alpha None"),
        ({"clamp": 7.0}, "ours: glu of kind swiglu, offset 0.0, clamp 7.0, alpha None"),
        ({"kind": "reglu"}, "ours: glu of kind reglu, offset 0.0, clamp None, alpha None"),
        ({"probs": None}, "SwiGLU"),
        ({"probs": None, "interleave": 4}, "SwiGLU"),
        ({"probs": None, "kind": "geglu"}, "GEGLU"),
        ({"probs": None, "kind": "quick_geglu"}, "QGEGLU"),
        ({"probs": None, "kind": "reglu"}, "ReGLU"),
        ({"probs": None, "clamp": 0.5}, "ClampedSwiGLU"),
        ({"probs": None, "clamp": 0.5, "offset": 1.0, "kind": "quick_geglu"}, "ClampedSwiGLU"),
        ({"probs": None, "clamp": 0.5, "offset": 1.0, "alpha": 2.0, "interleave": 4}, "ClampedSwiGLU"),
        ({"probs": None, "offset": 1.0}, "ours: glu without probs of kind swiglu, offset 1.0, clamp None, alpha None"),
        ({"probs": None, "kind": "geglu", "interleave": 4}, "ours: glu without probs of kind geglu, {}"),
        ({"probs": normal(6).double()}, "ours: glu of float32 by probs of float64: it rounds them to the former"),
    ],
)
def test_each_kind_takes_its_operation_or_ours(settings, path):
    adapter = Adapter(standin("2.20"), ours=moe_ref)
    h, settings = normal(6, 16), {"probs": normal(6, seed=4), **settings}
    assert torch.equal(adapter.glu(h, **settings), moe_ref.glu(h, **settings))
    assert adapter.path["glu"] == path.format("offset 0.0, clamp None, alpha None")


@pytest.mark.parametrize(
    ("kind", "bucket", "name"),
    [
        ("silu", "2.6", "SiLU"),
        ("gelu_tanh", "2.1", "GELU"),
        ("quick_gelu", "2.6", "QGELU"),
        ("relu", "2.1", "ReLU"),
        ("squared_relu", "2.6", "SReLU"),
        ("silu", "2.1", "ours: activation without probs of kind silu, offset 0.0, clamp None, alpha None"),
        ("gelu", "2.20", "ours: activation without probs of kind gelu, offset 0.0, clamp None, alpha None"),
    ],
)
def test_an_activation_without_probs_takes_its_operation_where_the_release_has_it(kind, bucket, name):
    adapter, h = Adapter(standin(bucket), ours=moe_ref), normal(6, 16)
    assert torch.equal(adapter.activation(h, kind=kind), moe_ref.activation(h, kind=kind))
    assert adapter.path["activation"] == name


def test_the_default_kind_of_an_activation_is_that_of_the_reference():
    adapter, h = Adapter(standin("2.20"), ours=moe_ref), normal(6, 16)
    assert torch.equal(adapter.activation(h), moe_ref.activation(h)) and adapter.path["activation"] == "SReLU"
    probs = normal(6, seed=4)
    assert torch.equal(adapter.activation(h, probs=probs), moe_ref.activation(h, probs=probs))
    assert adapter.path["activation"] == "ScaledSReLU"


def test_a_pending_minus_is_applied_where_the_adapter_is_complete(monkeypatch):
    read, forward = [], _Activation.forward
    monkeypatch.setattr(_Activation, "forward", lambda self, x: read.append(x.is_neg()) or forward(self, x))
    h = laid_out(normal(6, 16), "negated")
    for adapter in (Adapter(standin("2.20")), Adapter(standin("2.20"), ours=moe_ref)):
        assert torch.equal(adapter.glu(h), moe_ref.glu(h))
    assert h.is_neg() and read == [True, False]


def test_squared_relu_is_there_since_2_17():
    h, settings = normal(6, 16), {"probs": normal(6, seed=4), "kind": "squared_relu"}
    lacking = "ours: activation of kind squared_relu, offset 0.0, clamp None, alpha None"
    for bucket, path in {"2.12": lacking, "2.15": "ScaledSReLU"}.items():
        adapter = Adapter(standin(bucket), ours=moe_ref)
        assert torch.equal(adapter.activation(h, **settings), moe_ref.activation(h, **settings))
        assert adapter.path["activation"] == path
