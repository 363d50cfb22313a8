"""`quantize` and its readers (`amax`, `scales`, `codes`, `dequantize`), and delayed scaling in
several steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm, nearly, one_nan
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import laid_out
from conformance.families.quantization.cases import QuantizeCase, inputs_of
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation
from moe_ref.config import QuantizerState
from moe_ref.quantization.quantize import Form

KEYWORDS = ("role", "splits", "rowwise", "columnwise", "noise")
STATE = ("amax_history", "scale")
FRESH = Opaque("state")  # the state before the first step
READERS = ("amax", "scales", "codes", "dequantize")
GEMM_LAYOUT = "scales.layout"  # without it the other outputs are judged
NEEDED = Opaque("parameter")  # marks a parameter of another function
Watch = Callable[[str, Any], None]
Script = Callable[[Any, dict[str, Any]], dict[str, Any]]


def problem_of(
    required: dict[str, Any], settings: dict[str, Any], steps: str = "quantize", gemm: bool = False, **fields: Any
) -> Problem:
    """The calls: quantises x, x.1, … in turn."""
    all_settings = settings
    if required["recipe"].scaling == "delayed":
        all_settings = all_settings | {"state": FRESH} | _of_the_state(settings, steps)
    first = {name: required[name] for name in ("x", "recipe")}
    return Problem(
        "quantize",
        required,
        all_settings | of_readers(settings),
        script=script_of(steps.split("+")),
        first=first,
        read=reader_of(settings, gemm),
        **fields,
    )


def of_readers(settings: Mapping[str, Any]) -> dict[str, Opaque]:
    """The parameters of the readers of the result.

    If an implementation lacks one, the call is not offered.
    """
    return {f"{reader}.columnwise": NEEDED for reader in READERS if settings.get("columnwise")}


def _of_the_state(settings: Mapping[str, Any], steps: str) -> dict[str, Opaque]:
    """The parameters of the functions of delayed scaling."""
    needed = {
        "new_quantizer_state.device": True,
        "new_quantizer_state.num_groups": "splits" in settings,
        "update_scales.role": "role" in settings and ("update" in steps or "reduced" in steps),
        "update_scales.reduced_amax": "reduced" in steps,
    }
    return {name: NEEDED for name, is_needed in needed.items() if is_needed}


def script_of(steps: list[str], watch: Watch | None = None) -> Script:
    """A script that runs the steps: quantise, dequantise, pass the state on, and reload it, as
    views like x.
    """

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        recipe, count = tensors["recipe"], 0
        outputs: dict[str, Any] = {}
        settings = {name: tensors[name] for name in KEYWORDS if name in tensors}
        role = {name: x for name, x in settings.items() if name == "role"}
        state = tensors.get("state")
        if state is FRESH:
            groups = {"num_groups": len(settings["splits"])} if "splits" in settings else {}
            state = implementation.call("new_quantizer_state", recipe, **groups, device=tensors["x"].device)
        for step in steps:
            if step in ("update", "reduced"):
                reduced = {"reduced_amax": tensors["reduced_amax"]} if step == "reduced" else {}
                state = implementation.call("update_scales", state, recipe, **role, **reduced)
            elif step == "reload":
                layout = "contiguous" if tensors["x"].is_contiguous() else "strided"
                saved_state = {name: x.detach().clone() for name, x in named_outputs(state, STATE).items()}
                state = QuantizerState(**{name: laid_out(x, layout) for name, x in saved_state.items()})
            else:
                prefix, x = (f"{count}.", tensors[f"x.{count}"]) if count else ("", tensors["x"])
                remembered = {"state": state} if state is not None else {}
                result = named_outputs(
                    implementation.call("quantize", x, recipe, **settings, **remembered), ("quantized", "state")
                )
                state, count = result["state"], count + 1
                if watch:
                    watch(prefix, result["quantized"])
                outputs[f"{prefix}result"] = result["quantized"]
                for suffix, columnwise in directions(settings):
                    outputs[f"{prefix}dequantized{suffix}"] = implementation.call(
                        "dequantize", result["quantized"], **_columnwise(columnwise)
                    )
        if tensors.get("state") is not None:
            outputs |= {f"state.{name}": x.clone() for name, x in named_outputs(state, STATE).items()}
        return outputs

    return script


def directions(settings: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(suffix of output names, columnwise) of each requested form."""
    rowwise = [("", False)] if settings.get("rowwise", True) else []
    return rowwise + ([(".columnwise", True)] if settings.get("columnwise") else [])


def reader_of(settings: Mapping[str, Any], gemm: bool) -> Script:
    """Replaces each result by its parts. Scale shapes depend on splits: reading may sync."""

    def read(implementation: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: x for name, x in outputs.items() if not name.endswith("result")}
        for name in outputs.keys() - tensors.keys():
            for suffix, columnwise in directions(settings):
                readings = _read(implementation, outputs[name], columnwise, gemm)
                tensors |= {
                    f"{name.removesuffix('result')}{reading}{suffix}": value for reading, value in readings.items()
                }
        for name in [name for name in tensors if "dequantized" in name]:
            value = tensors[name]
            tensors[name.replace("dequantized", "values")] = (
                one_nan(value.detach()) if isinstance(value, Tensor) else value
            )
        return tensors

    return read


def _read(implementation: Any, quantized: Any, columnwise: bool, gemm: bool) -> dict[str, Any]:
    form = _columnwise(columnwise)
    out = {name: implementation.call(name, quantized, **form) for name in ("amax", "scales", "codes")}
    if gemm and not implementation.lacks("scales", {"layout": ""}):
        laid_out = implementation.call("scales", quantized, **form, layout="gemm")
        out["scales.gemm"] = torch.cat([block.flatten() for block in laid_out])
    return out


def _columnwise(columnwise: bool) -> dict[str, Any]:
    """The setting for the columnwise form."""
    return {"columnwise": True} if columnwise else {}


class Quantize(Contract[QuantizeCase]):
    """`quantize`, `amax`, `scales`, `codes` and `dequantize`; delayed scaling with its state."""

    function = "quantize"
    case_type = QuantizeCase
    signature = Signature(
        inputs=[
            Input("x", "MN", gradient=True),
            Input("splits", "E", field="index_dtype", optional="experts"),
            Input("noise", "2MN", ("float32",), field="", optional="noisy"),
        ],
        outputs=[
            *(Output("quantized"), Output("state")),
            Output("dequantized", "MN", of="x", probed=True, optional="rowwise"),
            Output("dequantized.columnwise", "MN", of="x", probed=True, optional="columnwise"),
        ],
        settings=("role", "rowwise", "columnwise", "state", GEMM_LAYOUT),
    )
    primary = "codes"
    companions = READERS

    def legal(self, case: QuantizeCase) -> Problem:
        required, settings = inputs_of(case)
        rows, columns = required["x"].shape
        call = self.call(case, required, settings, lengths={"M": rows, "N": columns})
        return problem_of(
            required,
            settings,
            case.steps,
            case.gemm,
            **{name: getattr(call, name) for name in ("layouts", "wanted", "cotangents")},
        )

    def expected(self, case: QuantizeCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        quantized_forms: dict[str, Any] = {}
        x = problem.required["x"].detach().clone().requires_grad_(bool(problem.wanted))
        script, read = (
            script_of(case.steps.split("+"), quantized_forms.__setitem__),
            reader_of(problem.settings, case.gemm),
        )
        out = read(
            Implementation(moe_ref), script(Implementation(moe_ref), problem.required | problem.settings | {"x": x})
        )
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        expectations: dict[str, Expectation] = {}
        for prefix, quantized in quantized_forms.items():
            for suffix, columnwise in directions(problem.settings):
                form: Form = quantized.form(columnwise)
                names = {
                    name: f"{prefix}{name}{suffix}" for name in ("amax", "scales", "codes", "values", "scales.gemm")
                }
                noise = (
                    problem.settings["noise"][int(columnwise)] if form.scheme.stochastic and not case.repeats else None
                )
                expected = QuantizedForm(form, names, out, reciprocal, noise_MN=noise)
                if case.repeats:
                    repeated_outputs = tuple(
                        f"{second_prefix}codes{suffix}" for second_prefix in quantized_forms if second_prefix != prefix
                    )
                    expected = replace(expected, repeated=case.tokens * case.unit, others=repeated_outputs)
                expectations |= expected.expectations()
        if "state.scale" in out:
            expectations["state.amax_history"] = Exact(out["state.amax_history"], "values")
            # reciprocal: FMAX · (1/a) for FMAX / a
            expectations["state.scale"] = nearly(out["state.scale"], 3) if reciprocal else Exact(out["state.scale"])
        if problem.wanted:
            attached = {name: cotangent for name, cotangent in problem.cotangents.items() if out[name].requires_grad}
            (gradient,) = torch.autograd.grad([out[name] for name in attached], [x], list(attached.values()))
            expectations["d_x"] = Exact(gradient, "values")
        return expectations
