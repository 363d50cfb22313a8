"""Gradients of an activation with its input kept in E4M3: at the stored number; output from h."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import moe_fast
import moe_ref
from conformance.analysis.input_store import MOST_KEPT, in_e4m3, kept_in_e4m3
from conformance.analysis.running import Running
from conformance.families.experts.cases import ActivationCase
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from moe_ref.quantization.formats import E4M3, E5M2, Format, decode, encode
from tests.common.fast import interpreted
from tests.common.suite import failures, statuses

NAMESPACES = [pytest.param(moe_ref, id="moe_ref"), pytest.param(moe_fast, id="moe_fast", marks=interpreted)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SETTINGS = (
    {},
    {"clamp": 2.0},
    {"interleave": 3, "offset": 1.0},
    {"alpha": 1.702, "clamp": 7.0, "interleave": 1},
    {"round_before_probs": True},
)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


def results(namespace, h: Tensor, probs: Tensor | None, d_out: Tensor, **settings) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [x.clone().requires_grad_() for x in (h, probs) if x is not None]
    out = namespace.glu(leaves[0], probs=leaves[1] if len(leaves) > 1 else None, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_gradients_are_those_at_the_stored_number_and_the_output_is_that_of_h(namespace, dtype, settings):
    h, probs, d_out = numbers(9, 24, dtype=dtype), numbers(9, seed=1), numbers(9, 12, seed=2, dtype=dtype)
    stored = h.float().to(torch.float8_e4m3fn).to(dtype)  # torch's cast: no value beyond its range
    assert not torch.equal(stored, h)
    for p in (probs, None):
        out, *gradients = results(namespace, h, p, d_out, **settings, fp8_input_store=True)
        assert torch.equal(out, results(namespace, h, p, d_out, **settings)[0])
        assert all(map(torch.equal, gradients, results(namespace, stored, p, d_out, **settings)[1:]))


def test_the_reference_is_what_megatron_core_does():
    fused = pytest.importorskip("megatron.core.fusions.fused_bias_swiglu")
    package = SimpleNamespace(glu=lambda h, *, probs: fused.weighted_bias_swiglu_impl(h, None, probs[:, None], True))
    h, probs, d_out = numbers(9, 24), numbers(9, seed=1), numbers(9, 12, seed=2)
    with torch.compiler.set_stance("force_eager"):
        megatrons = results(package, h, probs, d_out)
    for got, expected in zip(megatrons, results(moe_ref, h, probs, d_out, fp8_input_store=True), strict=True):
        assert torch.allclose(
            got, expected, rtol=1e-5, atol=1e-5
        )  # why: float32 in another order; a gradient at h itself is off by 2e-2


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_what_is_beyond_the_largest_number_is_stored_as_that(namespace):
    h = torch.tensor([[464.0, 1000.0, -465.0, 2.0]])
    stored = torch.tensor([[448.0, 448.0, -448.0, 2.0]])
    ones = torch.ones(1, 2)
    assert torch.equal(
        results(namespace, h, None, ones, fp8_input_store=True)[1], results(namespace, stored, None, ones)[1]
    )


def bytes_saved(call) -> dict[tuple[int, ...], int]:
    """The bytes of each saved shape."""
    sizes: dict[tuple[int, ...], int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[tuple(x.shape)] = sizes.get(tuple(x.shape), 0) + x.numel() * x.element_size()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        call()
    return sizes


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_byte_for_each_number_is_saved(namespace):
    h = numbers(9, 24, dtype=torch.bfloat16).requires_grad_()
    assert bytes_saved(lambda: namespace.glu(h)) == {(9, 24): 2 * 9 * 24}
    assert bytes_saved(lambda: namespace.glu(h, fp8_input_store=True)) == {(9, 24): 9 * 24}


@interpreted
def test_an_expert_saves_its_hidden_numbers_as_bytes_and_nothing_else_more():
    rows, counts, fc1, fc2 = (
        numbers(9, 5),
        torch.tensor([4, 5]),
        numbers(2, 12, 5, seed=1).requires_grad_(),
        numbers(2, 5, 6, seed=2),
    )
    full, stored = (
        bytes_saved(lambda stored=stored: moe_fast.grouped_mlp(rows, counts, fc1, fc2, fp8_input_store=stored))
        for stored in (False, True)
    )
    assert full.pop((9, 12)) == 4 * 9 * 12 and stored.pop((9, 12)) == 9 * 12
    assert full == stored


@interpreted
def test_nothing_is_encoded_where_no_gradient_is_wanted(monkeypatch):
    dtypes = []
    original = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: dtypes.append(k.get("dtype")) or original(*a, **k))
    moe_fast.glu(numbers(3, 4), fp8_input_store=True)
    assert torch.uint8 not in dtypes
    moe_fast.glu(numbers(3, 4).requires_grad_(), fp8_input_store=True)
    assert torch.uint8 in dtypes


@pytest.mark.parametrize("recompute", ["moe_act", "moe"])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_computing_again_changes_nothing(namespace, recompute):
    rows, counts, probs = numbers(9, 5), torch.tensor([4, 0, 5]), numbers(9, seed=3)
    leaves = [x.requires_grad_() for x in (rows, numbers(3, 12, 5, seed=1), numbers(3, 5, 6, seed=2))]
    gradients = []
    for option in (None, recompute):
        out = namespace.grouped_mlp(leaves[0], counts, *leaves[1:], probs=probs, fp8_input_store=True, recompute=option)
        gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    assert all(map(torch.equal, *gradients))


# ---- what is judged


class _AtKept(torch.autograd.Function):
    """glu, and its gradients at what a cast leaves of h."""

    @staticmethod
    def forward(ctx, h, probs, settings, cast):
        ctx.save_for_backward(cast(h), probs)
        ctx.settings = settings
        return moe_ref.glu(h, probs=probs, **settings)

    @staticmethod
    def backward(ctx, d_out):
        stored, probs = ctx.saved_tensors
        return *moe_ref.glu_backward(d_out, stored, probs=probs, **ctx.settings), None, None


def kept_by(cast) -> SimpleNamespace:
    """The reference's glu and shared experts, with another cast."""

    def glu(h, *, probs=None, fp8_input_store=False, **settings):
        return _AtKept.apply(h, probs, settings, cast) if fp8_input_store else moe_ref.glu(h, probs=probs, **settings)

    def grouped_mlp(rows, counts, fc1, fc2, *, probs=None, fp8_input_store=False, **settings):
        h = moe_ref.grouped_linear(rows, fc1, counts)
        return moe_ref.grouped_linear(glu(h, probs=probs, fp8_input_store=fp8_input_store, **settings), fc2, counts)

    def shared_experts(x, fc1, fc2, **settings):
        return grouped_mlp(x, torch.tensor([len(x)]), fc1[None], fc2[None], **settings)

    return SimpleNamespace(glu=glu, grouped_mlp=grouped_mlp, shared_experts=shared_experts)


def coded(x: Tensor, format: Format, scale: Tensor | float = 1.0) -> Tensor:
    return decode(encode(x.float() * scale, format), format).div(scale).to(x.dtype)


def scaled(x: Tensor) -> Tensor:
    return coded(x, E4M3, 448 / x.float().abs().nan_to_num(0, 0, 0).max().clamp(min=2.0**-10))


def towards_zero(x: Tensor) -> Tensor:
    near = coded(x, E4M3)
    return torch.where(near.abs() > x.abs(), decode(encode(near.float(), E4M3) - 1, E4M3).to(x.dtype), near)


def nan_beyond(x: Tensor) -> Tensor:
    return torch.where(x.abs() > MOST_KEPT, torch.nan, coded(x, E4M3))


def output_of_the_codes() -> SimpleNamespace:
    """What is stored is read in the forward, too."""
    original = kept_by(lambda h: h)
    return SimpleNamespace(
        **{
            name: lambda h, *arguments, f=f, **settings: f(
                h + (coded(h.detach(), E4M3) - h.detach()), *arguments, **settings
            )
            for name, f in vars(original).items()
        }
    )


GLU = ActivationCase(function="glu", tokens=9, width=8, probs="float32", stored=True, grads="h+probs")
MLP = MlpCase(
    function="grouped_mlp",
    tokens=12,
    experts=3,
    counts=(5, 0, 7),
    hidden=6,
    width=5,
    probs="float32",
    stored=True,
    grads="rows+probs+fc1_weight",
)
SHARED = SharedCase(function="shared_experts", tokens=9, hidden=6, width=5, stored=True, grads="x+fc1_weight")
CASES = [GLU, *(replace(GLU, dtype=dtype) for dtype in ("bfloat16", "float16", "float64")), MLP, SHARED]
CASES += [
    replace(GLU, **settings)
    for settings in ({"values": "saturated"}, {"values": "rows"}, {"values": "special"}, {"early": True, "clamp": 6})
]
HONEST = {"reference": moe_ref, "saturated": kept_by(lambda h: coded(h, E4M3)), "NaN beyond": kept_by(nan_beyond)}
WRONG = {
    "not stored": kept_by(lambda h: h),
    "E5M2": kept_by(lambda h: coded(h, E5M2)),
    "with a scale": kept_by(scaled),
    "rounded towards zero": kept_by(towards_zero),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", HONEST)
def test_any_honest_cast_is_accepted(name, case):
    assert statuses(case, HONEST[name], 2) == {"PASS"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", WRONG)
def test_another_way_of_storing_is_found(name, case):
    assert any(failures(case, WRONG[name], 4))


def test_an_output_of_the_stored_numbers_is_found():
    assert statuses(GLU, output_of_the_codes(), 4) == {"FAIL"}


def test_a_gradient_lost_beside_a_number_beyond_the_range_is_found():
    """In the columns of the others everything is still judged."""

    def all_of_the_row(x: Tensor) -> Tensor:
        return torch.where((x.abs() > MOST_KEPT).any(1, keepdim=True), torch.nan, coded(x, E4M3))

    case = replace(GLU, values="saturated", grads="h")
    assert any(failures(case, kept_by(all_of_the_row), 4)) and statuses(case, kept_by(nan_beyond), 4) == {"PASS"}


def test_numbers_known_in_part_are_kept_as_any_that_lie_between():
    h = Running(
        torch.tensor([1.0, 1.06, 1.06, 463.0, 0.0]).double(),
        torch.tensor([0.0, 0.001, 0.01, 2.0, 0.0]).double(),
        torch.float32,
    )
    stored = kept_in_e4m3(h)
    assert stored.value.tolist() == [1, 1, 1, 448, 0]  # 1.0625 lies in the middle of 1 and 1.125
    assert stored.error.tolist() == [0, 0, 0.125, torch.inf, 0]


def test_ties_are_stored_as_the_even_code():
    assert in_e4m3(torch.tensor([1.0625, 1.1875, 17.0, 464.0, -1.0625, 2.0**-10, 3 * 2.0**-10])).tolist() == [
        1,
        1.25,
        16,
        448,
        -1,
        0,
        2.0**-8,
    ]
