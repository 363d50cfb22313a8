"""latent_projection: honest ones pass in high and low precision, every mistake is located."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.families.experts.cases import GroupedCase
from conformance.judge.ratios import RowWise
from moe_ref.config import check_linear
from tests.common.suite import (
    WITH_UNSUPPORTED,
    assert_accepted,
    failures,
    gate_cases,
    in_turn,
    outcome_of,
    reference,
    statuses,
)
from tests.honest import low_precision, wrong_products
from tests.honest.wrong_products import parts_with

FUNCTION = "latent_projection"
HONEST = ("reference", "ScaledLast", "FourteenBits")
CASE = GroupedCase(function=FUNCTION, tokens=30, hidden=40, width=20, bias="float32", grads="x+weight+bias")
LOW = replace(CASE, scaling="current", values="patches")


def by_layer(layer: Any) -> SimpleNamespace:
    """The projection by another namespace's grouped_linear."""

    def latent_projection(x, weight, *, bias=None, **settings):
        check_linear("weight", x, weight, bias)
        bias = None if bias is None else bias[None]
        return layer.grouped_linear(x, weight[None], torch.tensor([len(x)]), bias=bias, **settings)

    def supports(function, x, **arguments):
        return "sums are taken in float32" if x.dtype == torch.float64 else None

    return SimpleNamespace(latent_projection=latent_projection, declares=layer.declares, supports=supports)


def quantized(change: Any, role: str, gemm: str) -> SimpleNamespace:
    return by_layer(parts_with(change, role=role, gemm=gemm))


def wrongly(change: Any) -> SimpleNamespace:
    """The reference of other inputs."""
    return reference(
        latent_projection=lambda x, w, **settings: moe_ref.latent_projection(*change(x, w, settings), **settings)
    )


def without_bias(x, weight, settings):
    settings.pop("bias", None)
    return x, weight


@pytest.mark.parametrize("name", HONEST)
def test_honest_projections_are_accepted(name):
    cases = gate_cases(FUNCTION, every=4) + scope_of(FUNCTION, Space()).more([])
    implementation = moe_ref if name == "reference" else by_layer(getattr(low_precision, name))
    assert_accepted(in_turn(cases, name, HONEST), implementation, statuses=WITH_UNSUPPORTED)


LOW_BIAS = low_precision.make(low_precision.Way(bias=wrong_products.low_bias))
WRONG = {
    "no bias": (replace(CASE, grads=""), wrongly(without_bias), "out"),
    "the last column is not read": (CASE, wrongly(lambda x, w, settings: (x * (torch.arange(40) < 39), w)), "out"),
    "no gradient of the weight": (CASE, wrongly(lambda x, w, settings: (x, w.detach())), "d_weight"),
    "no gradient of x": (CASE, wrongly(lambda x, w, settings: (x.detach(), w)), "d_x"),
    "a weight in half": (CASE, wrongly(lambda x, w, settings: (x, w.bfloat16().to(w.dtype))), "out"),
    "tokens not quantised": (LOW, quantized(wrong_products.in_high_precision, "input", "fprop"), "out"),
    "a weight in high precision for x": (LOW, quantized(wrong_products.in_high_precision, "weight", "dgrad"), "d_x"),
    "a cotangent in E4M3": (LOW, quantized(wrong_products.in_e4m3, "grad_output", "wgrad"), "d_weight"),
    "a quantised bias": (replace(LOW, values="dyadic"), by_layer(LOW_BIAS), "out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_is_found_where_it_is(name):
    case, implementation, output = WRONG[name]
    assert (output, "bound") in failures(case, implementation, 4)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG.values()), ids=lambda case: case.id)
def test_honest_projections_pass_the_cases_that_find_mistakes(case):
    for implementation in (moe_ref, by_layer(low_precision.ScaledFirst)):
        assert statuses(case, implementation, 2) == {"PASS"}


@pytest.mark.parametrize(
    ("law", "wrong_where"),
    [
        ("token_reversal", lambda x: x[0, 0] > x[-1, 0]),
        ("neighbour_independence", lambda x: x.isnan().any()),
        ("scaling", lambda x: x.abs().max() > 2),
    ],
)
def test_each_law_finds_what_only_it_sees(law, wrong_where):
    """Wrong for other inputs than the case's own."""

    def latent_projection(x, weight, **settings):
        return moe_ref.latent_projection(x, weight, **settings) * (1.5 if wrong_where(x) else 1.0)

    case = next(
        replace(CASE, law=law, grads="", bias="", seed=seed)
        for seed in range(20)
        if not wrong_where(first_of(replace(CASE, seed=seed)))
    )
    assert outcome_of(case, moe_ref).status == "PASS"
    assert outcome_of(case, reference(latent_projection=latent_projection)).finding["check"] == law


def first_of(case: GroupedCase) -> torch.Tensor:
    return CONTRACTS[FUNCTION].problem(case).required["x"]


def test_a_large_gradient_of_the_weight_is_compared_with_the_reference_too():
    case = replace(CASE, tokens=96, hidden=80, width=70, dtype="bfloat16")
    contract = CONTRACTS[FUNCTION]
    expected = contract.expected(case, contract.problem(case), {})
    assert isinstance(expected["d_weight"], RowWise) and isinstance(expected["out"], RowWise)
    assert expected["d_weight"].reference.shape == expected["d_weight"].value.shape == (70, 80)
    assert outcome_of(case, moe_ref).status == "PASS"
