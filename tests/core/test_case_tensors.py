"""Tensors of a case: pinned bytes, exact dyadic values, spreads, segments."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conformance.analysis.curves import split
from conformance.catalogue import CONTRACTS
from conformance.core.tensors import BITS, DTYPES, PROB_BITS, hashed, payload, probabilities, row_scales
from conformance.families.experts import cases as expert_cases
from conformance.families.permutation.cases import RoutingCase, routed
from conformance.families.quantization.cases import BINADES, QuantizeCase, x_of
from conformance.families.router import cases as router_cases
from conformance.judge.exact import bits


def test_another_seed_makes_other_tensors():
    case = RoutingCase(function="permute", tokens=3, experts=3, routing=(1, 2, 7), hidden=4)
    first, second = (CONTRACTS["permute"].problem(x).required["tokens"] for x in (case, replace(case, seed=1)))
    assert not torch.equal(first, second)


def test_hashing_is_pinned():
    assert hashed(7, "tokens", 4).tolist() == [2928969240, 1410587951, 3064867217, 71826486]
    assert hashed(7, "tokens", 2).tolist() == hashed(7, "tokens", 4).tolist()[:2]
    assert hashed(7, "rows", 4).tolist() != hashed(7, "tokens", 4).tolist()


def test_payloads_are_pinned():
    assert payload(1, "tokens", (2, 3), "float32").tolist() == [
        [-1.9990234375, 0.921875, -0.51611328125],
        [-1.41259765625, 0.94580078125, 0.11376953125],
    ]
    assert payload(1, "tokens", (2, 3), "bfloat16").tolist() == [
        [-1.984375, -0.6875, 0.5078125],
        [-0.5859375, 0.9765625, 0.671875],
    ]
    wide_values = payload(1, "tokens", (1, 3), "float32", "wide").tolist()
    assert wide_values == [[-4.38795280456543, -0.008654408156871796, -13.915393829345703]]
    assert payload(0, "rows", (2, 4), "uint8").tolist() == [[17, 18, 153, 223], [71, 1, 123, 138]]


def test_probabilities_are_pinned():
    assert probabilities(3, "probs", (4,), "float32").tolist() == [0.787109375, 0.962890625, 0.919921875, 0.5185546875]
    zeros = probabilities(3, "probs", (8,), "bfloat16", zeros=True).tolist()
    assert zeros == [0.296875, 0.703125, 0.0, 0.1484375, 0.96875, 0.953125, 0.5, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dyadic_values_are_exact_and_fill_their_dtype(dtype):
    bits_of_them = BITS[DTYPES[dtype]]
    integers = payload(5, "tokens", (300, 9), dtype).double() * 2 ** (bits_of_them - 1)
    assert torch.equal(integers, integers.round())
    assert 2 ** (bits_of_them - 1) < integers.abs().max() < 2**bits_of_them
    assert bool((integers % 2 == 1).any())
    narrower = {"float32": torch.bfloat16, "float16": torch.bfloat16, "bfloat16": torch.float8_e4m3fn}[dtype]
    assert not torch.equal(
        (integers / 2 ** (bits_of_them - 1)).to(narrower).double(), integers / 2 ** (bits_of_them - 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_probabilities_are_exact_and_fill_their_dtype(dtype):
    integers = probabilities(5, "probs", (300, 9), dtype).double() * 2 ** PROB_BITS[DTYPES[dtype]]
    assert torch.equal(integers, integers.round())
    assert bool((integers % 2 == 1).any())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wide_values_lie_many_powers_of_two_apart_and_do_not_overflow(dtype):
    x = payload(5, "tokens", (300, 9), dtype, "wide").float().abs()
    assert x.isfinite().all()
    assert x.max() > 2**11
    assert 0 < x[x > 0].min() < 2**-11


def test_probabilities_lie_above_zero_unless_zeros_are_asked_for():
    assert probabilities(0, "probs", (500,), "float32").min() > 0
    assert probabilities(0, "probs", (500,), "float32").max() <= 1
    assert (probabilities(0, "probs", (500,), "float32", zeros=True) == 0).any()


def test_rows_in_sequence_differ_in_their_first_column():
    for dtype in ("float32", "bfloat16", "float16"):
        first = payload(4, "tokens", (511, 3), dtype)[:, 0]
        assert len(set(first.tolist())) == len(first)


def test_special_values_hold_every_strange_number():
    x = payload(0, "tokens", (100, 8), "float32", "special")
    assert x.isnan().any()
    assert (x == torch.inf).any()
    assert (x == -torch.inf).any()
    assert ((x == 0) & x.signbit()).any()
    assert x.isfinite().any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_strange_number_is_the_first_and_the_last_element_of_some_row(dtype):
    for style, kinds in (("edges", 6), ("ends", 4)):
        x = payload(0, "tokens", (60, 5), dtype, style)
        for column in (x[:, 0], x[:, -1]):
            small = (column != 0) & (column.abs() < torch.finfo(x.dtype).tiny)
            is_infinite = (column == torch.inf, column == -torch.inf)
            masks = (column.isnan(), *is_infinite, (column == 0) & column.signbit())
            assert all(mask.any() for mask in masks)
            assert len(column[small].unique()) == kinds - 4
            assert bool((sum(mask.int() for mask in (*masks, small)) == 1).all())
        assert x[:, 1:-1].isfinite().all()


def test_the_first_and_the_last_element_are_nan_for_some_seed():
    payloads = [payload(seed, "tokens", (2, 3), "float32", "edges") for seed in range(6)]
    assert any(x[0, 0].isnan() for x in payloads) and any(x[-1, -1].isnan() for x in payloads)
    assert payload(0, "tokens", (0, 3), "float32", "edges").shape == (0, 3)


@pytest.mark.parametrize(
    ("dtype", "patterns"), [("bfloat16", 2**16), ("float16", 2**16), ("float8_e4m3fn", 2**8), ("uint8", 2**8)]
)
def test_every_bit_pattern_occurs_once_in_as_many_elements(dtype, patterns):
    for seed in (0, 3):
        x = payload(seed, "tokens", (16, patterns // 16), dtype, "every")
        assert len(set(bits(x).flatten().tolist())) == patterns
    assert len(set(bits(payload(0, "tokens", (64, 64), dtype, "every")).flatten().tolist())) == min(patterns, 4096)


def test_patterns_of_wide_dtypes_have_every_exponent():
    for dtype in ("float32", "float64"):
        x = payload(0, "tokens", (64, 128), dtype, "every").double().abs()
        assert len(x[x > 0].log2().floor()[x[x > 0].isfinite()].unique()) > 250
        assert x.isnan().any()


def test_one_byte_payloads_hold_every_code():
    for dtype in ("float8_e4m3fn", "float8_e5m2", "uint8"):
        assert len(payload(0, "tokens", (80, 80), dtype).view(torch.uint8).unique()) == 256


def test_an_explicit_map_has_one_bit_for_each_expert():
    case = RoutingCase(function="permute", tokens=3, experts=3, routing=(0b001, 0b110, 0))
    assert routed(case).tolist() == [[True, False, False], [False, True, True], [False, False, False]]


LOGITS = router_cases.LogitsCase(function="topk_routing", tokens=40, experts=24, topk=3)


def test_explicit_logits_are_eighths():
    case = router_cases.LogitsCase(
        function="topk_indices",
        tokens=2,
        experts=2,
        logits=(4, -12, router_cases.MINUS_INFINITY, router_cases.NOT_A_NUMBER),
    )
    assert router_cases.logits_of(case).nan_to_num(nan=7).tolist() == [[0.5, -1.5], [torch.finfo(torch.float32).min, 7]]


def test_logits_are_pinned():
    case = replace(LOGITS, tokens=1, experts=4, seed=1)
    assert router_cases.logits_of(case).tolist() == [
        [-4.16064453125, -5.17236328125, 7.6793212890625, -5.7032470703125]
    ]
    assert router_cases.logits_of(replace(case, dtype="bfloat16")).tolist() == [[-1.25, -4.0625, 4.5, -6.3125]]


@pytest.mark.parametrize("spread", router_cases.SPREADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_spread_is_what_its_name_says(spread, dtype):
    x = router_cases.logits_of(replace(LOGITS, spread=spread, dtype=dtype))
    order = x.sort(dim=1).values.double()
    assert x.dtype == DTYPES[dtype]
    says = {
        "distinct": (order.diff(dim=1) > 0).double().mean() > 0.9 and x.isfinite().all(),
        "ties": (order.diff(dim=1) == 0).any(1).all(),
        "near": (order.diff(dim=1).abs() < 2 * x.double().abs().max() * torch.finfo(x.dtype).eps).sum(1).min() > 1
        and len(x.unique()) > 6,
        "negative": (x < 0).all(),
        "extreme": x.isfinite().all() and x.abs().max() > 2**14,
        "minus_inf": (x == -torch.inf).all(1).any() and (x == -torch.inf).any(1).all() and x.isfinite().any(),
        "nan": x.isnan().any() and (x == torch.inf).any() and x.isfinite().all(1).any(),
        "equal": len(x.unique()) == 1,
        "saturated": (x >= 16).all(),
    }
    assert says[spread]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_strange_logits_are_first_and_last_and_every_pattern_is_finite(dtype):
    x = router_cases.logits_of(replace(LOGITS, spread="edges", dtype=dtype))
    for column in (x[:, 0], x[:, -1]):
        small = (column > 0) & (column < torch.finfo(x.dtype).tiny)
        kinds = (column == -torch.inf, (column == 0) & column.signbit(), small, column > 1000, column < -1000)
        assert all(kind.any() for kind in kinds)
    patterns = router_cases.logits_of(replace(LOGITS, tokens=256, experts=256, spread="every", dtype=dtype))
    assert patterns.isfinite().all()
    assert len(patterns.unique()) > 60_000
    assert (
        router_cases.logits_of(replace(LOGITS, function="z_loss", tokens=256, spread="every", dtype=dtype)).abs().max()
        < 16
    )


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64"])
@pytest.mark.parametrize(("counted", "past"), router_cases.COUNTED.items())
def test_counts_past_a_power_differ_by_little(dtype, counted, past):
    case = router_cases.LoadCase(function="update_expert_bias", counted=counted, map_dtype=dtype)
    x = router_cases.counts_past(case, np.arange(9)).double()
    assert past <= x.min() < x.max() < past * 1.001
    assert len(x.unique()) == 5


def test_counts_have_fractions_if_asked_for():
    case = router_cases.LoadCase(function="update_expert_bias", counted="fractions", map_dtype="uint8")
    assert router_cases.counts_past(case, np.arange(3)).tolist() == [0, 0.125, 0.25]
    assert case.clash() is None
    assert replace(case, map_dtype="int64").clash()
    assert replace(case, counted="past_31_bits", map_dtype="int32").clash()


QUANTIZED = QuantizeCase(function="quantize", tokens=9, hidden=7, values="edges")


def test_a_quantiser_gets_strange_values_at_the_ends_of_some_rows_and_columns_of_zeros():
    x = x_of(QUANTIZED)
    assert (~x[:, 1:-1].isfinite()).sum() == 0 < (~x[:, [0, -1]].isfinite()).sum()
    assert (x == 0).all(0).tolist() == [False, False, True, False, False, False, False]
    assert bool(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any())


def test_a_quantiser_gets_every_significand_in_every_binade_below_the_largest_value():
    x = x_of(replace(QUANTIZED, tokens=32, hidden=256, dtype="bfloat16", values="every")).double()
    assert len(x[x.abs() < 2].unique()) > 0.9 * 2 * 128 * BINADES
    assert 2 <= x.abs().max() < 4 and x.abs().min() < 2.0 ** (2 - BINADES)


@pytest.mark.parametrize(("dtype", "exponents"), [("float32", 255), ("bfloat16", 250), ("float16", 35)])
def test_block_scales_have_every_exponent(dtype, exponents):
    x = x_of(replace(QUANTIZED, scaling="mxfp8", tokens=4, hidden=3, dtype=dtype, values="every"))
    largest = x.double().reshape(len(x), -1, 32).abs().amax(2)
    assert x.isfinite().all()
    assert len(largest[largest > 0].log2().floor().unique()) >= exponents


@pytest.mark.parametrize("interleave", [0, 4])
def test_every_pattern_passes_a_gate(interleave):
    case = replace(ROWS, tokens=16, width=4096, dtype="bfloat16", values="every", interleave=interleave)
    gate, value = split(expert_cases.hidden_of(case, 8192), expert_cases.activation_blocks(case))
    assert len(set(bits(gate).flatten().tolist())) == 2**16
    assert value.abs().max() <= 2


def test_given_indices_name_different_experts():
    index = router_cases.indices_of(LOGITS)
    assert index.shape == (40, 3)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 24 for row in index.tolist())


def test_padding_marks_its_share_of_the_tokens():
    assert [int(router_cases.padding_of(replace(LOGITS, padding=n)).sum()) for n in (0, 8)] == [0, 40]
    assert 8 < int(router_cases.padding_of(replace(LOGITS, padding=4)).sum()) < 32


ROWS = expert_cases.ActivationCase(function="glu", tokens=60, width=9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("values", ["dyadic", "rows", "bounds", "saturated", "special"])
def test_hidden_values_are_what_their_name_says(values, dtype):
    x = expert_cases.hidden_of(replace(ROWS, values=values, dtype=dtype, clamp=56), 18)
    x64 = x.double()
    says = {
        "dyadic": x64.abs().max() <= 2,
        "rows": x64.abs().amax(1).max() > 2**11 and x64.abs().amax(1).min() < 2**-10,
        "bounds": all(bool((x64 == y).any()) for y in (7, -7, 0))
        and bool(((x64 > 7) & (x64 < 7.2)).any() and ((x64 < 7) & (x64 > 6.9)).any()),
        "saturated": x64.isfinite().all()
        and {abs(y) for y in x64.flatten().tolist() if abs(y) > 2}
        == {float(torch.tensor(y).to(x.dtype)) for y in expert_cases.FAR},
        "special": x.isnan().any()
        and (x == torch.inf).any()
        and (x == -torch.inf).any()
        and 0 < int(x.isfinite().all(1).sum()) < 60,
    }
    assert x.dtype == DTYPES[dtype]
    assert says[values]


def test_row_scales_are_powers_of_two_from_one_end_to_the_other():
    exponents = row_scales(0, 400).log2()
    assert exponents.unique().tolist() == list(range(-12, 13))


def test_signed_probs_lie_on_both_sides_of_zero_and_beyond_one():
    p = expert_cases.probs_of(0, 200, "float32", "signed")
    assert p.min() < -1 and p.max() > 1
    assert (p == 0).any() and p[p == 0].signbit().any() and not p[p == 0].signbit().all()


SEGMENTS = expert_cases.GroupedCase(function="grouped_linear", tokens=7, experts=3, tail=2, hidden=4, width=5)


def test_counts_are_as_even_as_can_be_unless_they_are_given():
    assert expert_cases.counts_of(SEGMENTS) == (3, 2, 2)
    assert expert_cases.counts_of(replace(SEGMENTS, counts=(0, 7, 0))) == (0, 7, 0)


@pytest.mark.parametrize("values", ["dyadic", "rows", "special"])
def test_rows_behind_the_last_segment_hold_nothing_but_nan(values):
    x = expert_cases.grouped_rows(replace(SEGMENTS, values=values), "rows", 4)
    assert x[7:].isnan().all()
    assert values == "special" or x[:7].isfinite().all()


def test_special_rows_and_weights_are_spoilt_in_places():
    case = replace(SEGMENTS, tokens=60, experts=9, values="special")
    odd, weights = (
        ~expert_cases.grouped_rows(case, "rows", 4)[:60].isfinite(),
        ~expert_cases.weights_of(case, "weight", 5, 4).isfinite(),
    )
    assert 0 < int(odd.any(1).sum()) < 30 and int(odd.sum(1).max()) == 1
    assert weights.flatten(1).sum(1).tolist() == [1, 0, 0] * 3
