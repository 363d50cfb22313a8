"""Calls that break a rule.

Each must raise an error, or be declared unchecked. If only the device sees the values that break
the rule, the result may show the error by a NaN instead. The name of the rule describes the
violation, and `blame` in the problem names the argument at fault.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from conformance.core.contract import Problem

Rule = Callable[[Problem], Problem]


def setting(name: str, value: object) -> Rule:
    return together(name, **{name: value})


def bare(problem: Problem) -> Problem:
    """The problem without gradients, cotangents and layouts."""
    return replace(problem, wanted=(), cotangents={}, layouts={})


def only_setting(name: str, value: object) -> Rule:
    return lambda problem: replace(bare(problem), settings={name: value}, blame=name)


def one_more(name: str, dim: int = 0) -> Rule:
    """The input with one entry more than the other inputs allow."""

    def extended(x: torch.Tensor) -> torch.Tensor:
        extra = torch.zeros([1 if d == dim else n for d, n in enumerate(x.shape)], dtype=x.dtype)
        return torch.cat([x, extra], dim)

    return changed(name, extended)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    return lambda problem: replace(bare(problem).with_tensors({name: change(problem.tensors[name])}), blame=name)


def flat(name: str) -> Rule:
    return changed(name, lambda x: x.reshape(-1))


def index_too_large(problem: Problem) -> Problem:
    too_large = torch.full_like(problem.required["indices"], problem.settings["num_experts"])
    return replace(bare(problem).with_tensors({"indices": too_large}), blame="indices")


def index_too_large_for_a_slot(problem: Problem) -> Problem:
    """The same where slots may be empty: an unknown expert may be read as an empty slot."""
    empty = bare(problem).with_tensors({"indices": torch.full_like(problem.required["indices"], -1)})
    return replace(index_too_large(problem), on_device=True, same_as=empty)


def in_dtype(name: str, dtype: torch.dtype) -> Rule:
    return changed(name, lambda x: x.to(dtype))


def with_values(name: str, value: torch.Tensor) -> Rule:
    return lambda problem: replace(bare(problem).with_tensors({name: value}), blame=name)


def on_device(rule: Rule) -> Rule:
    """The same rule, marked as broken by values that only the device sees."""
    return lambda problem: replace(rule(problem), on_device=True)


def together(blame: str, **settings: object) -> Rule:
    """Settings that are legal one by one, and illegal in combination."""
    return lambda problem: replace(bare(problem), settings=problem.settings | settings, blame=blame)
