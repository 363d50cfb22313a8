"""Namespaces with `grouped_wgrad` in a small kernel: right, or with a fault for one tool.

Right             no fault
LeavesOutARow     an expert's last row is not added: seen by fpsan, and by the reference's judge
                  only where the row is not tiny
StoresPastTheEnd  one element past the result: seen by memcheck
DoesNotWait       an input is copied through shared memory, and read before it has arrived: seen
                  by consan
Waits             the same copy, right
"""

import torch
from torch import Tensor

from moe_fast.launch.descriptors import described
from tests.sanitizers import _staged
from tests.sanitizers._wgrad import wgrad_kernel

BLOCKS = {"BLOCK_P": 32, "BLOCK_M": 32, "BLOCK_N": 32}


def wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor, left_out: int = 0, past: bool = False) -> Tensor:
    """Σ d_outᵀ rows over each expert's rows, in one launch."""
    begin = torch.zeros(len(tokens_per_expert) + 1, dtype=torch.int64, device=rows.device)
    begin[1:] = tokens_per_expert.cumsum(0)
    shape = (len(tokens_per_expert), d_out.shape[1], rows.shape[1])
    out = torch.empty(shape, dtype=rows.dtype, device=rows.device)  # the kernel stores every element
    if out.numel():
        grid = (shape[0], -(-shape[1] // BLOCKS["BLOCK_M"]), -(-shape[2] // BLOCKS["BLOCK_N"]))
        faults = {"LEFT_OUT": left_out, "PAST": past}
        tensors = (d_out.contiguous(), rows.contiguous(), begin, out)
        wgrad_kernel[grid](*tensors, *shape[1:], out.numel(), **faults, **BLOCKS)
    return out


def staged(x: Tensor, waits: bool) -> Tensor:
    """A copy of the tensor, through shared memory in tiles."""
    data = x.contiguous().view(torch.uint8).flatten()
    tile = 4 * _staged.WORDS * _staged.LINES
    source = torch.zeros(-(-len(data) // tile) * tile, dtype=torch.uint8, device=x.device)
    source[: len(data)] = data
    words = source.view(torch.int32).view(-1, _staged.WORDS)
    out = torch.empty_like(words)  # the kernel stores every element
    sizes = {"LINES": _staged.LINES, "WORDS": _staged.WORDS}
    if len(words):
        grid = (len(words) // _staged.LINES,)
        tiles = described(words, [_staged.LINES, _staged.WORDS])
        _staged.staged_copy_kernel[grid](tiles, out, WAITS=waits, **sizes)
    return out.view(torch.uint8).flatten()[: len(data)].view(x.dtype).view(x.shape)


class Right:
    """No fault."""

    @staticmethod
    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return wgrad(d_out, rows, tokens_per_expert)

    @staticmethod
    def declares(function: str) -> dict[str, object]:
        return {"deterministic": True, "unchecked": ("d_out", "rows", "tokens_per_expert")}

    @staticmethod
    def supports(function: str, **arguments: Tensor) -> str | None:
        return "it adds in float32" if arguments["rows"].dtype == torch.float64 else None


class LeavesOutARow(Right):
    """An expert's last row of several is not added."""

    @staticmethod
    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return wgrad(d_out, rows, tokens_per_expert, left_out=1)


class StoresPastTheEnd(Right):
    """One element is stored past the end of the result."""

    @staticmethod
    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return wgrad(d_out, rows, tokens_per_expert, past=True)


class Waits(Right):
    """An input is copied through shared memory."""

    @staticmethod
    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return wgrad(d_out, staged(rows, waits=True), tokens_per_expert)


class DoesNotWait(Right):
    """The same copy is read before it has arrived."""

    @staticmethod
    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return wgrad(d_out, staged(rows, waits=False), tokens_per_expert)
