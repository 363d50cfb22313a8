"""A layer's experts from tokens to tokens: `permute`, `grouped_mlp` and `unpermute`, without rows
in high precision that one function writes for the next. With FP8 by blocks, or without gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts.activated_linear import activated_linear
from moe_fast.experts.activations import Settings, activated
from moe_fast.experts.factors import Precision, Product, quantized_weight
from moe_fast.experts.linear import linear_of
from moe_fast.experts.mlp import activated_then, check_mlp, checked_settings
from moe_fast.experts.scaled_linear import scaled_fprop, scaled_plan
from moe_fast.experts.segments import plans_shared
from moe_fast.experts.token_linear import RowsOfTokens, linear_of_tokens, linear_to_tokens
from moe_fast.fused.activate_and_quantize import activation_and_quantize, glu_and_quantize
from moe_fast.fused.permute_and_quantize import Place, Work
from moe_fast.permutation.permute import move_to_rows, sum_rows, unpermute
from moe_fast.permutation.places import place_rows
from moe_fast.permutation.row_map import Tiles, place
from moe_fast.quantization.gathered import Gathered
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import LayerConfig, LayerParameters, Permuted, Recipe, check_recompute


def rows_of_tokens(
    tokens_TH: Tensor, routing_map_TE: Tensor, recipe: Recipe | None,
    *, probs: Tensor, num_rows: int, tile_rows: int | None,
) -> tuple[RowsOfTokens, Permuted, Tiles | None]:  # fmt: skip
    """(rows that are not written, the other results of `permute`, the segments in tiles of
    `tile_rows`).
    """
    lists, slots, tiles = place(routing_map_TE, None, num_rows, tile_rows)
    rows = tokens_TH.new_empty(()).expand(num_rows, tokens_TH.shape[1])  # it takes no memory
    counts, codes = slots.tokens_per_expert, None
    source: Tensor | None
    if recipe is None:
        row_map = lists.without_bases()
        source, row_probs = place_rows(probs.detach(), lists, row_map)
    else:
        work = Work(tokens_TH.detach(), probs, recipe, "input", lists, counts)
        by_rows, _, _ = work.done(True, False, None)
        codes = Quantized(recipe, work.format, tokens_TH.dtype, counts, None, by_rows, None)
        row_map, source, row_probs = work.row_map, work.source, work.row_probs
        if torch.is_grad_enabled() and (tokens_TH.requires_grad or probs.requires_grad):
            rows, row_probs = Place.apply(tokens_TH, probs, row_probs, row_map)
    assert source is not None and row_probs is not None
    permuted = Permuted(None, row_probs, row_map, counts, None, slots.overflow)  # type: ignore[arg-type]
    return RowsOfTokens(rows, codes, tokens_TH, row_map, source), permuted, tiles


def activation_of(config: LayerConfig) -> Settings:
    """The settings of the routed experts' activation."""
    options: dict[str, Any] = {"clamp": config.clamp, "interleave": config.interleave}
    return checked_settings(config.kind, offset=config.offset, fp8_input_store=config.fp8_input_store, **options)


def mlp_of_tokens(
    token_rows: RowsOfTokens, tokens_per_expert_L: Tensor, p: LayerParameters, config: LayerConfig,
    *, probs: Tensor | None, recompute: str | Sequence[str] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, `unpermute` of y), with y = `grouped_mlp` of the rows. If `recompute` names "permute",
    the tokens are saved in place of the codes of the rows. Without a recipe neither the rows nor
    the probs may need a gradient.
    """
    recipe, settings, (tokens_again, of_experts) = config.recipe, activation_of(config), check_recompute(recompute)
    check_mlp(
        token_rows.rows_PH, tokens_per_expert_L, p.fc1_weight, p.fc2_weight, probs, p.fc1_bias, None, config.interleave,
        config.kind, False, None, of_experts, recipe=recipe, state=None, noise=None, wgrads=None, rows_again=None,
        amaxes=None,
    )  # fmt: skip
    if recipe is None:
        return _without_gradients(token_rows, tokens_per_expert_L, p, probs, settings)
    with plans_shared():
        fc1 = partial(linear_of_tokens, bias=p.fc1_bias, recipe=recipe, tokens_again=tokens_again)
        h_PF = fc1(token_rows, p.fc1_weight, tokens_per_expert_L)
        wanted = any(x is not None and x.requires_grad for x in (h_PF, probs, p.fc2_weight))
        if not (wanted and torch.is_grad_enabled()):
            return _fc2_of_codes(h_PF, probs, settings, token_rows, p.fc2_weight, tokens_per_expert_L, recipe)
        fc2 = partial(linear_to_tokens, weight_LMN=p.fc2_weight, tokens_per_expert_L=tokens_per_expert_L)
        fc2 = partial(fc2, recipe=recipe, row_map=token_rows.row_map, source_P=token_rows.source_P)
        return activated_then(fc2, h_PF, probs, settings, config.fp8_input_store, of_experts == "moe_act", recipe)


def _without_gradients(
    token_rows: RowsOfTokens, counts_L: Tensor, p: LayerParameters, probs: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The same in high precision. If no kernel gathers the rows, they are written first."""
    tokens = token_rows.tokens_TH.detach().resolve_neg()
    epilogue: dict[str, Any] = {"bias": p.fc1_bias, "probs": probs, "settings": settings}
    with plans_shared():
        a_PF = activated_linear(Gathered(tokens, token_rows.source_P), p.fc1_weight, counts_L, **epilogue)
        if a_PF is None:
            rows = move_to_rows(tokens, None, token_rows.row_map)[0]
            h_PF = linear_of(rows, p.fc1_weight, counts_L, Product(), bias=p.fc1_bias)
            a_PF = activated(h_PF, settings, probs=probs)
        rows = linear_of(a_PF, p.fc2_weight, counts_L, Product())
    return rows, unpermute(rows, token_rows.row_map, restore_shape=(tokens.shape[0], tokens.shape[1]))


def _fc2_of_codes(
    h_PF: Tensor, probs: Tensor | None, settings: Settings, token_rows: RowsOfTokens, fc2_weight_LHF: Tensor,
    counts_L: Tensor, recipe: Recipe,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fc2 and `unpermute`, without gradients: the activation of h is written as codes only."""
    options: dict[str, Any] = {"splits": counts_L, "probs": probs, "kind": settings.kind, "round_before_quantize": True}
    if settings.gated:
        glu_settings = {name: getattr(settings, name) for name in ("offset", "clamp", "alpha", "interleave")}
        codes = glu_and_quantize(h_PF, recipe, **options, **glu_settings).quantized
    else:
        codes = activation_and_quantize(h_PF, recipe, **options).quantized
    matrices = quantized_weight(fc2_weight_LHF, Precision(recipe), True, False)
    rows = scaled_fprop(codes, matrices, scaled_plan(counts_L, len(h_PF), recipe))
    combined = sum_rows(rows, None, None, token_rows.row_map)[0]
    assert combined is not None
    return rows, combined
