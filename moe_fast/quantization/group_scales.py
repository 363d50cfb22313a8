"""One scale per group: delayed and current scaling, and the state of delayed scaling."""

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION, number_bits
from moe_fast.launch.backend import check_device, strided
from moe_fast.launch.operators import launch, operator, traceable
from moe_fast.launch.tuning import at_least, power_of_two
from moe_fast.quantization import _group_scales as kernels
from moe_fast.quantization.quantized import Form, Grid, encoding, format_of, grid_of, is_ragged, splits_arguments
from moe_ref.config import QuantizerState, Recipe, check_role, check_state, require

FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}  # OCP OFP8 1.0


def _grid(x: Tensor, splits: Tensor | None) -> Grid:
    walk = tuning.for_device(x.device).quantize.groups
    return grid_of(x.shape, splits, walk, True, ragged=is_ragged(x.stride(0), x.shape[1]))


def group_amax(x: Tensor, splits: Tensor | None) -> Tensor:
    """[G]: max |x| of each group, as the bits of float32."""
    grid = _grid(x, splits)
    amax = torch.zeros(grid.groups, dtype=torch.int32, device=x.device)
    launch(kernels.group_amax_kernel, (grid.programs,), x)(
        *strided(x), *splits_arguments(splits), amax, *x.shape, *grid.sizes, **grid.settings
    )
    return amax


@operator
def cast_groups(
    x: Tensor, recipe: Recipe, format: str, splits: Tensor | None, state: QuantizerState | None
) -> tuple[Form, QuantizerState | None]:
    """(form, next state), with one scale per group: from the state, which gets this step's amax, or
    from the amax.
    """
    grid = _grid(x, splits)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)  # cast_groups_kernel writes all of it
    inverse = torch.empty(grid.groups, device=x.device)  # its first program writes all of it
    scales = history = None
    if state is None:
        amax = group_amax(x, splits)
    else:
        scales, history = state.scale, state.amax_history.clone()
        amax = torch.zeros(grid.groups, dtype=torch.int32, device=x.device)
        state = QuantizerState(history, scales)
    launch(kernels.cast_groups_kernel, (at_least(grid.programs, 1),), x)(
        *strided(x),
        *splits_arguments(splits),
        *strided(scales, 1),
        amax,
        *strided(None if history is None else history.view(torch.int32))[:2],
        codes,
        inverse,
        *x.shape,
        *grid.sizes,
        number_bits(recipe.amax_epsilon or 0.0),
        **encoding(recipe, format, x.device),
        **grid.settings,
        **NO_FP_FUSION,
    )
    return Form(codes, inverse, amax.view(torch.float32), None), state


@traceable
def update_scales(
    state: QuantizerState, recipe: Recipe, *, role: str = "input", reduced_amax: Tensor | None = None
) -> QuantizerState:
    """The state of the next step, for each group, by one launch."""
    require(recipe.scaling == "delayed", "recipe", f"of scaling {recipe.scaling!r}", "delayed: only that has a state")
    check_state(recipe, state, len(state.scale))
    if reduced_amax is not None:
        shape = tuple(reduced_amax.shape)
        require(
            shape == tuple(state.scale.shape),
            "reduced_amax",
            f"of shape {shape}",
            f"of shape {tuple(state.scale.shape)}",
        )
    check_role(role)
    check_device("state", state.scale)
    return QuantizerState(*_next_state(state, recipe, role, reduced_amax))


@operator
def _next_state(state: QuantizerState, recipe: Recipe, role: str, reduced_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(amax history, scales) of the next step."""
    assert recipe.margin is not None
    groups, length = state.amax_history.shape
    history = torch.empty((groups, length), device=state.scale.device)  # update_scales_kernel writes all of it
    scale = torch.empty(groups, device=state.scale.device)  # as above
    largest = FORMAT_MAX[format_of(recipe, role)] * 2.0**-recipe.margin
    launch(kernels.update_scales_kernel, (groups,), scale)(
        *strided(state.amax_history),
        *strided(state.scale, 1),
        *strided(reduced_amax, 1),
        history,
        scale,
        length,
        number_bits(largest),
        MOST_RECENT=recipe.amax_compute_algo == "most_recent",
        BLOCK_L=power_of_two(length),
        **NO_FP_FUSION,
    )
    return history, scale
