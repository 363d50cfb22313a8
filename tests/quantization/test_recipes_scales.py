"""Scales from amax, and the state of delayed scaling."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_ref.config import (
    QuantizerState,
    Recipe,
)
from moe_ref.config.quantization import SCALINGS
from moe_ref.config.state import new_quantizer_state
from moe_ref.quantization.formats import E4M3, E5M2, E8M0, decode, encode
from moe_ref.quantization.recipes import (
    FLOAT32_MAX,
    block_amax,
    nearest32,
    over,
    scale_from_amax,
    spread,
    update_scales,
)

often = settings(max_examples=150, deadline=None, database=None, derandomize=True)


# ---- settings


def exact32(value: Fraction) -> float:
    """The float32 nearest to a positive normal fraction, ties to even, in integers."""
    exponent = math.floor(math.log2(value))
    exponent += 1 if value >= Fraction(2) ** (exponent + 1) else -1 if value < Fraction(2) ** exponent else 0
    return float(Fraction(round(value / Fraction(2) ** (exponent - 23))) * Fraction(2) ** (exponent - 23))


@pytest.mark.parametrize(
    ("value", "bits"), [(Fraction(1, 448), 0x3B124925), (Fraction(1, 57344), 0x37924925), (Fraction(1, 6), 0x3E2AAAAB)]
)
def test_constants_are_rounded_once(value, bits):
    assert nearest32(float(value)) == exact32(value)
    assert torch.tensor(nearest32(float(value))).view(torch.int32) == bits


@pytest.mark.parametrize("denominator", [6 * 448, 6 * 256])
def test_constants_of_nvfp4_are_rounded_once(denominator):
    assert nearest32(1 / denominator) == exact32(Fraction(1, denominator))


@often
@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([448.0, 57344.0]))
def test_the_scale_is_the_exact_quotient_rounded_once(amax, top):
    assert scale_from_amax(torch.tensor(amax), top).item() == exact32(Fraction(top) / Fraction(amax))
    power = scale_from_amax(torch.tensor(amax), top, power_of_two=True).item()
    assert power <= exact32(Fraction(top) / Fraction(amax)) < 2 * power
    assert math.frexp(power)[0] == 0.5


def test_a_quotient_by_way_of_the_reciprocal_is_another_one():
    amax = torch.arange(1, 200, dtype=torch.float32)
    assert (scale_from_amax(amax, 448.0) != amax.reciprocal() * 448.0).any()
    assert torch.equal(over(448.0, amax), torch.tensor([exact32(Fraction(448, a)) for a in range(1, 200)]))


def test_amax_of_zero_or_infinity_has_scale_1():
    amax = torch.tensor([0.0, math.inf])
    assert scale_from_amax(amax, 448.0).tolist() == [1.0, 1.0]
    assert scale_from_amax(amax, 448.0, power_of_two=True).tolist() == [1.0, 1.0]


def test_a_tiny_amax_has_the_largest_finite_scale():
    overflows, just, fits = 2.0**-149, 2.0**-120, 2.0**-119  # 448·2^120 > max; 448·2^119 is finite
    amax = torch.tensor([overflows, just, fits])
    assert scale_from_amax(amax, 448.0).tolist() == [FLOAT32_MAX, FLOAT32_MAX, 448.0 * 2.0**119]
    assert scale_from_amax(amax, 448.0, power_of_two=True).tolist() == [2.0**127] * 3
    assert scale_from_amax(amax, 448.0, infinity=65504.0, power_of_two=True).tolist() == [2.0**15, 2.0**15, 2.0**127]


def test_epsilon_is_the_least_amax():
    assert scale_from_amax(torch.tensor([0.0, 1e-3, 7.0]), 448.0, epsilon=3.5).tolist() == [128.0, 128.0, 64.0]


def test_block_amax_passes_over_nan_and_counts_missing_elements_as_0():
    x = torch.tensor([[1.0, -2.0, math.nan], [0.5, 3.0, -7.0], [math.nan, -0.0, -math.inf]])
    assert block_amax(x, (1, 2)).tolist() == [[2.0, 0.0], [3.0, 7.0], [0.0, math.inf]]
    assert block_amax(x, (2, 2)).tolist() == [[3.0, 7.0], [0.0, math.inf]]
    assert block_amax(x, (None, None)).tolist() == [[math.inf]]
    assert block_amax(x[:0], (None, None)).tolist() == [[0.0]]
    assert block_amax(x[:0], (1, 2)).shape == (0, 2)


def test_spread_gives_each_element_its_blocks_scale():
    assert spread(torch.tensor([[1, 2], [3, 4]]), (2, 2), torch.zeros(3, 3)).tolist() == [
        [1, 1, 2],
        [1, 1, 2],
        [3, 3, 4],
    ]


# ---- a power-of-two block scale and an E8M0 scale are the same rule, said from two sides


def amax_values() -> Tensor:
    """Every positive normal bf16 whose scale is in range, and float32 around every top · 2^k."""
    bf16 = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    edges = torch.tensor([top * 2.0**k for top in (448.0, 57344.0) for k in range(-100, 100)])
    near = [(edges.view(torch.int32) + ulp).view(torch.float32) for ulp in range(-4, 5)]
    x = torch.cat([bf16, *near])
    return x[(x > 2.0**-110) & x.isfinite()]


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_floor_of_the_encode_scale_is_the_ceiling_of_the_decode_scale(format):
    amax = amax_values()
    block = over(1.0, scale_from_amax(amax, format.max, power_of_two=True))
    assert torch.equal(block, decode(encode(amax * nearest32(1 / format.max), E8M0), E8M0))


def test_the_floor_of_the_decode_scale_is_another_rule():
    amax = amax_values()
    v = amax * nearest32(1 / 448)
    floor = (v.view(torch.int32) >> 23).to(torch.uint8)
    assert (encode(v, E8M0) != floor).float().mean() > 0.9
    exact = torch.tensor([448.0 * 2.0**k for k in range(-100, 100)]) * nearest32(1 / 448)
    assert torch.equal(encode(exact, E8M0), (exact.view(torch.int32) >> 23).to(torch.uint8))


# ---- the state of delayed scaling


def stepped(state: QuantizerState, amax: float | list[float], recipe: Recipe, **options) -> QuantizerState:
    """One step: an amax is measured, and the scales are updated."""
    measured = torch.as_tensor(amax, dtype=torch.float32).reshape(-1, 1)
    return update_scales(
        QuantizerState(torch.cat([measured, state.amax_history[:, 1:]], 1), state.scale), recipe, **options
    )


@pytest.mark.parametrize(("algorithm", "frozen"), [("max", 4), ("most_recent", 1)])
def test_an_infinite_amax_freezes_the_scale_while_it_is_remembered(algorithm, frozen):
    recipe = Recipe("delayed", amax_history_len=4, amax_compute_algo=algorithm)
    state = stepped(new_quantizer_state(recipe), 7.0, recipe)
    scales = []
    for amax in (math.inf, 3.5, 3.5, 3.5, 3.5, 3.5):
        state = stepped(state, amax, recipe)
        scales.append(state.scale.item())
    assert scales == [64.0] * frozen + [128.0] * (6 - frozen)


def test_margin_format_and_a_tiny_amax():
    assert (
        stepped(new_quantizer_state(Recipe("delayed", margin=3)), 7.0, Recipe("delayed", margin=3)).scale.item() == 8.0
    )
    recipe = Recipe("delayed")
    assert stepped(new_quantizer_state(recipe), 7.0, recipe, role="grad_output").scale.item() == 8192.0
    assert stepped(new_quantizer_state(recipe), 1e-40, recipe).scale.item() == FLOAT32_MAX
    assert stepped(new_quantizer_state(recipe), 3.0, recipe).scale.item() == exact32(Fraction(448, 3))


def updated_by_loop(history: list[float], scale: float, algorithm: str, margin: int) -> tuple[list[float], float]:
    """The update rule with plain numbers, as it is written for one tensor."""
    last, amax = history[0], 0.0
    if last != 0:
        length, old = len(history), list(history)
        for i in range(length):
            rolled = old[i + 1] if i < length - 1 else last
            amax = max(amax, rolled)
            history[i] = rolled if i > 0 else 0.0
    if algorithm == "most_recent":
        amax = last
    if math.isfinite(amax) and amax > 0:
        scale = float(np.float32(448 * 2.0**-margin) / np.float32(amax))
    return history, min(scale, FLOAT32_MAX)


@often
@given(
    st.lists(st.sampled_from([0.0, 1.0, 3.0, 0.7, 100.0, 1e-3, math.inf]), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["max", "most_recent"]),
    st.integers(0, 3),
)
def test_every_trajectory_is_that_of_the_loop(amaxes, length, algorithm, margin):
    recipe = Recipe("delayed", amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    state, history, scale = new_quantizer_state(recipe), [0.0] * length, 1.0
    for amax in np.float32(amaxes).tolist():
        state = stepped(state, amax, recipe)
        history, scale = updated_by_loop([amax, *history[1:]], scale, algorithm, margin)
        assert (state.amax_history[0].tolist(), state.scale.item()) == (history, scale)


def test_only_delayed_scaling_has_a_state():
    assert all(new_quantizer_state(Recipe(scaling)) is None for scaling in SCALINGS if scaling != "delayed")
    state = new_quantizer_state(Recipe("delayed"))
    with pytest.raises(ValueError, match="recipe is of scaling 'current'"):
        update_scales(state, Recipe("current"))
    with pytest.raises(ValueError, match=r"state is with amax_history of shape \(1, 1024\)"):
        update_scales(state, Recipe("delayed", amax_history_len=4))
    with pytest.raises(ValueError, match=r"reduced_amax is of shape \(2,\)"):
        update_scales(state, Recipe("delayed"), reduced_amax=torch.ones(2))
    with pytest.raises(ValueError, match="num_groups is 0"):
        new_quantizer_state(Recipe("delayed"), num_groups=0)
