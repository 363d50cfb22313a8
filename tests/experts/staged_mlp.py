"""grouped_mlp from its stages: with other linear layers, other rounding, or one mistake."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from moe_ref.config import check_grouped_mlp, check_pairs
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.mlp import accumulator_of, pad_segments, trim_segments


def taken_apart(
    rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, *, probs=None, fc1_bias=None, fc2_bias=None, recompute=None,
    align=None, probs_on_input=False, recipe=None, state=None, noise=None, **activation,
) -> SimpleNamespace:  # fmt: skip
    """The checked arguments by name, the activation `act`, and `accumulator`, the dtype of sums."""
    act = chosen_activation(activation.pop("kind", "swiglu"), **activation)
    checked = (activation.get("interleave"), act.keywords["kind"], probs_on_input, align, recompute)
    check_grouped_mlp(rows, counts, fc1, fc2, probs, fc1_bias, fc2_bias, *checked)
    check_pairs(state, noise)
    accumulator = accumulator_of(rows, probs, fc2_bias)
    return SimpleNamespace(**locals())


def staged(first: Any = moe_ref, second: Any = moe_ref, *, mistake: str = "", unrounded: bool = False, **declared: Any):
    """A namespace whose grouped_mlp is made of the linear layers of two others.

    Args:
        mistake: padding_kept, weighted_last, weighted_after_the_bias, bias_not_weighted,
            or neighbours_bias.
        unrounded: in float32 between the stages.
    """

    def grouped_mlp(*tensors, **settings):
        call = taken_apart(*tensors, **settings)
        storage, counts, align, accumulator, p = call.rows.dtype, call.counts, call.align, call.accumulator, call.probs
        total, num_rows, segments = int(counts.sum()), len(call.rows), counts
        rows, fc1, fc2 = (x.float() if unrounded else x for x in (call.rows, call.fc1, call.fc2))
        rows, p = rows[:total], None if p is None else p[:total].to(accumulator)
        if align is not None:
            rows, p = pad_segments(rows, counts, align), None if p is None else pad_segments(p, counts, align)
            segments = -(-counts // align) * align
        if p is not None and call.probs_on_input:
            rows, p = (rows.to(accumulator) * p[:, None]).to(rows.dtype), None
        recipe_settings = {} if call.recipe is None else {"recipe": call.recipe}
        layers: list[dict[str, Any]] = [
            recipe_settings | {"state": s} if s else recipe_settings for s in call.state or (None, None)
        ]
        if call.noise:
            layers = [layer | {"noise": x[:, : len(rows)]} for layer, x in zip(layers, call.noise, strict=True)]
        h = first.grouped_linear(rows, fc1, segments, bias=call.fc1_bias, **layers[0])
        y = second.grouped_linear(
            call.act(h, probs=None if mistake == "weighted_last" else p), fc2, segments, **layers[1]
        )
        if mistake == "weighted_last" and p is not None:
            y = (y.to(accumulator) * p[:, None]).to(y.dtype)
        if call.fc2_bias is not None:
            bias = (
                call.fc2_bias.to(accumulator)
                .roll(-1 if mistake == "neighbours_bias" else 0, 0)
                .repeat_interleave(segments, 0)
            )
            y = (y.to(accumulator) + (bias if p is None or mistake == "bias_not_weighted" else bias * p[:, None])).to(
                y.dtype
            )
            if mistake == "weighted_after_the_bias" and p is not None:
                y = ((y.to(accumulator) - bias * p[:, None] + bias) * p[:, None]).to(y.dtype)
        if align is not None and mistake != "padding_kept":
            y = trim_segments(y, counts, align)
        return torch.cat([y, y.new_zeros((max(num_rows - len(y), 0), y.shape[1]))])[:num_rows].to(storage)

    return SimpleNamespace(grouped_mlp=grouped_mlp, declares=lambda function: declared)
