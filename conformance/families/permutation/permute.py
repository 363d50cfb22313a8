"""permute and unpermute."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.core.contract import Contract, Opaque, Problem, computed_in, narrowed
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import STRANGE, payload, probabilities
from conformance.families.permutation.cases import FLOATS, MAPS, MOVED, PROBS, RoutingCase, routed, routing_map
from conformance.judge import Expectation
from conformance.judge.bound import sum_bound
from conformance.judge.exact import Exact, bits
from moe_ref.permutation.permute import PADDING, permute, unpermute

SETTINGS = ("align", "capacity", "num_rows")
POISONED = {"nan": float("nan"), "max": None, "zero": 0.0}


def settings_of(case: RoutingCase) -> dict[str, Any]:
    """The case's sizes as keyword arguments."""
    settings: dict[str, Any] = {}
    if case.align:
        settings["align"] = case.align
    if case.capacity:
        settings["capacity"] = case.capacity
    if case.slack is not None:
        settings["num_rows"] = max(_rows_needed(case) + case.slack * max(case.align, 1), 0)
    return settings


def _rows_needed(case: RoutingCase) -> int:
    """Total rows of all segments."""
    unit = max(case.align, 1)
    return sum(-(-int(n) // unit) * unit for n in routed(case).sum(0))


def _rows(case: RoutingCase, settings: dict[str, Any]) -> int:
    """Rows of the permuted buffer."""
    return settings.get("num_rows", case.experts * case.capacity if case.capacity else _rows_needed(case))


class Permute(Contract[RoutingCase]):
    """`permute`: rows, probs, counts, padding, both gradients; `unpermute` probes the row map."""

    function = "permute"
    case_type = RoutingCase
    signature = Signature(
        inputs=[
            Input("tokens", "TH", MOVED, gradient=True, expands=True),
            Input("routing_map", "TE", MAPS, field="map_dtype"),
            Input("probs", "TE", PROBS, field="probs", gradient=True, optional="probs"),
        ],
        outputs=[
            Output("rows", "PH", of="tokens"),
            Output("probs", "P", of="probs"),
            *(Output("row_map"), Output("tokens_per_expert", "E"), Output("pad_offsets", "E"), Output("overflow")),
        ],
        settings=SETTINGS,
        static=("capacity", "num_rows"),
        linear=("tokens", "rows"),
    )

    def legal(self, case: RoutingCase) -> Problem:
        tokens = payload(case.seed, "tokens", (case.tokens, case.hidden), case.dtype, case.values)
        settings = settings_of(case)
        chosen = torch.from_numpy(routed(case))
        if case.probs:
            probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.probs, case.zero_probs)
            # unrouted probs are never read, unless a capacity is filled with unrouted tokens
            settings["probs"] = probs if case.capacity else torch.where(chosen, probs, torch.nan)
        required = {"tokens": tokens, "routing_map": routing_map(case)}
        return self.call(case, required, settings, lengths={"P": _rows(case, settings)})

    @staticmethod
    def _reference(problem: Problem):
        return permute(*problem.required.values(), **problem.settings)

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        out = self._reference(problem)
        zeroed = declared.get("zero_prob_rows") == "zero" and out.probs is not None
        expectations: dict[str, Expectation] = {
            "rows": Exact(without_zero_probs(out.rows, out.probs) if zeroed else out.rows)
        }
        if out.probs is not None:
            expectations["probs"] = Exact(out.probs)
        expectations["tokens_per_expert"] = Exact(out.tokens_per_expert, "integers")
        if out.pad_offsets is not None:
            expectations["pad_offsets"] = Exact(out.pad_offsets, "integers")
        expectations["overflow"] = Exact(out.overflow, "integers", flag=True)
        return expectations | self._gradients(problem, out, declared)

    def _gradients(self, problem: Problem, out, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        expectations: dict[str, Expectation] = {}
        if "tokens" in problem.wanted:
            tokens = problem.required["tokens"]
            d_rows = problem.cotangents.get("rows", torch.zeros_like(out.rows)).double()
            value, magnitude = (unpermute(x, out.row_map) for x in (d_rows, d_rows.abs()))
            acc = computed_in(declared, tokens)
            terms = max(problem.required["routing_map"].shape[1], 1) + narrowed(acc, tokens)
            expectations["d_tokens"] = sum_bound(value, magnitude, terms, tokens.dtype, acc)
        if "probs" in problem.wanted:
            probs = problem.settings["probs"]
            d_probs = torch.zeros_like(probs)
            if "probs" in problem.cotangents:
                real = out.row_map.token_P != PADDING
                d_probs[out.row_map.token_P[real], out.row_map.expert_P[real]] = problem.cotangents["probs"][real]
            expectations["d_probs"] = Exact(d_probs, "values")
        return expectations

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        if output != "rows" or not index:
            return None
        row_map, tokens = self._reference(problem).row_map, problem.required["tokens"]
        row = observed[index[0]]
        same = [
            t
            for t in range(min(len(tokens), 4096))
            if torch.equal(tokens[t].view(torch.uint8), row.contiguous().view(torch.uint8))
        ]
        token, expert = int(row_map.token_P[index[0]]), int(row_map.expert_P[index[0]])
        first = int((row_map.expert_P == expert).nonzero()[0])
        probs = problem.settings.get("probs")
        if token in same and probs is not None and probs[token, expert] == 0:
            return None  # a copy, if rows of zeros are declared
        location = f"row {index[0]} (expert {expert}, place {index[0] - first} of its segment)"
        wrong_columns = [] if token == PADDING else np.flatnonzero(bits(row) != bits(tokens[token])).tolist()
        if wrong_columns and 2 * len(wrong_columns) < len(row):
            values = _start(row[wrong_columns[0] :])
            columns = (
                f"{len(wrong_columns)} of its {len(row)} columns are wrong, from column {wrong_columns[0]} ({values})"
            )
            return f"{location} holds token {token} as it should, but {columns}"
        holds = (
            f"holds token {same[0]}"
            if same
            else "is zero"
            if not row.float().any()
            else f"holds no token's values ({_start(row)})"
        )
        expectation = "has a padding row of zeros there" if token == PADDING else f"puts token {token} there"
        return f"{location} {holds}; the reference {expectation}"


def without_zero_probs(rows: Tensor, probs: Tensor) -> Tensor:
    """The rows, with zeros where their probability is 0 or -0."""
    raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # fp8 cannot be filled on every torch
    return raw.masked_fill((probs == 0)[:, None], 0).view(rows.dtype)


def _start(row: Tensor) -> str:
    return ", ".join(f"{x:.4g}" for x in row[:3].float().tolist()) + (", …" if len(row) > 3 else "")


class Unpermute(Contract[RoutingCase]):
    """`unpermute` of rows independent of `permute`, by the row map of the candidate's `permute`."""

    function = "unpermute"
    case_type = RoutingCase
    signature = Signature(
        inputs=[
            Input("rows", "PH", FLOATS, gradient=True),
            Input("probs", "TE", PROBS, field="probs", gradient=True, optional="probs"),
        ],
        outputs=[Output("tokens", "TH", of="rows")],
        settings=SETTINGS,
        producer="permute",
        made_from=(Input("routing_map", "TE", MAPS, field="map_dtype"),),
        redundant=("restore_shape",),
        linear=("rows", "tokens"),
    )

    def legal(self, case: RoutingCase) -> Problem:
        chosen = routing_map(case)
        numbers = torch.arange(1, case.tokens + 1, dtype=torch.float32)[:, None]
        producer = Problem("permute", {"tokens": numbers, "routing_map": chosen}, settings_of(case))
        produced = permute(numbers, chosen, **producer.settings)
        row_map = produced.row_map
        style = "ends" if case.values in STRANGE[1:] else case.values  # rows are summed
        rows = payload(case.seed, "rows", (len(row_map.token_P), case.hidden), case.dtype, style)
        garbage = POISONED[case.poison]
        rows[row_map.token_P == PADDING] = torch.finfo(rows.dtype).max if garbage is None else garbage
        settings: dict[str, Any] = {"restore_shape": (case.tokens, case.hidden)}
        if case.probs:
            real = row_map.token_P != PADDING
            has_row = torch.zeros(chosen.shape, dtype=torch.bool)
            has_row[row_map.token_P[real], row_map.expert_P[real]] = True
            probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.probs, case.zero_probs)
            settings["probs"] = torch.where(has_row, probs, torch.nan)
        required = {"rows": rows, "row_map": Opaque("row_map")}
        omitted = () if case.seed % 3 else ("restore_shape",)
        return self.call(case, required, settings, producer=producer, produced=produced, omitted=omitted)

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        row_map = problem.produced.row_map
        rows, probs = problem.required["rows"], problem.settings.get("probs")
        acc = computed_in(declared, rows, probs)
        terms = max(row_map.num_experts, 1) + narrowed(acc, rows, probs)
        float64_inputs = rows.double(), None if probs is None else probs.double()
        value = unpermute(float64_inputs[0], row_map, probs=float64_inputs[1])
        magnitude = unpermute(
            float64_inputs[0].abs(), row_map, probs=None if float64_inputs[1] is None else float64_inputs[1].abs()
        )
        expectations: dict[str, Expectation] = {"tokens": sum_bound(value, magnitude, terms, rows.dtype, acc)}
        if problem.wanted:
            expectations |= self._gradients(problem, row_map, float64_inputs, acc)
        return expectations

    def _gradients(
        self, problem: Problem, row_map, float64_inputs: tuple[Tensor, Tensor | None], acc: torch.dtype
    ) -> dict[str, Expectation]:
        rows, probs = problem.required["rows"], problem.settings.get("probs")
        real = row_map.token_P != PADDING
        token_R, expert_R = row_map.token_P[real], row_map.expert_P[real]
        d_out = problem.cotangents["tokens"].double()[token_R]
        expectations: dict[str, Expectation] = {}
        if "rows" in problem.wanted:
            value = torch.zeros(rows.shape, dtype=torch.float64)
            value[real] = d_out if float64_inputs[1] is None else d_out * float64_inputs[1][token_R, expert_R][:, None]
            expectations["d_rows"] = sum_bound(value, value.abs(), 1 + narrowed(acc, rows, probs), rows.dtype, acc)
        if "probs" in problem.wanted and probs is not None:
            value, magnitude = torch.zeros((2, *probs.shape), dtype=torch.float64)
            terms_RH = float64_inputs[0][real] * d_out
            value[token_R, expert_R] = terms_RH.sum(1)
            magnitude[token_R, expert_R] = terms_RH.abs().sum(1)
            terms = max(rows.shape[1], 1) + narrowed(acc, rows, rows)  # rows and their cotangent
            expectations["d_probs"] = sum_bound(value, magnitude, terms, probs.dtype, acc)
        return expectations
