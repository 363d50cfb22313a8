"""Values of rows and scales on the wire are those that scales go wrong at."""

import torch

import moe_ref
from conformance.core.tensors import payload
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.dispatch.hybridep import RECIPES
from conformance.families.dispatch.values_of_wire import CODES, at_reciprocals, packed_codes

TINY = torch.finfo(torch.float32).tiny


def test_the_scales_of_reciprocals_are_subnormal_or_replace_an_infinite_factor():
    x = at_reciprocals(payload(1, "tokens", (10, 8), "float32"))
    assert x.isfinite().all()
    scales = moe_ref.scales(moe_ref.quantize(x, RECIPES["fp8"]).quantized)[:, 0]
    factor = 448.0 / x.abs().amax(1)
    assert factor.isinf().tolist() == [True, True, False, False, False] * 2
    subnormal = (scales > 0) & (scales < TINY)
    assert subnormal.tolist() == [True, True, True, False, False] * 2


def test_eight_copies_of_a_row_can_be_added():
    x = at_reciprocals(payload(1, "tokens", (10, 8), "bfloat16"))
    assert (x.float() * 8).isfinite().all()


def test_packed_scales_have_no_pending_minus():
    case = DispatchCase(function="deepep_dispatch", dtype="float8_e4m3fn", scales=3, layout="negated")
    assert case.changed(layout_of="scales", values="reciprocals").clash()
    assert not case.changed(layout_of="scales").clash()
    assert not case.changed(layout_of="tokens", values="reciprocals").clash()


def test_packed_scales_hold_every_code_and_no_number_survives_arithmetic():
    packed = packed_codes(3, (40, 3))
    assert set(packed.view(torch.uint8).flatten().tolist()) == set(CODES)
    assert bool(packed.isnan().any()) and bool(((packed.abs() < TINY) & (packed != 0)).any())
