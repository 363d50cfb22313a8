"""glu, activation and their gradients, fused with quantisation.

Running error analysis bounds the quantised operand; each output is judged given the earlier ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm
from conformance.analysis.running import Running
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.families.experts.activations import Activation, Glu, evaluated_in
from conformance.families.experts.cases import PROB_DTYPES, ActivationCase
from conformance.families.fused.cases import QuantizedActivationCase, inputs_of
from conformance.families.quantization.quantize import GEMM_LAYOUT, STATE, Script, directions, of_readers, reader_of
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation, Given, Outputs
from moe_ref.config import QuantizerState

GATE = ("kind", "offset", "clamp", "alpha", "interleave")
ACTIVATING = (*GATE, "probs")  # inputs of the activation
KEYWORDS = (*ACTIVATING, "splits", "rowwise", "columnwise", "noise", "round_before_quantize")
GIVEN = Opaque("state")  # the state with `history` and `scale`
READ = ("amax", "scales", "codes", "values", "scales.gemm")


def problem_of(
    function: str, required: dict[str, Any], settings: dict[str, Any], gemm: bool = False, **more: Any
) -> Problem:
    """The call, and the readers of its result."""
    if "scale" in required:
        settings = settings | {"state": GIVEN}
    first = {name: x for name, x in required.items() if name not in ("scale", "history")}
    return Problem(
        function,
        required,
        settings | of_readers(settings),
        script=_script_of(function),
        first=first,
        read=reader_of(settings, gemm),
        **more,
    )


def _script_of(function: str) -> Script:
    """One call, and its result dequantised in each direction."""

    def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        settings = {name: given[name] for name in KEYWORDS if name in given}
        state = given.get("state")
        if state is not None:
            settings["state"] = QuantizerState(given["history"], given["scale"]) if state is GIVEN else state
        backward = "d_out" in given
        names = ("quantized", "state", "d_probs") if backward else ("quantized", "state")
        required = ("d_out", "h", "recipe") if backward else ("h", "recipe")
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


def _signature(backward: bool, *activating: str) -> Signature:
    """Signature: gradients of the values; backward, none of the quantised gradient of h."""
    floats, differentiable = ("float32",), not backward
    inputs = [
        *((Input("d_out", "TF"),) if backward else ()),
        Input("h", "TH", gradient=differentiable),
        Input("probs", "T", PROB_DTYPES, field="probs", gradient=differentiable, optional="probs"),
        Input("splits", "E", field="index_dtype", optional="experts"),
        Input("history", "EL", floats, field="", optional="stateful", part_of="state"),
        Input("scale", "E", floats, field="", optional="stateful", part_of="state"),
        *((Input("noise", "2TH", floats, field="", optional="noisy"),) if backward else ()),
    ]
    values = [  # of both directions; the first has a cotangent
        Output("dequantized", "TF", of="h", probed=True, optional="rowwise"),
        Output("dequantized.columnwise", "TF", of="h", probed=True, optional="only_columnwise"),
    ]
    outputs = [Output("quantized"), Output("state"), *([Output("d_probs", "T")] if backward else values)]
    return Signature(
        inputs, outputs, settings=(*activating, "rowwise", "columnwise", "round_before_quantize", GEMM_LAYOUT)
    )


class _QuantizedActivation(Contract[QuantizedActivationCase]):
    """Base of the four functions."""

    case_type = QuantizedActivationCase
    primary = "codes"
    companions = ("amax", "scales", "codes", "dequantize")
    plain: Glu | Activation  # the contract of the activation itself

    def legal(self, case: QuantizedActivationCase) -> Problem:
        required, settings = inputs_of(case)
        call = self.call(case, required, settings, lengths={"T": len(required["h"]), "F": case.features})
        parts = {"layouts": call.layouts, "wanted": call.wanted, "cotangents": call.cotangents}
        return problem_of(self.function, required, settings, case.gemm, **parts)

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
        """The reference's outputs, and the tensor it quantised."""
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
        """All groups' rows before their final rounding, and the mask of unspecified ones."""
        probs = activating.get("probs")
        dtype = evaluated_in(declared, h, probs)
        p = None if probs is None else Running.of(probs[:, None], dtype)
        if "d_out" not in given:
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
        """The activation's straight-through gradients; 0 past the last group."""
        backward = "d_out" in given
        wanted = ("probs",) * ("probs" in given) if backward else problem.wanted
        if not wanted:
            return {}
        cotangent = given["d_out"] if backward else next(iter(problem.cotangents.values()))
        call = Problem(
            self.plain.function, {"h": h}, activating, wanted=wanted, cotangents={"out": cotangent[: len(h)]}
        )
        found: dict[str, Any] = self.plain.expected(ActivationCase(function=self.plain.function), call, declared)
        return {name: _with_zeros(found[name], len(given["h"])) for name in (f"d_{name}" for name in wanted)}


def _groups(quantized: Any, settings: dict[str, Any]) -> list[Tensor]:
    """The codes of each group, in logical orientation."""
    columnwise = directions(settings)[0][1]
    return [group.codes.T if columnwise else group.codes for group in quantized.form(columnwise).groups]


def _history_of(history: Tensor, suffix: str) -> Any:
    """The returned amax within the given history."""

    def right(outputs: Outputs) -> Exact:
        return Exact(
            torch.cat([torch.maximum(history[:, :1], outputs[f"amax{suffix}"].reshape(-1, 1)), history[:, 1:]], 1)
        )

    return right


def _with_zeros(expected: Any, rows: int) -> Any:
    """The expectation of the first rows, exactly 0 in the others."""
    value, bound = (torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) for x in (expected.value, expected.bound))
    return replace(expected, value=value, bound=bound)


class GluAndQuantize(_QuantizedActivation):
    """`glu_and_quantize`, its readers, and gradients straight through the quantiser."""

    function = "glu_and_quantize"
    signature = _signature(False, *GATE)
    plain = Glu()


class ActivationAndQuantize(_QuantizedActivation):
    """`activation_and_quantize` with the same readers and gradients."""

    function = "activation_and_quantize"
    signature = _signature(False, "kind")
    plain = Activation()


class GluBackwardAndQuantize(_QuantizedActivation):
    """`glu_backward_and_quantize`: the quantised gradient of h, and the gradient of the probs."""

    function = "glu_backward_and_quantize"
    signature = _signature(True, *GATE)
    plain = Glu()


class ActivationBackwardAndQuantize(_QuantizedActivation):
    """`activation_backward_and_quantize`: the same for an activation without a gate."""

    function = "activation_backward_and_quantize"
    signature = _signature(True, "kind")
    plain = Activation()
