"""The law of sequences: handles of several dispatches are used in any order, and more than once.

As in `laws`, every rank makes the same calls in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import moe_ref
from conformance.core.contract import Problem
from conformance.core.law import Law, Trial
from conformance.core.ranks import AtRank
from conformance.families.dispatch.cases import DispatchCase, values_of
from conformance.families.dispatch.dispatcher import free_behind, row_tokens_of, specified, sum_of_rows, together
from conformance.families.dispatch.laws import FLOATS, has_plain_slots, is_fine
from conformance.families.dispatch.laws_journeys import (
    dispatches_of,
    named,
    reduce_dtype,
    rows_right,
    send,
    send_back,
    tree_of,
)
from conformance.interface import Implementation
from conformance.judge import Expectation, Finding

WIDER = 3  # columns that a cached dispatch has in addition to those of its handle


@dataclass
class Sent:
    """One dispatch on all ranks, or a cached one through its handle."""

    mark: str  # of its arguments
    case: DispatchCase
    calls: list[Problem]
    every: list[Any]  # the reference's results of the dispatch
    rows: list[Tensor]  # the reference's rows, of the cached dispatch if it is one
    tokens: list[Tensor] | None = None  # of the cached dispatch

    def right(self) -> list[Expectation]:
        if self.tokens is None:
            return [rows_right(self.case, out) for out in self.every]
        return [
            free_behind("rows", rows, specified(self.case, out))
            for rows, out in zip(self.rows, self.every, strict=True)
        ]


def planned(case: DispatchCase) -> list[tuple[str, Sent]]:
    """Each step, with the dispatch that it makes, or whose handle and rows it takes."""
    plain_case = replace(case, grads="", unused="", law="", layout="contiguous", layout_of="", journey="")
    if plain_case.values == "reciprocals":  # rows are added up here, and a GPU's atomics flush subnormals
        plain_case = replace(plain_case, values="dyadic")
    dispatches: list[Sent] = []
    steps: list[tuple[str, Sent]] = []
    for number, word in enumerate(case.journey.split("+")):
        mark = f" {number}"
        if word == "send":
            step_case = plain_case if not dispatches else replace(plain_case, seed=plain_case.seed + number, slots=None)
            calls = dispatches_of(step_case)
            results = together(calls)
            dispatches.append(Sent(mark, step_case, calls, results, [out.rows for out in results]))
        elif word in ("again", "wider"):
            last = dispatches[-1]
            step_case = replace(last.case, hidden=last.case.hidden + WIDER * (word == "wider"))
            tokens = values_of(step_case, f"tokens{mark}", list(step_case.counts))
            cached = getattr(moe_ref, last.calls[0].function.replace("dispatch", "cached_dispatch"))
            rows = cached(tokens, [out.handle for out in last.every])
            dispatches[-1] = Sent(mark, last.case, last.calls, last.every, rows, tokens)
        steps.append((word, dispatches[0] if word == "first" else dispatches[-1]))
    return steps


def _sums(dispatch: Sent, declared: Any) -> Sequence[Expectation]:
    rows = [rows.flatten(0, -2) for rows in dispatch.rows]
    kind, tree = tree_of(dispatch.case, rows[0].dtype, declared, reduce_dtype(dispatch.case, rows[0].dtype))
    return sum_of_rows(dispatch.case, rows, row_tokens_of([out.handle for out in dispatch.every]), kind, tree)


def _sequence(trial: Trial) -> Finding | None:
    """Each step returns the rows of its own dispatch, or its tokens."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, steps = at.place.rank, planned(trial.case)
    function = steps[0][1].calls[0].function

    def script(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
        dispatched: dict[str, dict[str, Any]] = {}  # by the mark of the dispatch
        newest: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        for number, (word, dispatch) in enumerate(steps):
            if word == "send":
                newest = dispatched[dispatch.mark] = send(
                    implementation, dispatch.calls[rank], arguments, dispatch.mark
                )
                outputs[f"{number}.rows"] = newest["rows"]
            elif dispatch.tokens is not None and dispatch.mark == f" {number}":
                name = function.replace("dispatch", "cached_dispatch")
                rows = implementation.call(
                    name, arguments[f"tokens{dispatch.mark}"], newest["handle"], group=arguments["group"]
                )
                newest = dispatched[dispatch.mark] = newest | {"rows": rows}
                outputs[f"{number}.rows"] = rows
            else:
                combined = send_back(
                    implementation,
                    function,
                    dispatched[dispatch.mark]["rows"],
                    dispatched[dispatch.mark],
                    arguments,
                    _mark(dispatch, steps),
                )
                outputs[f"{number}.tokens"] = combined
        return outputs

    first = steps[0][1].calls[rank]
    problem = Problem(
        function,
        _inputs(steps, rank),
        {"group": at.place.group},
        script=script,
        first=first.required | first.settings,
    )
    expectations: dict[str, Expectation] = {}
    for number, (word, dispatch) in enumerate(steps):
        if word in ("back", "first"):
            expectations[f"{number}.tokens"] = _sums(dispatch, trial.declared)[rank]
        else:
            expectations[f"{number}.rows"] = dispatch.right()[rank]
    return trial.judged("sequence", expectations, trial.run(problem))


def _mark(dispatch: Sent, steps: list[tuple[str, Sent]]) -> str:
    """The mark of the arguments of the dispatch that made this handle."""
    return next(candidate.mark for word, candidate in steps if word == "send" and candidate.every is dispatch.every)


def _inputs(steps: list[tuple[str, Sent]], rank: int) -> dict[str, Any]:
    """All arguments of this rank, by name and mark."""
    arguments: dict[str, Any] = {}
    for word, dispatch in steps:
        if word == "send":
            arguments |= named(dispatch.calls[rank], dispatch.mark)
        elif dispatch.tokens is not None:
            arguments[f"tokens{dispatch.mark}"] = dispatch.tokens[rank]
    return arguments


def _applies(case: DispatchCase) -> bool:
    has_plain_rows = not case.fp8 and case.dtype in FLOATS and has_plain_slots(case)
    return bool(case.journey) and is_fine(case) and has_plain_rows


SEQUENCE = Law("sequence", _sequence, _applies)
