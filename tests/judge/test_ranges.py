"""Codes and values that may lie in a range: the judge accepts what is in it and nothing else."""

from typing import Any

import pytest
import torch

from conformance.analysis.curves import CURVES
from conformance.analysis.quantizer import transformed
from conformance.analysis.running import Running
from conformance.judge import controls, judge
from conformance.judge.ranges import Ranged, code_places
from moe_ref.quantization.formats import E2M1, E4M3, E5M2, decode
from moe_ref.quantization.quantize import hadamard


def ranged(least: list[int], most: list[int], format: Any = E4M3) -> Ranged:
    places = code_places(decode(torch.arange(256, dtype=torch.uint8), format, dtype=torch.float64), format.sign_bit)
    first, last = (places[torch.tensor([codes])] for codes in (least, most))
    return Ranged(torch.tensor([least], dtype=torch.uint8), "integers", least=first, most=last, places=places)


@pytest.mark.parametrize(
    ("observed", "is_right"),
    [(0x10, True), (0x11, True), (0x12, False), (0x0F, False), (0x90, False), (0x7F, False)],
)
def test_a_code_between_the_ends_of_its_range_is_right(observed, is_right):
    finding = judge("codes", ranged([0x10], [0x11]), torch.tensor([[observed]], dtype=torch.uint8))
    assert (finding is None) == is_right
    assert is_right or (finding.check == "code" and finding.index == (0, 0))


def test_both_zeros_lie_beside_each_other_and_a_nan_beside_nothing():
    around = ranged([0x81], [0x01])
    for code in (0x81, 0x80, 0x00, 0x01):
        assert judge("codes", around, torch.tensor([[code]], dtype=torch.uint8)) is None
    for code in (0x82, 0x02, 0x7F, 0xFF):
        assert judge("codes", around, torch.tensor([[code]], dtype=torch.uint8)) is not None
    assert judge("codes", ranged([0x7F], [0x7F]), torch.tensor([[0xFF]], dtype=torch.uint8)) is None


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1], ids=lambda format: format.name)
def test_places_are_in_the_order_of_what_codes_mean(format):
    count = 2 * format.sign_bit
    meaning = decode(torch.arange(256, dtype=torch.uint8), format, dtype=torch.float64)[:count]
    places = code_places(meaning, format.sign_bit)[:count]
    numbers = ~meaning.isnan()
    assert bool((meaning[numbers][places[numbers].argsort()].diff() >= 0).all())


def test_the_judge_of_ranges_sees_corrupted_codes():
    exact = ranged([0x10, 0x20, 0x30], [0x10, 0x20, 0x30])
    rows = Ranged(exact.value.T.contiguous(), "integers", least=exact.least.T, most=exact.most.T, places=exact.places)
    assert controls.check("codes", rows) >= 2


def test_known_numbers_are_rounded_at_both_ends():
    x = Running(
        torch.tensor([[1 + 2.0**-9, 1.5, 0.0]], dtype=torch.float64),
        torch.tensor([[2.0**-8, 0, 0]], dtype=torch.float64),
        torch.float32,
    )
    interval = x.interval(torch.bfloat16, torch.zeros(1, 3, dtype=torch.bool))
    assert (
        interval.low.tolist() == [[1 - 2.0**-9 if interval.low[0, 0] < 1 else 1.0, 1.5, 0]]
        and interval.high[0, 0] == 1 + 2.0**-7
    )
    assert interval.low.signbit().tolist() == [[False, False, True]]
    least, most = interval.magnitudes()
    assert least.tolist() == [[float(interval.low[0, 0]), 1.5, 0]] and most[0, 1] == 1.5


def test_what_is_transformed_lies_in_the_range_of_its_transform():
    x = CURVES["silu"].value(Running.of(torch.randn(8, 32).bfloat16(), torch.float32))
    interval = x.interval(torch.bfloat16, torch.zeros(8, 32, dtype=torch.bool))
    turned = hadamard(x.value.to(torch.bfloat16)).double()
    bounds = transformed(interval)
    assert bool(((bounds.low <= turned) & (turned <= bounds.high)).all())
    assert float((bounds.high - bounds.low).mean()) < 0.05  # why: a wider range would forgive anything
