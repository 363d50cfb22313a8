"""A gated activation of a linear layer's result, in one launch, on NVIDIA's Hopper."""

import torch
from torch import Tensor

from moe_fast.experts import hopper
from moe_fast.experts.activations import Settings
from moe_fast.experts.segments import have_descriptors, plan_of, tile_of
from moe_fast.launch.backend import is_hopper, strided
from moe_fast.launch.descriptors import DESCRIBED_BYTES
from moe_fast.launch.operators import has_memory, tracing
from moe_fast.quantization.gathered import Gathered, in_lines

MOST_GATHERED = 2048  # gates of an expert; with more, the gather costs more than the rows (CHANGELOG.md)


def activated_linear(
    x: Tensor | Gathered, weight_LMN: Tensor, tokens_per_expert_L: Tensor,
    *, bias: Tensor | None, probs: Tensor | None, settings: Settings,
) -> Tensor | None:  # fmt: skip
    """A gated activation of the result of `grouped_linear`, which itself is not stored; None unless
    `can_activate`.
    """
    rows, like = (x.tokens_TH, x.like) if isinstance(x, Gathered) else (x.resolve_neg(),) * 2
    weight, num_rows = weight_LMN.resolve_neg(), len(like)
    if not can_activate(rows, num_rows, weight, bias, probs, settings):
        return None
    plan, width = plan_of(tokens_per_expert_L, like), weight.shape[1] // 2
    # activated_matmul_kernel writes all of it
    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    operand = x if isinstance(x, Gathered) else rows
    hopper.activated_matmul(operand, weight, strided(bias, 2), strided(probs, 1), settings, plan, out)
    return out


def can_activate(
    rows: Tensor, num_rows: int, weight_LMN: Tensor, bias: Tensor | None, probs: Tensor | None, settings: Settings
) -> bool:
    """Whether no backward needs the product, and `hopper.activated_matmul` can multiply `num_rows`
    rows with the layout of `rows`.
    """
    tensors, width = (rows, weight_LMN, bias, probs), weight_LMN.shape[1] // 2
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if saves or tracing() or not has_memory() or not is_hopper(rows.device):
        return False
    halves = settings.gated and (settings.interleave or width) == width > 1
    if not halves or not num_rows or (probs is not None and probs.dtype == torch.float64):
        return False
    result_fits = width * rows.itemsize % DESCRIBED_BYTES == 0  # new memory is aligned
    tile = tile_of(rows, num_rows, len(weight_LMN))
    return tile.rows == hopper.MATMUL_ROWS and have_descriptors(rows, weight_LMN) and result_fits


def can_gather_activated(
    tokens: Tensor, num_rows: int, weight_LMN: Tensor, bias: Tensor | None, probs: Tensor, settings: Settings
) -> bool:
    """Whether `activated_linear` can take tokens in place of rows, and is faster that way."""
    is_narrow = weight_LMN.shape[1] // 2 <= MOST_GATHERED
    return is_narrow and in_lines(tokens) and can_activate(tokens, num_rows, weight_LMN, bias, probs, settings)
