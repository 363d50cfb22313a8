"""torchao's MXFP8 through its adapter; it needs the package."""

from importlib.util import find_spec

import pytest
import torch

import moe_ref
from moe_ref.config import Recipe

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
READERS = ("codes", "scales", "amax", "dequantize")


@pytest.fixture
def peer():
    from conformance.peers import torchao_mx

    return torchao_mx


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_codes_and_scales_are_the_reference_s(peer, role):
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {"role": role, "splits": torch.tensor([32, 32])}
    got, right = (one.quantize(x, Recipe("mxfp8", fp8_format="hybrid"), **given).quantized for one in (peer, moe_ref))
    for name in READERS:
        assert torch.equal(getattr(peer, name)(got), getattr(moe_ref, name)(right)), name
    other = moe_ref.quantize(x * 3, Recipe("mxfp8", fp8_format="hybrid"), **given).quantized
    assert not torch.equal(peer.codes(got), moe_ref.codes(other))


def test_just_above_a_power_of_two_its_scale_is_one_too_small(peer):
    x = torch.full((32, 32), 448 * 2.0**-8 * (1 + 2.0**-23))
    got, right = (one.quantize(x, Recipe("mxfp8")).quantized for one in (peer, moe_ref))
    assert peer.scales(got)[0, 0] == 119 and moe_ref.scales(right)[0, 0] == 120


def test_what_it_has_not_is_declared(peer):
    x = torch.zeros(32, 32)
    assert peer.supports("quantize", x=x, recipe=Recipe("block")) == "quantize under block"
    square = Recipe("mxfp8", two_dimensional_weights=True)
    assert peer.supports("quantize", x=x, recipe=square) == "quantize under mxfp8 in squares"
    assert peer.supports("quantize", x=x.half(), recipe=Recipe("mxfp8")) == "quantize of torch.float16"
