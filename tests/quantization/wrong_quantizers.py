"""Cases of quantize, and quantisers that are wrong in one place of every group."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.families.quantization.cases import QuantizeCase
from moe_ref.quantization.formats import E8M0, decode, encode
from moe_ref.quantization.recipes import Scaled, spread
from tests.common.suite import reference
from tests.honest import quantizers

HONEST = {"the_reference": moe_ref, "divides": quantizers.Divides, "multiplies": quantizers.Multiplies}

CURRENT = QuantizeCase(function="quantize", tokens=9, experts=3, counts=(4, 0, 5), hidden=21, seed=1)
BLOCK = replace(CURRENT, scaling="block", hidden=150)
MXFP8 = replace(CURRENT, scaling="mxfp8", tokens=3, counts=(1, 0, 2), hidden=3)
NVFP4 = replace(MXFP8, scaling="nvfp4", role="grad_output")
DELAYED = replace(CURRENT, scaling="delayed", steps="quantize+update+quantize")

Change = Callable[
    [Scaled, Tensor, Any], Scaled
]  # a group, what was quantised in the form's own orientation, and the scheme


def changed(change: Change, **declared: Any) -> SimpleNamespace:
    """The reference with every group changed."""

    def form(form_of):
        sizes = [(group.codes.T if form_of.columnwise else group.codes).shape[0] for group in form_of.groups]
        rows = form_of.source_MN.detach()[: sum(sizes)].float().split(sizes)
        sources = [source.T if form_of.columnwise else source for source in rows]
        return replace(
            form_of,
            groups=tuple(
                change(group, source, form_of.scheme) for group, source in zip(form_of.groups, sources, strict=True)
            ),
        )

    def quantize(x, recipe, **settings):
        out = moe_ref.quantize(x, recipe, **settings)
        q = out.quantized
        return out._replace(
            quantized=replace(q, rowwise=q.rowwise and form(q.rowwise), columnwise=q.columnwise and form(q.columnwise))
        )

    return reference(quantize=quantize, declares=lambda function: declared)


def multiplied(group: Scaled, values: Tensor, scheme: Any) -> Tensor:
    """x over its scale, where that is a power of two."""
    scale = decode(group.scale, E8M0) if scheme.recipe.scaling == "mxfp8" else group.scale
    return values / spread(scale, (1, scheme.block[1]) if scheme.recipe.scaling == "mxfp8" else scheme.block, values)


def exponent_rounded_down(group, values, scheme):
    lower = torch.where(
        torch.frexp(group.amax / scheme.format.max)[0] == 0.5, group.scale, group.scale.clamp(min=1) - 1
    )
    scaled = values * spread(decode(254 - lower, E8M0), (1, scheme.block[1]), values)
    return group._replace(scale=lower, codes=encode(scaled, scheme.format))


def exponent_rounded_up_from_nothing(group, values, scheme):
    """2^⌊log₂⌋ + 1, which is one too many where amax is FMAX times a power of two."""
    exact = (torch.frexp(group.amax / scheme.format.max)[0] == 0.5) & (group.amax > 0)
    higher = group.scale + exact.to(torch.uint8)
    scaled = values * spread(decode(254 - higher, E8M0), (1, scheme.block[1]), values)
    return group._replace(scale=higher, codes=encode(scaled, scheme.format))


def truncated(group, values, scheme):
    larger = (
        decode(group.codes, scheme.format, dtype=torch.float64).abs() > multiplied(group, values, scheme).double().abs()
    )
    return group._replace(codes=group.codes - (larger & (group.codes & 0x7F > 0)).to(torch.uint8))


def half_goes_up(group, values, scheme):
    v, table = (
        multiplied(group, values, scheme).double().abs(),
        decode(torch.arange(128, dtype=torch.uint8), scheme.format, dtype=torch.float64),
    )
    body = (group.codes & 0x7F).long()
    tie = (body < scheme.format.max_code) & (v == (table[body] + table[(body + 1).clamp(max=127)]) / 2)
    return group._replace(codes=group.codes + tie.to(torch.uint8))


def nan_beyond_the_largest(group, values, scheme):
    return group._replace(
        codes=torch.where(multiplied(group, values, scheme).abs() > scheme.format.max, 0x7F, group.codes)
    )


def minus_zero_is_zero(group, values, scheme):
    return group._replace(codes=torch.where(group.codes == scheme.format.sign_bit, 0, group.codes))


def subnormals_flushed(group, values, scheme):
    return group._replace(codes=torch.where((group.codes & 0x7F) < 8, group.codes & 0x80, group.codes))


def the_next_blocks_scale(group, values, scheme):
    return group._replace(scale=group.scale.roll(1, 1))


def scale_in_half(group, values, scheme):
    return group._replace(scale=group.scale.bfloat16().float())


def codes_for_other_scales(group, values, scheme):
    """Scales within what a reciprocal may be off, and codes one off where no midpoint is near."""
    return group._replace(codes=torch.where((group.codes & 7) == 3, group.codes + 1, group.codes))


def amax_not_a_number(group, values, scheme):
    return group._replace(amax=torch.where(values.isnan().any(), torch.nan, group.amax))
