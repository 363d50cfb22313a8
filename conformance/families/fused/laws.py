"""Laws of permute_and_quantize: codes depend on their segment only; one step equals two."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core import universal_laws as general
from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, plain, same, upside_down
from conformance.families.fused.cases import permuting
from conformance.families.fused.permute_and_quantize import KEYWORDS, read_back
from conformance.families.permutation.permute import Permute
from conformance.families.quantization.quantize import Quantize, directions
from conformance.interface import named_outputs
from conformance.judge import Finding
from moe_ref.config import QuantizerState
from moe_ref.permutation.permute import PADDING, RowMap, permute

BY_EXPERT = ("routing_map", "probs")  # [T,E]
STATES = ("amax_history", "scale")  # per expert
STEPS = ("rows", "probs", "row_map", "tokens_per_expert", "pad_offsets", "overflow")  # of `permute`


def _row_map(problem: Problem) -> RowMap:
    settings = {name: x for name, x in problem.settings.items() if name in KEYWORDS[1:4]}
    return permute(torch.zeros(len(problem.required["tokens"]), 0), problem.required["routing_map"], **settings).row_map


def _rows_in(second: RowMap, first: RowMap, expert: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`first`'s rows with a token, and `second`'s rows of that token and `expert(expert)`."""
    row_TE = torch.full((second.num_tokens, second.num_experts), PADDING)
    real = second.token_P != PADDING
    row_TE[second.token_P[real], second.expert_P[real]] = real.nonzero().flatten()
    there = (first.token_P != PADDING).nonzero().flatten()
    return there, row_TE[first.token_P[there], expert(first.expert_P[there])]


def _same_rows(law: str, trial: Trial, second: Problem, expert: Callable[[Tensor], Tensor]) -> Finding | None:
    """The codes and values of every row with a token, in both calls."""
    first_rows, second_rows = _rows_in(_row_map(second), _row_map(trial.problem), expert)
    names = [f"{name}{suffix}" for name in ("codes", "values") for suffix, _ in directions(trial.problem.settings)]
    outputs = trial.run(second)
    return same(
        law,
        {name: trial.first[name][first_rows] for name in names},
        {name: outputs[name][second_rows] for name in names},
    )


def _without_gradients(problem: Problem) -> Problem:
    return replace(problem, wanted=(), cotangents={}, layouts={})


def _expert_relabelling(trial: Trial) -> Finding | None:
    """Experts in reverse order: the same codes, in reversed segments."""
    last = trial.case.experts - 1
    flipped = {name: upside_down(x, 1) for name, x in trial.problem.tensors.items() if name in BY_EXPERT}
    flipped |= {name: upside_down(x) for name, x in trial.problem.tensors.items() if name in STATES}
    return _same_rows(
        "expert_relabelling", trial, _without_gradients(trial.problem.with_tensors(flipped)), lambda e: last - e
    )


def _padding_independence(trial: Trial) -> Finding | None:
    """Three times the padding, and no rows past the last segment: the codes of other rows do not
    change.
    """
    settings = {name: x for name, x in trial.problem.settings.items() if name != "num_rows"}
    second = replace(trial.problem, settings=settings | {"align": 3 * max(permuting(trial.case).align, 1)})
    return _same_rows("padding_independence", trial, _without_gradients(second), lambda e: e)


def _two_steps(trial: Trial) -> Finding | None:
    """The implementation's `permute`, then its `quantize`.

    An output that `permute` may omit is not compared.
    """

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if not (implementation.offers(Permute.function) and implementation.offers(Quantize.function)):
            return {}
        settings = {name: tensors[name] for name in KEYWORDS if name in tensors}
        sizes, options = (
            {name: x for name, x in settings.items() if name in names} for names in (KEYWORDS[:4], KEYWORDS[4:])
        )
        if "state" in tensors:
            options["state"] = QuantizerState(tensors["amax_history"], tensors["scale"])
        permuted = named_outputs(
            implementation.call(Permute.function, tensors["tokens"], tensors["routing_map"], **sizes), STEPS
        )
        quantized = implementation.call(
            "quantize", permuted["rows"], tensors["recipe"], splits=permuted["tokens_per_expert"], **options
        )
        return read_back(implementation, options, permuted | named_outputs(quantized, ("quantized", "state")))

    outputs = trial.run(replace(_without_gradients(trial.problem), script=script))
    return same(
        "two_steps",
        {
            name: x
            for name, x in trial.first.items()
            if isinstance(x, Tensor) and name in trial.expected and isinstance(outputs.get(name), Tensor)
        },
        outputs,
    )


def _dropless(case: Any) -> bool:
    """Whether no row is dropped or filled in."""
    return plain(case) and not case.capacity and (case.slack is None or case.slack >= 0)


def _turns_over(case: Any) -> bool:
    """Whether the inputs stay legal if they are reversed and negated. Given scales do not."""
    return bool(case.scaling != "delayed")


EXPERT_RELABELLING = Law(
    "expert_relabelling", _expert_relabelling, lambda case: plain(case) and (case.slack is None or case.slack >= 0)
)
PADDING_INDEPENDENCE = Law("padding_independence", _padding_independence, _dropless)
TWO_STEPS = Law("two_steps", _two_steps, plain, recompiles=True)
BUFFER_REUSE = replace(
    general.BUFFER_REUSE, applies=lambda case: general.BUFFER_REUSE.applies(case) and _turns_over(case)
)
GRAPH_CAPTURE = replace(
    general.GRAPH_CAPTURE, applies=lambda case: general.GRAPH_CAPTURE.applies(case) and _turns_over(case)
)

PERMUTE_AND_QUANTIZE = (
    *(EXPERT_RELABELLING, PADDING_INDEPENDENCE, TWO_STEPS, *general.CALLS),
    *(BUFFER_REUSE, general.LATE_PRODUCER, general.HOST_SYNC, GRAPH_CAPTURE),
)
