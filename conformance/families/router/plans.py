"""Sinkhorn routing in running numbers: weights, plan, and the gradient of the weights."""

import torch
from torch import Tensor

from conformance.analysis.running import Running
from conformance.families.router.selection import score

SINKHORN_STOP = 1e-4  # mean change of d1, as in moe_ref.router.sinkhorn
# if the change is so small, later plans differ by less than their errors
CONVERGED = SINKHORN_STOP / 100
MOST_ERROR = 64 * SINKHORN_STOP


def activation_of(logits: Tensor, topk: int, dtype: torch.dtype) -> Running:
    """[T,E] weights: σ(x) for one expert per token, else softmax(x)."""
    return score(Running.of(logits, dtype), "sigmoid" if topk == 1 else "softmax")


def plan_of(logits: Tensor, dtype: torch.dtype) -> Running:
    """The interval of all plans at which a correct computation may stop.

    The stop criterion is rounded too, by an error that grows with the rounds. Where it exceeds the
    threshold, a computation may stop at any later plan; they converge, so that the last one here
    stands for those behind it, with twice its error. Where the error exceeds MOST_ERROR first, all
    keys are NaN.
    """
    cost = Running.of(logits, dtype).exp()
    unit = cost.constant(1.0)
    rows, columns = unit / float(max(len(logits), 1)), unit / float(logits.shape[1])
    d1 = Running(
        torch.ones(1, logits.shape[1], dtype=torch.float64),
        torch.zeros(1, logits.shape[1], dtype=torch.float64),
        dtype,
    )
    lows, highs = [], []
    while True:
        previous_d1 = d1
        d0 = rows / ((cost * d1).sum(1) + 1e-8)
        d1 = columns / ((cost * d0).sum(0) + 1e-8)
        step = previous_d1 - d1
        change = Running(step.value.abs(), step.error, dtype).sum(1) / float(logits.shape[1])
        value, error = float(change.value), float(change.error)
        if not error < MOST_ERROR:
            return Running(torch.full_like(cost.value, torch.nan), torch.zeros_like(cost.value), dtype)
        last = value + error <= SINKHORN_STOP or value <= CONVERGED
        if value - error <= SINKHORN_STOP:
            plan = d1 * cost * d0
            off = plan.error * (2 if last else 1)
            lows.append(plan.value - off)
            highs.append(plan.value + off)
        if last:
            break
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return Running((low + high) / 2, (high - low) / 2, dtype)


def slope_by_plan(activation: Running, g: Running, topk: int) -> Running:
    """dlogits of the weights' cotangent, 0 where no expert is chosen."""
    if topk == 1:
        return g * activation * (g.constant(1.0) - activation)
    return activation * (g - (g * activation).sum(1))
