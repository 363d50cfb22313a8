"""permute_and_quantize, fused: a token is read once, and its codes and scales are written to its
rows.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_fast.fused import _permute_and_quantize as kernels
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.autograd import mark_constant, once_differentiable
from moe_fast.launch.backend import bits, check_device, strided
from moe_fast.launch.operators import launch, operator, traceable
from moe_fast.launch.tuning import EXPERT_LANES, ceil_div, power_of_two
from moe_fast.permutation.permute import permute, sum_rows
from moe_fast.permutation.places import place_rows
from moe_fast.permutation.row_map import RowMap, place, place_in_capacity
from moe_fast.quantization.gathered import Gathered, can_gather, quantize_gathered
from moe_fast.quantization.group_scales import FORMAT_MAX
from moe_fast.quantization.nvfp4 import SCOPES
from moe_fast.quantization.quantize import form_arguments, quantize
from moe_fast.quantization.quantized import (
    KERNEL_OF,
    LEAST_GROUPS_OF_BLOCKS,
    Form,
    Quantized,
    encoding,
    format_of,
    grid_of,
    is_ragged,
    scale_limits,
    warps_for,
)
from moe_ref.config import PermutedQuantization, QuantizerState, Recipe, check_permute_and_quantize
from moe_ref.config.quantization import BLOCK

E4M3_MAX = FORMAT_MAX["e4m3"]


@traceable
def permute_and_quantize(
    tokens_TH: Tensor, routing_map_TE: Tensor, recipe: Recipe,
    *, probs: Tensor | None = None, align: int | None = None, capacity: int | None = None,
    num_rows: int | None = None, role: str = "input", rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None,
) -> PermutedQuantization:  # fmt: skip
    """`permute`, then `quantize` of each expert's segment, without writing the rows; bit by bit as
    the reference.

    Two launches find the places (three with `capacity`). Then

        blocks along rows, delayed     one reads each token once and writes the codes of its rows;
                                       block scaling: one more for scales, which lie across rows
        current, plain NVFP4 by rows   one more before it, for the amax of each expert
        blocks that span rows          one writes each row's token (or the first above), one gathers

    Other NVFP4 (by columns, square blocks, row-scaled, four over six) permutes first and then
    quantises. The host waits once, for the number of rows, if neither `capacity` nor `num_rows` is
    given.
    """
    check_permute_and_quantize(
        tokens_TH, routing_map_TE, recipe, probs, align, capacity, num_rows, role, rowwise, columnwise, state
    )
    check_device("tokens", tokens_TH)
    if not _in_one_step(recipe, role, columnwise):
        permuted = permute(tokens_TH, routing_map_TE, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
        options: dict[str, Any] = {"splits": permuted.tokens_per_expert, "rowwise": rowwise, "columnwise": columnwise}
        quantization = quantize(permuted.rows, recipe, role=role, state=state, **options)
        return PermutedQuantization(*quantization, *permuted[1:])
    lists, slots = (
        place(routing_map_TE, align, num_rows)[:2] if capacity is None else place_in_capacity(routing_map_TE, capacity)
    )
    counts, format = slots.tokens_per_expert, format_of(recipe, role)
    forms, next_state, row_probs, row_slots = _moved(
        tokens_TH.detach().resolve_neg(), probs, recipe, role, lists, counts, rowwise, columnwise, state
    )
    row_map, source = replace(lists, slots_TE=row_slots, base_BE=None), None
    if torch.is_grad_enabled() and (tokens_TH.requires_grad or (probs is not None and probs.requires_grad)):
        source, row_probs = Place.apply(tokens_TH, probs, row_probs, row_map)
    source = source if source is not None and source.requires_grad else None
    quantized = Quantized(recipe, format, tokens_TH.dtype, counts, source, *forms)
    pad_offsets = None if align is None else slots.pad_offsets
    return PermutedQuantization(quantized, next_state, row_probs, row_map, counts, pad_offsets, slots.overflow)


@operator
def _moved(
    tokens: Tensor, probs: Tensor | None, recipe: Recipe, role: str, lists: RowMap, splits: Tensor,
    rowwise: bool, columnwise: bool, state: QuantizerState | None,
) -> tuple[tuple[Form | None, Form | None], QuantizerState | None, Tensor | None, Tensor]:  # fmt: skip
    """(form by rows, form by columns, next state, probs by row, lists of rows)."""
    work = Work(tokens, probs, recipe, role, lists, splits)
    by_rows, by_columns, next_state = work.done(rowwise, columnwise, state)
    return (by_rows, by_columns), next_state, work.row_probs, work.row_map.slots_TE


def _in_one_step(recipe: Recipe, role: str, columnwise: bool) -> bool:
    """Whether the kernels of this module suffice. Of NVFP4 they only have blocks along rows with
    one amax per expert.
    """
    if recipe.scaling != "nvfp4":
        return True
    square = role == "weight" and bool(recipe.two_dimensional_weights)
    return not (
        columnwise
        or square
        or recipe.four_over_six in SCOPES[role]
        or (bool(recipe.row_scaled_activation) and role == "input")
    )


class Place(torch.autograd.Function):
    """The rows' node in autograd's graph, a tensor of their shape whose values are never read; and
    the probs of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor | None, row_probs: Tensor | None, row_map: RowMap
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        tensors, ctx.numbers = row_map.parts()
        ctx.save_for_backward(*tensors)
        source = tokens.new_empty(()).expand(row_map.num_rows, tokens.shape[1])  # it takes no memory
        moved = None if row_probs is None else row_probs.view_as(row_probs)
        mark_constant(ctx, source, moved)
        return source, moved

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_rows: Tensor | None, d_row_probs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_rows = d_rows if ctx.needs_input_grad[0] else None
        d_row_probs = d_row_probs if ctx.needs_input_grad[1] else None
        return *sum_rows(d_rows, None, d_row_probs, RowMap(*ctx.saved_tensors, *ctx.numbers)), None, None


class Work:
    """The launches of one call."""

    def __init__(
        self, tokens: Tensor, probs: Tensor | None, recipe: Recipe, role: str, lists: RowMap, splits: Tensor
    ) -> None:
        self.tokens, self.probs, self.recipe, self.splits = tokens, probs, recipe, splits
        self.lists, self.row_map = lists, lists.without_bases()
        self.rule, self.size = KERNEL_OF[recipe.scaling], BLOCK.get(recipe.scaling, 1)
        self.role, self.format = role, format_of(recipe, role)
        self.square = recipe.scaling in BLOCK and role == "weight" and bool(recipe.two_dimensional_weights)
        self.sizes = tuning.for_device(tokens.device)
        self.source: Tensor | None = None  # [P] the token of each row, or -1
        self.shape = torch.Size((lists.num_rows, tokens.shape[1]))
        self.row_probs: Tensor | None = None
        self.ragged = is_ragged(tokens.stride(0), tokens.shape[1])

    def done(
        self, rowwise: bool, columnwise: bool, state: QuantizerState | None
    ) -> tuple[Form | None, Form | None, QuantizerState | None]:
        """(rowwise form, columnwise form, next state)."""
        if self.rule == "group":
            form, state = self._groups(state)
            return form if rowwise else None, form if columnwise else None, state
        if self.rule == "nvfp4":
            return self._two_levels(), None, None
        if self.square:
            form = self._gather()
            return form if rowwise else None, form if columnwise else None, None
        by_rows = self._blocks_along_rows(with_source=columnwise) if rowwise else None
        tall = self._gather_tiles if can_gather(self.tokens, self.recipe) else self._gather
        return by_rows, tall() if columnwise else None, None

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tokens.device)

    def _blocks_along_rows(self, with_source: bool) -> Form:
        """A form with a scale for each block of a row. On the way `source` is filled, if
        `with_source`.
        """
        form = self._blank((1, self.size), self.row_map.num_rows)
        if self.rule == "mxfp8":
            self._scatter("mxfp8", form, with_source=with_source)
            return form
        tokens, blocks = self.tokens.shape[0], form.scale.shape[1]
        scale = self._empty(tokens, blocks, dtype=form.scale.dtype)  # scatter_kernel writes all of it
        amax = self._empty(tokens, blocks, dtype=form.amax.dtype)  # as above
        self._scatter("amax", replace(form, scale=scale, amax=amax), with_source=True)
        tile = self.sizes.permute_quantize.scales
        programs = ceil_div(self.shape[0], tile.tokens) * ceil_div(blocks, tile.columns)
        launch(kernels.row_scales_kernel, (programs,), self.tokens)(
            self.source,
            scale,
            amax,
            form.scale,
            form.amax,
            *form.scale.stride(),
            self.shape[0],
            blocks,
            *scale_limits(self.recipe, self.tokens.dtype),
            FORMAT=self.format,
            POWER_OF_TWO=bool(self.recipe.power_of_two_scales),
            **tile.blocks("M", "B"),
            **NO_FP_FUSION,
        )
        return form

    def _two_levels(self) -> Form:
        """The form of NVFP4 along rows."""
        amax = self._group_amax()
        # scatter_kernel writes all of it
        scale = self._empty(self.shape[0], self.shape[1] // self.size, dtype=torch.uint8)
        codes = self._empty(*self.shape, dtype=torch.uint8)  # the same kernel writes all of it
        form = Form(codes, scale, amax.view(torch.float32), (1, self.size), "group", E4M3_MAX)
        self._scatter("nvfp4", form, {"group_amax": amax})
        return form

    def _blank(self, block: tuple[int, int], rows: int) -> Form:
        """A form with room for all blocks. Kernels write all codes, and the scales of blocks that
        exist.
        """
        columns = ceil_div(self.shape[1], block[1])
        # neighbouring rows side by side, for matrix products
        turned = self.rule == "amax" and block[0] == 1

        def blocks(dtype: torch.dtype) -> Tensor:
            return self._empty(columns, rows, dtype=dtype).T if turned else self._empty(rows, columns, dtype=dtype)

        scale = blocks(torch.float32 if self.rule == "amax" else torch.uint8)
        narrow = torch.float32 if self.tokens.dtype == torch.float64 else self.tokens.dtype
        return Form(self._empty(*self.shape, dtype=torch.uint8), scale, blocks(narrow), block)

    def _group_amax(self) -> Tensor:
        """[E] max |x|, as the bits of float32."""
        amax = torch.zeros(self.row_map.num_experts, dtype=torch.int32, device=self.tokens.device)
        tile = self.sizes.permute_quantize.amax
        programs = ceil_div(self.tokens.shape[0], tile.tokens)
        launch(kernels.expert_amax_kernel, (programs,), self.tokens)(
            *strided(self.tokens),
            amax,
            *self.lists.arguments(),
            *self.row_map.sizes(self.shape[1]),
            **tile.blocks("T", "H"),
        )
        return amax

    def _groups(self, state: QuantizerState | None) -> tuple[Form, QuantizerState | None]:
        """(form, next state), with one scale per expert: from the state, which gets this step's
        amax, or from the amax.
        """
        experts = self.row_map.num_experts
        inverse = self._empty(experts, dtype=torch.float32)  # the first program of scatter_kernel writes all of it
        by_expert: dict[str, Any] = {"inverse": inverse}
        if state is None:
            by_expert["group_amax"] = self._group_amax()
        else:
            history = state.amax_history.clone()
            by_expert["group_amax"] = torch.zeros(experts, dtype=torch.int32, device=self.tokens.device)
            by_expert |= {"given": state.scale, "history": history}
            state = QuantizerState(history, state.scale)
        form = Form(
            self._empty(*self.shape, dtype=torch.uint8), inverse, by_expert["group_amax"].view(torch.float32), None
        )
        self._scatter("group", form, by_expert)
        return form, state

    def _scatter(
        self, rule: str, form: Form, by_expert: dict[str, Any] | None = None, with_source: bool = False
    ) -> None:
        """Launch scatter_kernel: move the probs, write the lists of rows, and write codes to each
        row.
        """
        if with_source:
            narrow = self.tokens.shape[0] < 2**31
            # scatter_kernel writes all of it
            self.source = self._empty(self.row_map.num_rows, dtype=torch.int32 if narrow else torch.int64)
        if self.probs is not None:
            self.row_probs = self._empty(self.row_map.num_rows, dtype=self.probs.dtype)  # as above
        scales, group_amax, history, inverse = (
            (by_expert or {}).get(name) for name in ("given", "group_amax", "history", "inverse")
        )
        tile, fill, row_map = self.sizes.permute_quantize.scatter, self.sizes.fill, self.row_map
        block_columns = max(tile.columns, self.size)
        programs, (token_blocks, *lanes) = row_map.programs(tile.tokens, fill)
        columns, fills = max(1, ceil_div(self.shape[1], block_columns)), programs - token_blocks
        programs += ceil_div(row_map.num_tokens, self.sizes.list_tokens)
        blocks: tuple[Any, ...] = (None, None, 0, 0)
        if rule != "group":
            blocks = (form.scale, form.amax if group_amax is None else None, *form.scale.stride())
        launch(kernels.scatter_kernel, (max(programs * columns, 1),), self.tokens)(
            *strided(self.tokens),
            *strided(None if self.probs is None else bits(self.probs)),
            *strided(scales, 1),
            group_amax,
            *strided(None if history is None else history.view(torch.int32))[:2],
            inverse,
            form.codes_MN,
            *blocks,
            None if self.row_probs is None else bits(self.row_probs),
            row_map.slots_TE,
            self.source,
            *self.lists.arguments(),
            row_map.gap_2E,
            fills,
            *lanes,
            *row_map.sizes(self.shape[1]),
            *scale_limits(self.recipe, self.tokens.dtype),
            RULE=rule,
            **encoding(self.recipe, self.format, self.tokens.device),
            BLOCK=block_columns if rule == "group" else self.size,
            BLOCK_T=tile.tokens,
            BLOCK_H=block_columns,
            BLOCK_E=power_of_two(row_map.num_experts, least=EXPERT_LANES),
            BLOCK_G=fill.lanes,
            BLOCK_R=fill.rows,
            BLOCK_L=self.sizes.list_tokens,
            num_warps=warps_for(tile, tile.tokens * block_columns, self.ragged),
            **NO_FP_FUSION,
        )

    def places(self) -> None:
        """Fill `source`, the lists of rows and the probs by row, without writing a row."""
        self.source, self.row_probs = place_rows(self.probs, self.lists, self.row_map)

    def _gather_tiles(self) -> Form:
        """The form by columns with a scale for each block, from the kernel for Hopper."""
        if self.source is None:
            self.places()
        assert self.source is not None
        rows = Gathered(self.tokens, self.source)
        quantized = quantize_gathered(rows, self.recipe, self.role, self.splits, False, True, for_products=False)
        return quantized.form(True)

    def _gather(self) -> Form:
        """The form with a scale for each block that spans rows: blocks of a column, or
        square ones.
        """
        aligned = self.rule == "amax"  # whole groups of MXFP8 consist of whole blocks, wherever the rows are cut
        block = (self.size, self.size if self.square else 1)
        tuned = self.sizes.permute_quantize
        walk, height = (tuned.tall, self.size) if aligned else (tuned.gather, None)
        grid = grid_of(
            self.shape, self.splits, walk, aligned, block, height, ragged=self.ragged,
            least_groups=LEAST_GROUPS_OF_BLOCKS,
        )  # fmt: skip
        form = self._blank(block, grid.tiles if aligned else ceil_div(self.shape[0], self.size))
        if self.source is None:
            self.places()
        programs = grid.tiles * ceil_div(grid.column_programs, tuned.slab) * tuned.slab
        launch(kernels.gather_kernel, (programs,), self.tokens)(
            *strided(self.tokens),
            self.source,
            self.splits,
            *form_arguments(form),
            *self.shape,
            grid.groups,
            grid.tiles,
            grid.steps,
            *scale_limits(self.recipe, self.tokens.dtype),
            RULE=self.rule,
            **encoding(self.recipe, self.format, self.tokens.device),
            ALIGNED=aligned,
            BLOCK_R=block[0],
            BLOCK_C=block[1],
            SLAB=tuned.slab,
            **grid.settings,
            **NO_FP_FUSION,
        )
        return form
