"""sort_chunks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.core.case import Case
from conformance.core.contract import Contract, Problem
from conformance.core.tensors import payload, probabilities
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.permutation.permute import sort_chunks


@dataclass(frozen=True, kw_only=True)
class ChunksCase(Case):
    """A case of chunk sizes and their new order."""

    sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    tail: int = 0  # rows behind the last chunk
    hidden: int = 1
    dtype: str = "float32"
    probs: str = ""
    values: str = "dyadic"
    index_dtype: str = "int64"
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""
    unused: str = ""

    def __post_init__(self) -> None:
        if (
            sorted(self.order) != list(range(len(self.sizes)))
            or min((*self.sizes, self.tail, self.hidden), default=0) < 0
        ):
            raise ValueError(
                f"order must be a permutation of the {len(self.sizes)} chunks, and sizes ≥ 0; they are {self.order}, {self.sizes}"
            )


ChunksCase.serves("sort_chunks")


class SortChunks(Contract[ChunksCase]):
    """`sort_chunks`: rows, probabilities and both gradients, all of them moves."""

    function = "sort_chunks"
    outputs = ("rows", "probs")
    primary = "rows"
    optional = ("probs",)

    def legal(self, case: ChunksCase) -> Problem:
        count = sum(case.sizes) + case.tail
        kind = getattr(torch, case.index_dtype)
        required = {
            "rows": payload(case.seed, "rows", (count, case.hidden), case.dtype, case.values),
            "chunk_sizes": torch.tensor(case.sizes, dtype=kind),
            "order": torch.tensor(case.order, dtype=kind),
        }
        settings: dict[str, Any] = (
            {"probs": probabilities(case.seed, "probs", (count,), case.probs)} if case.probs else {}
        )
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = (
            {"rows": payload(case.seed, "d_rows", (count, case.hidden), case.dtype)}
            if wanted and case.unused != "rows"
            else {}
        )
        if wanted and case.probs and case.unused != "probs":
            cotangents["probs"] = payload(case.seed, "d_probs", (count,), case.probs)
        return Problem(self.function, required, settings, {case.layout_of: case.layout}, wanted, cotangents)

    def expected(self, case: ChunksCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, sizes, order = problem.required.values()
        out = sort_chunks(rows, sizes, order, **problem.settings)
        right: dict[str, Expectation] = {"rows": Exact(out.rows)}
        if out.probs is not None:
            right["probs"] = Exact(out.probs)
        # back again: the sorted chunks in the inverse order
        back = order.argsort() if len(order) else order
        for name, source in (("rows", rows), ("probs", problem.settings.get("probs"))):
            if name in problem.wanted and source is not None:
                cotangent = problem.cotangents.get(name, torch.zeros_like(source))
                flat = cotangent if cotangent.dim() == 2 else cotangent[:, None]
                right[f"d_{name}"] = Exact(
                    sort_chunks(flat, sizes[order.long()], back).rows.reshape(source.shape), "values"
                )
        return right

    def neighbour(self, case: ChunksCase) -> ChunksCase:
        last = len(case.order) - 1
        order = tuple(last - i for i in case.order)
        return replace(
            case,
            golden="",
            law="",
            seed=case.seed + 1,
            sizes=case.sizes[::-1],
            order=order,
            layout="contiguous",
            layout_of="",
        )

    def simpler(self, case: ChunksCase) -> Iterator[ChunksCase]:
        for name in (
            "law",
            "values",
            "layout",
            "grads",
            "unused",
            "index_dtype",
            "dtype",
            "probs",
            "seed",
            "poison",
            "tail",
        ):
            default: Any = ChunksCase.__dataclass_fields__[name].default
            if getattr(case, name) != default:
                changes = {name: default} | ({"layout_of": ""} if name == "layout" else {})
                yield replace(
                    case, **changes | ({"grads": "rows" if "rows" in case.grads else ""} if name == "probs" else {})
                )
        for i in range(len(case.sizes)):
            place = case.order.index(i)
            rest = tuple(o - (o > i) for o in case.order[:place] + case.order[place + 1 :])
            yield replace(case, sizes=case.sizes[:i] + case.sizes[i + 1 :], order=rest)
        for i, size in enumerate(case.sizes):
            for smaller in sorted({0, 1, 2, size // 2, size - 1}):
                if 0 <= smaller < size:
                    yield replace(case, sizes=(*case.sizes[:i], smaller, *case.sizes[i + 1 :]))
        yield from (
            replace(case, hidden=h)
            for h in sorted({0, 1, 2, case.hidden // 2, case.hidden - 1})
            if 0 <= h < case.hidden
        )
        yield from (replace(case, tail=t) for t in sorted({1, case.tail // 2}) if 0 < t < case.tail)
        for grad in case.grads.split("+") if "+" in case.grads else ():
            yield replace(case, grads=grad)
