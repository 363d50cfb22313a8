"""Plays a case of the suite by two formulations, and compares all results and gradients."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Opaque, Problem
from conformance.core.ranks import Collective, Ranked
from conformance.core.space import Space
from conformance.core.tensors import STRANGE
from conformance.engine.choose.draw import drawn, run_seed, strategy
from conformance.interface import Implementation, named_outputs
from evidence.formulations.layers import play_layer
from evidence.formulations.worlds import gradients, placed_inputs, play_ranks, play_together
from moe_ref.config import LayerConfig, Recipe

EXACT_DTYPES = ("quantize",)  # functions whose rules depend on the dtype of x, so that no input is widened
OF_A_STATE = ("history", "amax_history", "scale", "noise")  # tensors that are float32
UP_TO_SIGN = ("activation_and", "activation_backward", "glu_and", "glu_backward")  # codes of 0: see the values
ELEMENTS = 2**15  # the most elements of a case's tensors together, because a formulation visits them one by one
RELATIVE = 2.0**-36  # in units of float64's 2⁻⁵³: an exponential of float16's largest number loses 16 bits
CANCELLED = 2.0**-44  # relative to the largest value in the row, and to the largest cotangent, because terms cancel


def cases(function: str, count: int, seed: int = 0) -> list[Case]:
    """Drawn cases that are small enough."""
    return drawn(strategy(function, Space()), run_seed("formulations", function, seed), count, _small)


def _small(case: Case) -> Case | None:
    """The case, if it is small, and if a rounding in float64 changes none of its choices."""
    spread, dtype = getattr(case, "spread", ""), getattr(case, "dtype", "")
    if case.is_large or case.is_heavy or spread == "nan" or (spread == "near" and dtype == "float64"):
        return None
    if case.function == "sinkhorn_routing" and spread == "equal":
        return None  # the keys of a plan would be equal, so that rounding decides
    if "backward" in case.function and _strange(case):
        return None
    calls = calls_of(case)
    elements = sum(x.numel() for call in calls for x in (*call.tensors.values(), *call.cotangents.values()))
    return case if elements <= ELEMENTS else None


def _strange(case: Case) -> bool:
    """Whether rows have NaN or infinities, because their gradients are then unspecified."""
    return getattr(case, "values", "") in (*STRANGE, "ends")


@lru_cache(maxsize=64)
def calls_of(case: Case) -> list[Problem]:
    """The call of each rank."""
    contract = CONTRACTS[case.function]
    if isinstance(contract, Collective) or (isinstance(contract, Ranked) and contract.ranks(case)):
        return contract.calls(case)
    return [contract.problem(case)]


def played(namespace: Any, case: Case) -> dict[str, Any]:
    """The results and gradients of the case by name; of several ranks by rank and name."""
    calls = [widened(call) for call in calls_of(case)]
    torch.manual_seed(case.seed)
    if case.function == "moe_layer":
        return play_layer(namespace, calls)
    if isinstance(CONTRACTS[case.function], Collective):
        return play_ranks(namespace, calls)
    if hasattr(calls[0].settings.get("ranks"), "groups"):
        return play_together(namespace, calls, play)
    results_of_ranks = [play(namespace, call) for call in calls]
    return {
        f"{rank}: {name}": x for rank, rank_results in enumerate(results_of_ranks) for name, x in rank_results.items()
    }


def play(namespace: Any, call: Problem) -> dict[str, Any]:
    """The results of one call, and the gradients that it wants."""
    placed = placed_inputs(call)
    implementation = Implementation(namespace)
    if call.script:
        out = call.script(implementation, call.required | call.settings | placed)
        out = call.read(implementation, out) if call.read else out
    else:
        out = _results_of(namespace, call, placed)
    outputs, inputs = [out[name] for name in call.cotangents], [placed[name] for name in call.wanted]
    results = gradients(outputs, [*call.cotangents.values()], inputs)
    return out | {f"d_{name}": gradient for name, gradient in zip(call.wanted, results, strict=True)}


def _results_of(namespace: Any, call: Problem, placed: dict[str, Tensor]) -> dict[str, Any]:
    producer_results: dict[str, Any] = {}
    if call.producer:
        producer_results = _results_of(namespace, call.producer, call.producer.tensors)
    required_inputs = {name: placed.get(name, x) for name, x in call.required.items()}
    arguments = [producer_results[x.field_name] if isinstance(x, Opaque) else x for x in required_inputs.values()]
    settings = {name: placed.get(name, x) for name, x in call.settings.items()}
    result = getattr(namespace, call.function)(*arguments, **settings)
    return named_outputs(result, CONTRACTS[call.function].outputs)


def widened(call: Problem) -> Problem:
    """The call in float64. Tensors whose bits matter stay as they are."""
    if call.function in EXACT_DTYPES:
        return call
    settings = {name: _in_float64(x, name) for name, x in call.settings.items()}
    settings |= {"router_dtype": "fp64"} if "router_dtype" in settings else {}
    required = {name: _in_float64(x, name) for name, x in call.required.items()}
    cotangents = {name: _in_float64(x) for name, x in call.cotangents.items()}
    producer = call.producer and widened(call.producer)
    return replace(call, required=required, settings=settings, cotangents=cotangents, producer=producer)


def _in_float64(x: Any, name: str = "") -> Any:
    if name.startswith("state.") or name in OF_A_STATE:
        return x
    if isinstance(x, tuple) and x and all(isinstance(element, Tensor) for element in x):
        return tuple(map(_in_float64, x))
    if isinstance(x, LayerConfig) and x.router_dtype:
        return replace(x, router_dtype="fp64")
    if isinstance(x, Recipe) and x.hadamard:
        return replace(x, hadamard=False)  # a transform is computed in bfloat16; `quantize` has it, bit by bit
    is_wide_float = isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1
    return x.double() if is_wide_float else x


def difference(case: Case, expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The first result that the formulations do not agree on; empty if they agree on all."""
    cotangents = [x.double() for call in calls_of(case) for x in call.cotangents.values()]
    largest = max((float(_finite(x).max()) for x in cotangents if x.numel()), default=0.0)
    strange = _strange(case)
    for name, x in expected.items():
        left_out = (strange and ": d_" in name) or ("codes" in name and case.function.startswith(UP_TO_SIGN))
        if isinstance(x, Tensor) and not left_out:
            reason = _tensors_differ(x.detach(), got.get(name), largest if ": d_" in name else None)
            if reason:
                return f"{name}: {reason}"
    return ""


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0.0)


def _tensors_differ(x: Tensor, second: Any, cotangent: float | None) -> str:
    """How two tensors differ.

    A gradient, which has a cotangent, may be NaN in place of an infinity.
    """
    if not isinstance(second, Tensor) or second.shape != x.shape:
        return f"{tuple(x.shape)} against {tuple(second.shape) if isinstance(second, Tensor) else second}"
    y = second.detach()
    if x.element_size() == 1 or not x.is_floating_point():
        x, y = (z.contiguous().view(torch.uint8) if z.dtype.itemsize == 1 else z for z in (x, y))
        differs = x != y
    else:
        x, y = x.double(), y.double()
        size = _finite(x)
        row = size.amax(-1, keepdim=True) if x.dim() and x.shape[-1] else size
        near = (x - y).abs() <= RELATIVE * size + CANCELLED * (row + (cotangent or 0.0))
        lost = x.isnan() & y.isnan() if cotangent is None else ~x.isfinite() & ~y.isfinite()
        differs = ~(near | (x == y) | lost)
    if not differs.any():
        return ""
    at = tuple(differs.nonzero()[0].tolist())
    return f"{int(differs.sum())} of {differs.numel()}, first at {at}: {x[at].item()!r} against {y[at].item()!r}"
