"""Auxiliary losses, z-loss and the expert bias."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION, accumulator, number_bits
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import integers, strided
from moe_fast.launch.operators import as_operators, launch, traceable
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.router import _balancing as kernels
from moe_fast.router.selection import check_computed, check_rows
from moe_ref.config import (
    AuxScores,
    check_coeff,
    check_load_balancing_loss,
    check_logits,
    check_loss_scale,
    check_padding_mask,
    check_score_function,
    check_topk,
    check_update_expert_bias,
)


@traceable
def aux_loss_scores(
    logits_TE: Tensor, *, topk: int, score_function: str = "softmax", padding_mask: Tensor | None = None
) -> AuxScores:
    """The scores and the choice of all experts for the balancing losses, by one launch. The
    backward computes the scores again.

    Raises:
        ValueError: also for what `check_rows` refuses.
    """
    check_logits(logits_TE)
    check_topk(topk, logits_TE.shape[1])
    check_score_function(score_function)
    check_padding_mask(padding_mask, logits_TE.shape[0])
    check_rows(logits_TE, topk)
    return AuxScores(*ScoresOfAll.apply(logits_TE, padding_mask, topk, score_function))


@traceable
def load_balancing_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    *,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    """This rank's share of the balancing loss of the Switch Transformer, by two launches.

    The order of the sum depends only on the shape. If the number of tokens is a tensor, the kernel
    reads it: the host never waits.

    Raises:
        ValueError: also for scores of other dtypes than `LOGITS`.
    """
    check_load_balancing_loss(scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)
    check_computed("scores", scores)
    return balancing_loss(scores, tokens_per_expert, total_num_tokens, coeff * num_experts / topk)


def balancing_loss(scores: Tensor, counts: Tensor, total: int | Tensor, factor: float) -> Tensor:
    """`load_balancing_loss` of arguments that have been checked; `factor` is coeff · E / K."""
    if isinstance(total, Tensor):
        total = total.detach().to(scores.device, non_blocking=True)
    return _BalancingLoss.apply(scores, counts.detach(), total, factor)


@traceable
def z_loss(logits_TE: Tensor, *, coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """The penalty on large logits, by two launches. The order of the sum depends only on the shape.

    Raises:
        ValueError: also for what `check_rows` refuses.
    """
    check_logits(logits_TE)
    check_coeff(coeff)
    check_padding_mask(padding_mask, logits_TE.shape[0])
    check_rows(logits_TE)
    return ZLoss.apply(logits_TE, padding_mask, coeff)


@as_operators
class ScoresOfAll(torch.autograd.Function):
    """`aux_loss_scores`; the choice has no gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, padding: Tensor | None, topk: int, score: str) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.score = score
        ctx.save_for_backward(logits, padding)
        score_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # aux_scores_kernel writes all of it
        scores = torch.empty(logits.shape, dtype=score_dtype, device=logits.device)
        routing_map = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)  # as above
        ctx.mark_non_differentiable(routing_map)
        grid, sizes = _whole_rows(logits)
        launch(kernels.aux_scores_kernel, grid, logits)(
            *strided(logits),
            *_padding(padding),
            scores,
            integers(routing_map),
            *logits.shape,
            topk,
            SCORE=score,
            TIES_ARE_RARE=logits.dtype.itemsize >= 4,
            **sizes,
        )
        return scores, routing_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None]:
        if dscores is None:
            return None, None, None, None
        logits, padding = ctx.saved_tensors
        # aux_scores_backward_kernel writes all of it
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        grid, sizes = _whole_rows(logits)
        launch(kernels.aux_scores_backward_kernel, grid, logits)(
            *strided(dscores),
            *strided(logits),
            *_padding(padding),
            dlogits,
            *logits.shape,
            SCORE=ctx.score,
            **sizes,
        )
        return dlogits, None, None, None


@as_operators
class _BalancingLoss(torch.autograd.Function):
    """`load_balancing_loss`; saved are the counts and the factor."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, count: Tensor, total: int | Tensor, coeff: float) -> Tensor:
        sizes = tuning.for_device(scores.device)
        num_rows, num_columns = scores.shape
        columns = ceil_div(num_columns, sizes.balance.columns)
        tiles = ceil_div(num_rows, sizes.balance.tokens)
        tiles_per_program = max(1, ceil_div(tiles * columns, sizes.balance_programs))
        grid = (max(1, ceil_div(tiles, tiles_per_program)), columns)
        sum_dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        # balance_kernel writes all of it
        partial = torch.empty(grid[0] * columns, dtype=sum_dtype, device=scores.device)
        launch(kernels.balance_kernel, grid, scores)(
            *strided(scores),
            *strided(count, 1),
            partial,
            num_rows,
            num_columns,
            tiles_per_program,
            ACCUMULATOR=accumulator(scores),
            **sizes.balance.blocks("R", "C"),
            **NO_FP_FUSION,
        )
        loss, factor = _finish(partial, None, total, coeff)
        ctx.shape, ctx.dtype = scores.shape, scores.dtype
        ctx.save_for_backward(count, factor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        count, factor = ctx.saved_tensors
        tile = tuning.for_device(count.device).balance
        num_rows, num_columns = ctx.shape
        # balance_backward_kernel writes all of it
        dscores = torch.empty(ctx.shape, dtype=ctx.dtype, device=count.device)
        launch(
            kernels.balance_backward_kernel,
            (ceil_div(num_rows, tile.tokens), ceil_div(num_columns, tile.columns)),
            dloss,
        )(
            dloss.resolve_neg(),
            factor,
            *strided(count, 1),
            dscores,
            num_rows,
            num_columns,
            ACCUMULATOR=accumulator(factor),
            **tile.blocks("R", "C"),
        )
        return dscores, None, None, None


@as_operators
class ZLoss(torch.autograd.Function):
    """`z_loss`; saved are the logits and the factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, padding: Tensor | None, coeff: float) -> Tensor:
        (programs, tiles_per_program), sizes = _rows_of_programs(logits)
        sum_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        partial = torch.empty(programs, dtype=sum_dtype, device=logits.device)  # z_loss_kernel writes all of it
        valid = torch.empty(programs, dtype=torch.int32, device=logits.device)  # as above
        launch(kernels.z_loss_kernel, (programs,), logits)(
            *strided(logits), *_padding(padding), partial, valid, *logits.shape, tiles_per_program, **sizes
        )
        loss, factor = _finish(partial, valid, 0, coeff)
        ctx.save_for_backward(logits, padding, factor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        logits, padding, factor = ctx.saved_tensors
        # z_loss_backward_kernel writes all of it
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        grid, sizes = _whole_rows(logits)
        launch(kernels.z_loss_backward_kernel, grid, logits)(
            dloss.resolve_neg(), factor, *strided(logits), *_padding(padding), dlogits, *logits.shape, **sizes
        )
        return dlogits, None, None


def _finish(partial: Tensor, valid: Tensor | None, total: int | Tensor, coeff: float) -> tuple[Tensor, Tensor]:
    """The loss, and the factor of its sum."""
    loss = torch.empty((), dtype=partial.dtype, device=partial.device)  # finish_loss_kernel writes all of it
    factor = torch.empty((), dtype=partial.dtype, device=partial.device)  # as above
    in_tensor = isinstance(total, Tensor)
    launch(kernels.finish_loss_kernel, (1,), partial)(
        partial,
        valid,
        total if in_tensor else None,
        0 if isinstance(total, Tensor) else number_bits(total),
        number_bits(coeff),
        loss,
        factor,
        len(partial),
        ACCUMULATOR=accumulator(partial),
        BLOCK=tuning.for_device(partial.device).loss_step,
        num_warps=4,
    )
    return loss, factor


def _whole_rows(logits: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """(grid, block sizes) of the kernels that take whole rows."""
    rows = tuning.for_device(logits.device).aux_scores
    width = power_of_two(logits.shape[1], least=8)
    grid = (ceil_div(logits.shape[0], rows.tile_tokens(width)),)
    return grid, {"ACCUMULATOR": accumulator(logits), **rows.blocks(width)}


def _rows_of_programs(logits: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """((programs, tiles per program), block sizes) of a kernel whose programs add up rows."""
    rows = tuning.for_device(logits.device).z_loss
    width = power_of_two(logits.shape[1], least=8)
    tiles = ceil_div(logits.shape[0], rows.tile_tokens(width))
    tiles_per_program = ceil_div(tiles, rows.max_programs)
    return (ceil_div(tiles, tiles_per_program) if tiles else 1, tiles_per_program), {
        "ACCUMULATOR": accumulator(logits),
        **rows.blocks(width),
    }


def _padding(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """The padding mask, as the kernels take it."""
    return (None, 0) if mask is None else (integers(mask), mask.stride(0))


class AttachLoss(torch.autograd.Function):
    """The identity, with `scale` as the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.full_like(ctx.like, ctx.scale), None


@traceable
def attach_loss(x: Tensor, loss: Tensor, *, scale: float = 1.0) -> Tensor:
    """x itself, with a loss attached: the gradient of the loss is `scale`, whatever the gradient of
    the result is.
    """
    check_loss_scale(scale)
    return AttachLoss.apply(x, loss, scale)


@traceable
def update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, *, update_rate: float) -> Tensor:
    """The next bias: larger where an expert had fewer tokens than the average, smaller where it had
    more.
    """
    check_update_expert_bias(expert_bias, tokens_per_expert, update_rate)
    count = tokens_per_expert.double()  # exact below 2⁵³, and so is the comparison E · c with Σ c
    direction = (count.sum() - len(count) * count).sign()
    return expert_bias + update_rate * direction.to(expert_bias.dtype)
