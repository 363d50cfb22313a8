"""torchao's MXFP8 and NVFP4 through their adapters; they need the package."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import moe_ref
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.core.where import parsed
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.quantization.cases import RECIPES
from conformance.families.quantization.space import zero_tensors
from conformance.interface import Implementation
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
    settings = {"role": role, "splits": torch.tensor([32, 32])}
    got, expected = (
        implementation.quantize(x, Recipe("mxfp8", fp8_format="hybrid"), **settings).quantized
        for implementation in (peer, moe_ref)
    )
    for name in READERS:
        assert torch.equal(getattr(peer, name)(got), getattr(moe_ref, name)(expected)), name
    different = moe_ref.quantize(x * 3, Recipe("mxfp8", fp8_format="hybrid"), **settings).quantized
    assert not torch.equal(peer.codes(got), moe_ref.codes(different))


def test_just_above_a_power_of_two_its_scale_is_one_too_small(peer):
    x = torch.full((32, 32), 448 * 2.0**-8 * (1 + 2.0**-23))
    got, expected = (implementation.quantize(x, Recipe("mxfp8")).quantized for implementation in (peer, moe_ref))
    assert peer.scales(got)[0, 0] == 119 and moe_ref.scales(expected)[0, 0] == 120


@pytest.fixture
def nvfp4():
    from conformance.peers import torchao_nvfp4

    return torchao_nvfp4


PLAIN = RECIPES["nvfp4"][1]


def test_nvfp4_codes_and_scales_are_the_references_but_for_ties(nvfp4):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    settings = {"role": "weight", "splits": torch.tensor([16, 16])}
    got, expected = (implementation.quantize(x, PLAIN, **settings).quantized for implementation in (nvfp4, moe_ref))
    for name in ("codes", "scales", "amax"):
        assert torch.equal(getattr(nvfp4, name)(got), getattr(moe_ref, name)(expected)), name
    different = moe_ref.quantize(x.flip(0), PLAIN, **settings).quantized
    assert not torch.equal(nvfp4.codes(got), moe_ref.codes(different))


def test_nvfp4_of_a_zero_tensor_is_nan_and_the_suite_says_so(nvfp4):
    (case,) = (case for case in zero_tensors(scope_of("quantize", Space())) if case.scaling == "nvfp4")
    finding = evaluate(case, Implementation(nvfp4)).finding
    assert (finding["output"], finding["nan"]) == ("scales", "values")
    assert evaluate(case, Implementation(moe_ref)).finding is None


def test_recipes_that_an_adapter_lacks_are_outside_its_scope(peer, nvfp4):
    for implementation, recipe in ((peer, Recipe("mxfp8")), (nvfp4, PLAIN)):
        where = parsed(implementation.scope, "scope")
        in_scope = [x for kind in RECIPES for x in range(len(RECIPES[kind])) if where.holds(of_recipe(kind, x))]
        assert in_scope and where.holds(of_recipe(recipe.scaling, RECIPES[recipe.scaling].index(recipe)))
        assert not where.holds(of_recipe("block", 0))


def of_recipe(scaling, variant):
    return Case.family["quantize"](function="quantize", scaling=scaling, variant=variant, role="weight")


@pytest.mark.parametrize(
    "adapter", ["conformance/peers/torchao_mx.py", "conformance/peers/torchao_nvfp4.py", "examples/te_permutation.py"]
)
def test_an_adapter_has_at_most_60_lines(adapter):
    text = (Path(__file__).parents[2] / adapter).read_text()
    assert 20 < sum(map(bool, text.splitlines())) <= 60
