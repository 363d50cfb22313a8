"""permute_and_quantize of `moe_fast` makes every bit of its permute and quantize, in every recipe, direction and room, with blocks of any size."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_fast
import moe_ref
from conformance.core.tensors import laid_out
from moe_fast.launch import tuning
from moe_ref.config import QuantizerState, Recipe

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
PLAIN_FP4: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
RECIPES = {
    "block": Recipe("block", fp8_format="hybrid"),
    "block, epsilon": Recipe("block", power_of_two_scales=False, amax_epsilon=0.3),
    "current": Recipe("current"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "mxfp8": Recipe("mxfp8", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4", **PLAIN_FP4),
    "nvfp4, four over six": Recipe("nvfp4", four_over_six="all", **PLAIN_FP4),
}
FUSED = tuple(RECIPES)[:-1]
ROOMS: dict[str, dict[str, Any]] = {
    "aligned": {"align": 32},
    "tight": {"align": 32, "num_rows": 96},
    "ample": {"align": 32, "num_rows": 320},
    "capacity": {"capacity": 32},
}
SMALL = tuning.PermuteQuantize(
    scatter=tuning.Tile(tokens=2, columns=32, num_warps=2),
    amax=tuning.Tile(tokens=4, columns=16, num_warps=2),
    scales=tuning.Tile(tokens=8, columns=1, num_warps=2),
    gather=tuning.Walk(tokens=16, columns=16, num_warps=2, steps=1, stages=1),
    tall=tuning.Walk(tokens=16, columns=16, num_warps=2, steps=1, stages=1),
    slab=2,
)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, permute_quantize=SMALL))


def inputs(tokens: int = 40, experts: int = 5, hidden: int = 160) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator) * torch.exp2(
        torch.randint(-8, 9, (tokens, 1), generator=generator)
    )
    chosen = torch.rand(tokens, experts, generator=generator) < 0.4
    chosen[:, 2] = False
    chosen[5] = False
    x[5] = torch.inf  # goes nowhere
    return x, chosen, torch.rand(tokens, experts, generator=generator)


def agree(name: str, x: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor | None, **how: Any) -> None:
    """Every result is the reference's.

    Raises:
        AssertionError: one is another.
    """
    state = None
    if name == "delayed":
        scale = torch.exp2(torch.arange(chosen.shape[1]) - 2.0) * 1.25
        state = QuantizerState(torch.arange(3.0 * len(scale)).reshape(-1, 3), scale)
    got, right = (
        namespace.permute_and_quantize(x, chosen, RECIPES[name], probs=probs, state=state, **how)
        for namespace in (moe_fast, moe_ref)
    )
    directions = [
        columnwise for columnwise in (False, True) if how.get("columnwise" if columnwise else "rowwise", not columnwise)
    ]
    for columnwise in directions:
        for read in ("codes", "scales", "amax", "dequantize"):
            a, b = (
                getattr(namespace, read)(made.quantized, columnwise=columnwise)
                for namespace, made in ((moe_fast, got), (moe_ref, right))
            )
            assert a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()), (
                read,
                columnwise,
            )
    for field in ("probs", "tokens_per_expert", "pad_offsets", "overflow"):
        a, b = getattr(got, field), getattr(right, field)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), field
    numbers = torch.arange(1.0, len(right.row_map.token_P) + 1)[:, None]
    assert torch.equal(moe_fast.unpermute(numbers, got.row_map), moe_ref.unpermute(numbers, right.row_map))
    assert (got.state is None) == (right.state is None)
    if got.state is not None:
        assert torch.equal(got.state.amax_history, right.state.amax_history) and torch.equal(
            got.state.scale, right.state.scale
        )


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", FUSED)
def test_one_step_is_the_references(name, room):
    x, chosen, probs = inputs()
    agree(name, x, chosen, probs, **ROOMS[room])
    agree(
        name,
        x.bfloat16(),
        chosen,
        None,
        **ROOMS[room],
        columnwise=name != "nvfp4",
        role="weight" if name == "mxfp8" else "grad_output",
    )
    if name != "nvfp4":
        agree(name, x.half(), chosen, probs.bfloat16(), **ROOMS[room], rowwise=False, columnwise=True)


@pytest.mark.parametrize("name", FUSED)
def test_blocks_of_any_size_give_the_same(name, small_blocks):
    x, chosen, probs = inputs()
    agree(name, x, chosen, probs, **ROOMS["ample"], columnwise=name != "nvfp4")


@pytest.mark.parametrize(("role", "columnwise"), [("input", True), ("weight", False), ("input", False)])
def test_what_takes_two_steps_is_the_references(role, columnwise):
    x, chosen, probs = inputs()
    agree("nvfp4, four over six", x, chosen, probs, **ROOMS["tight"], role=role, columnwise=columnwise)


@pytest.mark.parametrize("name", ["block", "current", "mxfp8"])
def test_nothing_and_nobody_is_quantised(name):
    for tokens, hidden in ((0, 32), (3, 0)):
        x, chosen = torch.zeros(tokens, hidden), torch.zeros(tokens, 4, dtype=torch.bool)
        agree(name, x, chosen, torch.zeros(tokens, 4), align=32)
        agree(name, x, chosen, None, align=32, num_rows=64, columnwise=True)


@pytest.mark.parametrize("layout", ["transposed", "strided", "shifted", "expanded"])
def test_tokens_of_any_strides_are_read(layout):
    x, chosen, probs = inputs()
    x[0] = 1.5
    agree(
        "block",
        laid_out(x, layout),
        laid_out(chosen, "transposed"),
        laid_out(probs, "strided"),
        align=32,
        columnwise=True,
    )
    agree("delayed", laid_out(x, layout), chosen, probs, align=32)


@pytest.mark.parametrize("name", ["block", "current", "nvfp4"])
def test_gradients_are_summed_in_float32_and_rounded_once(name):
    x, chosen, probs = inputs()
    made = []
    for namespace in (moe_fast, moe_ref):
        tokens, weights = x.bfloat16().requires_grad_(), probs.clone().requires_grad_()
        out = namespace.permute_and_quantize(tokens, chosen, RECIPES[name], probs=weights, align=32)
        value = namespace.dequantize(out.quantized)
        cotangent = torch.arange(value.numel()).reshape(value.shape).remainder(255).bfloat16()
        made.append(
            torch.autograd.grad([value, out.probs], [tokens, weights], [cotangent, torch.arange(len(value)).float()])
        )
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_what_needs_no_gradient_is_not_in_the_graph():
    x, chosen, probs = inputs()
    out = moe_fast.permute_and_quantize(x, chosen, RECIPES["block"], probs=probs.requires_grad_(), align=32)
    assert not moe_fast.dequantize(out.quantized).requires_grad and out.probs.requires_grad


@pytest.mark.parametrize("wrong", ["codes", "scales", "probs", "state"])
def test_a_wrong_result_is_noticed(wrong, monkeypatch):
    """One number in the last row or expert is another."""
    original = moe_fast.permute_and_quantize

    def changed(*arguments: Any, **settings: Any) -> Any:
        out = original(*arguments, **settings)
        form = out.quantized.rowwise
        if wrong == "codes":
            form.codes_MN[-1, -1] ^= 1
        elif wrong == "scales":
            form.scale.flatten()[-1:].mul_(2)
        elif wrong == "probs":
            out.probs[-1] += 1
        else:
            out.state.amax_history[-1, 0] += 1
        return out

    x, chosen, probs = inputs()
    agree("delayed", x, chosen, probs, align=32)
    monkeypatch.setattr(moe_fast, "permute_and_quantize", changed)
    with pytest.raises(AssertionError):
        agree("delayed", x, chosen, probs, align=32)
