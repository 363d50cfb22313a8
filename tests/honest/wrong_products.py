"""Low-precision grouped GEMMs wrong in one stage: a defect replaces one operand's parts."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

import moe_ref
from conformance.judge.codes import RECIPROCAL
from moe_ref.quantization.formats import E4M3, decode, encode
from moe_ref.quantization.quantize import quantize
from tests.honest.low_precision import Part, Source, Way, as_stored, by_codes, make


def parts_with(change: Callable[[Source], list[Part]], **where: str) -> SimpleNamespace:
    """Honest parts; of sources with this role and gemm, the parts from `change`."""

    def parts(source: Source) -> list[Part]:
        return (
            change(source) if all(getattr(source, name) == value for name, value in where.items()) else by_codes(source)
        )

    return make(Way(parts=parts))


def other_direction(source: Source) -> list[Part]:
    return by_codes(source, columnwise=not source.columnwise)


def in_e4m3(source: Source) -> list[Part]:
    return by_codes(source._replace(recipe=replace(source.recipe, fp8_format="e4m3")))


def neighbours(source: Source) -> list[Part]:
    """Each expert with the previous expert's scales."""
    honest = by_codes(source)
    return [
        operand._replace(scale=previous.scale, whole=previous.whole)
        for operand, previous in zip(honest, honest[-1:] + honest[:-1], strict=True)
    ]


def transposed_scales(source: Source) -> list[Part]:
    """Square blocks with the other form's (transposed) scales."""
    size = {"block": 128, "mxfp8": 32}[source.recipe.scaling]
    operands = []
    for operand in by_codes(source):
        side = min(-(-n // size) for n in operand.scale.shape)
        scale, grid = operand.scale.clone(), operand.scale[::size, ::size][:side, :side].T
        large = grid.repeat_interleave(size, 0).repeat_interleave(size, 1)[: scale.shape[0], : scale.shape[1]]
        scale[: large.shape[0], : large.shape[1]] = large
        operands.append(operand._replace(scale=scale))
    return operands


def in_high_precision(source: Source) -> list[Part]:
    return as_stored(source)


def by_override(override: str | None) -> Callable[[Source], list[Part]]:
    """Parts by another backward_override; NVFP4 without transform and noise."""

    def parts(source: Source) -> list[Part]:
        bare = {"hadamard": False, "stochastic_rounding": False} if source.recipe.scaling == "nvfp4" else {}
        return by_codes(source._replace(recipe=replace(source.recipe, backward_override=override, **bare)))

    return parts


def not_rounded(source: Source) -> list[Part]:
    """Dequantised values in float32, not rounded to the dtype."""
    return by_codes(source._replace(x=source.x.float()))


def in_bfloat16(source: Source) -> list[Part]:
    """Dequantised values rounded to bfloat16."""
    return [
        Part(operand.value.bfloat16().float(), torch.ones_like(operand.scale), torch.ones_like(operand.whole))
        for operand in by_codes(source)
    ]


def across_experts(source: Source) -> list[Part]:
    """Blocks along tokens ignore the segments: one block spans two experts."""
    rows = torch.tensor([int(source.splits.sum())])
    (joined,) = by_codes(source._replace(splits=rows))
    sizes = source.splits.tolist()
    return [
        Part(code, scale, joined.whole)
        for code, scale in zip(joined.code.split(sizes, 1), joined.scale.split(sizes, 1), strict=True)
    ]


def with_the_tail(source: Source) -> list[Part]:
    """The last block includes the (finite) rows past the last segment."""
    x = source.x.nan_to_num(4.0, 4.0, -4.0)
    sizes = source.splits.clone()
    tail_rows = len(x) - int(sizes.sum())
    sizes[-1] += tail_rows
    *preceding, last = by_codes(source._replace(x=x, splits=sizes))
    width = last.code.shape[1] - tail_rows
    return [*preceding, last._replace(code=last.code[:, :width], scale=last.scale[:, :width])]


def updated_too_early(source: Source) -> list[Part]:
    """The scale already includes this step's amax."""
    measured = quantize(
        source.x.detach(), source.recipe, role=source.role, splits=source.splits, state=source.state
    ).state
    assert measured is not None
    return by_codes(source._replace(state=moe_ref.update_scales(measured, source.recipe, role=source.role)))


def one_state_for_all(source: Source) -> list[Part]:
    assert source.state is not None
    return by_codes(
        source._replace(state=source.state._replace(scale=source.state.scale.amin().expand_as(source.state.scale)))
    )


def to_nearest(source: Source) -> list[Part]:
    return by_codes(source._replace(recipe=replace(source.recipe, stochastic_rounding=False), noise=None))


def noise_of_the_other_direction(source: Source) -> list[Part]:
    assert source.noise is not None
    return by_codes(source._replace(noise=source.noise.flip(0)))


def untransformed(source: Source) -> list[Part]:
    return by_codes(source._replace(recipe=replace(source.recipe, hadamard=False)))


def not_saturated(source: Source) -> list[Part]:
    """E4M3 cast without saturation: NaN where a delayed scale is too large."""
    assert source.state is not None
    sizes = source.splits.tolist()
    scaled = [rows * source.state.scale[e] for e, rows in enumerate(source.x[: sum(sizes)].float().split(sizes))]
    turned = source.gemm == "wgrad"
    lost = [(x.T if turned else x).abs() >= 464 for x in scaled]
    return [
        operand._replace(code=torch.where(overflows, torch.nan, operand.code))
        for operand, overflows in zip(by_codes(source), lost, strict=True)
    ]


def last_block_by_the_one_before(source: Source) -> list[Part]:
    return [
        operand._replace(
            scale=torch.cat(
                [operand.scale[:, :128], operand.scale[:, 127:128].expand(-1, operand.scale.shape[1] - 128)], 1
            )
        )
        for operand in by_codes(source)
    ]


def low_bias(bias: Tensor) -> Tensor:
    return bias.to(torch.float8_e4m3fn).to(bias.dtype)


def upwards(source: Source) -> list[Part]:
    """Ties rounded away from zero, as reciprocal scales may round them."""
    operands = []
    for operand in by_codes(source):
        rows = source.x[: int(source.splits.sum())].float().split(source.splits.tolist())[len(operands)]
        scaled = rows.double() / (operand.scale * operand.whole).double()
        operands.append(operand._replace(code=decode(encode(scaled * (1 + RECIPROCAL), E4M3), E4M3)))
    return operands
