"""permute_and_quantize: the contract of `quantize` for rows that nobody sees, and all of `permute` but the rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.tensors import hashed, payload, probabilities
from conformance.families.fused.simpler_routing import simpler_routing
from conformance.families.permutation.cases import RoutingCase, routed, routing_map
from conformance.families.permutation.permute import Permute, settings_of
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    TAIL,
    UNIT,
    VALUES,
    VARIANTS,
    QuantizeCase,
    is_random,
    x_of,
)
from conformance.families.quantization.quantize import Script, Watch, directions, reader_of
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation
from moe_ref.config import QuantizerState, Recipe
from moe_ref.permutation.permute import permute
from moe_ref.quantization.quantize import Form

KEYWORDS = ("probs", "align", "capacity", "num_rows", "role", "rowwise", "columnwise")
OUTPUTS = ("quantized", "state", "probs", "row_map", "tokens_per_expert", "pad_offsets", "overflow")
MOVED = ("probs", "tokens_per_expert", "pad_offsets", "overflow")  # what `permute` returns too
GIVEN = Opaque("state")  # stands for the state that is made of the inputs amax_history and scale


@dataclass(frozen=True, kw_only=True)
class PermutedQuantizationCase(RoutingCase):
    """A routing map, and how what it permutes is quantised. `hidden`, `align` and `capacity` are in units of what the scaling wants."""

    scaling: str = "current"
    variant: int = 0  # of the scaling, in RECIPES
    role: str = "input"
    direction: str = "rowwise"
    gemm: bool = False  # whether scales are read in the layout of matrix products, too
    values: str = "dyadic"
    dtype: str = "float32"
    layout: str = "contiguous"

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "scaling": tuple(RECIPES),
        "role": ROLES,
        "direction": DIRECTIONS,
        "values": VALUES,
        "dtype": ("float32", "bfloat16", "float16"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.variant < VARIANTS:
            raise ValueError(f"variant is {self.variant}; it must be from 0 to {VARIANTS - 1}")


PermutedQuantizationCase.serves("permute_and_quantize")


def recipe_of(case: PermutedQuantizationCase) -> Recipe:
    return RECIPES[case.scaling][case.variant]


def unit_of(case: PermutedQuantizationCase) -> int:
    return UNIT.get(case.scaling, 1)


def fits(case: PermutedQuantizationCase) -> bool:
    """Whether the reference takes the call, and its result is the same in whatever order it adds."""
    alike = _alike(case)
    return not is_random(alike) and alike.clash() is None


def _alike(case: PermutedQuantizationCase) -> QuantizeCase:
    """What is quantised, as if it were not permuted: a row for each token, and up to a unit more."""
    common = {
        name: getattr(case, name)
        for name in ("scaling", "variant", "role", "direction", "hidden", "dtype", "values", "seed")
    }
    return QuantizeCase(function="quantize", tokens=-(-case.tokens // unit_of(case)), **common)


def permuting(case: PermutedQuantizationCase) -> RoutingCase:
    """The permutation, in rows; a scaling of whole blocks has an alignment where no capacity is asked for."""
    unit = unit_of(case)
    align = case.align or (1 if unit > 1 and not case.capacity else 0)
    names = (
        "tokens",
        "experts",
        "topk",
        "routing",
        "spread",
        "map_dtype",
        "probs",
        "zero_probs",
        "slack",
        "grads",
        "unused",
        "seed",
    )
    common = {name: getattr(case, name) for name in names}
    return RoutingCase(
        function="permute",
        hidden=unit * case.hidden,
        align=unit * align,
        capacity=unit * case.capacity,
        dtype=case.dtype,
        **common,
    )


def tokens_of(case: PermutedQuantizationCase, token_P: Tensor) -> Tensor:
    """Values as `quantize` has them; tokens without a row hold what must reach no amax."""
    tokens = x_of(_alike(case))[: case.tokens].clone()
    without = torch.ones(case.tokens, dtype=torch.bool)
    without[token_P[token_P >= 0]] = False
    strange = torch.tensor(TAIL, dtype=tokens.dtype)[(torch.arange(case.tokens) + case.seed) % len(TAIL)]
    return torch.where(without[:, None], strange[:, None], tokens)


def state_of(case: PermutedQuantizationCase) -> dict[str, Tensor]:
    """Another scale for each expert, and what its history holds so far."""
    length = recipe_of(case).amax_history_len
    assert length is not None
    history = payload(case.seed, "amax_history", (case.experts, length), "float32").abs()
    exponent = torch.from_numpy(hashed(case.seed, "scale", case.experts).astype("int64")) % 9 - 4
    return {"amax_history": history, "scale": (torch.exp2(exponent.double()) * 1.25).float()}


def problem_of(required: dict[str, Any], settings: dict[str, Any], gemm: bool = False, **how: Any) -> Problem:
    """The call, and what is read of its result."""
    if "scale" in required:
        settings = settings | {"state": GIVEN}
    first = {name: required[name] for name in ("tokens", "routing_map", "recipe")}
    return Problem(
        "permute_and_quantize",
        required,
        settings,
        script=script_of(),
        first=first,
        read=reader_of(settings, gemm),
        **how,
    )


def script_of(watch: Watch | None = None) -> Script:
    """Permute and quantise, go back, and see where the row map says that rows are."""

    def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        settings = {name: given[name] for name in KEYWORDS if name in given}
        if "state" in given:
            settings["state"] = (
                QuantizerState(given["amax_history"], given["scale"]) if given["state"] is GIVEN else given["state"]
            )
        called = implementation.call(
            "permute_and_quantize", given["tokens"], given["routing_map"], given["recipe"], **settings
        )
        result = named_outputs(called, OUTPUTS)
        if watch:
            watch("", result["quantized"])
        return read_back(implementation, settings, result)

    return script


def read_back(implementation: Any, settings: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The outputs by which a result is judged: `result` is for the reader."""
    outputs = {"result": result["quantized"]} | {name: result[name] for name in MOVED}
    for suffix, columnwise in directions(settings):
        outputs[f"dequantized{suffix}"] = implementation.call(
            "dequantize", result["quantized"], **({"columnwise": True} if columnwise else {})
        )
    rows = next(x for name, x in outputs.items() if name.startswith("dequantized"))
    numbers = torch.arange(1, len(rows) + 1, dtype=torch.float32, device=rows.device)
    outputs["row_sums"] = implementation.call("unpermute", numbers[:, None], result["row_map"])
    if "state" in settings:
        outputs |= {
            f"state.{name}": x.clone() for name, x in named_outputs(result["state"], ("amax_history", "scale")).items()
        }
    return outputs


class PermuteAndQuantize(Contract[PermutedQuantizationCase]):
    """`permute_and_quantize`; its result is read by `amax`, `scales`, `codes` and `dequantize`, its row map by `unpermute`."""

    function = "permute_and_quantize"
    outputs = OUTPUTS
    primary = "codes"
    optional = (*KEYWORDS, "state")
    companions = ("amax", "scales", "codes", "dequantize", "unpermute")
    static = ("capacity", "num_rows")

    def legal(self, case: PermutedQuantizationCase) -> Problem:
        routing, chosen = permuting(case), torch.from_numpy(routed(case))
        settings = settings_of(routing)
        token_P = permute(torch.zeros(case.tokens, 0), chosen, **settings).row_map.token_P
        required: dict[str, Any] = {
            "tokens": tokens_of(case, token_P),
            "routing_map": routing_map(case),
            "recipe": recipe_of(case),
        }
        required |= state_of(case) if case.scaling == "delayed" else {}
        if case.probs:
            probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.probs, case.zero_probs)
            settings["probs"] = probs if case.capacity else torch.where(chosen, probs, torch.nan)
        settings |= {"role": case.role} if case.role != "input" else {}
        settings |= {"rowwise": False} if case.direction == "columnwise" else {}
        settings |= {"columnwise": True} if case.direction != "rowwise" else {}
        wanted, cotangents = tuple(filter(None, case.grads.split("+"))), {}
        if wanted:
            shape = (len(token_P), routing.hidden)
            cotangents = {
                f"dequantized{suffix}": payload(case.seed, f"d_{suffix}", shape, case.dtype)
                for suffix, _ in directions(settings)
            }
            cotangents |= {"probs": payload(case.seed, "d_probs", shape[:1], case.probs)} if case.probs else {}
            unused = {"rows": "dequantized", "probs": "probs", "": "-"}[case.unused]
            cotangents = {name: x for name, x in cotangents.items() if not name.startswith(unused)}
        return problem_of(
            required, settings, case.gemm, layouts={case.layout_of: case.layout}, wanted=wanted, cotangents=cotangents
        )

    def expected(
        self, case: PermutedQuantizationCase, problem: Problem, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        seen: dict[str, Any] = {}
        given = problem.required | problem.settings
        reference = Implementation(moe_ref)
        out = reader_of(problem.settings, case.gemm)(reference, script_of(seen.__setitem__)(reference, given))
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        right: dict[str, Expectation] = {}
        for suffix, columnwise in directions(problem.settings):
            form: Form = seen[""].form(columnwise)
            names = {name: f"{name}{suffix}" for name in ("amax", "scales", "codes", "values", "scales.gemm")}
            right |= QuantizedForm(form, names, out, reciprocal).expectations()
        right |= {name: Exact(out[name]) for name in ("row_sums", "state.amax_history", "state.scale") if name in out}
        permuted = Permute().expected(permuting(case), _permutation(problem), declared)
        return right | {name: x for name, x in permuted.items() if name != "rows"}

    def neighbour(self, case: PermutedQuantizationCase) -> PermutedQuantizationCase:
        plain: dict[str, Any] = {
            "golden": "",
            "law": "",
            "layout": "contiguous",
            "layout_of": "",
            "seed": case.seed + 1,
            "slack": None,
        }
        masks = None if case.routing is None else case.routing[::-1]
        align = 0 if case.capacity else 3 if case.align != 3 else 5
        other = replace(case, **plain, variant=(case.variant + 1) % VARIANTS, routing=masks, align=align)
        return other if fits(other) else replace(other, scaling="mxfp8", role="input", values="dyadic")

    def simpler(self, case: PermutedQuantizationCase) -> Iterator[PermutedQuantizationCase]:
        for other in _simpler(case):
            if fits(other):
                of = ("tokens", "routing_map", "probs" * bool(other.probs), *self.legal(other).cotangents)
                names = {name if name in of[:3] else f"d_{name}" for name in of}
                stays = other.layout != "contiguous" and other.layout_of in names
                yield other if stays else replace(other, layout="contiguous", layout_of="")


def _permutation(problem: Problem) -> Problem:
    """The call of `permute` with the same places and the same gradients."""
    settings = {name: problem.settings[name] for name in KEYWORDS[:4] if name in problem.settings}
    required = {name: problem.required[name] for name in ("tokens", "routing_map")}
    cotangents = {name: x for name, x in problem.cotangents.items() if name == "probs"}
    if any(name.startswith("dequantized") for name in problem.cotangents):
        cotangents["rows"] = _row_gradient(problem)
    return Problem("permute", required, settings, wanted=problem.wanted, cotangents=cotangents)


def _row_gradient(problem: Problem) -> Tensor:
    """What the cotangents of the values are for the rows before they were quantised."""
    settings = {name: problem.settings[name] for name in KEYWORDS[:4] if name in problem.settings}
    how = {name: problem.settings[name] for name in KEYWORDS[4:] if name in problem.settings}
    if "state" in problem.settings:
        how["state"] = QuantizerState(problem.required["amax_history"], problem.required["scale"])
    permuted = permute(problem.required["tokens"], problem.required["routing_map"], **settings)
    rows = permuted.rows.detach().requires_grad_()
    quantized = moe_ref.quantize(rows, problem.required["recipe"], splits=permuted.tokens_per_expert, **how).quantized
    pairs = [
        (f"dequantized{suffix}", turn)
        for suffix, turn in directions(problem.settings)
        if f"dequantized{suffix}" in problem.cotangents
    ]
    values = [moe_ref.dequantize(quantized, columnwise=turn) for _, turn in pairs]
    (gradient,) = torch.autograd.grad(values, [rows], [problem.cotangents[name] for name, _ in pairs])
    return gradient


def _simpler(case: PermutedQuantizationCase) -> Iterator[PermutedQuantizationCase]:
    if case.scaling != "current" or case.variant:
        yield replace(case, scaling="current", variant=0)
        yield replace(case, variant=0)
    for name in ("gemm", "direction", "role"):
        default: Any = PermutedQuantizationCase.__dataclass_fields__[name].default
        if getattr(case, name) != default:
            yield replace(case, **{name: default})
    if case.direction == "both":
        yield replace(case, direction="columnwise")
    for other in simpler_routing(case):
        without_probs = "probs" in other.grads and not other.probs
        assert isinstance(other, PermutedQuantizationCase)
        yield (
            replace(other, grads=other.grads.replace("+probs", "").removesuffix("probs"), unused="")
            if without_probs
            else other
        )
