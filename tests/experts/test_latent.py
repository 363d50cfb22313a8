"""latent_projection: honest ones are accepted in high and in low precision, and what is wrong in one place is found there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import covering_cases, drawn, shape_cases, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.experts.cases import GroupedCase
from conformance.families.experts.space_recipes import recipe_cases
from conformance.interface import Implementation, load
from conformance.judge.ratios import RowWise
from moe_ref.config import check_linear
from tests.honest import low_precision, wrong_products
from tests.honest.wrong_products import parts_with

poison.install()

FUNCTION = "latent_projection"
CASE = GroupedCase(function=FUNCTION, tokens=30, hidden=40, width=20, bias="float32", grads="x+weight+bias")
LOW = replace(CASE, scaling="current", values="patches")


def by_layer(layer: Any) -> Implementation:
    """The projection by another namespace's grouped_linear."""

    def latent_projection(x, weight, *, bias=None, **how):
        check_linear("weight", x, weight, bias)
        return layer.grouped_linear(
            x, weight[None], torch.tensor([len(x)]), bias=None if bias is None else bias[None], **how
        )

    def supports(function, x, **arguments):
        return "sums are taken in float32" if x.dtype == torch.float64 else None

    return Implementation(
        SimpleNamespace(latent_projection=latent_projection, declares=layer.declares, supports=supports), "here"
    )


def wrongly(change: Any) -> Implementation:
    """The reference of other inputs."""
    return Implementation(
        SimpleNamespace(
            latent_projection=lambda x, weight, **how: moe_ref.latent_projection(*change(x, weight, how), **how)
        ),
        "here",
    )


def cases() -> list[Any]:
    every = [
        *fixed_cases(FUNCTION, Space()),
        *covering_cases(FUNCTION, Space()).cases,
        *shape_cases(FUNCTION, Space()),
        *recipe_cases(FUNCTION, Space()),
    ]
    return [*every, *(case for seed in (11, 12, 13) for case in drawn(strategy(FUNCTION, Space()), seed, 30))]


@pytest.mark.parametrize("name", ["reference", "ScaledLast", "FourteenBits"])
def test_honest_projections_are_accepted(name):
    implementation = load("moe_ref") if name == "reference" else by_layer(getattr(low_precision, name))
    outcomes = {case.text: evaluate(case, implementation) for case in cases()}
    assert {
        text: x.finding or x.reason
        for text, x in outcomes.items()
        if x.status not in ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
    } == {}
    assert sum(x.status == "PASS" for x in outcomes.values()) > len(outcomes) / 2


def without_bias(x, weight, how):
    how.pop("bias", None)
    return x, weight


WRONG = {
    "the bias is left out": (replace(CASE, grads=""), wrongly(without_bias), "out"),
    "the last column is not read": (
        CASE,
        wrongly(lambda x, weight, how: (x * (torch.arange(x.shape[1]) < x.shape[1] - 1), weight)),
        "out",
    ),
    "no gradient of the weight": (CASE, wrongly(lambda x, weight, how: (x, weight.detach())), "d_weight"),
    "no gradient of x": (CASE, wrongly(lambda x, weight, how: (x.detach(), weight)), "d_x"),
    "a weight in half": (CASE, wrongly(lambda x, weight, how: (x, weight.bfloat16().to(weight.dtype))), "out"),
    "tokens not quantised": (
        LOW,
        by_layer(parts_with(wrong_products.in_high_precision, role="input", gemm="fprop")),
        "out",
    ),
    "a weight in high precision for x": (
        LOW,
        by_layer(parts_with(wrong_products.in_high_precision, role="weight", gemm="dgrad")),
        "d_x",
    ),
    "a cotangent in E4M3": (
        LOW,
        by_layer(parts_with(wrong_products.in_e4m3, role="grad_output", gemm="wgrad")),
        "d_weight",
    ),
    "a quantised bias": (
        replace(LOW, values="dyadic"),
        by_layer(low_precision.make(low_precision.Way(bias=wrong_products.low_bias))),
        "out",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_place_is_found_there_by_its_value(name):
    case, wrong, output = WRONG[name]
    outcomes = [evaluate(replace(case, seed=seed), wrong) for seed in range(4)]
    assert (output, "bound") in {(x.finding["output"], x.finding["check"]) for x in outcomes if x.status == "FAIL"}, [
        x.finding for x in outcomes
    ]


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG.values()), ids=lambda case: case.id)
def test_the_cases_that_find_it_are_passed_by_the_honest(case):
    for implementation in (load("moe_ref"), by_layer(low_precision.ScaledFirst)):
        assert {evaluate(replace(case, seed=seed), implementation).status for seed in range(4)} == {"PASS"}


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

    def latent_projection(x, weight, **how):
        return moe_ref.latent_projection(x, weight, **how) * (1.5 if wrong_where(x) else 1.0)

    case = next(
        replace(CASE, law=law, grads="", bias="", seed=seed)
        for seed in range(20)
        if not wrong_where(first_of(replace(CASE, seed=seed)))
    )
    assert evaluate(case, load("moe_ref")).status == "PASS"
    assert (
        evaluate(case, Implementation(SimpleNamespace(latent_projection=latent_projection), "here")).finding["check"]
        == law
    )


def first_of(case: GroupedCase) -> torch.Tensor:
    return CONTRACTS[FUNCTION].problem(case).required["x"]


def test_a_large_gradient_of_the_weight_is_compared_with_the_reference_too():
    case = replace(CASE, tokens=96, hidden=80, width=70, dtype="bfloat16")
    contract = CONTRACTS[FUNCTION]
    right = contract.expected(case, contract.problem(case), {})
    assert isinstance(right["d_weight"], RowWise) and isinstance(right["out"], RowWise)
    assert right["d_weight"].reference.shape == right["d_weight"].value.shape == (70, 80)
    assert evaluate(case, load("moe_ref")).status == "PASS"
