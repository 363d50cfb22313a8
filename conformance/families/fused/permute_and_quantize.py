"""permute_and_quantize: `quantize` of permuted rows, and the other outputs of `permute`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import probabilities
from conformance.families.fused.cases import PermutedQuantizationCase, permuting, state_of, tokens_of
from conformance.families.permutation.cases import MAPS, PROBS, routed, routing_map
from conformance.families.permutation.permute import Permute, settings_of
from conformance.families.quantization.cases import recipe_of
from conformance.families.quantization.quantize import GEMM_LAYOUT, Script, Watch, directions, of_readers, reader_of
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation
from moe_ref.config import QuantizerState
from moe_ref.permutation.permute import permute
from moe_ref.quantization.quantize import Form

KEYWORDS = ("probs", "align", "capacity", "num_rows", "role", "rowwise", "columnwise")
OUTPUTS = ("quantized", "state", "probs", "row_map", "tokens_per_expert", "pad_offsets", "overflow")
MOVED = ("probs", "tokens_per_expert", "pad_offsets", "overflow")  # also outputs of `permute`
GIVEN = Opaque("state")  # the state of inputs amax_history and scale


def problem_of(
    required: dict[str, Any], settings: dict[str, Any], gemm: bool = False, **problem_fields: Any
) -> Problem:
    """The call, and the readers of its result."""
    if "scale" in required:
        settings = settings | {"state": GIVEN}
    first = {name: required[name] for name in ("tokens", "routing_map", "recipe")}
    return Problem(
        "permute_and_quantize",
        required,
        settings | of_readers(settings),
        script=script_of(),
        first=first,
        read=reader_of(settings, gemm),
        **problem_fields,
    )


def script_of(watch: Watch | None = None) -> Script:
    """Permute and quantise, dequantise, and sum row numbers by the row map."""

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        settings = {name: tensors[name] for name in KEYWORDS if name in tensors}
        if "state" in tensors:
            settings["state"] = (
                QuantizerState(tensors["amax_history"], tensors["scale"])
                if tensors["state"] is GIVEN
                else tensors["state"]
            )
        called = implementation.call(
            "permute_and_quantize", tensors["tokens"], tensors["routing_map"], tensors["recipe"], **settings
        )
        result = named_outputs(called, OUTPUTS)
        if watch:
            watch("", result["quantized"])
        return read_back(implementation, settings, result)

    return script


def read_back(implementation: Any, settings: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The judged outputs; `result` itself goes to the reader."""
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
    """`permute_and_quantize`, the readers of its codes, and `unpermute` by its row map."""

    function = "permute_and_quantize"
    case_type = PermutedQuantizationCase
    signature = Signature(
        inputs=[
            Input("tokens", "TH", gradient=True, expands=True),
            Input("routing_map", "TE", MAPS, field="map_dtype"),
            Input("probs", "TE", PROBS, field="probs", gradient=True, optional="probs"),
            Input("amax_history", "EL", ("float32",), field="", optional="stateful", part_of="state"),
            Input("scale", "E", ("float32",), field="", optional="stateful", part_of="state"),
        ],
        outputs=[
            *(Output("quantized"), Output("state"), Output("probs", "P", of="probs"), Output("row_map")),
            *(Output("tokens_per_expert", "E"), Output("pad_offsets", "E"), Output("overflow")),
            Output("dequantized", "PH", of="tokens", probed=True, optional="uses_rowwise"),
            Output("dequantized.columnwise", "PH", of="tokens", probed=True, optional="uses_columnwise"),
        ],
        settings=("align", "capacity", "num_rows", "role", "rowwise", "columnwise", GEMM_LAYOUT),
        static=("capacity", "num_rows"),
    )
    primary = "codes"
    companions = ("amax", "scales", "codes", "dequantize", "unpermute")

    def legal(self, case: PermutedQuantizationCase) -> Problem:
        routing, chosen = permuting(case), torch.from_numpy(routed(case))
        settings = settings_of(routing)
        token_P = permute(torch.zeros(case.tokens, 0), chosen, **settings).row_map.token_P
        required: dict[str, Any] = {
            "tokens": tokens_of(case, token_P),
            "routing_map": routing_map(case),
            "recipe": recipe_of(case),
        }
        required |= state_of(case) if case.stateful else {}
        if case.probs:
            probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.probs, case.zero_probs)
            settings["probs"] = probs if case.capacity else torch.where(chosen, probs, torch.nan)
        settings |= {"role": case.role} if case.role != "input" else {}
        settings |= case.direction_settings
        call = self.call(case, required, settings, lengths={"P": len(token_P), "H": routing.hidden})
        return problem_of(
            required, settings, case.gemm, layouts=call.layouts, wanted=call.wanted, cotangents=call.cotangents
        )

    def expected(
        self, case: PermutedQuantizationCase, problem: Problem, declared: Mapping[str, Any]
    ) -> dict[str, Expectation]:
        quantized_forms: dict[str, Any] = {}
        arguments = problem.required | problem.settings
        reference = Implementation(moe_ref)
        out = reader_of(problem.settings, case.gemm)(
            reference, script_of(quantized_forms.__setitem__)(reference, arguments)
        )
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        expectations: dict[str, Expectation] = {}
        for suffix, columnwise in directions(problem.settings):
            form: Form = quantized_forms[""].form(columnwise)
            names = {name: f"{name}{suffix}" for name in ("amax", "scales", "codes", "values", "scales.gemm")}
            expectations |= QuantizedForm(form, names, out, reciprocal).expectations()
        expectations |= {
            name: Exact(out[name]) for name in ("row_sums", "state.amax_history", "state.scale") if name in out
        }
        permuted = Permute().expected(permuting(case), _permutation(problem), declared)
        return expectations | {name: x for name, x in permuted.items() if name != "rows"}


def _permutation(problem: Problem) -> Problem:
    """The call of `permute` with the same places and the same gradients."""
    settings = {name: problem.settings[name] for name in KEYWORDS[:4] if name in problem.settings}
    required = {name: problem.required[name] for name in ("tokens", "routing_map")}
    cotangents = {name: x for name, x in problem.cotangents.items() if name == "probs"}
    if any(name.startswith("dequantized") for name in problem.cotangents):
        cotangents["rows"] = _row_gradient(problem)
    return Problem(Permute.function, required, settings, wanted=problem.wanted, cotangents=cotangents)


def _row_gradient(problem: Problem) -> Tensor:
    """The values' cotangents, pulled back to the rows before quantisation."""
    settings = {name: problem.settings[name] for name in KEYWORDS[:4] if name in problem.settings}
    options = {name: problem.settings[name] for name in KEYWORDS[4:] if name in problem.settings}
    if "state" in problem.settings:
        options["state"] = QuantizerState(problem.required["amax_history"], problem.required["scale"])
    permuted = permute(problem.required["tokens"], problem.required["routing_map"], **settings)
    rows = permuted.rows.detach().requires_grad_()
    quantized = moe_ref.quantize(
        rows, problem.required["recipe"], splits=permuted.tokens_per_expert, **options
    ).quantized
    pairs = [
        (f"dequantized{suffix}", turn)
        for suffix, turn in directions(problem.settings)
        if f"dequantized{suffix}" in problem.cotangents
    ]
    values = [moe_ref.dequantize(quantized, columnwise=turn) for _, turn in pairs]
    (gradient,) = torch.autograd.grad(values, [rows], [problem.cotangents[name] for name, _ in pairs])
    return gradient
