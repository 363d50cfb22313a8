"""`glu`, `activation` and their gradients, fused with quantisation.

Running error analysis bounds the quantised operand, and each output is judged given the earlier
ones.
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
    function: str, required: dict[str, Any], settings: dict[str, Any], gemm: bool = False, **problem_fields: Any
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
        **problem_fields,
    )


def _script_of(function: str) -> Script:
    """One call, and its result dequantised in each direction."""

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        settings = {name: tensors[name] for name in KEYWORDS if name in tensors}
        state = tensors.get("state")
        if state is not None:
            settings["state"] = QuantizerState(tensors["history"], tensors["scale"]) if state is GIVEN else state
        backward = "d_out" in tensors
        names = ("quantized", "state", "d_probs") if backward else ("quantized", "state")
        required = ("d_out", "h", "recipe") if backward else ("h", "recipe")
        result_fields = named_outputs(
            implementation.call(function, *(tensors[name] for name in required), **settings), names
        )
        outputs: dict[str, Any] = {"result": result_fields["quantized"]}
        for suffix, columnwise in directions(settings):
            outputs[f"dequantized{suffix}"] = implementation.call(
                "dequantize", result_fields["quantized"], **({"columnwise": True} if columnwise else {})
            )
        if result_fields.get("d_probs") is not None:
            outputs["d_probs"] = result_fields["d_probs"]
        if state is not None:
            outputs |= {f"state.{name}": x for name, x in named_outputs(result_fields["state"], STATE).items()}
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
        call_fields = {"layouts": call.layouts, "wanted": call.wanted, "cotangents": call.cotangents}
        return problem_of(self.function, required, settings, case.gemm, **call_fields)

    def expected(
        self, case: QuantizedActivationCase, problem: Problem, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        arguments = problem.required | problem.settings
        settings = {name: arguments[name] for name in KEYWORDS if name in arguments}
        out, quantized = self._reference(problem)
        rows = sum(len(group_rows) for group_rows in _groups(quantized, settings))
        h, activating = arguments["h"][:rows], {name: arguments[name] for name in ACTIVATING if name in arguments}
        activating |= {"probs": arguments["probs"][:rows]} if "probs" in arguments else {}
        rounds = bool(settings.get("round_before_quantize"))
        dtype = h.dtype if rounds else torch.float32
        activated, unspecified = self.before_rounding(arguments, h, activating, declared)
        interval = activated.interval(dtype, unspecified)
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        expectations: dict[str, Expectation] = {}
        for suffix, columnwise in directions(settings):
            form = quantized.form(columnwise)
            noise = arguments["noise"][int(columnwise)] if form.scheme.stochastic else None
            names = {name: f"{name}{suffix}" for name in READ}
            expectations |= QuantizedForm(
                form, names, out, reciprocal, interval, dtype, arguments.get("scale"), noise
            ).expectations()
        if arguments.get("state") is not None:
            expectations["state.amax_history"] = Given(
                out["state.amax_history"], _history_of(arguments["history"], directions(settings)[0][0])
            )
            expectations["state.scale"] = Exact(arguments["scale"])
        return expectations | self._gradients(problem, arguments, h, activating, declared)

    def _reference(self, problem: Problem) -> tuple[dict[str, Any], Any]:
        """The outputs of the reference, and the tensor that it quantised."""
        implementation = Implementation(moe_ref)
        assert problem.script is not None and problem.read is not None
        arguments = {
            name: x.detach() if isinstance(x, Tensor) else x
            for name, x in (problem.required | problem.settings).items()
        }
        outputs = problem.script(implementation, arguments)
        return problem.read(implementation, outputs), outputs["result"]

    def before_rounding(
        self, arguments: dict[str, Any], h: Tensor, activating: dict[str, Any], declared: Mapping[str, Any]
    ) -> tuple[Running, Tensor]:
        """All groups' rows before their final rounding, and the mask of unspecified ones."""
        probs = activating.get("probs")
        dtype = evaluated_in(declared, h, probs)
        p = None if probs is None else Running.of(probs[:, None], dtype)
        if "d_out" not in arguments:
            act = self.plain.activated(h, activating, dtype)
            return act if p is None else act * p, self.plain.hidden_nan(h, activating)
        g = Running.of(arguments["d_out"][: len(h)], dtype)
        return self.plain.vjp(g if p is None else g * p, h, activating), (~h.isfinite().all(1))[:, None].expand(h.shape)

    def _gradients(
        self,
        problem: Problem,
        arguments: dict[str, Any],
        h: Tensor,
        activating: dict[str, Any],
        declared: Mapping[str, Any],
    ) -> dict[str, Expectation]:
        """The activation's straight-through gradients; 0 past the last group."""
        backward = "d_out" in arguments
        wanted = ("probs",) * ("probs" in arguments) if backward else problem.wanted
        if not wanted:
            return {}
        cotangent = arguments["d_out"] if backward else next(iter(problem.cotangents.values()))
        call = Problem(
            self.plain.function, {"h": h}, activating, wanted=wanted, cotangents={"out": cotangent[: len(h)]}
        )
        expectations: dict[str, Any] = self.plain.expected(ActivationCase(function=self.plain.function), call, declared)
        return {name: _with_zeros(expectations[name], len(arguments["h"])) for name in (f"d_{name}" for name in wanted)}


def _groups(quantized: Any, settings: dict[str, Any]) -> list[Tensor]:
    """The codes of each group, in logical orientation."""
    columnwise = directions(settings)[0][1]
    return [group.codes.T if columnwise else group.codes for group in quantized.form(columnwise).groups]


def _history_of(history: Tensor, suffix: str) -> Any:
    """The expected history: the returned amax entered into the given history."""

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
