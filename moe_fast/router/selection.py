"""The choice of experts: top-k, fused in one kernel that chooses and weighs and another one for the
gradient, and by Sinkhorn's plan.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION, accumulator, number_bits
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import check_device, integers, strided
from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import as_operators, has_memory, launch, operator, traceable
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.router import _selection as kernels
from moe_ref.config import Routed, TopK, check_logits, check_topk, check_topk_routing, require

LOGITS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of logits, scores and bias
MAX_EXPERTS, MAX_TOPK = 2048, 32  # a row stays in registers, and every slot takes a round
LEAST = 1e-8  # added to the sums of Sinkhorn's plan
TOLERANCE = 1e-4  # mean change of the experts' factors that ends the rounds


@traceable
def topk_indices(
    logits_TE: Tensor,
    *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
    num_groups: int | None = None, group_topk: int | None = None,
    scaling_factor: float | None = None, expert_bias: Tensor | None = None,
    precomputed_indices: Tensor | None = None,
) -> TopK:  # fmt: skip
    """Choose K experts per token and weigh them: one launch, and one for the gradient.

    Saved for the backward are the logits as they came and the indices.

    Raises:
        ValueError: also for logits or a bias outside `LOGITS`, more than `MAX_EXPERTS` experts or
            `MAX_TOPK` slots. A token whose `precomputed_indices` name an expert twice, or none,
            has probs of NaN.
    """
    _check(logits_TE, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed_indices)
    settings = Settings.of(topk, score_function, pre_softmax, num_groups, group_topk, scaling_factor)
    precomputed = None if precomputed_indices is None else precomputed_indices.long()
    probs, indices = _TopK.apply(logits_TE, expert_bias, precomputed, settings, False)
    return TopK(probs, indices if precomputed is None else precomputed)


@traceable
def topk_routing(
    logits_TE: Tensor,
    *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
    num_groups: int | None = None, group_topk: int | None = None,
    scaling_factor: float | None = None, expert_bias: Tensor | None = None,
    precomputed_indices: Tensor | None = None,
) -> Routed:  # fmt: skip
    """`topk_indices`, spread over all experts by the same kernel."""
    _check(logits_TE, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed_indices)
    settings = Settings.of(topk, score_function, pre_softmax, num_groups, group_topk, scaling_factor)
    precomputed = None if precomputed_indices is None else precomputed_indices.long()
    return Routed(*_TopK.apply(logits_TE, expert_bias, precomputed, settings, True))


@unless_known
def _check(
    logits_TE: Tensor, topk: int, score_function: str, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, expert_bias: Tensor | None, precomputed: Tensor | None,
) -> None:  # fmt: skip
    check_topk_routing(
        logits_TE, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed
    )
    check_rows(logits_TE, topk, expert_bias)


@dataclass(frozen=True)
class Settings:
    """The settings of the choice and of the weights."""

    topk: int
    score: str
    num_groups: int
    group_topk: int
    scale: int

    @staticmethod
    def of(
        topk: int,
        score_function: str,
        pre_softmax: bool,
        num_groups: int | None,
        group_topk: int | None,
        scaling_factor: float | None,
    ) -> "Settings":
        """The settings as the kernels take them."""
        score = "pre_softmax" if pre_softmax and score_function == "softmax" else score_function
        scale = 1.0 if scaling_factor is None else scaling_factor
        return Settings(topk, score, num_groups or 1, group_topk or 1, number_bits(scale))


@as_operators
class _TopK(torch.autograd.Function):
    """The choice and its weights, compact or dense; the choice has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, precomputed: Tensor | None, settings: Settings, dense: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.dense = settings, dense
        probs, choice = _choose(logits, bias, precomputed, settings, dense)
        ctx.save_for_backward(logits, precomputed if choice is None else choice)
        if choice is not None:
            ctx.mark_non_differentiable(choice)
        return probs, choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None, None]:
        logits, choice = ctx.saved_tensors
        if dprobs is None:
            return None, None, None, None, None
        return _choose_backward(dprobs, logits, choice, ctx.settings, ctx.dense), None, None, None, None


def _choose(
    logits: Tensor, bias: Tensor | None, precomputed: Tensor | None, settings: Settings, dense: bool
) -> tuple[Tensor, Tensor | None]:
    """(probs, map) if dense, else (probs, indices), or (probs, None) with precomputed indices."""
    num_tokens, num_experts = logits.shape
    shape = logits.shape if dense else (num_tokens, settings.topk)
    # all by topk_kernel, which has K different slots a token
    probs = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    choice = None
    if dense or precomputed is None:
        choice = torch.empty(shape, dtype=torch.bool if dense else torch.int64, device=logits.device)  # as above
    if num_tokens == 0:
        return probs, choice
    groups = 1 if precomputed is not None else settings.num_groups
    block_groups = power_of_two(groups)
    block_size = power_of_two(num_experts // groups, least=8 if groups == 1 else 1)
    rows = tuning.for_device(logits.device).topk
    block_tokens = rows.tile_tokens(block_groups * block_size)
    launch(kernels.topk_kernel, (ceil_div(num_tokens, block_tokens),), logits)(
        *strided(logits),
        *strided(bias, 1),
        *strided(precomputed),
        probs,
        None if dense else choice,
        integers(choice) if dense and choice is not None else None,
        settings.scale,
        num_tokens,
        num_experts,
        settings.topk,
        groups,
        num_experts // groups,
        settings.group_topk,
        settings.topk // settings.group_topk,
        SCORE=settings.score,
        ACCUMULATOR=accumulator(logits),
        TIES_ARE_RARE=logits.dtype.itemsize >= 4,
        RAGGED=block_groups * block_size != num_experts,
        BLOCK_T=block_tokens,
        BLOCK_G=block_groups,
        BLOCK_S=block_size,
        num_warps=rows.tile_warps(block_groups * block_size),
        **NO_FP_FUSION,
    )
    return probs, choice


def _choose_backward(dprobs: Tensor, logits: Tensor, choice: Tensor, settings: Settings, dense: bool) -> Tensor:
    """The gradient of the logits, from the probs'."""
    num_tokens, num_experts = logits.shape
    # topk_backward_kernel writes all of it
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if num_tokens == 0:
        return dlogits
    block_experts = power_of_two(num_experts, least=8)
    rows = tuning.for_device(logits.device).topk_backward
    block_tokens = rows.tile_tokens(block_experts)
    launch(kernels.topk_backward_kernel, (ceil_div(num_tokens, block_tokens),), logits)(
        *strided(dprobs),
        None if dense else choice,
        *choice.stride(),
        integers(choice) if dense else None,
        *strided(logits),
        dlogits,
        settings.scale,
        num_tokens,
        num_experts,
        settings.topk,
        SCORE=settings.score,
        ACCUMULATOR=accumulator(logits),
        **rows.blocks(block_experts),
    )
    return dlogits


def check_rows(logits: Tensor, topk: int = 1, bias: Tensor | None = None) -> None:
    """Raise `ValueError` for logits that are legal, but for which there is no kernel."""
    check_computed("logits", logits)
    require(
        logits.shape[1] <= MAX_EXPERTS, "logits", f"of shape {tuple(logits.shape)}", f"of at most {MAX_EXPERTS} experts"
    )
    require(topk <= MAX_TOPK, "topk", topk, f"at most {MAX_TOPK}")
    if bias is not None:
        check_computed("expert_bias", bias)


def check_computed(argument: str, x: Tensor) -> None:
    """Raise `ValueError` for numbers of a dtype in which no kernel computes."""
    require(x.dtype in LOGITS, argument, f"of dtype {x.dtype}", f"one of {LOGITS}")
    check_device(argument, x)


# --- Sinkhorn, in plain torch, because the number of rounds depends on the logits


@traceable
def sinkhorn_routing(logits_TE: Tensor, *, topk: int, training: bool = True) -> Routed:
    """Choose by a balanced plan, with two sums over the matrix per round. The host waits for the
    change of each round; in evaluation it never waits. Of equal keys the lowest experts are chosen.
    """
    check_logits(logits_TE)
    check_topk(topk, logits_TE.shape[1])
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    activation_TE = wide_TE.sigmoid() if topk == 1 else wide_TE.softmax(1)
    map_TE = _chosen(wide_TE.detach() if training else activation_TE.detach(), topk, training)
    return Routed(torch.where(map_TE, activation_TE, 0).to(logits_TE.dtype), map_TE)


@operator
def _chosen(x_TE: Tensor, topk: int, by_plan: bool) -> Tensor:
    """[T,E] bool: the K largest of each row of x, or of its plan."""
    if not has_memory():
        return torch.empty_like(x_TE, dtype=torch.bool, memory_format=torch.contiguous_format)
    keys_TE = _plan(x_TE) if by_plan and x_TE.shape[0] else x_TE
    order_TE = keys_TE.sort(dim=1, descending=True, stable=True).indices
    chosen_TE = torch.zeros(x_TE.shape, dtype=torch.bool, device=x_TE.device)
    return chosen_TE.scatter_(1, order_TE[:, :topk], True)


def _plan(x_TE: Tensor) -> Tensor:
    """exp(x), with rows and columns scaled until the shares of the experts are equal.

    Each expert's sum is that of a row in memory. So equal columns have equal sums, which a product
    of a matrix and a vector would not guarantee.
    """
    cost_TE = x_TE.exp()
    cost_ET = cost_TE.T.contiguous()
    tokens, experts = cost_TE.shape
    expert_E, changed = cost_TE.new_ones(experts), True
    token_T = cost_TE.new_ones(tokens)
    while changed:
        previous_E = expert_E
        token_T = (torch.mv(cost_TE, expert_E) + LEAST).reciprocal() / tokens
        expert_E = ((cost_ET * token_T).sum(1) + LEAST).reciprocal() / experts
        changed = bool((previous_E - expert_E).abs().mean() > TOLERANCE)  # a NaN ends it too
    return expert_E * cost_TE * token_T[:, None]
