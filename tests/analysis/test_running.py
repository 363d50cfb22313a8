"""The running error bound holds for every honest formula and order, and is tight."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.analysis.running import Running
from conformance.families.router import selection as topk
from conformance.families.router.balancing import aux_gradient, aux_scores, z_terms
from conformance.families.router.cases import LogitsCase, logits_of
from conformance.judge import judge
from conformance.judge.bound import ROUNDOFF
from tests.honest.routers import ascending, descending, exp_base_two

LOW = (torch.float32, torch.bfloat16, torch.float16)
often = settings(max_examples=150, deadline=None, database=None, derandomize=True)


def drawn(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def within(bound: Running, observed: Tensor) -> bool:
    return bool(((observed.double() - bound.value).abs() <= bound.error).all())


# ---- sequences of operations

OPERATIONS = {
    "add": (lambda x, y: x + y, lambda x, y: x + y),
    "subtract": (lambda x, y: x - y, lambda x, y: x - y),
    "multiply": (lambda x, y: x * y, lambda x, y: x * y),
    "divide": (lambda x, y: x / y, lambda x, y: x / y),
    "constant": (lambda x, y: x * 0.3 + 1e-3, lambda x, y: x * 0.3 + 1e-3),
    "exp": (lambda x, y: (x * -0.25).exp(), lambda x, y: (x * -0.25).exp()),
    "root": (lambda x, y: (x * x).sqrt(), lambda x, y: (x * x).sqrt()),
    "log1p": (lambda x, y: (y * y).log1p(), lambda x, y: (y * y).log1p()),
    "log": (lambda x, y: (x * x + 0.5).log(), lambda x, y: (x * x + 0.5).log()),
    "sum": (lambda x, y: x.sum(1) * y, lambda x, y: x.sum(1, keepdim=True) * y),
    "mask": (lambda x, y: x.masked(y.value > 0) + y, lambda x, y: torch.where(y > 0, x, 0) + y),
}


@often
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=7), st.integers(0, 2**31), st.sampled_from(LOW)
)
def test_whatever_is_computed_step_by_step_stays_within_the_bound(names, seed, dtype):
    """Both sides take signs from the float64 value, so steps differ by rounding only."""
    x, y = drawn(seed, 3, 6, dtype=dtype), drawn(seed + 1, 3, 6, dtype=dtype)
    bounds, lows = [Running.of(x, dtype), Running.of(y, dtype)], [x, y]
    for name in names:
        analysed, computed = OPERATIONS[name]
        masks = (
            lows[-2] if name != "mask" else torch.where(bounds[-2].value > 0, lows[-2].abs() + 1, -lows[-2].abs() - 1)
        )
        bounds.append(analysed(bounds[-1], bounds[-2]))
        lows.append(computed(lows[-1], masks) if name != "mask" else torch.where(masks > 0, lows[-1], 0) + lows[-2])
        assert lows[-1].dtype == dtype
        finite = lows[-1].isfinite() & bounds[-1].value.isfinite()
        assert ((lows[-1].double() - bounds[-1].value).abs() <= bounds[-1].error)[finite].all(), names


@often
@given(st.integers(0, 2**31), st.integers(1, 300), st.sampled_from(LOW))
def test_sums_in_every_order_stay_within_the_bound(seed, count, dtype):
    terms = drawn(seed, 1, count, dtype=dtype)
    bound = Running.of(terms, dtype).sum(1)
    for order in (
        terms,
        terms.flip(1),
        terms.sort(dim=1).values,
        terms.abs().sort(dim=1, descending=True).values * terms.sign(),
    ):
        total = torch.zeros(1, 1, dtype=dtype)
        exact = Running.of(order, dtype).sum(1)
        for term in order.split(1, dim=1):
            total = total + term
        assert within(exact, total)
    assert within(bound, terms.sum(1, keepdim=True))


def test_what_is_exactly_zero_stays_zero():
    x = Running.of(torch.tensor([0.0, 0.0]), torch.float32)
    for result in (
        x + x,
        x - x,
        x * 3.0,
        x * x,
        x.sqrt(),
        x.log1p(),
        x.sum(0),
        x / Running.of(torch.tensor([1.0, 2.0]), torch.float32),
    ):
        assert not result.value.any() and not result.error.any()


def test_an_exact_infinity_brings_no_error():
    x = Running.of(torch.tensor([-torch.inf, 1.0]), torch.float32)
    assert x.exp().value[0] == 0 and x.exp().error[0] == 0
    assert (x + 1.0).error[0] == 0


def test_a_divisor_that_may_be_zero_has_no_bound():
    x = Running.of(torch.tensor([1.0, 1.0]), torch.float32)
    lost = Running(torch.tensor([1e-9, 1.0]).double(), torch.tensor([1e-8, 0.0]).double(), torch.float32)
    assert (x / lost).error.isinf().tolist() == [True, False]


def test_a_wider_input_is_rounded_on_its_way_in():
    x = torch.tensor([1 + 2.0**-30, 2.0**-30], dtype=torch.float64)
    assert (Running.of(x, torch.float32).error > 0).all()
    assert not Running.of(x.float(), torch.float32).error.any()
    assert not Running.of(x, torch.float64).error.any()
    assert within(Running.of(x, torch.float32), x.float())


# ---- the router's formulas in kernels


def in_halves(x: Tensor) -> Tensor:
    return x[..., ::2].cumsum(-1)[..., -1:] + x[..., 1::2].flip(-1).cumsum(-1)[..., -1:]


EXPONENTIALS, TOTALS = (torch.exp, exp_base_two), (ascending, descending, in_halves)


def softmaxes(x: Tensor):
    """softmax by all formulas; without the maximum if no exponential overflows."""
    shifts = [x.amax(-1, keepdim=True), *([torch.zeros_like(x[..., :1])] if x.abs().max() < 40 else [])]
    for exp, total, shift in itertools.product(EXPONENTIALS, TOTALS, shifts):
        power = exp(x - shift)
        yield power / total(power)
        yield power * (1 / total(power))


def sigmoids(x: Tensor):
    for exp in EXPONENTIALS:
        yield 1 / (1 + exp(-x))
        power = exp(x.clamp(max=60))
        yield torch.where(x > 60, torch.ones_like(x), power / (1 + power))
    yield torch.sigmoid(x)


def roots_of_softplus(x: Tensor):
    yield torch.nn.functional.softplus(x).sqrt()
    yield torch.logaddexp(x, torch.zeros_like(x)).sqrt()
    for exp in EXPONENTIALS:
        yield (x.clamp(min=0) + torch.log1p(exp(-x.abs()))).sqrt()
        yield torch.where(x > 20, x, torch.log1p(exp(x.clamp(max=20)))).sqrt()


FORMULAS = {"softmax": softmaxes, "sigmoid": sigmoids, "sqrtsoftplus": roots_of_softplus}
INPUTS = {
    "well scaled": lambda seed: drawn(seed, 40, 24),
    "wide": lambda seed: drawn(seed, 40, 24, scale=12),
    "negative": lambda seed: -10 - drawn(seed, 40, 24).abs() * 3,
    "saturated": lambda seed: 16 + drawn(seed, 40, 24).abs() * 4,
    "far apart": lambda seed: drawn(seed, 40, 24, scale=200).clamp(-80, 600),
    "of bfloat16": lambda seed: drawn(seed, 40, 24, scale=4, dtype=torch.bfloat16).float(),
}


@pytest.mark.parametrize("function", FORMULAS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_scores_by_every_formula_are_within_the_bound(function, inputs):
    for seed in range(4):
        x = INPUTS[inputs](seed)
        bound = topk.score(Running.of(x, torch.float32), function)
        for number, computed in enumerate(FORMULAS[function](x)):
            assert within(bound, computed), (function, inputs, number)


SETTINGS = {
    "softmax of the chosen": {"topk": 6},
    "softmax of all": {"topk": 6, "pre_softmax": True},
    "sigmoid": {"topk": 6, "score_function": "sigmoid", "scaling_factor": 2.5},
    "sigmoid alone": {"topk": 1, "score_function": "sigmoid"},
    "sqrtsoftplus": {"topk": 6, "score_function": "sqrtsoftplus"},
    "sqrtsoftplus alone": {"topk": 1, "score_function": "sqrtsoftplus", "scaling_factor": 0.3},
}


def chosen_of(x: Tensor, settings: dict) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.bool).scatter(1, x.topk(settings["topk"], dim=1).indices, True)


def weights_by_formulas(x: Tensor, chosen: Tensor, settings: dict):
    """Weights of the chosen experts in float32, by all score formulas and summation orders."""
    function, factor = settings.get("score_function", "softmax"), settings.get("scaling_factor", 1.0)
    if function == "softmax":
        held = x if settings.get("pre_softmax") else x[chosen].reshape(len(x), -1)
        for p in softmaxes(held):
            yield (
                torch.where(chosen, p, 0)
                if settings.get("pre_softmax")
                else torch.zeros_like(x).masked_scatter(chosen, p)
            )
        return
    for s, total in itertools.product(FORMULAS[function](x), TOTALS):
        s = torch.where(chosen, s, 0)
        yield (s / (total(s) + 1e-20) if settings["topk"] > 1 else s) * factor


def gradients_by_formulas(x: Tensor, chosen: Tensor, g: Tensor, settings: dict):
    """dlogits in float32: by torch's autograd, and in closed form with several summation orders."""
    function, factor = settings.get("score_function", "softmax"), settings.get("scaling_factor", 1.0)
    leaf = x.clone().requires_grad_()
    for w in weights_by_formulas(leaf, chosen, settings) if function != "sqrtsoftplus" else ():
        yield torch.autograd.grad(w, leaf, torch.where(chosen, g, 0), retain_graph=True)[0]
    g = torch.where(chosen, g, 0) * factor
    for total in TOTALS:
        for s in FORMULAS[function](x) if function != "softmax" or settings.get("pre_softmax") else ():
            held = torch.where(chosen, s, 0)
            norm = total(held) + 1e-20
            slope = {"sigmoid": s * (1 - s), "sqrtsoftplus": torch.sigmoid(x) / (2 * s)}.get(function, s)
            if function == "softmax":
                yield s * (g - total(g * held))
            elif settings["topk"] > 1:
                yield torch.where(chosen, (g / norm - total(g * held) / norm / norm) * slope, 0)
                yield torch.where(chosen, (g - total(g * (held / norm))) / norm * slope, 0)
            else:
                yield torch.where(chosen, g * slope, 0)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_weights_and_gradients_by_every_formula_are_within_the_bound(name, inputs):
    settings = SETTINGS[name]
    for seed in range(3):
        x, g = INPUTS[inputs](seed), drawn(seed + 100, 40, 24)
        chosen = chosen_of(x, settings)
        _, bound = topk.weights(x, chosen, settings, torch.float32)
        assert all(within(bound, w) for w in weights_by_formulas(x, chosen, settings))
        if settings.get("score_function") == "sqrtsoftplus" and (x < topk.UNDERFLOW).any():
            continue
        slope = topk.gradient(x, chosen, g, settings, torch.float32)
        for number, computed in enumerate(gradients_by_formulas(x, chosen, g, settings)):
            assert within(slope, computed), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SETTINGS)
def test_rounding_to_the_output_is_part_of_the_bound(name, dtype):
    x = drawn(1, 40, 24, scale=3, dtype=dtype)
    chosen = chosen_of(x, SETTINGS[name])
    bounded = topk.weights(x, chosen, SETTINGS[name], torch.float32)[1].bounded(dtype)
    for w in weights_by_formulas(x.float(), chosen, SETTINGS[name]):
        assert judge("probs", bounded, w.to(dtype)) is None
    assert judge("probs", bounded, w.to(dtype) * 1.1).check == "bound"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_declared_low_accumulator_is_within_its_bound(name):
    x = drawn(2, 40, 24, dtype=torch.bfloat16)
    chosen = chosen_of(x, SETTINGS[name])
    bound = topk.weights(x, chosen, SETTINGS[name], torch.bfloat16)[1]
    assert all(within(bound, w) for w in weights_by_formulas(x, chosen, SETTINGS[name]))


@pytest.mark.parametrize("function", FORMULAS)
def test_normalised_scores_and_their_gradients_are_within_the_bound(function):
    for seed in range(4):
        x, g = drawn(seed, 40, 24, scale=3), drawn(seed + 9, 40, 24)
        _, scores = aux_scores(Running.of(x, torch.float32), function)
        slope = aux_gradient(Running.of(x, torch.float32), Running.of(g, torch.float32), function)
        leaf = x.clone().requires_grad_()
        for number, (raw, total) in enumerate(itertools.product(FORMULAS[function](leaf), TOTALS)):
            p = raw if function == "softmax" else raw / (total(raw) + 1e-20)
            assert within(scores, p.detach())
            assert within(slope, torch.autograd.grad(p, leaf, g, retain_graph=True)[0]), number


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_z_loss_and_its_gradient_are_within_the_bound(inputs):
    for seed in range(4):
        x = INPUTS[inputs](seed).requires_grad_()
        loss, slope = z_terms(Running.of(x, torch.float32), torch.ones(40, dtype=torch.bool), 0.5)
        for exp, total in itertools.product(EXPONENTIALS, TOTALS):
            top = x.amax(1, keepdim=True).detach()
            lse = total(exp(x - top)).log() + top
            computed = 0.5 * total((lse * lse).T) / 40
            assert within(loss, computed.detach())
            assert within(slope, torch.autograd.grad(computed, x)[0])
        computed = (x.logsumexp(1) ** 2).mean() * 0.5
        assert within(loss, computed.detach()) and within(slope, torch.autograd.grad(computed, x)[0])


# ---- tightness

MULTIPLE = {"softmax": 64, "sigmoid": 20, "sqrtsoftplus": 20}


@pytest.mark.parametrize("function", FORMULAS)
def test_the_bound_of_a_score_is_some_units_of_the_last_place(function):
    x = INPUTS["well scaled"](0)
    bound = topk.score(Running.of(x, torch.float32), function)
    assert (bound.error / bound.value.abs()).median() < MULTIPLE[function] * ROUNDOFF[torch.float32]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bound_of_weights_and_gradients_is_far_below_what_a_defect_moves(name):
    """Below 1/1000 of the row's largest value."""
    x, g = INPUTS["well scaled"](0), drawn(100, 40, 24)
    chosen = chosen_of(x, SETTINGS[name])
    for bound in (
        topk.weights(x, chosen, SETTINGS[name], torch.float32)[1],
        topk.gradient(x, chosen, g, SETTINGS[name], torch.float32),
    ):
        assert (bound.error.amax(1) < bound.value.abs().amax(1) / 1000).all()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("inputs", ["well scaled", "of bfloat16"])
def test_an_error_of_a_tenth_is_outside(name, inputs):
    x, g, settings = INPUTS[inputs](0), drawn(100, 40, 24), SETTINGS[name]
    chosen = chosen_of(x, settings)
    w, slope = topk.weights(x, chosen, settings, torch.float32)[1], topk.gradient(x, chosen, g, settings, torch.float32)
    for bound in (w, slope):
        largest = bound.value.abs() == bound.value.abs().amax(1, keepdim=True)
        for t, e in largest.nonzero().tolist():
            off_by_a_tenth = bound.value.float()
            off_by_a_tenth[t, e] *= 1.1
            assert judge("x", bound.bounded(torch.float32), off_by_a_tenth).index == (t, e)
            assert judge("x", bound.bounded(torch.bfloat16), off_by_a_tenth.bfloat16()).index == (t, e)


@pytest.mark.parametrize("function", FORMULAS)
def test_a_score_computed_in_bfloat16_is_outside(function):
    x = INPUTS["well scaled"](0)
    bound = topk.score(Running.of(x, torch.float32), function)
    low = topk.score(Running.of(x, torch.bfloat16), function)
    computed = next(iter(FORMULAS[function](x.bfloat16()))).float()
    assert not within(bound, computed)
    assert within(low, computed)


@pytest.mark.parametrize("spread", ["distinct", "ties", "near", "negative", "equal", "saturated"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_logits_leave_no_weight_without_a_bound(name, spread):
    settings = SETTINGS[name]
    x = logits_of(LogitsCase(function="topk_routing", tokens=30, experts=24, topk=settings["topk"], spread=spread))
    bound = topk.weights(x, chosen_of(x, settings), settings, torch.float32)[1]
    assert bound.error.isfinite().all()
    assert (bound.error <= bound.value.abs() / 1000 + torch.finfo(torch.float32).tiny * 100).all()


# just above the tie of bfloat16's 1 and 1 + 2^-7; by way of float32 the tie itself, which goes to 1
NEAR_A_TIE = torch.tensor([[1 + 2.0**-8 + 2.0**-40]], dtype=torch.float64)


def test_float64_may_be_rounded_to_16_bits_once_or_by_way_of_float32():
    x = Running.of(NEAR_A_TIE, torch.float64)
    assert NEAR_A_TIE.to(torch.bfloat16) == 1  # torch and the reference
    assert x.ends(torch.bfloat16) == (1.0, 1 + 2.0**-7)
    assert x.ends(torch.float32) == (1 + 2.0**-8, 1 + 2.0**-8)
    infinite = Running.of(torch.tensor([-torch.inf, torch.inf]), torch.float64).ends(torch.bfloat16)
    assert [end.tolist() for end in infinite] == [[-math.inf, math.inf]] * 2


def test_what_is_computed_in_float32_is_rounded_once():
    x = Running(NEAR_A_TIE, torch.zeros(1, 1, dtype=torch.float64), torch.float32)
    assert x.ends(torch.bfloat16) == (1.0, 1.0)
