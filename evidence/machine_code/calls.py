"""Calls of moe_fast at the sizes of models, for tensors without memory."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.dispatch.ipc import wait_for_all
from moe_fast.dispatch.slabs import Room, Slab, offsets, slab_of
from moe_fast.dispatch.steps import Transfer, collect, resend, run_with, send
from moe_ref.config import LinearState, QuantizerState, Recipe, RouterConfig
from moe_ref.config.quantization import DEFAULTS, ROLES

Calls = Iterator[tuple[str, Callable[[], Any]]]
moe_fast: Any = import_module("moe_fast")  # its functions are imported by stars, which mypy does not follow
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = 4096


class Shape(NamedTuple):
    """A model: hidden size, experts of a rank, experts per token, width of an expert."""

    hidden: int
    experts: int
    topk: int
    width: int


MODELS = {  # the sizes of published models; the last is an odd neighbour of one
    "DeepSeek-V3": Shape(7168, 32, 8, 2048),
    "Qwen3-30B-A3B": Shape(2048, 128, 8, 768),
    "gpt-oss-120b": Shape(2880, 32, 4, 2880),
    "odd": Shape(2047, 9, 3, 1535),
}
LINES = (  # matrices that are quantised: width, dtype, groups
    *((2048, BF16, None), (7168, BF16, 8), (512, BF16, 128), (256, BF16, None)),
    *((2880, FP32, None), (2048, FP16, 8), (2047, BF16, None)),
)
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {  # options of a recipe on which constants of kernels depend
    "delayed": {"fp8_format": ("hybrid", "e4m3")},
    "current": {"fp8_format": ("hybrid", "e4m3"), "power_of_two_scales": (False, True)},
    "block": {
        "fp8_format": ("e4m3", "hybrid"), "power_of_two_scales": (True, False), "two_dimensional_weights": (True, False)
    },
    "mxfp8": {"fp8_format": ("e4m3", "hybrid"), "two_dimensional_weights": (False, True)},
    "nvfp4": {
        "hadamard": (True, False), "stochastic_rounding": (True, False), "two_dimensional_weights": (True, False),
        "row_scaled_activation": (False, True), "four_over_six": ("none", "all"),
        "four_over_six_error": ("mae", "mse"),
    },
}  # fmt: skip
DIRECTIONS = ((True, False), (False, True), (True, True))  # rowwise, columnwise


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def recipes() -> Iterator[Recipe]:
    """Every legal combination of the options."""
    assert OPTIONS.keys() == DEFAULTS.keys()
    for scaling, options in OPTIONS.items():
        for values in itertools.product(*options.values()):
            chosen = dict(zip(options, values, strict=True))
            if chosen.get("four_over_six") == "none" and chosen["four_over_six_error"] != "mae":
                continue  # the error has no part
            try:
                yield Recipe(scaling, **chosen)
            except ValueError:
                continue


def neighbours_of_defaults() -> Iterator[Recipe]:
    """The recipes that differ from a scaling's default recipe in at most one option."""
    for recipe in recipes():
        options = DEFAULTS[recipe.scaling]
        if sum(getattr(recipe, name) != value for name, value in options.items()) <= 1:
            yield recipe


def state_of(recipe: Recipe, groups: int) -> dict[str, Any]:
    """The argument `state` of a quantiser: delayed scaling alone has one."""
    if recipe.scaling != "delayed":
        return {}
    return {"state": QuantizerState(meta(groups, recipe.amax_history_len or 1, dtype=FP32), meta(groups, dtype=FP32))}


def differentiated(function: Callable[..., Any], *inputs: Any, **settings: Any) -> None:
    """The call and its backward with respect to every tensor that requires a gradient."""
    results = function(*inputs, **settings)
    outputs = [x for x in (results if isinstance(results, tuple) else (results,)) if isinstance(x, Tensor)]
    outputs = [x for x in outputs if x.requires_grad]
    leaves = [x for x in (*inputs, *settings.values()) if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs], allow_unused=True)


def quantizers() -> Calls:
    """Calls of quantisers for every recipe, role and direction."""
    for recipe, (width, dtype, groups), role in itertools.product(recipes(), LINES, ROLES):
        x, splits = (
            meta(TOKENS, width, dtype=dtype, grad=True),
            None if groups is None else meta(groups, dtype=torch.int64),
        )
        for rowwise, columnwise in DIRECTIONS:
            settings = {"role": role, "splits": splits, "rowwise": rowwise, "columnwise": columnwise}
            settings |= state_of(recipe, groups or 1)

            def quantized_and_back(x: Tensor, recipe: Recipe = recipe, settings: dict[str, Any] = settings) -> Tensor:
                quantized = moe_fast.quantize(x, recipe, **settings).quantized
                return moe_fast.dequantize(quantized, columnwise=not settings["rowwise"])

            text = f"quantize {width} {dtype} groups={groups} {role} {rowwise} {columnwise} {recipe}"
            yield text, partial(differentiated, quantized_and_back, x)
    for recipe in recipes():
        if recipe.scaling == "delayed":
            yield f"update_scales {recipe}", partial(moe_fast.update_scales, recipe=recipe, **state_of(recipe, 32))


def fused_quantizers() -> Calls:
    """The quantisers of a permutation and of activations."""
    settings: dict[str, Any]
    for recipe, (model, shape) in itertools.product(recipes(), MODELS.items()):
        for (rowwise, columnwise), weighted in itertools.product(DIRECTIONS, (False, True)):
            settings = {"rowwise": rowwise, "columnwise": columnwise} | state_of(recipe, shape.experts)
            text = f"{model} {rowwise} {columnwise} weighted={weighted} {recipe}"
            routing = meta(TOKENS, shape.experts, dtype=torch.bool)
            probs = {"probs": meta(TOKENS, shape.experts, dtype=FP32)} if weighted else {}
            rows = TOKENS * shape.topk + 128 * shape.experts
            call = partial(moe_fast.permute_and_quantize, meta(TOKENS, shape.hidden), routing, recipe, num_rows=rows)
            yield f"permute_and_quantize {text}", partial(call, align=128, **probs, **settings)
            settings |= {"splits": meta(shape.experts, dtype=torch.int64)}
            settings |= {"probs": meta(TOKENS, dtype=FP32)} if weighted else {}
            h, gated, d_out = (meta(TOKENS, x) for x in (shape.width, 2 * shape.width, shape.width))
            functions = {"glu_and_quantize": (gated,), "glu_backward_and_quantize": (d_out, gated)}
            functions |= {"activation_and_quantize": (h,), "activation_backward_and_quantize": (d_out, h)}
            for name, inputs in functions.items():
                yield f"{name} {text}", partial(getattr(moe_fast, name), *inputs, recipe, **settings)


def permutations() -> Calls:
    for (model, shape), dtype, weighted in itertools.product(MODELS.items(), (BF16, FP32), (False, True)):
        text, rows = f"{model} {dtype} weighted={weighted}", TOKENS * shape.topk + 16 * shape.experts
        routing = meta(TOKENS, shape.experts, dtype=torch.bool)
        tokens, probs = meta(TOKENS, shape.hidden, dtype=dtype, grad=True), meta(*routing.shape, dtype=FP32, grad=True)
        for align, capacity in ((16, None), (None, None), (None, 256)):
            settings = {"align": align, "capacity": capacity, "probs": probs if weighted else None}
            settings |= {} if capacity else {"num_rows": rows}

            def there_and_back(
                tokens: Tensor = tokens, routing: Tensor = routing, settings: dict[str, Any] = settings
            ) -> None:
                permuted = moe_fast.permute(tokens, routing, **settings)
                differentiated(lambda x: permuted.rows, tokens)
                expert_rows = meta(*permuted.rows.shape, dtype=tokens.dtype, grad=True)
                differentiated(moe_fast.unpermute, expert_rows, permuted.row_map, restore_shape=tokens.shape)
                differentiated(moe_fast.unpermute, expert_rows, permuted.row_map, probs=settings["probs"])

            yield f"permute and unpermute {text} align={align} capacity={capacity}", there_and_back
        chunks, order = meta(shape.experts * 8, dtype=torch.int64), meta(shape.experts * 8, dtype=torch.int64)
        lines = meta(rows, shape.hidden, dtype=dtype, grad=True)
        weights = {"probs": meta(rows, dtype=FP32, grad=True)} if weighted else {}
        yield f"sort_chunks {text}", partial(differentiated, moe_fast.sort_chunks, lines, chunks, order, **weights)
        yield f"pad_routing_map {text}", partial(moe_fast.pad_routing_map, routing, align=16)
        indices, of_slots = meta(TOKENS, shape.topk, dtype=torch.int64), meta(TOKENS, shape.topk, dtype=FP32, grad=True)
        multihot = partial(moe_fast.indices_to_multihot, num_experts=shape.experts)
        yield f"indices_to_multihot {text}", partial(differentiated, multihot, indices, of_slots)
        to_indices = partial(moe_fast.multihot_to_indices, topk=shape.topk)
        yield f"multihot_to_indices {text}", partial(differentiated, to_indices, routing, probs)


def routers() -> Calls:
    scores: dict[str, dict[str, Any]] = {
        "softmax": {}, "pre-softmax": {"pre_softmax": True}, "sigmoid": {"score_function": "sigmoid"},
        "grouped": {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5},
        "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    }  # fmt: skip
    for experts, (name, score), dtype in itertools.product((8, 64, 128, 256, 512), scores.items(), (FP32, BF16)):
        config = {"num_experts": experts, "topk": 8 if experts > 8 else 2, **score}
        for score_settings in (
            {}, {"expert_bias": True}, {"capacity_factor": 1.0}, {"aux_loss_coeff": 1e-2, "z_loss_coeff": 1e-3},
            {"capacity_factor": 1.5, "drop_policy": "position", "pad_to_capacity": True},
            {"seq_aux_loss_coeff": 1e-2, "global_aux_loss_coeff": 1e-2},
        ):  # fmt: skip

            def call(
                experts: int = experts, dtype: torch.dtype = dtype, settings: Any = config | score_settings
            ) -> None:
                router = RouterConfig(**settings)
                logits = meta(TOKENS, experts, dtype=dtype, grad=True)
                state = moe_fast.new_state(router, device="meta")
                differentiated(lambda x: moe_fast.route(x, router, state=state).probs, logits)
                differentiated(moe_fast.z_loss, logits, coeff=1e-3)
                scores = {name: settings[name] for name in ("topk", "score_function") if name in settings}
                differentiated(lambda x: moe_fast.aux_loss_scores(x, **scores).scores, logits)

            yield f"route {experts} {dtype} {name} {score_settings}", call


def activations() -> Calls:
    settings: dict[str, dict[str, Any]] = {
        "plain": {}, "clamped": {"clamp": 7.0, "alpha": 1.702, "offset": 1.0}, "interleaved": {"interleave": 32},
        "rounded": {"round_before_probs": True}, "input store": {"fp8_input_store": True},
    }  # fmt: skip
    for (model, shape), dtype, weighted in itertools.product(MODELS.items(), (BF16, FP32), (False, True)):
        probs = {"probs": meta(TOKENS, dtype=FP32, grad=True)} if weighted else {}
        h = meta(TOKENS, 2 * shape.width, dtype=dtype, grad=True)
        for (name, options), kind in itertools.product(settings.items(), ("swiglu", "geglu", "geglu_erf", "reglu")):
            if kind == "swiglu" or name != "clamped":
                call = partial(differentiated, moe_fast.glu, h, kind=kind, **options, **probs)
                yield f"glu {model} {dtype} weighted={weighted} {kind} {name}", call
        h = meta(TOKENS, shape.width, dtype=dtype, grad=True)
        for kind in ("squared_relu", "gelu", "relu", "silu"):
            call = partial(differentiated, moe_fast.activation, h, kind=kind, **probs)
            yield f"activation {model} {dtype} weighted={weighted} {kind}", call


def products() -> Calls:
    """The experts' products, of few rows and of many."""
    chosen = (None, *neighbours_of_defaults())
    for (model, shape), rows, recipe in itertools.product(MODELS.items(), (64, TOKENS * 4), chosen):
        counts = meta(shape.experts, dtype=torch.int64)
        settings: dict[str, Any] = {} if recipe is None else {"recipe": recipe}
        if recipe is not None and recipe.scaling == "delayed":
            states = [state_of(recipe, shape.experts)["state"] for _ in range(3)]
            settings |= {"state": LinearState(*states)}
        x, weight = meta(rows, shape.hidden, grad=True), meta(shape.experts, shape.width, shape.hidden, grad=True)
        text = f"{model} {rows} rows {recipe}"
        yield f"grouped_linear {text}", partial(differentiated, moe_fast.grouped_linear, x, weight, counts, **settings)
        frozen = partial(moe_fast.grouped_linear, x.detach(), weight.detach(), counts, **settings)
        yield f"grouped_linear without gradients {text}", frozen
        for weights in (True, False):
            sizes = shape.experts, 2 * shape.width, shape.hidden
            both = meta(*sizes, grad=weights), meta(sizes[0], sizes[2], shape.width, grad=weights)
            probs = meta(rows, dtype=FP32, grad=weights)
            mlp_settings = dict(settings)
            if "state" in mlp_settings:
                mlp_settings["state"] = (mlp_settings["state"],) * 2
            for kind in ("swiglu", "geglu") if recipe is None or recipe.scaling == "block" else ("swiglu",):
                operands = (x if weights else x.detach(), counts, *both)
                call = partial(differentiated, moe_fast.grouped_mlp, *operands, probs=probs, kind=kind, **mlp_settings)
                yield f"grouped_mlp {text} {kind} gradients={weights}", call
        if recipe is None:
            bias = meta(shape.experts, shape.width, grad=True)
            call = partial(differentiated, moe_fast.grouped_linear, x, weight, counts, bias=bias)
            yield f"grouped_linear with a bias {text}", call
            into, d_out = meta(*weight.shape, dtype=FP32), meta(rows, shape.width)
            call = partial(moe_fast.grouped_wgrad, d_out, x.detach(), counts, accumulate_into=into)
            yield f"grouped_wgrad accumulating {text}", call
            float32_operands = (meta(*operand.shape, dtype=FP32, grad=True) for operand in (x, weight))
            yield (
                f"grouped_linear float32 {text}",
                partial(differentiated, moe_fast.grouped_linear, *float32_operands, counts),
            )


def layers() -> Calls:
    """Experts with biases, with probs on the input, and shared experts with a gate."""
    for (model, shape), dtype in itertools.product(MODELS.items(), (BF16, FP32)):
        rows, counts = meta(TOKENS, shape.hidden, dtype=dtype, grad=True), meta(shape.experts, dtype=torch.int64)
        fc1 = meta(shape.experts, 2 * shape.width, shape.hidden, dtype=dtype, grad=True)
        fc2 = meta(shape.experts, shape.hidden, shape.width, dtype=dtype, grad=True)
        biases = {"fc1_bias": fc1[:, :, 0], "fc2_bias": fc2[:, :, 0], "probs": meta(TOKENS, dtype=FP32, grad=True)}
        call = partial(differentiated, moe_fast.grouped_mlp, rows, counts, fc1, fc2, **biases)
        yield f"grouped_mlp with biases {model} {dtype}", call
        yield f"grouped_mlp with probs on the input {model} {dtype}", partial(call, probs_on_input=True)
        yield f"grouped_mlp with an input store {model} {dtype}", partial(call, fp8_input_store=True)
        shared = partial(differentiated, moe_fast.shared_experts, rows, fc1[0], fc2[0], gate_weight=fc2[0, :1, :1])
        gate = meta(1, shape.hidden, dtype=dtype, grad=True)
        yield f"shared_experts {model} {dtype}", partial(shared, gate_weight=gate)


def dispatchers() -> Calls:
    """The kernels between the ranks of a node, which write rows into each other's memory."""
    ranks = 8
    for (model, shape), dtype, recipe in itertools.product(MODELS.items(), (BF16, FP32), (None, Recipe("block"))):
        num_rows = TOKENS * shape.topk
        room = Room(ranks, ranks * shape.experts, num_rows, shape.hidden * dtype.itemsize)
        memories = tuple(meta(offsets(room)[""], dtype=torch.uint8) for _ in range(ranks))
        slab = slab_of(room, memories[0], [0] * ranks, lambda: None, (), "", memories)
        tokens = meta(TOKENS, shape.hidden, dtype=dtype)
        routing, probs = (meta(TOKENS, ranks * shape.experts, dtype=x) for x in (torch.bool, FP32))

        def call(
            tokens: Tensor = tokens, routing: Tensor = routing, probs: Tensor = probs, slab: Slab = slab,
            num_rows: int = num_rows, recipe: Recipe | None = recipe,
        ) -> None:  # fmt: skip
            def stepped(steps: Any) -> Any:
                return run_with(steps, lambda: None)

            for once, weights in itertools.product((True, False), (probs, None)):
                transfer = Transfer(num_rows, 16, once, recipe=recipe)
                *_, handle = stepped(send(tokens, routing, weights, transfer, slab, 0))
                rows, row_probs = meta(num_rows, tokens.shape[1], dtype=tokens.dtype), meta(num_rows, dtype=FP32)
                stepped(collect(rows, None if weights is None else row_probs, handle, slab))
                stepped(resend(tokens, weights, handle, slab))
            wait_for_all(slab.tables["counts"], 0, 60_000)

        yield f"dispatch and combine {model} {dtype} {recipe}", call


FAMILIES = (quantizers, fused_quantizers, permutations, routers, activations, products, layers, dispatchers)


def calls() -> Calls:
    for family in FAMILIES:
        yield from family()
