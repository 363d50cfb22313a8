"""Laws of fused activation and quantisation: groups are independent, and powers of two are
exact.
"""

from dataclasses import replace
from typing import Any

import torch

from conformance.analysis.forms import by_group
from conformance.core import universal_laws as general
from conformance.core.contract import Problem
from conformance.core.law import Law, Outputs, Trial, plain, same
from conformance.families.quantization.cases import recipe_of
from conformance.families.quantization.quantize import directions
from conformance.judge import Finding

READ = ("amax", "scales", "codes", "values")


def _with_tensors(trial: Trial, **tensors: Any) -> Problem:
    """The call with other values, without gradients."""
    return replace(trial.problem.with_tensors(tensors), wanted=(), cotangents={})


def _compared(trial: Trial, law: str, first_outputs: Outputs, second: Outputs, problem: Problem) -> Finding | None:
    """Bitwise equal if runs repeat, else judged by the expectations of the second call."""
    return (
        same(law, first_outputs, second)
        if trial.declared.get("deterministic")
        else trial.judged(law, trial.reference(problem), second)
    )


def _neighbour_groups(trial: Trial) -> Finding | None:
    """A NaN and larger numbers in one group do not change the others."""
    h, splits = trial.problem.required["h"].clone(), trial.problem.settings["splits"]
    e = int(splits.argmax())
    first = int(splits[:e].sum())
    h[first : first + int(splits[e])] = torch.where(h[first : first + int(splits[e])] > 0, torch.nan, 3.0)
    problem = _with_tensors(trial, h=h)
    second = trial.run(problem)
    first_groups, there = {}, {}
    for suffix, form in _forms(trial).items():
        for what in READ:
            name = f"{what}{suffix}"
            groups_before, groups_after = (by_group(form, what, outputs[name]) for outputs in (trial.first, second))
            unchanged_groups = [g for g in range(len(splits)) if g != e]
            first_groups[name], there[name] = (
                torch.cat([groups[g] for g in unchanged_groups]) for groups in (groups_before, groups_after)
            )
    if trial.declared.get("deterministic"):
        return same("neighbour_groups", first_groups, there)
    return trial.judged("neighbour_groups", trial.reference(problem), second)


def _forms(trial: Trial) -> dict[str, Any]:
    """The reference's forms, by suffix of their outputs."""
    _, quantized = trial.contract._reference(trial.problem)  # type: ignore[attr-defined]
    return {suffix: quantized.form(columnwise) for suffix, columnwise in directions(trial.problem.settings)}


def _padding_values(trial: Trial) -> Finding | None:
    """Other numbers in the rows past the last group change nothing."""
    real = trial.case.tokens * trial.case.unit
    names = [name for name in ("h", "d_out", "probs") if name in trial.problem.tensors]
    changed_tensors = {name: trial.problem.tensors[name].clone() for name in names}
    for x in changed_tensors.values():
        x[real:] = torch.where(x[real:].isnan(), 3.0, torch.nan)
    problem = _with_tensors(trial, **changed_tensors)
    first_outputs = {
        name: trial.first[name] for name in trial.expected if not name.startswith("d_") or trial.case.backward
    }
    return _compared(trial, "padding_values", first_outputs, trial.run(problem), problem)


def _doubled_probs(trial: Trial) -> Finding | None:
    """Twice the probabilities give the same codes, and twice the scales where amax > 0."""
    problem = _with_tensors(trial, probs=trial.problem.settings["probs"] * 2)
    second = trial.run(problem)
    expected_outputs: Outputs = {}
    for suffix, _ in directions(trial.problem.settings):
        scale, amax = trial.first[f"scales{suffix}"], trial.first[f"amax{suffix}"]
        larger = {"nvfp4": lambda s: s, "mxfp8": lambda s: s + 1}.get(trial.case.scaling, lambda s: s * 2)(scale)
        expected_outputs |= {f"codes{suffix}": trial.first[f"codes{suffix}"], f"amax{suffix}": amax * 2}
        expected_outputs[f"scales{suffix}"] = (
            scale if trial.case.scaling == "nvfp4" else torch.where(amax > 0, larger, scale)
        )
    return _compared(trial, "doubled_probs", expected_outputs, second, problem)


def _doubles(case: Any) -> bool:
    fixed = case.scaling == "delayed" or bool(recipe_of(case).amax_epsilon) or case.noisy
    return (
        plain(case)
        and bool(case.probs)
        and not fixed
        and case.values == "dyadic"
        and case.dtype != "float16"
        and case.tokens * case.width > 0
    )


def _turns_over(case: Any) -> bool:
    """Whether the inputs stay legal if they are reversed and negated. Noise and scales do not."""
    return not case.noisy and case.scaling != "delayed"


NEIGHBOUR_GROUPS = Law(
    "neighbour_groups", _neighbour_groups, lambda case: plain(case) and case.experts > 1 and case.tokens > 0
)
PADDING_VALUES = Law("padding_values", _padding_values, lambda case: plain(case) and case.tail > 0)
DOUBLED_PROBS = Law("doubled_probs", _doubled_probs, _doubles)
BUFFER_REUSE = replace(
    general.BUFFER_REUSE, applies=lambda case: general.BUFFER_REUSE.applies(case) and _turns_over(case)
)
GRAPH_CAPTURE = replace(
    general.GRAPH_CAPTURE, applies=lambda case: general.GRAPH_CAPTURE.applies(case) and _turns_over(case)
)

GLU_AND_QUANTIZE = ACTIVATION_AND_QUANTIZE = (
    *(NEIGHBOUR_GROUPS, PADDING_VALUES, DOUBLED_PROBS, *general.CALLS),
    *(BUFFER_REUSE, general.LATE_PRODUCER, general.HOST_SYNC, GRAPH_CAPTURE),
)
GLU_BACKWARD_AND_QUANTIZE = ACTIVATION_BACKWARD_AND_QUANTIZE = GLU_AND_QUANTIZE
