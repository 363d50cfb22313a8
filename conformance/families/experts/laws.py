"""Laws of computations inside experts: rows and experts are independent."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core import universal_laws as general
from conformance.core.contract import Problem
from conformance.core.law import Law, Outputs, Trial, plain, same, upside_down
from conformance.core.tensors import STRANGE
from conformance.families.experts.precision import recipe_of
from conformance.judge import Bounded, Expectation, Finding, judge
from conformance.judge.bound import ROUNDOFF

BY_EXPERT = ("weight", "bias", "accumulate_into", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")
BY_ROW = (
    "delayed",
    "block",
    "mxfp8",
)  # scalings whose codes of a row do not depend on other rows, for blocks along rows
DOUBLED = ("dyadic", "rows", "columns", "patches", "zeros")  # values that stay finite


def scaled(expected: Expectation, factor: float) -> Bounded:
    """The expectation for `factor` times the input, a power of two: the same roundings except for
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
    """Where x and small multiples of x neither overflow nor are subnormal, in x's dtype and in
    float32, in which x was computed.
    """
    kind = torch.finfo(x.dtype)
    least = max(8 * kind.tiny, 2.0**24 * torch.finfo(torch.float32).tiny)
    return (x == 0) | ((x.abs() > least) & (x.abs() < kind.max / 8))


def doubled(trial: Trial, law: str, problem: Problem, outputs: tuple[str, ...]) -> Finding | None:
    """f(2x) = 2f(x), bitwise if deterministic, except for subnormals."""
    second = trial.run(problem)
    finding = trial.judged(law, {name: scaled(trial.expected[name], 2.0) for name in outputs}, second)
    if finding or not trial.declared.get("deterministic"):
        return finding
    compared = {name: ordinary(trial.first[name]) & ~_rounded_to_zero(trial, name) for name in outputs}
    return same(
        law,
        {name: trial.first[name][compared[name]] * 2 for name in outputs},
        {name: second[name][compared[name]] for name in outputs},
    )


def _rounded_to_zero(trial: Trial, name: str) -> Tensor:
    """Where the output is zero although its right value is not: twice that value may be
    subnormal.
    """
    return (trial.first[name] == 0) & (trial.expected[name].resolve(trial.first).value != 0)


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
    """A NaN in one row changes neither another row nor the gradient of another expert."""
    name = next(iter(trial.problem.required))
    x = trial.problem.required[name].clone()
    middle = trial.case.tokens // 2
    x[middle] = torch.nan
    second = trial.run(trial.problem.with_tensors({name: x}))
    rows, unaffected = torch.arange(len(x)) != middle, {}
    for output in judged_outputs(trial):
        unaffected[output] = (
            rows if of_rows(output) else torch.arange(len(trial.first[output])) != expert_of(trial.problem, middle)
        )
    return untouched(
        trial,
        "neighbour_independence",
        {output: second[output][some] for output, some in unaffected.items()},
        unaffected,
    )


def untouched(
    trial: Trial, law: str, second: dict[str, Any], unaffected: dict[str, Tensor], bitwise: bool = True
) -> Finding | None:
    """`second` equals these rows of the first run: bitwise if deterministic, else by their
    expectation.
    """
    if bitwise and trial.declared.get("deterministic"):
        return same(law, {name: trial.first[name][rows] for name, rows in unaffected.items()}, second)
    for name, rows in unaffected.items():
        expected = trial.expected[name]
        assert isinstance(expected, Bounded)
        finding = judge(name, expected.taken(rows), second[name])
        if finding:
            return Finding(name, law, finding.message, finding.index)
    return None


# ---- rows in segments, one per expert


def of_rows(name: str) -> bool:
    """Whether the tensor's first dimension is rows, not experts."""
    return name.removeprefix("d_") not in BY_EXPERT and not name.startswith("state.")


def judged_outputs(trial: Trial) -> list[str]:
    return [name for name, x in trial.first.items() if isinstance(x, Tensor) and name in trial.expected]


def expert_of(problem: Problem, row: int) -> int:
    """The expert of a row; -1 without segments."""
    counts = problem.required.get("tokens_per_expert")
    return -1 if counts is None else int((counts.cumsum(0) <= row).sum())


def regrouped(problem: Problem, rows: Tensor, experts: Tensor, counts: Tensor) -> Problem:
    """The call with these rows and experts; row -1 is a new row of NaN."""

    def taken(name: str, x: Tensor) -> Tensor:
        if name == "tokens_per_expert":
            return counts.to(x.dtype)
        if not of_rows(name):
            return x[experts].clone()
        if name == "noise" or name.startswith("noise."):  # one noise tensor per direction
            return torch.stack([taken("", direction) for direction in x])
        return torch.cat(
            [x, torch.full_like(x[:1], torch.nan) if len(x) else x.new_full((1, *x.shape[1:]), torch.nan)]
        )[rows]

    cotangents = {name: taken(name, x) for name, x in problem.cotangents.items()}
    return replace(
        problem.with_tensors({name: taken(name, x) for name, x in problem.tensors.items()}), cotangents=cotangents
    )


def _padding_independence(trial: Trial) -> Finding | None:
    """Nothing changes if the tail is removed, or if one is added where there was none."""
    counts = trial.problem.required["tokens_per_expert"]
    total = int(counts.sum())
    rows = torch.tensor([*range(total), *([-1] * 3 if not trial.case.tail else [])], dtype=torch.int64)
    outputs = trial.run(regrouped(trial.problem, rows, torch.arange(len(counts)), counts))
    segment_rows = {
        name: torch.arange(len(trial.first[name]))[: total if of_rows(name) else None] for name in judged_outputs(trial)
    }
    return untouched(
        trial,
        "padding_independence",
        {name: outputs[name][: len(some)] for name, some in segment_rows.items()},
        segment_rows,
        bitwise=False,
    )


def _in_order(trial: Trial, law: str, rows: Tensor, experts: Tensor) -> Finding | None:
    """Run with these rows and experts, each once, in this order: each keeps its results."""
    counts = trial.problem.required["tokens_per_expert"]
    outputs = trial.run(regrouped(trial.problem, rows, experts, counts[experts]))
    restored = {
        name: x[(rows if of_rows(name) else experts).argsort()] for name, x in outputs.items() if isinstance(x, Tensor)
    }
    return trial.judged(law, trial.expected, restored)


def _segments(trial: Trial) -> tuple[Tensor, ...]:
    """The numbers of each expert's rows, and of the tail's."""
    counts = trial.problem.required["tokens_per_expert"]
    sizes = [*counts.tolist(), trial.case.tail]
    return torch.arange(sum(sizes)).split(sizes)


def _expert_relabelling(trial: Trial) -> Finding | None:
    """Experts and their segments in reverse order."""
    *segments, tail = _segments(trial)
    experts = torch.arange(len(segments)).flip(0)
    return _in_order(trial, "expert_relabelling", torch.cat([*segments[::-1], tail]), experts)


def _row_reversal(trial: Trial) -> Finding | None:
    """Each expert's rows in reverse order. A sum over them is then added in another order."""
    *segments, tail = _segments(trial)
    rows = torch.cat([*(rows.flip(0) for rows in segments), tail])
    return _in_order(trial, "row_reversal", rows, torch.arange(len(segments)))


def _two_parts(trial: Trial) -> Finding | None:
    """The first half of each expert's rows is added to the given gradient, and the second half to
    that sum. This takes two more roundings, each of which is at most one rounding of the sum of all
    magnitudes.
    """
    problem, counts = trial.problem, trial.problem.required["tokens_per_expert"]
    *segments, tail = _segments(trial)
    halves = [(rows[: len(rows) // 2], rows[len(rows) // 2 :]) for rows in segments]
    outputs: Outputs = {"d_weight": problem.settings["accumulate_into"]}
    for halves_of_experts in zip(*halves, strict=True):
        some = torch.tensor([len(half) for half in halves_of_experts])
        half_problem = regrouped(
            problem, torch.cat([*halves_of_experts, tail]), torch.arange(len(halves_of_experts)), some
        )
        outputs = trial.run(half_problem.with_tensors({"accumulate_into": outputs["d_weight"]}))
    sizes = trial.reference(problem.with_tensors({name: x.abs() for name, x in problem.tensors.items()}))
    expected, size = trial.expected["d_weight"], sizes["d_weight"].value.nan_to_num(0.0, 0.0, 0.0)
    assert isinstance(expected, Bounded)
    second_rounding = torch.where((counts > 0)[:, None, None], 2 * ROUNDOFF[expected.dtype] * size, 0.0)
    return trial.judged("two_parts", {"d_weight": replace(expected, bound=expected.bound + second_rounding)}, outputs)


def _group_split(trial: Trial) -> Finding | None:
    """The largest expert is split into two experts with the same weights: rows do not change."""
    counts = trial.problem.required["tokens_per_expert"]
    e = int(counts.argmax())
    unit = 1 if getattr(trial.case, "align", 0) else trial.case.unit
    first = int(counts[e]) // unit // 2 * unit
    split = torch.cat([counts[:e], torch.tensor([first, int(counts[e]) - first]), counts[e + 1 :]])
    experts = torch.tensor([*range(e + 1), *range(e, len(counts))])
    outputs = trial.run(regrouped(trial.problem, torch.arange(int(counts.sum()) + trial.case.tail), experts, split))
    return trial.judged("group_split", {name: x for name, x in trial.expected.items() if of_rows(name)}, outputs)


def turned(problem: Problem) -> Problem:
    """Experts and rows of segments reversed, values but probs negated; the tail stays in place.

    An infinity of the tail inside a segment would make a whole NVFP4 expert undefined.
    """
    counts = problem.required.get("tokens_per_expert")

    def other(name: str, x: Tensor) -> Tensor:
        if counts is None or name == "tokens_per_expert" or not of_rows(name):
            return _negated(name, upside_down(x))
        total = int(counts.sum())
        return torch.cat([_negated(name, upside_down(x[:total])), x[total:]])

    return problem.with_tensors({name: other(name, x) for name, x in problem.tensors.items()})


def _negated(name: str, x: Tensor) -> Tensor:
    return -x if x.is_floating_point() and name != "probs" else x


def _buffer_reuse(trial: Trial) -> Finding | None:
    """Other values in the storage of the first run's inputs."""
    second = turned(trial.problem)
    return general.overwritten(trial, second, trial.reference(second))


def _graph_capture(trial: Trial) -> Finding | None:
    """A graph is captured with one set of values and replayed with another, where this is
    declared.
    """
    if not trial.declared.get("graph_capturable"):
        return None
    second = turned(trial.problem)
    return trial.judged("graph_capture", trial.reference(second), trial.run(trial.problem, replay=second))


def _linear(case: Any) -> bool:
    """Whether the output is linear in the doubled input."""
    without = not getattr(case, "bias", "") and not getattr(case, "into", "") and _doubles(case)
    if case.function in ("glu", "activation"):
        return plain(case) and bool(case.probs) and case.values not in STRANGE[1:]
    return plain(case) and without


def _doubles(case: Any) -> bool:
    """Whether doubled values quantise to the same codes and scales; none may be subnormal."""
    recipe = recipe_of(case) if getattr(case, "scaling", "") else None
    if recipe is None:
        return getattr(case, "values", "") not in STRANGE[1:]
    return recipe.scaling != "delayed" and not recipe.amax_epsilon and case.values in DOUBLED


def _by_row(case: Any) -> bool:
    """Whether the result of a row depends on no other row of its expert."""
    return getattr(case, "scaling", "") in ("", *BY_ROW)


def _turns_over(case: Any) -> bool:
    """Whether inputs stay legal reversed and negated; given scales and gradient noise do not."""
    recipe = recipe_of(case)
    return recipe is None or not (
        recipe.scaling == "delayed"
        or (recipe.stochastic_rounding and case.function in ("grouped_dgrad", "grouped_wgrad"))
    )


def unquantised(case: Any) -> bool:
    """Whether it is sums and products alone."""
    return not getattr(case, "scaling", "")


def _rounds_small_numbers(case: Any) -> bool:
    """Whether rows may be permuted. They may not if the noise also has rows for padding."""
    return bool(getattr(case, "early", False) or getattr(case, "scaling", "")) and case.dtype == "float16"


def _grouped(case: Any) -> bool:
    """Whether rows may be permuted: not if noise also has rows for padding."""
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
TWO_PARTS = Law("two_parts", _two_parts, lambda case: _grouped(case) and unquantised(case) and case.into == "float32")
ROW_REVERSAL = Law("row_reversal", _row_reversal, lambda case: _grouped(case) and unquantised(case))
GROUP_SPLIT = Law(
    "group_split",
    _group_split,
    lambda case: _grouped(case) and case.tokens > case.experts and _by_row(case),
    recompiles=True,
)
BUFFER_REUSE = replace(
    general.BUFFER_REUSE,
    check=_buffer_reuse,
    applies=lambda case: general.BUFFER_REUSE.applies(case) and _turns_over(case),
)
GRAPH_CAPTURE = replace(
    general.GRAPH_CAPTURE,
    check=_graph_capture,
    applies=lambda case: general.GRAPH_CAPTURE.applies(case) and _turns_over(case),
)
