"""What all contracts of dispatchers share: the calls of all ranks, and sums over ranks."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core.contract import Opaque, Problem, accumulator_of
from conformance.core.ranks import Collective
from conformance.core.signature import Signature
from conformance.core.tensors import DTYPES
from conformance.families.dispatch.cases import DispatchCase, probs_of, values_of
from conformance.families.dispatch.trees import Tree, flat, tree_bound
from conformance.judge import Bounded, Exact, Expectation, Given
from moe_ref.permutation.rows import PADDING

POISONED = {"nan": float("nan"), "max": None, "zero": 0.0}
LISTED = ("probs", "scales")  # per-rank settings
HANDLE = Opaque("handle")


class Dispatching(Collective[DispatchCase]):
    """A function of a dispatcher."""

    signature: Signature
    case_type = DispatchCase

    def ranks(self, case: DispatchCase) -> int:
        return case.ranks

    def backward(
        self, case: DispatchCase, lengths: list[int], columns_of_probs: tuple[int, ...] = ()
    ) -> list[dict[str, Any]]:
        """Fields of each rank's call: wanted gradients, cotangents and the layout.

        Args:
            lengths: rows of the outputs with a gradient, per rank.
            columns_of_probs: columns of the output `probs`, if any.
        """
        common = {"layouts": {case.layout_of: case.layout}, "wanted": self.signature.wanted(case)}
        cotangents: list[dict[str, Tensor]] = [{} for _ in case.counts]
        for name in self.signature.cotangents(case):
            if name == "probs":
                style = "integers" if case.values == "integers" else "dyadic"
                rank_gradients = values_of(case, "d_probs", lengths, columns_of_probs, case.probs, style)
            else:
                rank_gradients = cotangents_of(case, name, lengths)
            for cotangents_of_rank, x in zip(cotangents, rank_gradients, strict=True):
                cotangents_of_rank[name] = x
        return [common | {"cotangents": cotangents_of_rank} for cotangents_of_rank in cotangents]


class Combine(Dispatching):
    """A combine of other rows than the dispatched ones, with biases and probabilities."""

    @abstractmethod
    def dispatches(self, case: DispatchCase) -> list[Problem]:
        """One dispatch for each rank."""

    def settings_of(self, case: DispatchCase) -> dict[str, Any]:
        """Settings of each rank's combine."""
        return {}

    def columns_of_probs(self, case: DispatchCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of the rows' and of the tokens' probabilities."""
        return (case.topk,), (case.topk,)

    def calls(self, case: DispatchCase) -> list[Problem]:
        dispatch_calls = self.dispatches(case)
        dispatched = together(dispatch_calls)
        received = [
            received_of_rank != PADDING for received_of_rank in row_tokens_of([out.handle for out in dispatched])
        ]
        lengths, counts = [len(received_of_rank) for received_of_rank in received], list(case.counts)
        of_rows, of_tokens = self.columns_of_probs(case)
        settings = [self.settings_of(case) for _ in counts]
        biases = [values_of(case, f"bias {i}", counts) for i in range(case.biases)]
        for rank, call_settings in enumerate(settings if biases else ()):
            call_settings["biases"] = tuple(bias[rank] for bias in biases)
        if case.probs and "probs" in self.signature.names:
            row_probs = probs_of(case, "row probs", lengths, of_rows)
            for call_settings, probs, received_of_rank in zip(settings, row_probs, received, strict=True):
                call_settings["probs"] = given_probs(probs, received_of_rank.reshape(-1, *(1,) * len(of_rows)))
        backward = self.backward(case, counts, of_tokens)
        required = [
            {"rows": garbage_in(rows, received_of_rank, case.poison), "handle": HANDLE}
            for rows, received_of_rank in zip(values_of(case, "rows", lengths), received, strict=True)
        ]
        calls = [
            {"required": first, "settings": call_settings, **gradients}
            for first, call_settings, gradients in zip(required, settings, backward, strict=True)
        ]
        expected = [free_behind("rows", out.rows, specified(case, out)) for out in dispatched]
        return after(self.function, dispatch_calls, dispatched, expected, calls)


def specified(case: DispatchCase, out: Any) -> Tensor:
    """[P]: the rows with content: received (DeepEP), or not past the last segment."""
    if case.dispatcher == "deepep":
        return row_tokens_of([out.handle])[out.handle.rank] != PADDING
    return torch.arange(len(out.rows)) < out.tokens_per_expert.sum()


def together(calls: Sequence[Problem]) -> list[Any]:
    """The reference's results of one call per rank."""
    first = calls[0]
    listed: dict[str, Any] = {}
    for name in first.required:
        listed[name] = [call.required[name] for call in calls]
        if isinstance(first.required[name], Opaque):
            listed[name] = handles_of(calls)
    settings = {
        name: [call.settings[name] for call in calls] if name in LISTED else x for name, x in first.settings.items()
    }
    if "biases" in settings:
        settings["biases"] = [[call.settings["biases"][i] for call in calls] for i in range(len(settings["biases"]))]
    results: list[Any] = getattr(moe_ref, first.function)(*listed.values(), **settings)
    return results


def handles_of(calls: Sequence[Problem]) -> list[Any]:
    """The reference's handles of the dispatch before these calls."""
    return [call.produced.made.handle for call in calls]


def row_tokens_of(handles: Sequence[Any]) -> list[Tensor]:
    """[P] per rank: each row's token, numbered over all ranks, or PADDING."""
    return list(handles[0].row_tokens)


def after(
    function: str,
    dispatches: Sequence[Problem],
    dispatched: Sequence[Any],
    rows: Sequence[Expectation],
    calls: Sequence[dict[str, Any]],
) -> list[Problem]:
    """Calls on the handles of dispatches; `dispatched` are the reference's results."""
    return [
        Problem(
            function, producer=dispatch, produced=SimpleNamespace(rows=expected_rows, made=out, row_map=None), **call
        )
        for dispatch, out, expected_rows, call in zip(dispatches, dispatched, rows, calls, strict=True)
    ]


def free_behind(name: str, value: Tensor, specified: Tensor) -> Expectation:
    """The expected value, where unspecified rows match anything."""
    if bool(specified.all()):
        return Exact(value)

    def make(outputs: Mapping[str, Any]) -> Exact:
        got = outputs.get(name)
        if not isinstance(got, Tensor) or got.shape != value.shape or got.dtype != value.dtype:
            return Exact(value)
        return Exact(where_rows(specified, value, got.cpu()))

    return Given(value, make)


def where_rows(chosen: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where `chosen` (a mask over the leading dimensions), else y; any dtype."""
    chosen_values, other_values = (
        a.detach().contiguous().view(torch.uint8) if a.element_size() == 1 else a.detach() for a in (x, y)
    )
    return torch.where(
        chosen.reshape(*chosen.shape, *(1,) * (x.dim() - chosen.dim())), chosen_values, other_values
    ).view(x.dtype)


def garbage_in(rows: Tensor, real: Tensor, poison: str) -> Tensor:
    """The rows, with garbage in those that no kernel may read."""
    value = POISONED[poison]
    return rows.masked_fill(
        ~real.reshape(*real.shape, *(1,) * (rows.dim() - real.dim())),
        torch.finfo(rows.dtype).max if value is None else value,
    )


def given_probs(probs: Tensor, read: Tensor) -> Tensor:
    """The probabilities, with NaN in those that no kernel may read."""
    return torch.where(read, probs, torch.nan)


def d_style(case: DispatchCase) -> str:
    """The style of a cotangent: it has special values if the payload has them."""
    return case.values if case.values in ("special", "integers") else "dyadic"


def cotangents_of(case: DispatchCase, name: str, lengths: list[int]) -> list[Tensor]:
    """One cotangent of the rows or tokens per rank."""
    return values_of(case, f"d_{name}", lengths, style=d_style(case))


def masked_exact(value: Tensor) -> Exact:
    """The expectation of values that autograd moves, which may turn -0 into 0."""
    return Exact(value, "values")


def moved(x_GH: Tensor, source_P: Tensor) -> Tensor:
    """x[source], 0 where the source is PADDING."""
    out = x_GH.new_zeros((len(source_P), *x_GH.shape[1:]))
    real = source_P != PADDING
    out[real] = x_GH[source_P[real]]
    return out


# ---- sums


def tree_of(
    case: DispatchCase, dtype: torch.dtype, declared: Mapping[str, Any], reduce: torch.dtype
) -> tuple[str, Tree]:
    """The kind and the tree of the dispatcher's sums; `reduce` is the dtype of the sum over ranks,
    if there is a choice.
    """
    accumulator = accumulator_of(declared, dtype)
    if case.dispatcher == "allgather":
        return "ranks", Tree(accumulator, dtype, accumulator if case.ranks == 1 else reduce)
    if case.dispatcher == "alltoall" and case.shards > 1:
        return "shards", Tree(reduce, dtype, accumulator)
    if case.dispatcher == "hybridep":
        return "ranks", Tree(accumulator, dtype, accumulator)
    return "rows", flat(accumulator)


def sum_of_rows(
    case: DispatchCase, rows: Sequence[Tensor], row_tokens: Sequence[Tensor], kind: str, tree: Tree
) -> list[Bounded]:
    """y[g] = Σ rows of token g on all ranks; one bound per rank."""
    dtype = rows[0].dtype
    all_rows, source = torch.cat(list(rows)).double(), torch.cat(list(row_tokens))
    lengths = torch.tensor([len(rank_tokens) for rank_tokens in row_tokens])
    rank = torch.repeat_interleave(torch.arange(len(row_tokens)), lengths)
    row_in_rank = torch.arange(len(source)) - (lengths.cumsum(0) - lengths)[rank]
    key = {
        "rows": torch.arange(len(source)),
        "ranks": source * len(row_tokens) + rank,
        "shards": rank // case.shards * int(lengths.max()) + row_in_rank,
    }[kind]
    real = source != PADDING
    _, part_R = key[real].unique(return_inverse=True)
    token_P = source.new_zeros(int(part_R.max()) + 1 if len(part_R) else 0).index_copy(0, part_R, source[real])
    bound_of_all = tree_bound(case, all_rows[real], part_R, token_P, case.tokens, dtype, tree)
    return split_bound(bound_of_all, case.counts)


def split_bound(bound_of_all: Bounded, counts: Sequence[int]) -> list[Bounded]:
    """The slice of each rank."""
    pairs = zip(bound_of_all.value.split(list(counts)), bound_of_all.bound.split(list(counts)), strict=True)
    return [replace(bound_of_all, value=value, bound=bound) for value, bound in pairs]


def dtype_of(name: str) -> torch.dtype:
    return DTYPES[name]
