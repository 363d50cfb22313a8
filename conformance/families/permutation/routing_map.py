"""pad_routing_map and the two converters between maps and indices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import probabilities
from conformance.families.permutation.cases import FLOATS, MAPS, IndicesCase, RoutingCase, indices, routed, routing_map
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.permutation.routing_map import EMPTY, indices_to_multihot, multihot_to_indices, pad_routing_map


class PadRoutingMap(Contract[RoutingCase]):
    """`pad_routing_map`: the padded map, the experts that fell short; the input is not modified."""

    function = "pad_routing_map"
    case_type = RoutingCase
    signature = Signature(
        inputs=[Input("routing_map", "TE", MAPS, field="map_dtype")],
        outputs=[Output("routing_map", "TE"), Output("unreached", "E")],
        required=("align",),
    )

    def legal(self, case: RoutingCase) -> Problem:
        return self.call(case, {"routing_map": routing_map(case)}, {"align": max(case.align, 1)})

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        out = pad_routing_map(problem.required["routing_map"], align=problem.settings["align"])
        return {
            "routing_map": Exact(out.routing_map, "integers"),
            "unreached": Exact(out.unreached, "integers", flag=True),
        }


class IndicesToMultihot(Contract[IndicesCase]):
    """`indices_to_multihot`: the map, the probabilities and their gradient."""

    function = "indices_to_multihot"
    case_type = IndicesCase
    signature = Signature(
        inputs=[
            Input("indices", "TK", field="index_dtype"),
            Input("probs", "TK", FLOATS, gradient=True),
        ],
        outputs=[Output("routing_map", "TE"), Output("probs", "TE", of="probs")],
        required=("num_experts",),
        linear=("probs", "probs"),
    )

    def legal(self, case: IndicesCase) -> Problem:
        required = {
            "indices": indices(case).to(getattr(torch, case.index_dtype)),
            "probs": probabilities(case.seed, "probs", (case.tokens, case.topk), case.dtype, case.zero_probs),
        }
        return self.call(case, required, {"num_experts": case.experts})

    def expected(self, case: IndicesCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        index_TK, probs = problem.required.values()
        out = indices_to_multihot(index_TK, probs, **problem.settings)
        expectations: dict[str, Expectation] = {
            "routing_map": Exact(out.routing_map, "integers"),
            "probs": Exact(out.probs),
        }
        if problem.wanted:
            expectations["d_probs"] = Exact(_slot_gradient(index_TK, problem.cotangents["probs"]), "values")
        return expectations


def _slot_gradient(index_TK: Tensor, d_multihot: Tensor) -> Tensor:
    """[T,K] each slot's gradient: its expert's; 0 if empty or repeated in a later slot."""
    out = torch.zeros(index_TK.shape, dtype=d_multihot.dtype)
    for t, row in enumerate(index_TK.tolist()):
        for k, e in enumerate(row):
            if e != EMPTY and e not in row[k + 1 :]:
                out[t, k] = d_multihot[t, e]
    return out


class MultihotToIndices(Contract[RoutingCase]):
    """`multihot_to_indices`: the indices, the probabilities, the overflow flag and the gradient."""

    function = "multihot_to_indices"
    case_type = RoutingCase
    signature = Signature(
        inputs=[Input("routing_map", "TE", MAPS, field="map_dtype"), Input("probs", "TE", FLOATS, gradient=True)],
        outputs=[Output("indices", "TK"), Output("probs", "TK", of="probs"), Output("overflow")],
        required=("topk",),
        linear=("probs", "probs"),
    )

    def legal(self, case: RoutingCase) -> Problem:
        chosen = torch.from_numpy(routed(case))
        probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.dtype, case.zero_probs)
        required = {"routing_map": routing_map(case), "probs": torch.where(chosen, probs, torch.nan)}
        return self.call(case, required, {"topk": case.topk})

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        map_TE, probs = problem.required.values()
        out = multihot_to_indices(map_TE, probs, **problem.settings)
        expectations: dict[str, Expectation] = {
            "indices": Exact(out.indices, "integers"),
            "probs": Exact(out.probs),
            "overflow": Exact(out.overflow, "integers", flag=True),
        }
        if problem.wanted:
            d_probs = torch.zeros_like(probs)
            t, k = (out.indices != EMPTY).nonzero(as_tuple=True)
            d_probs[t, out.indices[t, k]] = problem.cotangents["probs"][t, k]
            expectations["d_probs"] = Exact(d_probs, "values")
        return expectations
