"""Laws of quantisation: groups and blocks are independent; scaling by two is exact."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import by_group
from conformance.core import universal_laws as general
from conformance.core.contract import Problem
from conformance.core.law import Law, Outputs, Trial, plain, same
from conformance.families.quantization.cases import is_random, recipe_of
from conformance.families.quantization.quantize import directions, script_of
from conformance.interface import Implementation
from conformance.judge import Finding

ORDINARY = ("dyadic", "rows", "wide", "bounds", "midpoints", "zeros")  # values that stay finite when doubled
READ = ("amax", "scales", "codes", "values")


def _of_rows(name: str) -> bool:
    """Whether an input has one row per row of x."""
    return name == "x" or name.startswith("x.")


def _with_rows(problem: Problem, rows: Tensor, splits: Tensor | None) -> Problem:
    """The calls on these rows (-1: a row of zeros), without gradients and layouts."""

    def select(x: Tensor, dim: int) -> Tensor:
        zero = x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
        return torch.cat([x, zero], dim).index_select(dim, torch.where(rows < 0, x.shape[dim], rows))

    changed = {name: select(x, 0) for name, x in problem.tensors.items() if _of_rows(name)}
    changed |= {"noise": select(problem.settings["noise"], 1)} if "noise" in problem.settings else {}
    changed |= {} if splits is None else {"splits": splits.to(problem.settings["splits"].dtype)}
    return replace(problem.with_tensors(changed), wanted=(), cotangents={}, layouts={})


def _forms(trial: Trial) -> dict[str, Any]:
    """The reference's forms, by the pattern of their outputs' names."""
    quantized_forms: dict[str, Any] = {}
    steps = trial.case.steps.split("+")
    script_of(steps, quantized_forms.__setitem__)(
        Implementation(moe_ref), trial.problem.required | trial.problem.settings
    )
    return {
        f"{prefix}{{}}{suffix}": q.form(columnwise)
        for prefix, q in quantized_forms.items()
        for suffix, columnwise in directions(trial.problem.settings)
    }


def _outputs(trial: Trial, what: tuple[str, ...]) -> list[str]:
    """The names of these outputs, in every step and direction."""
    return [name for name in trial.expected if name.removesuffix(".columnwise").split(".")[-1] in what]


def _scaling(trial: Trial) -> Finding | None:
    """Doubled values have the same codes; scales with a nonzero amax double."""
    twice = {name: x * 2 for name, x in trial.problem.tensors.items() if _of_rows(name)}
    if any((x.isinf() & trial.problem.tensors[name].isfinite()).any() for name, x in twice.items()):
        return None
    second = trial.run(replace(trial.problem.with_tensors(twice), wanted=(), cotangents={}, layouts={}))
    expected_outputs: Outputs = {name: trial.first[name] for name in _outputs(trial, ("codes",))}
    for name in _outputs(trial, ("scales",)):
        scale, amax = trial.first[name], trial.first[name.replace("scales", "amax")]
        if trial.case.scaling == "nvfp4":  # block scales are relative to amax
            expected_outputs[name] = scale
        elif trial.case.scaling == "mxfp8":
            expected_outputs[name] = torch.where(amax > 0, scale + 1, scale)
        else:
            expected_outputs[name] = torch.where(amax > 0, scale * 2, scale)
    expected_outputs |= {name: trial.first[name] * 2 for name in _outputs(trial, ("amax",))}
    return same("scaling", expected_outputs, second)


def _groups_alone(trial: Trial) -> Finding | None:
    """The largest group by itself has the same outputs as among the others."""
    splits = trial.problem.settings["splits"]
    e = int(splits.argmax())
    start = int(splits[:e].sum())
    rows = torch.arange(start, start + int(splits[e]))
    single_group = _with_rows(trial.problem, rows, splits[e : e + 1])
    state = {
        name: trial.first[name][e : e + 1] for name in ("state.scale", "state.amax_history") if name in trial.first
    }
    if "reduced_amax" in single_group.required:
        single_group = single_group.with_tensors({"reduced_amax": single_group.required["reduced_amax"][e : e + 1]})
    group_outputs: Outputs = {}
    for pattern, form in _forms(trial).items():
        for what in READ:
            first = trial.first[pattern.format(what)]
            group_values = by_group(form, what, first)[e]
            group_outputs[pattern.format(what)] = group_values.flatten() if first.dim() == 1 else group_values
    return same("groups_alone", group_outputs | state, trial.run(single_group))


def _zero_rows(trial: Trial) -> Finding | None:
    """Zero rows appended to each group: codes and values of the other rows do not change."""
    unit, splits = trial.case.unit, trial.problem.settings.get("splits")
    sizes = splits.tolist() if splits is not None else [len(trial.problem.required["x"])]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    segments = [[*range(end - size, end), *[-1] * unit] for end, size in zip(ends, sizes, strict=True)]
    rows = torch.tensor([row for segment in segments for row in segment])
    outputs = trial.run(_with_rows(trial.problem, rows, None if splits is None else splits + unit))
    names, real = _outputs(trial, ("codes", "values")), int(sum(sizes))
    return same(
        "zero_rows",
        {name: trial.first[name][:real] for name in names},
        {name: outputs[name][rows >= 0] for name in names},
    )


def _padding_independence(trial: Trial) -> Finding | None:
    """Rows past the last group are removed, or rows of zeros added: the outputs of the groups do
    not change.
    """
    splits = trial.problem.settings["splits"]
    total = int(splits.sum())
    rows = torch.tensor([*range(total), *([-1] * 3 if not trial.case.tail else [])], dtype=torch.int64)
    outputs = trial.run(_with_rows(trial.problem, rows, splits))
    first_outputs = {name: trial.first[name] for name in _outputs(trial, ("amax", "scales"))}
    by_row = _outputs(trial, ("codes", "values"))
    first_outputs |= {name: trial.first[name][:total] for name in by_row}
    return same("padding_independence", first_outputs, outputs | {name: outputs[name][:total] for name in by_row})


def _row_independence(trial: Trial) -> Finding | None:
    """The middle row × 16 with a leading NaN: no other row's codes, scales or values change."""
    x = trial.problem.required["x"].clone()
    middle = (trial.case.tokens * trial.case.unit) // 2
    x[middle] = x[middle] * 16
    x[middle, 0] = torch.nan
    second = trial.run(replace(trial.problem.with_tensors({"x": x}), wanted=(), cotangents={}, layouts={}))
    real = trial.case.tokens * trial.case.unit
    unchanged_rows = torch.arange(real) != middle
    return same(
        "row_independence",
        {n: trial.first[n][:real][unchanged_rows] for n in READ},
        {n: second[n][:real][unchanged_rows] for n in READ},
    )


def _idempotence(trial: Trial) -> Finding | None:
    """Quantising dequantised values is exact."""
    requantized = trial.run(
        replace(trial.problem.with_tensors({"x": trial.first["values"]}), wanted=(), cotangents={}, layouts={})
    )
    return same("idempotence", {"values": trial.first["values"]}, {"values": requantized["values"]})


def _by_rows(case: Any) -> bool:
    """Whether no two rows share a scale."""
    recipe = recipe_of(case)
    square = bool(recipe.two_dimensional_weights) and case.role == "weight"
    vectors = case.scaling in ("block", "mxfp8") and not square
    return case.direction == "rowwise" and (vectors or (bool(recipe.row_scaled_activation) and case.role == "input"))


def _exact_again(case: Any) -> bool:
    """Whether code × scale is exact in the dtype, and scales are powers of two."""
    recipe = recipe_of(case)
    by_two = case.scaling == "mxfp8" or bool(recipe.power_of_two_scales)
    return (
        by_two
        and not recipe.amax_epsilon
        and case.direction == "rowwise"
        and case.dtype != "float16"
        and case.values in ORDINARY
    )


def _doubles(case: Any) -> bool:
    fixed = case.scaling == "delayed" or bool(recipe_of(case).amax_epsilon)
    return plain(case) and not fixed and not is_random(case) and case.values in ORDINARY


def _turns_over(case: Any) -> bool:
    """Whether reversed and negated inputs stay legal. Noise and reduced amaxes do not."""
    return not is_random(case) and "reduced" not in case.steps


def _has_rows(case: Any) -> bool:
    return case.tokens > 0 and case.hidden > 0


SCALING = Law("scaling", _scaling, lambda case: _doubles(case) and _has_rows(case))
GROUPS_ALONE = Law("groups_alone", _groups_alone, lambda case: plain(case) and case.experts > 0, recompiles=True)
ZERO_ROWS = Law("zero_rows", _zero_rows, lambda case: plain(case) and _has_rows(case))
PADDING_INDEPENDENCE = Law("padding_independence", _padding_independence, lambda case: plain(case) and case.experts > 0)
ROW_INDEPENDENCE = Law(
    "row_independence",
    _row_independence,
    lambda case: plain(case) and _by_rows(case) and case.tokens > 1 and case.hidden > 0,
)
IDEMPOTENCE = Law("idempotence", _idempotence, lambda case: plain(case) and _exact_again(case) and _has_rows(case))
BUFFER_REUSE = replace(
    general.BUFFER_REUSE, applies=lambda case: general.BUFFER_REUSE.applies(case) and _turns_over(case)
)
GRAPH_CAPTURE = replace(
    general.GRAPH_CAPTURE, applies=lambda case: general.GRAPH_CAPTURE.applies(case) and _turns_over(case)
)

QUANTIZE = (
    *(IDEMPOTENCE, ROW_INDEPENDENCE, SCALING, GROUPS_ALONE, ZERO_ROWS, PADDING_INDEPENDENCE),
    *(*general.CALLS, BUFFER_REUSE, general.LATE_PRODUCER, general.HOST_SYNC, GRAPH_CAPTURE),
)
