"""Real defects of grouped products and activations, for planting; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper


def _legal(counts: Tensor, rows: Tensor) -> bool:
    """Pass an illegal call to the base implementation, which refuses it."""
    return (
        counts.dim() == 1
        and not counts.is_floating_point()
        and bool((counts >= 0).all())
        and int(counts.sum()) <= len(rows)
    )


def _starts(counts: Tensor) -> list[int]:
    return (counts.cumsum(0) - counts).tolist()


def _at_row_strides(x_PN: Tensor, counts: Tensor, stride: int) -> Tensor:
    """Writes each expert's rows from row · stride instead of row · N."""
    rows, width = x_PN.shape
    flat = x_PN.new_zeros(rows * max(stride, width) + rows * width)
    for start, count in zip(_starts(counts), counts.tolist(), strict=True):
        flat[start * stride : start * stride + count * width] = x_PN[start : start + count].flatten()
    return flat[: rows * width].reshape(rows, width)


class _BackWith(torch.autograd.Function):
    """Identity on x, with a changed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return ctx.change(g), None


def _stride_of_the_forward(
    grouped_dgrad: Wrapper, d_out: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    return _at_row_strides(grouped_dgrad(d_out, weight, counts, **settings), counts, d_out.shape[1])


def _stride_of_the_forward_back(
    grouped_linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    seen = _BackWith.apply(rows, lambda g: _at_row_strides(g, counts, weight.shape[1]))
    return grouped_linear(seen, weight, counts, **settings)


SCHEDULED = 2  # programs that share the groups


def _offset_of_visited_groups(
    grouped_wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    """Program e mod 2 takes every second group, and sums only the rows of its groups."""
    if not _legal(counts, rows) or len(rows) != len(d_out):
        return grouped_wgrad(d_out, rows, counts, **settings)
    visited = [int(counts[e % SCHEDULED : e : SCHEDULED].sum()) for e in range(len(counts))]
    index = [start + i for start, count in zip(visited, counts.tolist(), strict=True) for i in range(count)]
    behind = list(range(len(index), len(rows)))
    moved = torch.tensor(index + behind, dtype=torch.int64, device=rows.device)
    return grouped_wgrad(d_out[moved], rows[moved], counts, **settings)


def _mean_rows(grouped_linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    if not _legal(counts, rows):
        return grouped_linear(rows, weight, counts, **settings)
    total = int(counts.sum())
    ends = [(e + 1) * total // len(counts) for e in range(len(counts))]
    return grouped_linear(
        rows,
        weight,
        torch.tensor(ends, device=counts.device).diff(prepend=counts.new_zeros(1)).to(counts.dtype),
        **settings,
    )


def _probs_between_the_layers(
    mlp: Wrapper, rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any
) -> Any:
    """An illegal call keeps its flag: the base refuses it."""
    weighted = settings.get("probs") is not None
    return mlp(
        rows, counts, fc1, fc2, **{name: x for name, x in settings.items() if name != "probs_on_input" or not weighted}
    )


def _clamp_stays_outside(shared_experts: Wrapper, x: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
    legal = settings.get("clamp") is not None and settings["clamp"] > 0
    return shared_experts(
        x, fc1, fc2, **{name: value for name, value in settings.items() if name != "clamp" or not legal}
    )


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "G01",
        "the output of dgrad advances by the width of its input",
        "TransformerEngine #1475, 2.0",
        {"grouped_dgrad": _stride_of_the_forward, "grouped_linear": _stride_of_the_forward_back},
    ),
    Defect(
        "G12",
        "the offset grows by the groups that a program visits",
        "DeepGEMM #238, to 2.1",
        {"grouped_wgrad": _offset_of_visited_groups},
    ),
    Defect(
        "G21",
        "one formula, that of equal groups, for ragged ones",
        "TransformerEngine #3344, to 2.18",
        {"grouped_linear": _mean_rows},
    ),
    Defect(
        "H02",
        "the flag that weighs rows instead of activations is ignored",
        "Megatron-LM !3083, to 0.12",
        {"grouped_mlp": _probs_between_the_layers, "sequential_mlp": _probs_between_the_layers},
    ),
    Defect(
        "H04s",
        "the clamp does not reach the shared experts",
        "Megatron-LM #5940, 0.15 to 0.19",
        {"shared_experts": _clamp_stays_outside},
    ),
)
