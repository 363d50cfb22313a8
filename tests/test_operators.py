"""Registered operators: what is registered, and mistakes that must be found."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError

import moe_fast
from moe_fast import dispatch, parameters
from moe_fast.experts import factors, scaled_linear
from moe_fast.launch import operators
from moe_fast.launch.operators import _Dumped, as_operators, launch, operator
from moe_fast.launch.registry import PUBLIC
from moe_fast.permutation import _routing_map
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Recipe
from tests.common.fast import interpreted

pytestmark = interpreted


def doubled(x: Tensor) -> Tensor:
    return torch.empty(x.shape).copy_(2 * x)


def longer_without_memory(x: Tensor) -> Tensor:
    return torch.empty(len(x) + (not operators.has_memory())).fill_(1.0)


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2) + 1


def a_view(x: Tensor) -> Tensor:
    return x[1:]


def check(function: Callable[..., Any]) -> None:
    """opcheck of the function as an operator, called with one tensor."""
    name = function.__name__
    operator(function)
    dumped = _Dumped(((torch.ones(3),), {}), [])
    registered = getattr(torch.ops.moe_fast, f"tests_test_operators_{name}").default
    opcheck(registered, (dumped.tensors, dumped.numbers, dumped.text), test_utils=("test_schema", "test_faketensor"))


def test_a_right_operator_passes():
    check(doubled)


@pytest.mark.parametrize(
    "operator, why",
    [
        (longer_without_memory, r"Shapes torch.Size\(\[3\]\) and torch.Size\(\[4\]\) are not equal"),
        (in_place, "not defined as mutable but was mutated"),
        (a_view, "must not also be an input"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_operator_is_found(operator, why):
    with pytest.raises(OpCheckError, match=why):
        check(operator)


def test_a_launch_outside_an_operator_is_an_error_and_not_left_out():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="multihot_kernel is traced outside an operator"):
        launch(_routing_map.multihot_kernel, (1,), torch.empty(1))


def test_without_memory_a_function_gives_shapes_and_launches_nothing():
    with FakeTensorMode():
        x, routed = torch.empty(5, 3, requires_grad=True), torch.ones(5, 4, dtype=torch.bool)
        permuted = moe_fast.permute(x, routed, num_rows=20)
        merged = moe_fast.unpermute(permuted.rows, permuted.row_map)
        (gradient,) = torch.autograd.grad(merged.sum(), x)
    assert [tuple(t.shape) for t in (permuted.rows, merged, gradient)] == [(20, 3), (5, 3), (5, 3)]


def functions() -> Iterator[str]:
    """Functions of one rank that are defined in moe_fast."""
    for name in moe_fast.__all__:
        function = getattr(moe_fast, name)
        home = inspect.unwrap(function).__module__
        if name not in (*dispatch.__all__, "declares", "supports") and home.startswith("moe_fast"):
            yield name


def test_every_function_of_one_rank_is_one_call_of_a_graph():
    public = {(function.__module__, function.__name__) for function in PUBLIC}
    missing = [n for n in functions() if (getattr(moe_fast, n).__module__, n) not in public]
    # shapes of scales follow from values, which the host reads; parameters are no part of a step
    assert missing == ["scales", "amax", *(name for name in parameters.__all__ if name in missing)]


@as_operators
class Doubled(torch.autograd.Function):
    """2x; it keeps what its forward was told about gradients."""

    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubled.asked.append(tuple(ctx.needs_input_grad))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        return 2 * d_out


def test_a_forward_outside_grad_mode_is_told_that_no_gradient_is_wanted():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        eager = Doubled.apply(x)
    saved = Doubled.apply(x)
    assert Doubled.asked[-2:] == [(False,), (True,)]
    assert torch.equal(eager, saved) and (eager.requires_grad, saved.requires_grad) == (False, True)


def test_outside_grad_mode_other_derivatives_are_refused_and_not_lost():
    x = torch.ones(3)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        Doubled.apply(forward_ad.make_dual(x, x))
    with torch.no_grad(), pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(Doubled.apply)(x)


@pytest.mark.parametrize("wanted", [False, True])
def test_rows_and_weights_are_quantised_by_columns_only_where_a_gradient_is_wanted(wanted, monkeypatch):
    columns = []

    def recorded(*args: Any) -> Quantized:
        quantized = quantize(*args)
        columns.append(quantized.columnwise is not None)
        return quantized

    quantize = factors.quantized_rows
    monkeypatch.setattr(factors, "quantized_rows", recorded)
    monkeypatch.setattr(scaled_linear, "quantized_rows", recorded)
    x, weight = torch.ones(8, 32, requires_grad=True), torch.ones(2, 16, 32, requires_grad=True)
    with torch.set_grad_enabled(wanted):
        out = moe_fast.grouped_linear(x, weight, torch.tensor([3, 5]), recipe=Recipe("current"))
    assert columns == [wanted, wanted]
    torch.testing.assert_close(out.detach(), torch.full((8, 16), 32.0))
