"""Calls inside `torch.autocast`: they must give the results that they give outside, because their
inputs have a 16-bit dtype already.
"""

from dataclasses import replace
from typing import Any

import torch

from conformance.core.axes import Dtype
from conformance.core.case import axes_of
from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, next_values
from conformance.judge import Finding

NARROW = {"bfloat16", "float16"}


def autocast_dtype(problem: Problem) -> torch.dtype:
    """The dtype of the autocast around a call: its inputs' 16-bit dtype, or bfloat16."""
    narrow = (x.dtype for x in problem.tensors.values() if x.dtype in (torch.bfloat16, torch.float16))
    return next(narrow, torch.bfloat16)


def _autocast(trial: Trial) -> Finding | None:
    """The forward runs under `torch.autocast` in the dtype of the inputs, and the backward after
    it; then the same with other values. The results must be right, or the call must raise an error.
    Inputs whose dtype the caller chooses are 16 bits wide, or float64, which autocast does not
    change.
    """
    axes = axes_of(trial.contract.case_type)
    fixed = {x.name for x in trial.contract.signature.inputs if x.field not in axes}
    chosen = [x for name, x in trial.problem.tensors.items() if name.partition(".")[0] not in fixed]
    if {x.dtype for x in chosen if x.is_floating_point()} - {torch.float64, autocast_dtype(trial.problem)}:
        return None
    if next_call := next_values(trial):
        trial.run(next_call[1], manner="autocast")
    finding = trial.judged("autocast", trial.expected, trial.run(trial.problem, manner="autocast"))
    return finding and replace(finding, message=f"of a call under torch.autocast it {finding.message}")


def _floats(case: Any) -> set[str]:
    """The floating-point dtypes that the case names."""
    named = {getattr(case, name) for name, axis in axes_of(type(case)).items() if isinstance(axis, Dtype)}
    return {name for name in named if "float" in name}


def _narrow(case: Any) -> bool:
    """Whether all of them are the same 16 bits, or float64."""
    floats = _floats(case)
    rounded = floats - {"float64"}
    return not case.golden and not case.illegal and bool(floats) and len(rounded) < 2 and rounded <= NARROW


def _double(case: Any) -> bool:
    """Whether all of them are float64."""
    return _floats(case) == {"float64"}


# on a GPU torch makes float32 of more 16-bit results: of sums, softmax, exponentials
AUTOCAST = Law("autocast", _autocast, _narrow, device="cpu", on_a_gpu=_double, may_raise=True)


def of_products(*laws: Law) -> tuple[Law, ...]:
    """The laws of a function that multiplies matrices.

    Under autocast, torch rounds the factors and the product to 16 bits, so a float32 sum of several
    products changes. These laws therefore apply to float64 only, without a recipe, and not where
    the implementation declares that it multiplies float64 in float32.
    """

    def check(trial: Trial) -> Finding | None:
        return None if trial.declared.get("accumulator") == "float32_only" else _autocast(trial)

    def applies(case: Any) -> bool:
        return _narrow(case) and _double(case) and not getattr(case, "scaling", "")

    doubles = replace(AUTOCAST, check=check, applies=applies)
    return tuple(doubles if law is AUTOCAST else law for law in laws)
