"""Permutation of quantised rows through every release of Transformer Engine that has it."""

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter, quantized
from moe_ref.config import Recipe
from tests.te.judging import Checked, judged, wrong
from tests.te.standin import quantized as standins
from tests.te.standin import standin

MAP = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]], dtype=torch.bool)
READ = {"2.1": {"block"}, "2.6": {"block"}, "2.12": {"block", "mxfp8"}, "2.20": {"block", "mxfp8"}}


def tokens(columns):
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


def by_rows(case):
    return case.scaling in ("block", "mxfp8") and case.direction == "rowwise" and not case.grads


def judge(bucket, most=25):
    te = standin(bucket)
    return judged(Checked(te, Adapter(te)), ["permute_and_quantize"], most, by_rows)


@pytest.mark.parametrize("bucket", READ)
def test_a_release_alone_is_conformant_in_what_it_moves(bucket):
    outcomes = judge(bucket)
    assert not wrong(outcomes)
    assert {case.scaling for case, outcome in outcomes if outcome.status == "PASS"} == READ[bucket]


@pytest.mark.parametrize("bucket", READ)
def test_a_quantiser_alone_is_conformant_by_rows(bucket):
    te = standin(bucket)
    outcomes = judged(Checked(te, Adapter(te)), ["quantize"], 40, lambda case: by_rows(case) and case.role != "weight")
    assert not wrong(outcomes)
    assert {case.scaling for case, outcome in outcomes if outcome.status == "PASS"} == READ[bucket]


def test_rows_that_a_quantiser_adds_are_not_shown():
    adapter, x = Adapter(standin("2.20")), tokens(160)[:1].repeat(32, 1)  # of 128
    got, expected = (implementation.quantize(x, Recipe("mxfp8")).quantized for implementation in (adapter, moe_ref))
    for name in ("codes", "scales", "amax", "dequantize"):
        assert torch.equal(getattr(adapter, name)(got), getattr(moe_ref, name)(expected)), name


@pytest.mark.parametrize("align", [None, 32])
@pytest.mark.parametrize("scaling", ["block", "mxfp8"])
def test_codes_and_scales_are_the_reference_s(scaling, align):
    align = 32 if scaling == "mxfp8" else None if align is None else 1
    adapter, recipe, x = Adapter(standin("2.20")), Recipe(scaling), tokens(160)
    got, expected = (y.permute_and_quantize(x, MAP, recipe, align=align) for y in (adapter, moe_ref))
    for name in ("codes", "scales", "amax", "dequantize"):
        assert torch.equal(getattr(adapter, name)(got.quantized), getattr(moe_ref, name)(expected.quantized)), name
    ones = torch.ones(len(adapter.codes(got.quantized)), 4)
    assert torch.equal(adapter.unpermute(ones, got.row_map), moe_ref.unpermute(ones, expected.row_map))


@pytest.mark.parametrize(
    ("recipe", "settings", "reason"),
    [
        (Recipe("current"), {}, "an expert's rows share a scale, which is not known before they are permuted"),
        (Recipe("block"), {"role": "weight"}, "it moves rows of blocks alone"),
        (Recipe("block"), {"rowwise": False}, "it moves rows of blocks alone"),
    ],
)
def test_quantised_rows_that_it_cannot_permute_are_declared(recipe, settings, reason):
    answer = Adapter(standin("2.20")).supports(
        "permute_and_quantize", tokens=tokens(32), routing_map=MAP, recipe=recipe, **settings
    )
    assert answer == f"permute_and_quantize under {recipe.scaling}: {reason}"


def test_the_path_names_recipe_quantiser_and_move():
    adapter = Adapter(standin("2.20"))
    adapter.permute_and_quantize(tokens(32), MAP, Recipe("mxfp8"), align=32)
    assert adapter.path["permute_and_quantize"] == (
        "MXFP8BlockScaling, then get_fp8_te_dtype, then MXFP8Quantizer, then moe_permute_and_pad_with_probs"
    )


def test_the_completed_adapter_takes_our_permutation():
    adapter = Adapter(standin("2.20"), moe_ref)
    adapter.permute_and_quantize(tokens(32), MAP, Recipe("block"))
    assert adapter.path["permute_and_quantize"] == "ours: its quantised rows have one form"


def _scales_stay(self, move):
    codes = moved(self, move)._rowwise_data
    rows = moved(self, move)._rowwise_scale_inv
    return standins.replace(self, _rowwise_data=codes, _rowwise_scale_inv=rows.flip(self.scaling == "block"))


moved = standins.QuantisedRows.moved
TWINS = {
    "scales_of_other_rows": (standins.QuantisedRows, "moved", _scales_stay),
    "tokens_as_they_are": (quantized, "TOKENS", {"block": 1, "mxfp8": 1}),
    "scales_not_turned": (quantized, "BLOCK", {"block": 64, "mxfp8": 32}),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_release_or_an_adapter_that_moves_wrongly_is_found(monkeypatch, twin):
    monkeypatch.setattr(*TWINS[twin])
    assert "FAIL" in {outcome.status for _, outcome in judge("2.20")}
