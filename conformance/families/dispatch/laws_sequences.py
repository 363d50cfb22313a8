"""The law of sequences: handles of several dispatches, used in any order and more than once.

As in `laws`, every rank requests the same calls in the same order.
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

WIDER = 3  # columns that a cached dispatch has beyond its handle's


@dataclass
class Sent:
    """One dispatch, or a cached one through its handle, on all ranks."""

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
    """Each step with the dispatch that it makes or whose handle and rows it takes."""
    plain = replace(case, grads="", unused="", law="", layout="contiguous", layout_of="", journey="")
    if plain.values == "reciprocals":  # rows are added up here, and a GPU's atomics flush subnormals
        plain = replace(plain, values="dyadic")
    sent: list[Sent] = []
    steps: list[tuple[str, Sent]] = []
    for number, word in enumerate(case.journey.split("+")):
        mark = f" {number}"
        if word == "send":
            own = plain if not sent else replace(plain, seed=plain.seed + number, slots=None)
            calls = dispatches_of(own)
            every = together(calls)
            sent.append(Sent(mark, own, calls, every, [out.rows for out in every]))
        elif word in ("again", "wider"):
            last = sent[-1]
            own = replace(last.case, hidden=last.case.hidden + WIDER * (word == "wider"))
            tokens = values_of(own, f"tokens{mark}", list(own.counts))
            cached = getattr(moe_ref, last.calls[0].function.replace("dispatch", "cached_dispatch"))
            rows = cached(tokens, [out.handle for out in last.every])
            sent[-1] = Sent(mark, last.case, last.calls, last.every, rows, tokens)
        steps.append((word, sent[0] if word == "first" else sent[-1]))
    return steps


def _sums(sent: Sent, declared: Any) -> Sequence[Expectation]:
    rows = [rows.flatten(0, -2) for rows in sent.rows]
    kind, tree = tree_of(sent.case, rows[0].dtype, declared, reduce_dtype(sent.case, rows[0].dtype))
    return sum_of_rows(sent.case, rows, row_tokens_of([out.handle for out in sent.every]), kind, tree)


def _sequence(trial: Trial) -> Finding | None:
    """Each step has the rows, or gets back the tokens, of its own dispatch."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, steps = at.place.rank, planned(trial.case)
    function = steps[0][1].calls[0].function

    def script(implementation: Implementation, given: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, dict[str, Any]] = {}  # by the mark of the dispatch
        newest: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        for number, (word, own) in enumerate(steps):
            if word == "send":
                newest = made[own.mark] = send(implementation, own.calls[rank], given, own.mark)
                outputs[f"{number}.rows"] = newest["rows"]
            elif own.tokens is not None and own.mark == f" {number}":
                name = function.replace("dispatch", "cached_dispatch")
                rows = implementation.call(name, given[f"tokens{own.mark}"], newest["handle"], group=given["group"])
                newest = made[own.mark] = newest | {"rows": rows}
                outputs[f"{number}.rows"] = rows
            else:
                back = send_back(
                    implementation, function, made[own.mark]["rows"], made[own.mark], given, _mark(own, steps)
                )
                outputs[f"{number}.tokens"] = back
        return outputs

    first = steps[0][1].calls[rank]
    problem = Problem(
        function,
        _inputs(steps, rank),
        {"group": at.place.group},
        script=script,
        first=first.required | first.settings,
    )
    right: dict[str, Expectation] = {}
    for number, (word, own) in enumerate(steps):
        if word in ("back", "first"):
            right[f"{number}.tokens"] = _sums(own, trial.declared)[rank]
        else:
            right[f"{number}.rows"] = own.right()[rank]
    return trial.judged("sequence", right, trial.run(problem))


def _mark(sent: Sent, steps: list[tuple[str, Sent]]) -> str:
    """The mark of the arguments of the dispatch whose handle it is."""
    return next(own.mark for word, own in steps if word == "send" and own.every is sent.every)


def _inputs(steps: list[tuple[str, Sent]], rank: int) -> dict[str, Any]:
    """All arguments of this rank, by name and mark."""
    found: dict[str, Any] = {}
    for word, own in steps:
        if word == "send":
            found |= named(own.calls[rank], own.mark)
        elif own.tokens is not None:
            found[f"tokens{own.mark}"] = own.tokens[rank]
    return found


def _applies(case: DispatchCase) -> bool:
    plain = not case.fp8 and case.dtype in FLOATS and has_plain_slots(case)
    return bool(case.journey) and is_fine(case) and plain


SEQUENCE = Law("sequence", _sequence, _applies)
