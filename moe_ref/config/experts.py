"""Experts: activations, grouped linear layers, and the rules that make a call illegal."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ref.config.quantization import QuantizerState, Recipe
from moe_ref.config.rules import (
    check_choice,
    check_float,
    check_optional_count,
    check_probs,
    is_count,
    is_number,
    require,
    require_dtype,
    require_shape,
)

GATED = ("swiglu", "geglu", "geglu_erf", "quick_geglu", "reglu")  # f(u) · v: fc1 is twice as wide as fc2's input
PLAIN = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")  # f(h)
SIGMOID_GATED = ("swiglu", "quick_geglu")  # u · σ(αu): the gates that have an α
STORAGE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what rows and weights are kept in
ACCUMULATORS = ("float32", "float64")
RECOMPUTED = ("moe_act", "moe")  # Megatron's names: the activation alone, or the experts as a whole


class ActivationGradients(NamedTuple):
    """What `glu_backward` and `activation_backward` return."""

    d_h: Tensor  # of h's shape and dtype
    d_probs: Tensor | None  # [P], the probs' dtype; None when no probs were given


class LinearState(NamedTuple):
    """Delayed scaling's memory of the three tensors that a grouped linear layer quantises, a row
    per expert.
    """

    input: QuantizerState
    weight: QuantizerState
    grad_output: QuantizerState


class LinearAmax(NamedTuple):
    """The largest magnitudes of the three tensors, of each expert; products raise them in place."""

    input: Tensor  # [L] float32
    weight: Tensor
    grad_output: Tensor


def check_storage(argument: str, x: Tensor, *axes: str) -> None:
    """`x` has the named axes and a dtype that rows and weights may have."""
    require_shape(x.dim() == len(axes), argument, x, f"[{', '.join(axes)}]")
    require_dtype(x.dtype in STORAGE, argument, x, "bfloat16, float16, float32 or float64")


def check_gate_settings(kind: str, offset: float, clamp: float | None, alpha: float | None) -> None:
    """The settings of a gated activation: a kind of `GATED`, an offset, a positive bound, a
    positive slope of the sigmoid.
    """
    check_choice("kind", kind, GATED)
    require(is_number(offset), "offset", offset, "a number")
    requirement = "None, for no bound, or a positive number"
    require(clamp is None or (is_number(clamp) and clamp > 0), "clamp", clamp, requirement)
    if alpha is not None:
        require(is_number(alpha) and alpha > 0, "alpha", alpha, "None, for the kind's own, or a positive number")
        requirement = f"None: only {' and '.join(SIGMOID_GATED)} gate by σ(αu)"
        require(kind in SIGMOID_GATED, "alpha", f"{alpha} with kind {kind!r}", requirement)


def check_interleave(interleave: int | None, width: int) -> None:
    """Blocks of `interleave` columns fill each half of `width` columns in all."""
    requirement = "None, for halves, or a positive integer"
    require(interleave is None or (is_count(interleave) and interleave >= 1), "interleave", interleave, requirement)
    divides = interleave is None or (width // 2) % interleave == 0
    require(divides, "interleave", interleave, f"a divisor of {width // 2}, half of the width")


def check_input_store(fp8_input_store: bool, kind: str) -> None:
    """Only swiglu's input can be kept in E4M3 for the backward."""
    requirement = "False: only swiglu keeps its input in E4M3"
    require(not fp8_input_store or kind == "swiglu", "fp8_input_store", f"True with kind {kind!r}", requirement)


def check_glu(
    h: Tensor,
    probs: Tensor | None,
    kind: str,
    offset: float,
    clamp: float | None,
    alpha: float | None,
    interleave: int | None,
) -> None:
    """The rules of `glu`."""
    check_storage("h", h, "rows", "2 · width")
    require_shape(h.shape[1] % 2 == 0, "h", h, "of even width: a gate and a value for each column")
    check_gate_settings(kind, offset, clamp, alpha)
    check_interleave(interleave, h.shape[1])
    if probs is not None:
        check_probs(probs, (h.shape[0],), h)


def check_activation(h: Tensor, probs: Tensor | None, kind: str) -> None:
    """The rules of `activation`."""
    check_storage("h", h, "rows", "width")
    check_choice("kind", kind, PLAIN)
    if probs is not None:
        check_probs(probs, (h.shape[0],), h)


def check_cotangent(d_out: Tensor, rows: int, width: int, like: Tensor) -> None:
    """`d_out` is the gradient of a [rows, width] result in the dtype of `like`."""
    check_float("d_out", d_out, (rows, width), like)
    require_dtype(d_out.dtype == like.dtype, "d_out", d_out, f"{like.dtype}, as the output")


def check_counts(tokens_per_expert: Tensor, experts: int, like: Tensor) -> None:
    """One count per expert, int32 or int64, on the device of `like`."""
    shape = tuple(tokens_per_expert.shape)
    requirement = f"of shape ({experts},), a count for each expert of the weight"
    require(shape == (experts,), "tokens_per_expert", f"of shape {shape}", requirement)
    check_count_dtype(tokens_per_expert, like)


def check_count_dtype(tokens_per_expert: Tensor, like: Tensor) -> None:
    """int32 or int64, [experts], at least one, on the device of `like`."""
    shape = tuple(tokens_per_expert.shape)
    require(len(shape) == 1 and shape[0] >= 1, "tokens_per_expert", f"of shape {shape}", "[experts], at least one")
    legal = tokens_per_expert.dtype in (torch.int32, torch.int64)
    require_dtype(legal, "tokens_per_expert", tokens_per_expert, "int32 or int64")
    requirement = f"on {like.device}, where the rows are"
    require(tokens_per_expert.device == like.device, "tokens_per_expert", f"on {tokens_per_expert.device}", requirement)


def check_count_values(counts: list[int], rows: int) -> None:
    """Counts are ≥ 0 and sum to at most the rows. This reads the device; an implementation may
    declare it unchecked.
    """
    require(all(count >= 0 for count in counts), "tokens_per_expert", counts, "all ≥ 0")
    requirement = f"at most the {rows} rows together"
    require(sum(counts) <= rows, "tokens_per_expert", f"{counts}, together {sum(counts)}", requirement)


def check_precision(recipe: Recipe | None, state: LinearState | None, noise: Tensor | None, accumulator: str) -> None:
    """A recipe or none, its state and noise (see `check_quantize`), and one of ACCUMULATORS."""
    require(recipe is None or isinstance(recipe, Recipe), "recipe", repr(recipe), "None or a Recipe")
    require(recipe is not None or state is None, "state", "given without a recipe", "None")
    require(recipe is not None or noise is None, "noise", "given without a recipe", "None")
    if recipe is not None:
        delayed = recipe.scaling == "delayed"
        requirement = "given for delayed scaling, and only for it: a LinearState"
        legal = isinstance(state, LinearState) == delayed
        require(legal, "state", f"{type(state).__name__} with scaling {recipe.scaling!r}", requirement)
        override = recipe.backward_override
        requirement = "None: gradients are not quantised"
        require(noise is None or override is None, "noise", f"given with backward_override {override!r}", requirement)
    check_choice("accumulator", accumulator, ACCUMULATORS)


def check_grouped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor, bias: Tensor | None) -> None:
    """The rules of `grouped_linear` that do not read the device."""
    check_storage("rows", rows, "rows", "in")
    check_weight("weight", weight, rows, rows.shape[1])
    check_counts(tokens_per_expert, weight.shape[0], rows)
    if bias is not None:
        check_float("bias", bias, tuple(weight.shape[:2]), rows)


def check_weight(
    argument: str, weight: Tensor, rows: Tensor, width_in: int | None = None, width_out: int | None = None
) -> None:
    """[experts, out, in] in the dtype and on the device of the rows; a width of None may be any."""
    requirement = "[experts, out, in], at least one expert"
    require_shape(weight.dim() == 3 and weight.shape[0] >= 1, argument, weight, requirement)
    experts, columns_out, columns_in = weight.shape
    shape = (experts, columns_out if width_out is None else width_out, columns_in if width_in is None else width_in)
    check_float(argument, weight, shape, rows)
    require_dtype(weight.dtype == rows.dtype, argument, weight, f"{rows.dtype}, as the rows")


def check_grouped_dgrad(d_out: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> None:
    """The rules of `grouped_dgrad`."""
    check_storage("d_out", d_out, "rows", "out")
    check_weight("weight", weight, d_out, width_out=d_out.shape[1])
    check_counts(tokens_per_expert, weight.shape[0], d_out)


def check_grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor, accumulate_into: Tensor | None) -> None:
    """The rules of `grouped_wgrad`."""
    check_storage("d_out", d_out, "rows", "out")
    check_storage("rows", rows, "rows", "in")
    check_cotangent(d_out, rows.shape[0], d_out.shape[1], rows)
    check_count_dtype(tokens_per_expert, rows)
    if accumulate_into is not None:
        check_float(
            "accumulate_into", accumulate_into, (tokens_per_expert.shape[0], d_out.shape[1], rows.shape[1]), rows
        )
        accumulates = accumulate_into.dtype in (torch.float32, torch.float64)
        require_dtype(accumulates, "accumulate_into", accumulate_into, "float32 or float64")


def check_kind(kind: str, offset: float, clamp: float | None, alpha: float | None, interleave: int | None) -> None:
    """An activation of `GATED` with settings that fit, or one of `PLAIN`, which has none."""
    require(kind in GATED or kind in PLAIN, "kind", repr(kind), f"one of {', '.join(GATED + PLAIN)}")
    if kind in GATED:
        check_gate_settings(kind, offset, clamp, alpha)
        return
    for name, value, unset in (
        ("offset", offset, 0),
        ("clamp", clamp, None),
        ("alpha", alpha, None),
        ("interleave", interleave, None),
    ):
        require(value == unset, name, f"{value} with kind {kind!r}", f"{unset}: an activation without a gate has none")


def check_mlp_weights(rows: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, kind: str, interleave: int | None) -> None:
    """fc1 [experts, F or 2F, H] and fc2 [experts, H, F], F the width that the activation leaves, H
    the rows' width.
    """
    check_storage("rows", rows, "rows", "in")
    check_weight("fc1_weight", fc1_weight, rows, rows.shape[1])
    width = fc1_weight.shape[1]
    if kind in GATED:
        even = f"[experts, an even number, H]: {kind} has a gate and a value for each column"
        require_shape(width % 2 == 0, "fc1_weight", fc1_weight, even)
        check_interleave(interleave, width)
        width //= 2
    check_weight("fc2_weight", fc2_weight, rows, width, rows.shape[1])
    fits = fc2_weight.shape[0] == fc1_weight.shape[0]
    require_shape(fits, "fc2_weight", fc2_weight, f"of {fc1_weight.shape[0]} experts, as fc1_weight")


def check_grouped_mlp(
    rows: Tensor, tokens_per_expert: Tensor, fc1_weight: Tensor, fc2_weight: Tensor,
    probs: Tensor | None, fc1_bias: Tensor | None, fc2_bias: Tensor | None, interleave: int | None,
    kind: str, probs_on_input: bool, align: int | None, recompute: str | None,
) -> None:  # fmt: skip
    """The rules of `grouped_mlp` that do not read the device; the activation's
    are in `check_kind`.
    """
    check_mlp_weights(rows, fc1_weight, fc2_weight, kind, interleave)
    check_counts(tokens_per_expert, fc1_weight.shape[0], rows)
    for name, bias, weight in (("fc1_bias", fc1_bias, fc1_weight), ("fc2_bias", fc2_bias, fc2_weight)):
        if bias is not None:
            check_float(name, bias, tuple(weight.shape[:2]), rows)
    if probs is not None:
        check_probs(probs, (rows.shape[0],), rows)
    require(probs is not None or not probs_on_input, "probs_on_input", probs_on_input, "False without probs")
    check_optional_count("align", align)
    requirement = f"None or one of {', '.join(RECOMPUTED)}"
    require(recompute is None or recompute in RECOMPUTED, "recompute", repr(recompute), requirement)


def check_kept(wgrads: object, rows_again: object, recompute: str | None) -> None:
    """A list, which the backward extends; a function that makes the rows, which with "moe" are all
    that is kept; or None.
    """
    require(wgrads is None or isinstance(wgrads, list), "wgrads", type(wgrads).__name__, "a list, or None")
    requirement = "a function without arguments, or None"
    require(rows_again is None or callable(rows_again), "rows_again", type(rows_again).__name__, requirement)
    requirement = "None: the backward runs the experts again from the rows"
    require(rows_again is None or recompute != "moe", "rows_again", "given with recompute 'moe'", requirement)


def check_pairs(state: object, noise: object, amaxes: object = None) -> None:
    """State, noise and amaxes of two linear layers: none, or a pair; no amaxes without a state."""
    require(amaxes is None or state is not None, "amaxes", "given without a state", "None")
    for name, both in (("state", state), ("noise", noise), ("amaxes", amaxes)):
        requirement = "None or a pair, of fc1 and of fc2"
        require(both is None or (type(both) is tuple and len(both) == 2), name, type(both).__name__, requirement)


def check_linear(argument: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x [tokens, in], weight [out, in] of the same dtype, bias [out]."""
    check_storage("x", x, "tokens", "in")
    require_shape(weight.dim() == 2, argument, weight, "[out, in]")
    check_float(argument, weight, (weight.shape[0], x.shape[1]), x)
    require_dtype(weight.dtype == x.dtype, argument, weight, f"{x.dtype}, as x")
    if bias is not None:
        check_float("bias", bias, (weight.shape[0],), x)


def check_shared_experts(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, gate_weight: Tensor | None, kind: str, interleave: int | None
) -> None:
    """The rules of `shared_experts`; the activation's are in `check_kind`."""
    for name, weight in (("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
        require_shape(weight.dim() == 2, name, weight, "[out, in]")
    check_mlp_weights(x, fc1_weight[None], fc2_weight[None], kind, interleave)
    if gate_weight is not None:
        check_linear("gate_weight", x, gate_weight, None)
        require_shape(gate_weight.shape[0] == 1, "gate_weight", gate_weight, f"[1, {x.shape[1]}]")
