"""Stochastic rounding: given noise is used, own noise is judged by its statistics, and too little
randomness is found.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, scope_of
from conformance.families.quantization.space import random_cases
from conformance.judge.statistics import LEAST_REPEATS, Stochastic, improbable
from moe_ref.config import Recipe
from tests.common.suite import outcome_of, reference
from tests.quantization.wrong_quantizers import HONEST, changed

# ---- noise


def rounded_at_random(noise_for: Callable[[int], Tensor], repeats: int = LEAST_REPEATS) -> Tensor:
    """[repeats, N] what one row becomes, in units of its scale."""
    recipe, x = Recipe("nvfp4"), row_of_sixths()
    draws = [moe_ref.quantize(x, recipe, role="grad_output", noise=noise_for(i)).quantized for i in range(repeats)]
    return torch.stack([moe_ref.dequantize(q)[0] for q in draws]).double()


def row_of_sixths() -> Tensor:
    """[16,640] with amax 6 in every block, so that the scale is 1; the other rows are zero."""
    x = torch.zeros(16, 640)
    x[0] = torch.arange(640) % 16 * 0.37
    x[0, ::16] = 6
    return x


@pytest.fixture(autouse=True)
def same_numbers():
    """The same noise whatever test ran before: statistics seldom miss what they should find."""
    torch.manual_seed(0)


def expected_of_sixths() -> Stochastic:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    value = row_of_sixths()[0].double()
    low = torch.searchsorted(grid, value, right=True) - 1
    exact = grid[low] == value
    return Stochastic(value, grid[low], torch.where(exact, grid[low], grid[(low + 1).clamp(max=7)]))


def test_stochastic_rounding_is_right_on_average_and_rounding_to_nearest_is_not():
    source = torch.Generator().manual_seed(0)
    assert (
        improbable(expected_of_sixths(), rounded_at_random(lambda i: torch.rand(2, 16, 640, generator=source))) is None
    )
    assert improbable(expected_of_sixths(), rounded_at_random(lambda i: torch.full((2, 16, 640), 0.5)))
    shared = [torch.rand(1, generator=source) for _ in range(LEAST_REPEATS)]
    assert improbable(expected_of_sixths(), rounded_at_random(lambda i: shared[i].expand(2, 16, 640)))


OWN = random_cases(scope_of("quantize", Space()))
NO_NOISE = Space(without={"quantize": frozenset({"noise"})})


def drawing(noise_for: Callable[[tuple[int, ...]], Tensor | None]) -> SimpleNamespace:
    """A quantiser without an argument for noise; of the shape of its own."""

    def quantize(x, recipe, *, role="input", splits=None, rowwise=True, columnwise=False, state=None):
        random = bool(recipe.stochastic_rounding) and role == "grad_output"
        noise = noise_for((2, *x.shape)) if random else None
        return moe_ref.quantize(
            x, recipe, role=role, splits=splits, rowwise=rowwise, columnwise=columnwise, state=state, noise=noise
        )

    return reference(quantize=quantize)


def always_alike(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def test_a_quantiser_without_an_argument_for_noise_is_asked_for_its_own():
    assert random_cases(scope_of("quantize", NO_NOISE)) == OWN
    assert [case.direction for case in OWN] == ["rowwise", "columnwise"]
    assert [(case.repeats * case.steps.count("quantize")) for case in OWN] == [LEAST_REPEATS] * 2
    assert not any(case.repeats for case in covering_cases("quantize", NO_NOISE).cases)
    for case in OWN:
        assert outcome_of(case, drawing(torch.rand)).status == "PASS"


@pytest.mark.parametrize("name", HONEST)
def test_honest_noise_is_accepted(name):
    for case in OWN:
        for seed in range(3):
            assert outcome_of(replace(case, seed=seed), HONEST[name]).status == "PASS"


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.direction)
@pytest.mark.parametrize(("noise", "says"), [
    (lambda shape: torch.full(shape, 0.5), "the same random numbers"),  # to nearest
    (lambda shape: torch.full(shape, 1 - 2.0**-24), "the same random numbers"),  # truncation
    (lambda shape: torch.rand(shape).square(), "too high"),
    (lambda shape: torch.rand(shape) * 0.9, "too high"),
    (lambda shape: torch.rand(shape) * 0.9 + 0.1, "too low"),
    # one number for a whole column
    (lambda shape: torch.rand(shape[0], 1, shape[2]).expand(shape), "variance over repeats|mean of all"),
    # one number for a whole row
    (lambda shape: torch.rand(shape[0], shape[1], 1).expand(shape), "variance over repeats|mean of all"),
    (always_alike, "the same random numbers as in another call"),
], ids=["nearest", "truncated", "squares", "below 0.9", "above 0.1", "columns", "rows", "repeated"])  # fmt: skip
def test_noise_that_is_not_random_enough_is_found(case, noise, says):
    finding = outcome_of(case, drawing(noise)).finding
    assert (finding["output"], finding["check"]) == ("codes" + SUFFIX[case.direction], "random")
    assert re.search(says, finding["message"])


SUFFIX = {"rowwise": "", "columnwise": ".columnwise"}


def test_codes_that_are_no_neighbours_and_signs_are_found():
    def far(group, values, scheme):
        return group._replace(codes=torch.where(group.codes == 3, 5, group.codes))

    def positive_zero(group, values, scheme):
        return group._replace(codes=torch.where(group.codes == scheme.format.sign_bit, 0, group.codes))

    for change in (far, positive_zero):
        finding = outcome_of(OWN[0], changed(change)).finding
        assert (finding["output"], finding["check"]) == ("codes", "random")
        assert "its neighbours are" in finding["message"]


def test_repeats_are_for_gradients_that_are_rounded_stochastically():
    fits = CONTRACTS["quantize"].signature.fits
    for fields in ({"role": "input"}, {"variant": 1}, {"experts": 1}, {"grads": "x"}):
        assert "repeats is 128" in fits(replace(OWN[0], **fields))
    assert "delayed scaling alone has a state" in fits(replace(OWN[0], repeats=0))
