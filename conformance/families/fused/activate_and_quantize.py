"""glu and activation quantised at once, and their gradients likewise: judged by running error analysis up to the quantiser, and from there
on each output given those before it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm
from conformance.analysis.running import Running
from conformance.core.case import shorter, without
from conformance.core.contract import Contract, Opaque, Problem, computed_in
from conformance.core.tensors import payload
from conformance.families.experts.activations import Activation, Glu
from conformance.families.experts.cases import ActivationCase
from conformance.families.fused.cases import BACKWARD, OF_GATES, RECIPES_HERE, QuantizedActivationCase, fits, inputs_of
from conformance.families.quantization.cases import VARIANTS
from conformance.families.quantization.quantize import STATE, Script, directions, reader_of
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation, Given, Outputs
from moe_ref.config import GATED, PLAIN, QuantizerState

ACTIVATING = ("kind", "offset", "clamp", "alpha", "interleave", "probs")  # what the activation alone is given
KEYWORDS = (*ACTIVATING, "splits", "rowwise", "columnwise", "noise", "round_before_quantize")
GIVEN = Opaque("state")  # stands for the state that `history` and `scale` are of
READ = ("amax", "scales", "codes", "values", "scales.gemm")


def problem_of(function: str, required: dict[str, Any], settings: dict[str, Any], **how: Any) -> Problem:
    """The call, and what is read of its result."""
    if "scale" in required:
        settings = settings | {"state": GIVEN}
    first = {name: x for name, x in required.items() if name not in ("scale", "history")}
    return Problem(
        function, required, settings, script=_script_of(function), first=first, read=reader_of(settings, False), **how
    )


def _script_of(function: str) -> Script:
    """One call, and both ways back."""

    def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        settings = {name: given[name] for name in KEYWORDS if name in given}
        state = given.get("state")
        if state is not None:
            settings["state"] = QuantizerState(given["history"], given["scale"]) if state is GIVEN else state
        names = ("quantized", "state", "d_probs") if function in BACKWARD else ("quantized", "state")
        required = ("d_out", "h", "recipe") if function in BACKWARD else ("h", "recipe")
        made = named_outputs(implementation.call(function, *(given[name] for name in required), **settings), names)
        outputs: dict[str, Any] = {"result": made["quantized"]}
        for suffix, columnwise in directions(settings):
            outputs[f"dequantized{suffix}"] = implementation.call(
                "dequantize", made["quantized"], **({"columnwise": True} if columnwise else {})
            )
        if made.get("d_probs") is not None:
            outputs["d_probs"] = made["d_probs"]
        if state is not None:
            outputs |= {f"state.{name}": x for name, x in named_outputs(made["state"], STATE).items()}
        return outputs

    return script


class _QuantizedActivation(Contract[QuantizedActivationCase]):
    """What the four functions share."""

    primary = "codes"
    companions = ("amax", "scales", "codes", "dequantize")
    outputs: tuple[str, ...] = ("quantized", "state")
    plain: Glu | Activation  # the contract of the activation itself
    optional: tuple[str, ...] = ("splits", "rowwise", "columnwise", "state", "round_before_quantize")

    def legal(self, case: QuantizedActivationCase) -> Problem:
        required, settings = inputs_of(case)
        wanted = tuple(filter(None, case.grads.split("+")))
        name = f"dequantized{next(suffix for suffix, _ in directions(settings))}"
        shape = (len(required["h"]), required["h"].shape[1] // (2 if self.function in OF_GATES else 1))
        cotangents = {name: payload(case.seed, f"d_{name}", shape, case.dtype)} if wanted else {}
        return problem_of(
            self.function,
            required,
            settings,
            layouts={case.layout_of: case.layout},
            wanted=wanted,
            cotangents=cotangents,
        )

    def expected(
        self, case: QuantizedActivationCase, problem: Problem, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        given = problem.required | problem.settings
        settings = {name: given[name] for name in KEYWORDS if name in given}
        out, quantized = self._reference(problem)
        rows = sum(len(part) for part in _groups(quantized, settings))
        h, activating = given["h"][:rows], {name: given[name] for name in ACTIVATING if name in given}
        activating |= {"probs": given["probs"][:rows]} if "probs" in given else {}
        rounds = bool(settings.get("round_before_quantize"))
        dtype = h.dtype if rounds else torch.float32
        activated, unspecified = self.before_rounding(given, h, activating, declared)
        known = activated.interval(dtype, unspecified)
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        right: dict[str, Expectation] = {}
        for suffix, columnwise in directions(settings):
            form = quantized.form(columnwise)
            noise = given["noise"][int(columnwise)] if form.scheme.stochastic else None
            names = {name: f"{name}{suffix}" for name in READ}
            right |= QuantizedForm(form, names, out, reciprocal, known, dtype, given.get("scale"), noise).expectations()
        if given.get("state") is not None:
            right["state.amax_history"] = Given(
                out["state.amax_history"], _history_of(given["history"], directions(settings)[0][0])
            )
            right["state.scale"] = Exact(given["scale"])
        return right | self._gradients(problem, given, h, activating, declared)

    def _reference(self, problem: Problem) -> tuple[dict[str, Any], Any]:
        """What the reference returns, and the tensor that it quantised."""
        implementation = Implementation(moe_ref)
        assert problem.script is not None and problem.read is not None
        given = {
            name: x.detach() if isinstance(x, Tensor) else x
            for name, x in (problem.required | problem.settings).items()
        }
        outputs = problem.script(implementation, given)
        return problem.read(implementation, outputs), outputs["result"]

    def before_rounding(
        self, given: dict[str, Any], h: Tensor, activating: dict[str, Any], declared: Mapping[str, Any]
    ) -> tuple[Running, Tensor]:
        """What is quantised, of the rows of all groups, before it is rounded at last; and where it is unspecified."""
        probs = activating.get("probs")
        dtype = computed_in(declared, h, probs)
        p = None if probs is None else Running.of(probs[:, None], dtype)
        if self.function not in BACKWARD:
            act = self.plain.activated(h, activating, dtype)
            return act if p is None else act * p, self.plain.hidden_nan(h, activating)
        g = Running.of(given["d_out"][: len(h)], dtype)
        return self.plain.vjp(g if p is None else g * p, h, activating), (~h.isfinite().all(1))[:, None].expand(h.shape)

    def _gradients(
        self,
        problem: Problem,
        given: dict[str, Any],
        h: Tensor,
        activating: dict[str, Any],
        declared: Mapping[str, Any],
    ) -> dict[str, Expectation]:
        """The gradients of the activation, of a cotangent that came straight through; 0 behind the last group."""
        backward = self.function in BACKWARD
        wanted = ("probs",) * ("probs" in given) if backward else problem.wanted
        if not wanted:
            return {}
        cotangent = given["d_out"] if backward else next(iter(problem.cotangents.values()))
        call = Problem(
            self.plain.function, {"h": h}, activating, wanted=wanted, cotangents={"out": cotangent[: len(h)]}
        )
        found: dict[str, Any] = self.plain.expected(ActivationCase(function=self.plain.function), call, declared)
        return {name: _with_zeros(found[name], len(given["h"])) for name in (f"d_{name}" for name in wanted)}

    def neighbour(self, case: QuantizedActivationCase) -> QuantizedActivationCase:
        plain: dict[str, Any] = {
            "golden": "",
            "law": "",
            "layout": "contiguous",
            "layout_of": "",
            "interleave": 0,
            "alpha": 0,
            "seed": case.seed + 1,
        }
        kinds = GATED if self.function in OF_GATES else PLAIN
        kind = kinds[kinds.index(case.kind or self.plain_kind) - 1]
        other = replace(case, **plain, kind=kind, variant=(case.variant + 1) % VARIANTS, width=case.width + 1)
        if case.seed % 3 == 0:
            scalings = tuple(RECIPES_HERE)
            other = replace(other, scaling=scalings[scalings.index(case.scaling) - 1])
        return other if fits(other) else replace(other, dtype="bfloat16", rounded=True, grads="")

    @property
    def plain_kind(self) -> str:
        """The kind that is the default."""
        return "swiglu" if self.function in OF_GATES else "squared_relu"

    def simpler(self, case: QuantizedActivationCase) -> Iterator[QuantizedActivationCase]:
        for other in _simpler(case):
            if fits(other):
                gone = (other.layout_of == "probs" and not other.probs) or (
                    other.layout_of == "splits" and not other.experts
                )
                gone |= other.layout_of.startswith("d_dequantized") and (
                    not other.grads or other.direction != case.direction
                )
                yield replace(other, layout="contiguous", layout_of="") if gone or other.layout_of == "noise" else other


def _groups(quantized: Any, settings: dict[str, Any]) -> list[Tensor]:
    """The codes of each group, in logical orientation."""
    columnwise = directions(settings)[0][1]
    return [group.codes.T if columnwise else group.codes for group in quantized.form(columnwise).groups]


def _history_of(history: Tensor, suffix: str) -> Any:
    """The amax that was returned, among those before."""

    def right(outputs: Outputs) -> Exact:
        return Exact(
            torch.cat([torch.maximum(history[:, :1], outputs[f"amax{suffix}"].reshape(-1, 1)), history[:, 1:]], 1)
        )

    return right


def _with_zeros(expected: Any, rows: int) -> Any:
    """The expectation of the first rows, and exactly 0 in the others."""
    value, bound = (torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) for x in (expected.value, expected.bound))
    return replace(expected, value=value, bound=bound)


def _simpler(case: QuantizedActivationCase) -> Iterator[QuantizedActivationCase]:
    if case.scaling != "current" or case.variant:
        yield replace(case, scaling="current", variant=0)
        yield replace(case, variant=0)
    plain = (
        "law",
        "layout",
        "grads",
        "rounded",
        "values",
        "weights",
        "alpha",
        "kind",
        "interleave",
        "clamp",
        "offset",
        "probs",
        "direction",
    )
    beside: dict[str, dict[str, Any]] = {"layout": {"layout_of": ""}, "kind": {"alpha": 0}}
    beside["probs"] = {"grads": without(case.grads, "probs"), "weights": "plain"}
    for name in (*plain, "index_dtype", "dtype", "poison", "seed"):
        default: Any = QuantizedActivationCase.__dataclass_fields__[name].default
        if getattr(case, name) != default:
            yield replace(case, **{name: default} | beside.get(name, {}))
    yield from (replace(case, grads=grad) for grad in case.grads.split("+") if "+" in case.grads)
    if case.direction == "both":
        yield replace(case, direction="columnwise")
    if case.experts:
        yield replace(case, experts=0, counts=(), tail=0)
        yield replace(case, counts=())
    yield from (replace(case, experts=size, counts=()) for size in shorter(case.experts, 1))
    for e, count in enumerate(case.counts):
        kept = case.counts[:e] + case.counts[e + 1 :]
        if kept:
            yield replace(case, counts=kept, experts=len(kept), tokens=sum(kept))
        for size in shorter(count):
            yield replace(
                case, counts=(*case.counts[:e], size, *case.counts[e + 1 :]), tokens=case.tokens - count + size
            )
    yield from (replace(case, tokens=size) for size in shorter(case.tokens) if not case.counts)
    yield from (replace(case, tail=size) for size in shorter(case.tail))
    yield from (replace(case, width=size) for size in shorter(case.width))


_GATE = ("kind", "offset", "clamp", "alpha", "interleave", "probs")


class GluAndQuantize(_QuantizedActivation):
    """`glu_and_quantize` with `amax`, `scales`, `codes` and `dequantize`, and the gradients that go straight through the quantiser."""

    function = "glu_and_quantize"
    plain = Glu()
    optional = (*_QuantizedActivation.optional, *_GATE)


class ActivationAndQuantize(_QuantizedActivation):
    """`activation_and_quantize`, likewise."""

    function = "activation_and_quantize"
    plain = Activation()
    optional = (*_QuantizedActivation.optional, "kind", "probs")


class GluBackwardAndQuantize(_QuantizedActivation):
    """`glu_backward_and_quantize`: the quantised gradient of h, and that of the probs."""

    function = "glu_backward_and_quantize"
    outputs = ("quantized", "state", "d_probs")
    plain = Glu()
    optional = (*_QuantizedActivation.optional, *_GATE, "noise")


class ActivationBackwardAndQuantize(_QuantizedActivation):
    """`activation_backward_and_quantize`, likewise."""

    function = "activation_backward_and_quantize"
    outputs = ("quantized", "state", "d_probs")
    plain = Activation()
    optional = (*_QuantizedActivation.optional, "kind", "probs", "noise")
