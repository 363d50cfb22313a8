"""DeepEP's normal mode: each token once, its slots, and a combine that adds what the ranks have added before."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem, accumulator_of
from conformance.families.dispatch.cases import DispatchCase, indices_of, probs_of, values_of
from conformance.families.dispatch.dispatcher import (
    HANDLE,
    Dispatching,
    after,
    cotangents_of,
    free_behind,
    garbage_in,
    given_probs,
    handles_of,
    masked_exact,
    moved,
    p_style,
    row_tokens_of,
    sum_of_rows,
    together,
    tree_of,
    wanted_of,
)
from conformance.families.dispatch.trees import flat
from conformance.judge import Exact, Expectation
from moe_ref.config import IndexPolicy
from moe_ref.permutation.rows import PADDING


def policy_of(case: DispatchCase) -> IndexPolicy | None:
    """What becomes of repeated experts and of probabilities 0, where that is not the default."""
    if not case.repeats and not case.drop_zeros:
        return None
    return IndexPolicy(duplicates=case.repeats or "reject", zero_prob="drop" if case.drop_zeros else "keep")  # type: ignore[arg-type]


def dispatches(case: DispatchCase) -> list[Problem]:
    """The dispatch of each rank, without gradients."""
    counts = list(case.counts)
    indices, tokens = indices_of(case), values_of(case, "tokens", counts)
    settings: dict[str, Any] = {"num_experts": case.experts}
    if policy_of(case):
        settings["policy"] = policy_of(case)
    if case.align:
        settings["expert_alignment"] = case.align
    if case.slack is not None:
        home = [torch.cat(indices) // case.local_experts == rank for rank in range(case.ranks)]
        settings["num_worst_tokens"] = max(int(here.any(1).sum()) for here in home) + max(case.slack, 0)
    calls = [
        Problem("deepep_dispatch", {"tokens": x, "indices": own}, dict(settings))
        for x, own in zip(tokens, indices, strict=True)
    ]
    if case.probs:
        for call, probs in zip(calls, probs_of(case, "probs", counts, (case.topk,)), strict=True):
            call.settings["probs"] = given_probs(probs, call.required["indices"] >= 0)
    if case.scales:
        for call, scales in zip(
            calls, values_of(case, "scales", counts, (case.scales,), "float32", "dyadic"), strict=True
        ):
            call.settings["scales"] = scales
    return calls


class DeepEPDispatch(Dispatching):
    """`deepep_dispatch`: rows without duplicates, slots, counts and both gradients."""

    function, primary = "deepep_dispatch", "rows"
    outputs = ("rows", "scales", "indices", "probs", "tokens_per_expert", "handle")
    optional = ("probs", "scales", "policy", "expert_alignment", "num_worst_tokens")
    static = ("num_worst_tokens",)

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = dispatches(case)
        wanted = wanted_of(case)
        cotangents: list[dict[str, Tensor]] = [{} for _ in calls]
        if wanted:
            every = together(calls)
            lengths = [len(out.rows) for out in every]
            if case.unused != "rows":
                for own, d_rows in zip(cotangents, cotangents_of(case, "rows", lengths), strict=True):
                    own["rows"] = d_rows
            if case.probs and case.unused != "probs":
                d_probs = values_of(case, "d_probs", lengths, (case.topk,), case.probs, p_style(case))
                for own, out, x in zip(cotangents, every, d_probs, strict=True):
                    own["probs"] = torch.where(out.indices >= 0, x, 0.0)  # as what reads only its own slots gives back
        layouts = {case.layout_of: case.layout}
        return [
            Problem(call.function, call.required, call.settings, layouts, wanted, own)
            for call, own in zip(calls, cotangents, strict=True)
        ]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        every = together(calls)
        row_tokens = row_tokens_of([out.handle for out in every])
        right: list[dict[str, Expectation]] = []
        for out, source in zip(every, row_tokens, strict=True):
            said = source != PADDING
            own: dict[str, Expectation] = {
                "rows": free_behind("rows", out.rows, said),
                "indices": Exact(out.indices, "integers"),
            }
            for name in ("scales", "probs"):
                if getattr(out, name) is not None:
                    own[name] = free_behind(name, getattr(out, name), said)
            if out.tokens_per_expert is not None:
                own["tokens_per_expert"] = Exact(out.tokens_per_expert, "integers")
            right.append(own)
        accumulator = accumulator_of(declared, every[0].rows.dtype)
        for name in calls[0].wanted:
            output = "rows" if name == "tokens" else "probs"
            given = [
                call.cotangents.get(output, torch.zeros_like(getattr(out, output)))
                for call, out in zip(calls, every, strict=True)
            ]
            for own, gradient in zip(
                right, sum_of_rows(case, given, row_tokens, "rows", flat(accumulator)), strict=True
            ):
                own[f"d_{name}"] = gradient if name == "tokens" else masked_exact(gradient.value.to(given[0].dtype))
        return right


class DeepEPCombine(Dispatching):
    """`deepep_combine` of rows that dispatch never saw, with biases and probabilities."""

    function, primary = "deepep_combine", "tokens"
    outputs, optional, companions = ("tokens", "probs"), ("probs", "biases"), ("deepep_dispatch",)

    def calls(self, case: DispatchCase) -> list[Problem]:
        before = dispatches(case)
        made = together(before)
        row_tokens = row_tokens_of([out.handle for out in made])
        lengths, counts, wanted = [len(own) for own in row_tokens], list(case.counts), wanted_of(case)
        calls: list[dict[str, Any]] = []
        for rows, own in zip(values_of(case, "rows", lengths), row_tokens, strict=True):
            calls.append(
                {
                    "required": {"rows": garbage_in(rows, own != PADDING, case.poison), "handle": HANDLE},
                    "settings": {},
                    "cotangents": {},
                }
            )
        if case.biases:
            every = [values_of(case, f"bias {i}", counts) for i in range(case.biases)]
            for rank, call in enumerate(calls):
                call["settings"]["biases"] = tuple(bias[rank] for bias in every)
        if case.probs:
            for call, probs, own in zip(
                calls, probs_of(case, "row probs", lengths, (case.topk,)), row_tokens, strict=True
            ):
                call["settings"]["probs"] = given_probs(probs, (own != PADDING)[:, None].expand(probs.shape))
        if wanted and case.unused != "tokens":
            for call, d_tokens in zip(calls, cotangents_of(case, "tokens", counts), strict=True):
                call["cotangents"]["tokens"] = d_tokens
        if wanted and case.probs and case.unused != "probs":
            for call, d_probs in zip(
                calls, values_of(case, "d_probs", counts, (case.topk,), case.probs, p_style(case)), strict=True
            ):
                call["cotangents"]["probs"] = d_probs
        common = {"layouts": {case.layout_of: case.layout}, "wanted": wanted}
        expected = [free_behind("rows", out.rows, own != PADDING) for out, own in zip(made, row_tokens, strict=True)]
        return after(self.function, before, made, expected, [call | common for call in calls])

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        row_tokens = row_tokens_of(handles_of(calls))
        rows = [call.required["rows"] for call in calls]
        kind, tree = tree_of(case, rows[0].dtype, declared, rows[0].dtype)
        everywhere, sources = [*rows], [*row_tokens]
        for i in range(case.biases):  # a bias is one more row of every token
            everywhere.append(torch.cat([call.settings["biases"][i] for call in calls]))
            sources.append(torch.arange(case.tokens))
        right: list[dict[str, Expectation]] = [
            {"tokens": own} for own in sum_of_rows(case, everywhere, sources, kind, tree)
        ]
        if "probs" in calls[0].settings:
            probs = [call.settings["probs"] for call in calls]
            for own, total in zip(
                right,
                sum_of_rows(case, probs, row_tokens, "rows", flat(accumulator_of(declared, probs[0].dtype))),
                strict=True,
            ):
                own["probs"] = total
        for name in calls[0].wanted:
            output = "tokens" if name == "rows" else "probs"
            like = calls[0].required["rows"] if name == "rows" else calls[0].settings["probs"]
            given = torch.cat(
                [
                    call.cotangents.get(output, like.new_zeros(n, like.shape[1]))
                    for call, n in zip(calls, case.counts, strict=True)
                ]
            )
            for own, source in zip(right, row_tokens, strict=True):
                own[f"d_{name}"] = masked_exact(moved(given, source))
        return right
