"""The reference's second derivatives are right, and moe_fast raises an error where it has none."""

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import moe_fast
import moe_ref
from moe_fast.launch.autograd import once_differentiable
from tests.common.suite import outcome_of, wrapped
from tests.core.law_twins import GLU, LINEAR, PERMUTE, SPREAD_TOPK

X = torch.ones(2, requires_grad=True)
COUNTS, MAP = torch.tensor([2, 0, 1]), torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]]).bool()
DIFFERENTIATED = {
    "_Gate",
    "AttachLoss",
    "_Place",
    "_Refused",
    "_Pad",
    "_Unpad",
    "_ZeroRows",
}  # their backwards are torch's operations


def numbers(*shape, start=0):
    return (torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).cos() * 2).reshape(shape)


def unpermuted(rows, probs):
    row_map = moe_ref.permute(torch.zeros(3, 1), MAP).row_map
    return moe_ref.unpermute(rows, row_map, restore_shape=(3, 2), probs=probs)


SMOOTH = {
    "glu": (lambda h, p: moe_ref.glu(h, probs=p, kind="geglu"), [numbers(3, 4), numbers(3)]),
    "activation": (lambda h, p: moe_ref.activation(h, probs=p, kind="gelu"), [numbers(3, 4), numbers(3)]),
    "gate": (moe_ref.gate, [numbers(3, 4), numbers(2, 4, start=5)]),
    "grouped_linear": (
        lambda x, w, b: moe_ref.grouped_linear(x, w, COUNTS, bias=b),
        [numbers(3, 2), numbers(3, 2, 2), numbers(3, 2)],
    ),
    "permute": (lambda x, p: moe_ref.permute(x, MAP, probs=p)[:2], [numbers(3, 2), numbers(3, 3)]),
    "unpermute": (unpermuted, [numbers(4, 2), numbers(3, 3)]),
    "z_loss": (lambda x: moe_ref.z_loss(x, coeff=0.5), [numbers(3, 4)]),
    "aux_loss_scores": (lambda x: moe_ref.aux_loss_scores(x, topk=2)[0], [numbers(3, 4)]),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_the_reference_has_the_second_derivatives_of_its_values(name):
    function, inputs = SMOOTH[name]
    leaves = [x.requires_grad_() for x in inputs]
    assert gradcheck(function, leaves) and gradgradcheck(function, leaves)


@pytest.mark.parametrize("case", [LINEAR, GLU, replace(SPREAD_TOPK, grads="logits")], ids=lambda case: case.function)
def test_a_refused_second_derivative_is_accepted(case):
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        @once_differentiable
        def backward(ctx, cotangent):
            return cotangent.clone()

    implementation = wrapped(
        case.function, lambda original, x, *arguments, **settings: original(Refusing.apply(x), *arguments, **settings)
    )
    assert outcome_of(replace(case, law="double_backward"), implementation).status == "PASS"


def test_another_choice_among_equals_is_not_judged_by_the_reference_s_derivatives():
    tied = replace(SPREAD_TOPK, spread="equal", topk=2, experts=4, tokens=3, grads="logits", law="double_backward")

    def last_of_equals(original, logits, *arguments, **settings):
        out = original(logits.flip(1), *arguments, **settings)
        return out._replace(probs=out.probs.flip(1), routing_map=out.routing_map.flip(1))

    assert outcome_of(tied, wrapped("topk_routing", last_of_equals)).status in ("PASS", "UNINFORMATIVE")


def test_an_overflow_flag_of_none_does_not_count_as_another_choice():
    case = replace(PERMUTE, probs="float32", grads="tokens+probs", law="double_backward")

    def flagless(original, *args, **settings):
        return original(*args, **settings)._replace(overflow=None)

    assert outcome_of(case, wrapped("permute", flagless)).status == "PASS"


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent


def penalised(x, end):
    loss = Square.apply(x).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    return end(loss + dx.square().sum())


@pytest.mark.parametrize("grad", [torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, X)], ids=["all", "of"])
def test_a_penalty_on_a_gradient_by_kernels_raises(grad):
    with pytest.raises(RuntimeError, match="Square has no second derivative"):
        penalised(X, grad)


def test_a_gradient_by_kernels_may_be_computed_with_a_graph_that_nobody_uses():
    (dx,) = torch.autograd.grad(Square.apply(X).sum(), X, create_graph=True)
    assert dx.tolist() == [2, 2]
    X.grad = None
    Square.apply(X).sum().backward(retain_graph=True)
    assert X.grad.tolist() == [2, 2]


def functions_of(package):
    """Its autograd functions, without those of `integrations`: these launch no kernels."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".integrations" in module.name:  # each imports another package
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and issubclass(cls, torch.autograd.Function) and cls.__module__ == module.name:
                yield cls


def codes(cls):
    """The code of a function, and of what it wraps: an operator wraps a backward."""
    while cls is not None:
        yield cls.__code__
        cls = getattr(cls, "__wrapped__", None)


def test_every_backward_of_moe_fast_by_kernels_refuses_to_be_differentiated():
    functions = {f"{cls.__module__}.{cls.__name__}": cls for cls in functions_of(moe_fast)}
    once = once_differentiable(print).__code__
    ours = {name for name, cls in functions.items() if once in codes(cls.backward)}
    assert len(functions) > 25
    assert {name.rpartition(".")[2] for name in functions.keys() - ours} <= DIFFERENTIATED
