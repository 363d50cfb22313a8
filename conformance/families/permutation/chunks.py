"""sort_chunks."""

from collections.abc import Mapping
from typing import Any

import torch

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload, probabilities
from conformance.families.permutation.cases import MOVED, PROBS, ChunksCase
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.permutation.permute import sort_chunks


class SortChunks(Contract[ChunksCase]):
    """`sort_chunks`: rows, probabilities and both gradients, all exact moves."""

    function = "sort_chunks"
    case_type = ChunksCase
    signature = Signature(
        inputs=[
            Input("rows", "PH", MOVED, gradient=True),
            Input("chunk_sizes", "C", field="index_dtype"),
            Input("order", "C", field="order_dtype"),
            Input("probs", "P", PROBS, field="probs", gradient=True, optional="probs"),
        ],
        outputs=[Output("rows", "PH", of="rows"), Output("probs", "P", of="probs")],
        linear=("rows", "rows"),
    )

    def legal(self, case: ChunksCase) -> Problem:
        count = sum(case.sizes) + case.tail
        kind = getattr(torch, case.index_dtype)
        required = {
            "rows": payload(case.seed, "rows", (count, case.hidden), case.dtype, case.values),
            "chunk_sizes": torch.tensor(case.sizes, dtype=kind),
            "order": torch.tensor(case.order, dtype=getattr(torch, case.order_dtype)),
        }
        settings: dict[str, Any] = (
            {"probs": probabilities(case.seed, "probs", (count,), case.probs)} if case.probs else {}
        )
        return self.call(case, required, settings, lengths={"P": count})

    def expected(self, case: ChunksCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, sizes, order = problem.required.values()
        out = sort_chunks(rows, sizes, order, **problem.settings)
        expectations: dict[str, Expectation] = {"rows": Exact(out.rows)}
        if out.probs is not None:
            expectations["probs"] = Exact(out.probs)
        # the inverse: sort the sorted chunks by the inverse order
        inverse_order = order.argsort() if len(order) else order
        for name, source in (("rows", rows), ("probs", problem.settings.get("probs"))):
            if name in problem.wanted and source is not None:
                cotangent = problem.cotangents.get(name, torch.zeros_like(source))
                flat = cotangent if cotangent.dim() == 2 else cotangent[:, None]
                expectations[f"d_{name}"] = Exact(
                    sort_chunks(flat, sizes[order.long()], inverse_order).rows.reshape(source.shape), "values"
                )
        return expectations
