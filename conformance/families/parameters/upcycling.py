"""upcycle."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import DTYPES, payload
from conformance.families.parameters.cases import FLOATS, UpcycleCase
from conformance.judge import Exact, Expectation
from conformance.judge.bound import sum_bound
from moe_ref.parameters.upcycling import upcycle

SCALED = ("fc1_weight", "fc2_weight", "fc1_bias")
ROUNDINGS = 3  # of the scale's exponent, the scale and the product, in the accumulator


class Upcycle(Contract[UpcycleCase]):
    """`upcycle`: moved rows bit by bit; scaled slices within the roundings of one product."""

    function = "upcycle"
    case_type = UpcycleCase
    signature = Signature(
        inputs=[
            Input("router_weight", "EH", FLOATS),
            Input("fc1_weight", "SH", FLOATS),
            Input("fc2_weight", "HF", FLOATS),
            Input("fc1_bias", "S", FLOATS, optional="fc1_bias"),
            Input("fc2_bias", "H", FLOATS, optional="fc2_bias"),
        ],
        outputs=[Output(name) for name in ("router_weight", *SCALED[:2], "fc1_bias", "fc2_bias")],
        settings=("granularity", "kind", "pre_softmax"),
        required=("topk",),
    )
    primary = "fc1_weight"

    def legal(self, case: UpcycleCase) -> Problem:
        width, rows = case.granularity * case.width, case.fc1_rows
        shapes: dict[str, tuple[int, ...]] = {
            "router_weight": (case.experts, case.hidden),
            "fc1_weight": (rows, case.hidden),
        }
        shapes |= {"fc2_weight": (case.hidden, width), "fc1_bias": (rows,), "fc2_bias": (case.hidden,)}
        tensors = {name: payload(case.seed, name, shape, case.dtype) for name, shape in shapes.items()}
        biases = {name: tensors.pop(name) for name in ("fc1_bias", "fc2_bias")}
        settings: dict[str, Any] = {"topk": min(case.topk, case.experts)}
        settings |= {"granularity": case.granularity} if case.granularity > 1 else {}
        settings |= {"kind": case.kind} if case.kind != "swiglu" else {}
        settings |= {"pre_softmax": True} if case.pre_softmax else {}
        settings |= {name: x for name, x in biases.items() if getattr(case, name)}
        return self.call(case, tensors, settings)

    def expected(self, case: UpcycleCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        arguments = problem.required | problem.settings
        float64_arguments = {
            name: x.double() if name in SCALED and isinstance(x, Tensor) else x for name, x in arguments.items()
        }
        float64_arguments |= {
            name: arguments[name].double() for name in ("router_weight", "fc2_bias") if name in arguments
        }
        dtype = DTYPES[case.dtype]
        expectations: dict[str, Expectation] = {}
        for name, x in upcycle(**_arguments(float64_arguments))._asdict().items():
            if x is not None:
                expectations[name] = Exact(x.to(dtype)) if name not in SCALED else _scaled(x, dtype)
        return expectations


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {("router_weight_EH" if name == "router_weight" else name): x for name, x in arguments.items()}


def _scaled(x: Tensor, dtype: Any) -> Expectation:
    accumulator = DTYPES["float64" if dtype == DTYPES["float64"] else "float32"]
    return sum_bound(x, x.abs(), ROUNDINGS, dtype, accumulator)
