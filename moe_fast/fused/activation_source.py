"""An activation, or its gradient, in the form in which the kernels that quantise it take it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts.activations import CURVES, Settings, check_fused
from moe_fast.fused._tiles import Operands
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import accumulator
from moe_fast.launch.backend import strided
from moe_fast.launch.tuning import power_of_two
from moe_fast.quantization.quantized import LEAST_GROUPS, NARROW, Grid, format_of, grid_of, is_ragged, splits_arguments
from moe_ref.config import (
    QuantizerState,
    Recipe,
    check_splits,
)
from moe_ref.config.fused_activations import check_quantized_activation


@dataclass(frozen=True)
class Forms:
    """The arguments of `quantize`."""

    recipe: Recipe
    role: str
    splits: Tensor | None
    rowwise: bool
    columnwise: bool
    state: QuantizerState | None
    noise: Tensor | None
    rounds: bool

    @property
    def format(self) -> str:
        return format_of(self.recipe, self.role)

    def check(self, h: Tensor, width: int) -> None:
        """Raise `ValueError` for whatever the activation and `quantize` refuse, as far as it shows
        without reading the device.
        """
        options: dict[str, Any] = {
            "splits": self.splits,
            "rowwise": self.rowwise,
            "columnwise": self.columnwise,
            "state": self.state,
            "noise": self.noise,
        }
        check_quantized_activation(h, width, self.recipe, self.role, **options, round_before_quantize=self.rounds)
        if self.splits is None:
            check_splits([h.shape[0]], h.shape[0], self.recipe)


@dataclass(frozen=True)
class Source:
    """An activation, or with d_out its gradient, as the kernels compute it."""

    d_out: Tensor | None
    h: Tensor
    probs: Tensor | None
    settings: Settings
    forms: Forms

    @property
    def like(self) -> Tensor:
        """A tensor without memory, with the shape and dtype of the tensor that is quantised."""
        columns = self.settings.width(self.h) if self.d_out is None else self.h.shape[1]
        dtype = self.h.dtype if self.forms.rounds else torch.float32
        return torch.empty((), dtype=dtype, device=self.h.device).expand(self.h.shape[0], columns)  # it takes no memory

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The kernels' first arguments."""
        d_out, *d_out_strides = strided(self.d_out)
        probs, stride_probs = strided(self.probs, 1)
        layout = (self.settings.width(self.h), self.settings.between(self.h))
        operands, strides = Operands(d_out, self.h, probs), (*d_out_strides, *self.h.stride(), stride_probs)
        return operands, *strides, *layout, *self.settings.numbers(), *splits_arguments(self.forms.splits)

    def constants(self, grid: Grid) -> dict[str, Any]:
        """The kernels' constants."""
        layout = self.settings.layout(self.h)
        return {
            "CURVE": CURVES[self.settings.kind][0],
            "LAYOUT": layout,
            "WHOLE": self.halves and self.settings.width(self.h) % grid.settings["BLOCK_N"] == 0,
            "CLAMPED": self.settings.clamp is not None,
            "ROUNDED": self.forms.rounds,
            "ACCUMULATOR": accumulator(self.h, self.probs),
        }

    @property
    def faster_apart(self) -> bool:
        """Whether it is faster to write the rounded gradient first than to hold 128 rows of both
        halves.
        """
        forms = self.forms
        return (
            self.d_out is not None
            and forms.rounds
            and forms.columnwise
            and forms.recipe.scaling == "block"
            and self.h.dtype.itemsize == 2
        )

    @property
    def halves(self) -> bool:
        """Whether the gradients of gates and of values lie apart, so that one load gives a tile of
        each.
        """
        return self.d_out is not None and self.settings.layout(self.h) == "halves"

    @property
    def ragged(self) -> bool:
        """Whether rows, or the pieces of gates and values in them, are not whole lines."""
        h, width = self.h, self.settings.width(self.h)
        pieces = self.settings.between(h) if self.settings.layout(h) == "blocks" else width
        return is_ragged(h.stride(0), width, pieces, 0 if self.d_out is None else self.d_out.stride(0))

    def grid(
        self, walk: tuning.Walk, aligned: bool, least: tuple[int, int] = (1, 1), rows: int | None = None,
        least_groups: int = LEAST_GROUPS,
    ) -> Grid:  # fmt: skip
        """The tiles of the tensor that is quantised; if gates and values lie apart in whole tiles,
        those of the gates only. Tiles are no wider than rows, because the curves take long to
        compile.
        """

        def cut(columns: int) -> Grid:
            narrow = replace(walk, columns=min(walk.columns, power_of_two(columns, least=NARROW)))
            shape = torch.Size((self.h.shape[0], columns))
            return grid_of(
                shape, self.forms.splits, narrow, aligned, least, rows, ragged=self.ragged, least_groups=least_groups
            )

        width = self.settings.width(self.h)
        half = cut(width)
        if self.halves and width % half.settings["BLOCK_N"] == 0:
            return half
        return cut(self.like.shape[1])

    def d_probs_shares(self, grid: Grid) -> Tensor | None:
        """Memory for each program's share of d_probs, [rows, programs per row], if it is wanted."""
        if self.d_out is None or self.probs is None:
            return None
        dtype = torch.float64 if torch.float64 in (self.h.dtype, self.probs.dtype) else torch.float32
        # the kernel writes all of it: its tiles cover every row
        return torch.empty((self.h.shape[0], grid.column_programs), dtype=dtype, device=self.h.device)


def source_of(d_out: Tensor | None, h: Tensor, probs: Tensor | None, settings: Settings, forms: Forms) -> Source:
    """The tensors that the kernels read: memory without a pending minus, on the device of h."""
    check_fused(h, probs)
    # a copy, as the result reads them later; int64, as most are
    splits = None if forms.splits is None else forms.splits.to(h.device, torch.int64, non_blocking=True, copy=True)
    memories = (None if x is None else x.detach().resolve_neg() for x in (d_out, h, probs))
    d_out, memory, probs = memories
    assert memory is not None
    return Source(d_out, memory, probs, settings, replace(forms, splits=splits))
