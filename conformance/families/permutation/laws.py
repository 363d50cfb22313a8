"""Laws of functions that move rows: another routing moves the same rows to other places."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.core import universal_laws as universal
from conformance.core.contract import Problem
from conformance.core.double_backward import DOUBLE_BACKWARD
from conformance.core.law import Law, Trial, algebraic, same, upside_down
from conformance.core.tensors import SHARED, STRANGE
from conformance.families.permutation.cases import RoutingCase
from conformance.judge import Finding
from moe_ref.permutation.permute import PADDING, RowMap, permute

# (token, expert) in the second problem -> the same pair in the first
Cells = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _row_map(problem: Problem) -> RowMap:
    settings = {name: x for name, x in problem.settings.items() if name != "probs"}
    numbers = torch.zeros(len(problem.required["tokens"]), 0)
    return permute(numbers, problem.required["routing_map"], **settings).row_map


def _places(row_map: RowMap) -> Tensor:
    """[T,E] the row of each (token, expert); PADDING: none."""
    row_of_cell = torch.full((row_map.num_tokens, row_map.num_experts), PADDING)
    real = row_map.token_P != PADDING
    row_of_cell[row_map.token_P[real], row_map.expert_P[real]] = real.nonzero().flatten()
    return row_of_cell


def _relocated(trial: Trial, second: Problem, cells: Cells) -> dict[str, Tensor | None]:
    """Rows and probs of the first run at the second problem's place of their (token, expert)."""
    row_of_cell, second_map = _places(_row_map(trial.problem)), _row_map(second)
    there = second_map.token_P != PADDING
    token, expert = cells(second_map.token_P[there], second_map.expert_P[there])
    moved: dict[str, Tensor | None] = {}
    for name in ("rows", "probs"):
        x = trial.first.get(name)
        if x is not None:
            raw = x.view(torch.uint8) if x.element_size() == 1 else x
            out = raw.new_zeros((len(second_map.token_P), *x.shape[1:]))
            out[there] = raw[row_of_cell[token, expert]]
            moved[name] = out.view(x.dtype)
    return moved


def _plain_call(problem: Problem) -> Problem:
    return replace(problem, wanted=(), cotangents={}, layouts={})


def _token_permutation(trial: Trial) -> Finding | None:
    """Tokens in the opposite order: each expert's rows in the opposite order."""
    last = trial.case.tokens - 1
    second = _plain_call(
        trial.problem.with_tensors({name: upside_down(x) for name, x in trial.problem.tensors.items()})
    )
    return same("token_permutation", _relocated(trial, second, lambda t, e: (last - t, e)), trial.run(second))


def _expert_relabelling(trial: Trial) -> Finding | None:
    """Experts in the opposite order: the segments are in the opposite order."""
    last = trial.case.experts - 1
    flipped = {name: upside_down(x, 1) for name, x in trial.problem.tensors.items() if name != "tokens"}
    second = _plain_call(trial.problem.with_tensors(flipped))
    return same("expert_relabelling", _relocated(trial, second, lambda t, e: (t, last - e)), trial.run(second))


def _split(trial: Trial) -> Finding | None:
    """The first half of the tokens by itself: the same rows as in the whole batch."""
    half = trial.case.tokens // 2
    second = _plain_call(
        trial.problem.with_tensors({name: x[:half].clone() for name, x in trial.problem.tensors.items()})
    )
    return same("split", _relocated(trial, second, lambda t, e: (t, e)), trial.run(second))


def _padding_independence(trial: Trial) -> Finding | None:
    """Without the alignment: the same rows, without the padding."""
    settings = {name: x for name, x in trial.problem.settings.items() if name != "align"}
    second = _plain_call(replace(trial.problem, settings=settings))
    return same("padding_independence", _relocated(trial, second, lambda t, e: (t, e)), trial.run(second))


def _neighbour_independence(trial: Trial) -> Finding | None:
    """Another payload in one row of the input: no other row of the output changes."""
    name = next(iter(trial.problem.required))
    x = trial.problem.required[name]
    middle = len(x) // 2
    changed = x.clone().view(torch.uint8) if x.element_size() == 1 else x.clone()
    changed[middle] = 0 if x.element_size() == 1 else torch.nan
    outputs = trial.run(_plain_call(trial.problem.with_tensors({name: changed.view(x.dtype)})))
    expected_rows = trial.reference(trial.problem)["rows"].value
    untouched = _not_equal_rows(expected_rows, x[middle])
    got = outputs.get("rows")
    if not isinstance(got, Tensor) or got.shape != expected_rows.shape:
        return Finding("rows", "neighbour_independence", "changes shape when one row's payload changes")
    raw = [y.view(torch.uint8) if y.element_size() == 1 else y for y in (trial.first["rows"], got)]
    return same("neighbour_independence", {"rows": raw[0][untouched]}, {"rows": raw[1][untouched]})


def _not_equal_rows(rows: Tensor, row: Tensor) -> Tensor:
    """True for rows that differ from `row` in any byte."""
    return (
        (rows.contiguous().view(torch.uint8) != row.contiguous().view(torch.uint8)).any(1)
        if rows.numel()
        else torch.zeros(len(rows), dtype=torch.bool)
    )


def _round_trip(trial: Trial) -> Finding | None:
    """Sorting by the inverse order restores the rows."""
    order, sizes = (trial.problem.required[name].long() for name in ("order", "chunk_sizes"))
    sorted_inputs = {"rows": trial.first["rows"], "chunk_sizes": sizes[order], "order": order.argsort()}
    settings = {} if trial.first.get("probs") is None else {"probs": trial.first["probs"]}
    second = replace(_plain_call(trial.problem), required=sorted_inputs, settings=settings)
    first: dict[str, Tensor | None] = {
        "rows": trial.problem.required["rows"],
        "probs": trial.problem.settings.get("probs"),
    }
    return same("round_trip", first, trial.run(second))


def _idempotence(trial: Trial) -> Finding | None:
    """Padding a padded map changes nothing."""
    padded = trial.first["routing_map"]
    padded_again = trial.run(_plain_call(trial.problem.with_tensors({"routing_map": padded})))
    return same("idempotence", {"routing_map": padded.bool()}, {"routing_map": padded_again["routing_map"].bool()})


def _column_relabelling(trial: Trial) -> Finding | None:
    """Experts in the opposite order: columns in the opposite order."""
    second = _plain_call(
        trial.problem.with_tensors({"routing_map": upside_down(trial.problem.required["routing_map"], 1)})
    )
    return same("column_relabelling", {"routing_map": upside_down(trial.first["routing_map"], 1)}, trial.run(second))


def _row_reversal(trial: Trial) -> Finding | None:
    """Tokens in the opposite order: rows in the opposite order."""
    second = _plain_call(
        trial.problem.with_tensors({name: upside_down(x) for name, x in trial.problem.tensors.items()})
    )
    first = {
        name: upside_down(x)
        for name, x in trial.first.items()
        if isinstance(x, Tensor) and x.dim() == 2 and not name.startswith("d_")
    }
    return same("row_reversal", first, trial.run(second))


def _summed_relabelling(trial: Trial) -> Finding | None:
    """Experts in the opposite order: a token's rows are added in the opposite order."""
    producer, rows = trial.problem.producer, trial.problem.required["rows"]
    assert producer is not None
    flipped = {name: upside_down(x, 1) for name, x in producer.tensors.items() if name != "tokens"}
    producer = producer.with_tensors(flipped)
    produced = permute(producer.required["tokens"], producer.required["routing_map"], **producer.settings)
    row_map = produced.row_map
    there = (row_map.token_P != PADDING).nonzero().flatten()
    from_P = _places(trial.problem.produced.row_map)[
        row_map.token_P[there], row_map.num_experts - 1 - row_map.expert_P[there]
    ]
    reversed_rows = torch.zeros_like(rows)
    reversed_rows[there] = rows[from_P]
    tensors = {"rows": reversed_rows} | {
        name: x.flip(1) for name, x in trial.problem.tensors.items() if name == "probs"
    }
    second = replace(trial.problem.with_tensors(tensors), producer=producer, produced=produced)
    outputs = dict(trial.run(second))
    if isinstance(x := outputs.get("d_rows"), Tensor):
        outputs["d_rows"] = torch.zeros_like(x).index_copy(0, from_P, x[there])
    if isinstance(x := outputs.get("d_probs"), Tensor):
        outputs["d_probs"] = x.flip(1)
    return trial.judged("expert_relabelling", trial.expected, outputs)


def _moves_only(case) -> bool:
    return not case.golden and not case.illegal and case.layout not in SHARED


def _rows(case) -> int:
    return case.tokens if isinstance(case, RoutingCase) else sum(case.sizes) + case.tail


def _dropless(case) -> bool:
    """Whether no row is dropped, and none is filled in."""
    return _moves_only(case) and not case.capacity and (case.slack is None or case.slack >= 0)


TOKEN_PERMUTATION = Law("token_permutation", _token_permutation, _dropless)


def _keeps_rows(case) -> bool:
    """Whether no segment is cut off at the end of the buffer."""
    return _moves_only(case) and (case.slack is None or case.slack >= 0)


EXPERT_RELABELLING = Law("expert_relabelling", _expert_relabelling, _keeps_rows)
SUMMED_RELABELLING = Law("expert_relabelling", _summed_relabelling, _keeps_rows)
SPLIT = Law("split", _split, lambda case: _dropless(case) and case.tokens > 1)
PADDING_INDEPENDENCE = Law(
    "padding_independence", _padding_independence, lambda case: _dropless(case) and case.align > 1
)
NEIGHBOUR_INDEPENDENCE = Law(
    "neighbour_independence", _neighbour_independence, lambda case: _moves_only(case) and _rows(case) > 0
)
ROUND_TRIP = Law("round_trip", _round_trip, _moves_only)
IDEMPOTENCE = Law("idempotence", _idempotence, _moves_only)
COLUMN_RELABELLING = Law("column_relabelling", _column_relabelling, _moves_only)
ROW_REVERSAL = Law("row_reversal", _row_reversal, _moves_only)


def _zero_prob_rows(trial: Trial) -> Finding | None:
    """Of the probabilities 0, -0, tiny, NaN and 0.5, only zeros give rows of zeros, if this is
    declared.
    """
    probs = trial.problem.settings["probs"].clone().flatten()
    tiny = torch.finfo(probs.dtype).smallest_normal
    for offset, value in enumerate((0.0, -0.0, tiny, torch.nan, 0.5)):
        probs[offset::5] = value
    second = _plain_call(trial.problem.with_tensors({"probs": probs.reshape(trial.problem.settings["probs"].shape)}))
    return trial.judged("zero_prob_rows", {"rows": trial.reference(second)["rows"]}, trial.run(second))


ZERO_PROB_ROWS = Law("zero_prob_rows", _zero_prob_rows, lambda case: _moves_only(case) and bool(case.probs))


def _garbage_independence(trial: Trial) -> Finding | None:
    """Other garbage in the rows of padding: the tokens do not change."""
    rows = trial.problem.required["rows"].clone()
    row_map = trial.problem.produced.row_map
    rows[row_map.token_P < 0] = 3.0
    return trial.repeats("garbage_independence", trial.run(trial.problem.with_tensors({"rows": rows})))


def _exact_fp32(case) -> bool:
    is_plain = not case.golden and not case.illegal and case.values == "dyadic" and case.layout not in SHARED
    # a product has 12 + 10 bits; a sum of four adds 2: exact in float32
    exact_products = case.function != "unpermute" or not case.probs or case.experts <= 4
    return is_plain and exact_products and case.dtype == "float32" and case.probs in ("", "float32")


def _main_gradient(case) -> bool:
    return bool({"tokens", "rows"} & set(case.grads.split("+")))


ADJOINTNESS = universal.adjointness(lambda case: _exact_fp32(case) and _main_gradient(case))


def _adjointness_of_permute(trial: Trial) -> Finding | None:
    """Whether the transpose law holds.

    A forward that is declared to write zeros at probability 0 has another transpose there.
    """
    zeroed = trial.declared.get("zero_prob_rows") == "zero" and trial.case.zero_probs
    return None if zeroed else ADJOINTNESS.check(trial)


# a doubled NaN has other bits on other machines
SCALING = replace(
    universal.SCALING,
    applies=lambda case: universal.SCALING.applies(case) and getattr(case, "values", "") not in STRANGE,
)
GARBAGE_INDEPENDENCE = Law(
    "garbage_independence", _garbage_independence, lambda case: not case.golden and not case.illegal
)

_EVERY = (*universal.EVERYWHERE, *universal.STATIC)
_FLOATS = "dtype!=uint8"  # a ring is of floats; rows past 2^31 elements are of this dtype
_ORDERS = (TOKEN_PERMUTATION, EXPERT_RELABELLING, SPLIT, PADDING_INDEPENDENCE, NEIGHBOUR_INDEPENDENCE)
PERMUTE = (
    *(*_EVERY, *algebraic(*_ORDERS, where=_FLOATS)),
    *(replace(ADJOINTNESS, check=_adjointness_of_permute), SCALING, DOUBLE_BACKWARD, ZERO_PROB_ROWS),
)
UNPERMUTE = (
    *(*_EVERY, universal.HANDLE_AGAIN, *algebraic(GARBAGE_INDEPENDENCE, SUMMED_RELABELLING)),
    *(ADJOINTNESS, SCALING, DOUBLE_BACKWARD),
)
SORT_CHUNKS = (
    *(*_EVERY, *algebraic(NEIGHBOUR_INDEPENDENCE, ROUND_TRIP, where=_FLOATS)),
    *(ADJOINTNESS, SCALING, DOUBLE_BACKWARD),
)
PAD_ROUTING_MAP = (*_EVERY, IDEMPOTENCE, COLUMN_RELABELLING)
INDICES_TO_MULTIHOT = (*_EVERY, ROW_REVERSAL, universal.SCALING, DOUBLE_BACKWARD)
MULTIHOT_TO_INDICES = (*_EVERY, ROW_REVERSAL, universal.SCALING, DOUBLE_BACKWARD)
