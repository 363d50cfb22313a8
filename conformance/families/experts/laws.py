"""Laws of what happens inside experts: rows, and the experts that hold them, know nothing of one another."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core import universal_laws as general
from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, plain, same
from conformance.families.experts.precision import recipe_of, unit_of
from conformance.judge import Bounded, Expectation, Finding, judge

BY_EXPERT = ("weight", "bias", "accumulate_into", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")
BY_ROW = (
    "delayed",
    "block",
    "mxfp8",
)  # scalings of which a row's codes are the same whoever stands beside it, where blocks lie along rows
DOUBLED = ("dyadic", "rows", "columns", "patches", "zeros")  # values that stay finite


def scaled(expected: Expectation, factor: float) -> Bounded:
    """What is right for `factor` times the input, a power of two: the same roundings, but for
    subnormals and overflow.
    """
    assert isinstance(expected, Bounded)
    finite = expected.value.abs() * factor + expected.bound * factor <= torch.finfo(expected.dtype).max
    lost = torch.finfo(expected.dtype).tiny * max(factor, 1.0)
    bound = torch.where(
        finite & expected.bound.isfinite(),
        expected.bound * factor + torch.where(expected.bound > 0, lost, 0.0),
        torch.inf,
    )
    value = expected.value * factor
    return Bounded(value, torch.where(value.isfinite(), bound, 0.0), expected.dtype, expected.accumulator)


def ordinary(x: Tensor) -> Tensor:
    """Where neither x nor a few times x is subnormal or overflows; nor are the float32 numbers that
    it is made of, whatever its own dtype.
    """
    kind = torch.finfo(x.dtype)
    least = max(8 * kind.tiny, 2.0**24 * torch.finfo(torch.float32).tiny)
    return (x == 0) | ((x.abs() > least) & (x.abs() < kind.max / 8))


def doubled(trial: Trial, law: str, problem: Problem, outputs: tuple[str, ...]) -> Finding | None:
    """Twice the input is exactly twice the output, where runs repeat and nothing is subnormal."""
    second = trial.run(problem)
    finding = trial.judged(law, {name: scaled(trial.expected[name], 2.0) for name in outputs}, second)
    if finding or not trial.declared.get("deterministic"):
        return finding
    kept = {name: ordinary(trial.first[name]) for name in outputs}
    return same(
        law,
        {name: trial.first[name][kept[name]] * 2 for name in outputs},
        {name: second[name][kept[name]] for name in outputs},
    )


def _scaling(trial: Trial) -> Finding | None:
    """Twice the input."""
    name, output = trial.contract.signature.linear
    x = trial.problem.tensors[name]
    twice = replace(trial.problem.with_tensors({name: x * 2}), wanted=(), cotangents={})
    return doubled(trial, "scaling", twice, (output,))


def _cotangent_scaling(trial: Trial) -> Finding | None:
    """Twice the cotangent."""
    twice = replace(trial.problem, cotangents={name: x * 2 for name, x in trial.problem.cotangents.items()})
    return doubled(trial, "cotangent_scaling", twice, tuple(f"d_{name}" for name in trial.problem.wanted))


def _neighbour_independence(trial: Trial) -> Finding | None:
    """A NaN in one row: no other row changes, and no other expert's gradient."""
    name = next(iter(trial.problem.required))
    x = trial.problem.required[name].clone()
    middle = trial.case.tokens // 2
    x[middle] = torch.nan
    second = trial.run(trial.problem.with_tensors({name: x}))
    rows, kept = torch.arange(len(x)) != middle, {}
    for output in judged_outputs(trial):
        kept[output] = (
            rows if of_rows(output) else torch.arange(len(trial.first[output])) != expert_of(trial.problem, middle)
        )
    return untouched(
        trial, "neighbour_independence", {output: second[output][some] for output, some in kept.items()}, kept
    )


def untouched(
    trial: Trial, law: str, second: dict[str, Any], kept: dict[str, Tensor], bitwise: bool = True
) -> Finding | None:
    """`second` is what some rows were in the first run: bit by bit if runs of one shape repeat,
    else by what was expected there.
    """
    if bitwise and trial.declared.get("deterministic"):
        return same(law, {name: trial.first[name][rows] for name, rows in kept.items()}, second)
    for name, rows in kept.items():
        expected = trial.expected[name]
        assert isinstance(expected, Bounded)
        finding = judge(
            name,
            Bounded(expected.value[rows], expected.bound[rows], expected.dtype, expected.accumulator),
            second[name],
        )
        if finding:
            return Finding(name, law, finding.message, finding.index)
    return None


# ---- rows in segments, one for each expert


def of_rows(name: str) -> bool:
    """Whether a tensor has a row for each row, and not for each expert."""
    return name.removeprefix("d_") not in BY_EXPERT and not name.startswith("state.")


def judged_outputs(trial: Trial) -> list[str]:
    return [name for name, x in trial.first.items() if isinstance(x, Tensor) and name in trial.expected]


def expert_of(problem: Problem, row: int) -> int:
    """The expert in whose segment a row stands; -1 where there are none."""
    counts = problem.required.get("tokens_per_expert")
    return -1 if counts is None else int((counts.cumsum(0) <= row).sum())


def regrouped(problem: Problem, rows: Tensor, experts: Tensor, counts: Tensor) -> Problem:
    """The rows and the experts that these indices take; row -1 is a new one that holds NaN."""

    def taken(name: str, x: Tensor) -> Tensor:
        if name == "tokens_per_expert":
            return counts.to(x.dtype)
        if not of_rows(name):
            return x[experts].clone()
        if name == "noise" or name.startswith("noise."):  # a row of it for each direction
            return torch.stack([taken("", direction) for direction in x])
        return torch.cat(
            [x, torch.full_like(x[:1], torch.nan) if len(x) else x.new_full((1, *x.shape[1:]), torch.nan)]
        )[rows]

    cotangents = {name: taken(name, x) for name, x in problem.cotangents.items()}
    return replace(
        problem.with_tensors({name: taken(name, x) for name, x in problem.tensors.items()}), cotangents=cotangents
    )


def _padding_independence(trial: Trial) -> Finding | None:
    """Without the rows behind the last segment, or with some where there were none: nothing changes."""
    counts = trial.problem.required["tokens_per_expert"]
    total = int(counts.sum())
    rows = torch.tensor([*range(total), *([-1] * 3 if not trial.case.tail else [])], dtype=torch.int64)
    outputs = trial.run(regrouped(trial.problem, rows, torch.arange(len(counts)), counts))
    kept = {
        name: torch.arange(len(trial.first[name]))[: total if of_rows(name) else None] for name in judged_outputs(trial)
    }
    return untouched(
        trial,
        "padding_independence",
        {name: outputs[name][: len(some)] for name, some in kept.items()},
        kept,
        bitwise=False,
    )


def _expert_relabelling(trial: Trial) -> Finding | None:
    """Experts, and their segments with them, in the opposite order."""
    counts = trial.problem.required["tokens_per_expert"]
    numbers = torch.arange(int(counts.sum()) + trial.case.tail)
    segments = numbers.split([*counts.tolist(), trial.case.tail])
    rows = torch.cat([*segments[:-1][::-1], segments[-1]])
    outputs = trial.run(regrouped(trial.problem, rows, torch.arange(len(counts)).flip(0), counts.flip(0)))
    back = {
        name: x[rows.argsort()] if of_rows(name) else x.flip(0) for name, x in outputs.items() if isinstance(x, Tensor)
    }
    return trial.judged("expert_relabelling", trial.expected, back)


def _group_split(trial: Trial) -> Finding | None:
    """The largest expert as two with the same weights: each row is what it was."""
    counts = trial.problem.required["tokens_per_expert"]
    e = int(counts.argmax())
    unit = 1 if getattr(trial.case, "align", 0) else unit_of(trial.case)
    first = int(counts[e]) // unit // 2 * unit
    split = torch.cat([counts[:e], torch.tensor([first, int(counts[e]) - first]), counts[e + 1 :]])
    experts = torch.tensor([*range(e + 1), *range(e, len(counts))])
    outputs = trial.run(regrouped(trial.problem, torch.arange(int(counts.sum()) + trial.case.tail), experts, split))
    return trial.judged("group_split", {name: x for name, x in trial.expected.items() if of_rows(name)}, outputs)


def _linear(case: Any) -> bool:
    """Whether the output is linear in what is doubled."""
    without = not getattr(case, "bias", "") and not getattr(case, "into", "") and _doubles(case)
    return plain(case) and (bool(case.probs) if case.function in ("glu", "activation") else without)


def _doubles(case: Any) -> bool:
    """Whether twice the values become the same codes and twice the scales."""
    recipe = recipe_of(case) if getattr(case, "scaling", "") else None
    return recipe is None or (recipe.scaling != "delayed" and not recipe.amax_epsilon and case.values in DOUBLED)


def _by_row(case: Any) -> bool:
    """Whether a row's result is its own, whatever an expert's other rows are."""
    return getattr(case, "scaling", "") in ("", *BY_ROW)


def _turns_over(case: Any) -> bool:
    """Whether the inputs stay legal upside down and negated: scales of a state and a gradient's noise do not.
    Nor may an infinity of the tail enter a segment of NVFP4: it leaves no value of the expert defined.
    """
    recipe = recipe_of(case)
    return recipe is None or not (
        recipe.scaling == "delayed"
        or (recipe.scaling == "nvfp4" and getattr(case, "tail", 0) > 0)
        or (recipe.stochastic_rounding and case.function in ("grouped_dgrad", "grouped_wgrad"))
    )


def _rounds_small_numbers(case: Any) -> bool:
    """Whether a cotangent, or a product of quantised ones, may become a subnormal on its way, which
    doubling does not pass through.
    """
    return bool(getattr(case, "early", False) or getattr(case, "scaling", "")) and case.dtype == "float16"


def _grouped(case: Any) -> bool:
    """Whether rows may change their places: not where noise has rows for padding, too."""
    return (
        plain(case)
        and case.tokens + case.tail > 0
        and not (getattr(case, "scaling", "") == "nvfp4" and getattr(case, "align", 0) and case.grads)
    )


SCALING = Law("scaling", _scaling, _linear)
COTANGENT_SCALING = Law(
    "cotangent_scaling",
    _cotangent_scaling,
    lambda case: plain(case) and bool(case.grads) and _doubles(case) and not _rounds_small_numbers(case),
)
NEIGHBOUR_INDEPENDENCE = Law(
    "neighbour_independence",
    _neighbour_independence,
    lambda case: plain(case) and case.tokens > 1 and (_by_row(case) or case.function == "grouped_wgrad"),
)
ROW_INDEPENDENCE = replace(
    NEIGHBOUR_INDEPENDENCE, applies=lambda case: NEIGHBOUR_INDEPENDENCE.applies(case) and case.grads in ("", "x")
)  # no weight's
PADDING_INDEPENDENCE = Law("padding_independence", _padding_independence, _grouped)
EXPERT_RELABELLING = Law("expert_relabelling", _expert_relabelling, lambda case: _grouped(case) and case.experts > 1)
GROUP_SPLIT = Law(
    "group_split",
    _group_split,
    lambda case: _grouped(case) and case.tokens > case.experts and _by_row(case),
    recompiles=True,
)
BUFFER_REUSE = replace(
    general.BUFFER_REUSE, applies=lambda case: general.BUFFER_REUSE.applies(case) and _turns_over(case)
)
GRAPH_CAPTURE = replace(
    general.GRAPH_CAPTURE, applies=lambda case: general.GRAPH_CAPTURE.applies(case) and _turns_over(case)
)
