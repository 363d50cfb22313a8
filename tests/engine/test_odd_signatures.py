"""Functions of every kind are judged, whatever their signature says."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.engine.child import child
from conformance.engine.child.evaluate import evaluate
from conformance.interface import Implementation

CASE = CONTRACTS["gate"].case_type(function="gate", tokens=2, experts=3, hidden=2)


def gate(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, router_dtype: str | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def typed(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def positional(x, weight, bias=None, /):
    return gate(x, weight)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


def unprintable(x, weight, *, bias=Unprintable(), router_dtype=None):  # noqa: B008
    return gate(x, weight)


class Callable:
    def __call__(self, x, weight, *, bias=None):
        return gate(x, weight)


class WithoutSignature(Callable):
    __signature__ = "none"


class Class:
    def __new__(cls, x, weight, *, bias=None):
        return gate(x, weight)


class Method:
    def gate(self, x, weight, *, bias=None):
        return gate(x, weight)


class Module(torch.nn.Module):
    def forward(self, x, weight, *, bias=None):
        return gate(x, weight)


FUNCTIONS = {  # and the settings that they lack
    "function": (gate, []),
    "builtin": (torch._C._nn.linear, []),
    "partial": (functools.partial(gate, router_dtype=None), []),
    "partial of a partial": (functools.partial(functools.partial(gate), bias=None), []),
    "callable": (Callable(), ["router_dtype"]),
    "callable without a signature": (WithoutSignature(), []),
    "module": (Module(), ["router_dtype"]),
    "class": (Class, ["router_dtype"]),
    "method": (Method().gate, ["router_dtype"]),
    "positional": (positional, ["bias", "router_dtype"]),
    "anything": (lambda *args, **settings: gate(*args), []),
    "default without a repr": (unprintable, []),
    "cached": (functools.lru_cache(gate), []),
    "scripted": (torch.jit.script(typed), []),
    "compiled": (torch.compile(gate, backend="eager"), []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_is_judged_and_described(name):
    function, lacked = FUNCTIONS[name]
    implementation = Implementation(SimpleNamespace(gate=function))
    outcome = evaluate(CASE, implementation)
    assert (outcome.status, outcome.finding) == ("PASS", None)
    assert implementation.lacks("gate", {"bias": None, "router_dtype": None}) == lacked
    assert child._signature("gate", implementation).startswith("gate(")
