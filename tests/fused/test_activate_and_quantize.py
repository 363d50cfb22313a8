"""Activations quantised in one step: the reference is its two halves, honest variants are accepted,
mistakes are found.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.families.fused.cases import QuantizedActivationCase
from moe_ref.config import Quantization, Recipe
from moe_ref.config.fused_activations import QuantizedGradients
from moe_ref.quantization.formats import E4M3, encode
from moe_ref.quantization.quantize import Form, Quantized
from moe_ref.quantization.recipes import Scaled
from tests.common.suite import (
    WITH_UNSUPPORTED,
    assert_accepted,
    failures,
    gate_cases,
    in_turn,
    outcome_of,
    reference,
    statuses,
    wrapped,
)  # fmt: skip
from tests.honest.quantizers import Multiplies

EVERY, DRAWS = 6, 4  # one in so many of the covering array; drawn cases per seed
READ = ("amax", "scales", "codes", "dequantize")
FUNCTIONS = (
    *("glu_and_quantize", "activation_and_quantize"),
    *("glu_backward_and_quantize", "activation_backward_and_quantize"),
)


# ---- the reference


@pytest.mark.parametrize("scaling", ["current", "block", "mxfp8"])
def test_rounded_before_it_is_the_two_steps_one_after_the_other(scaling):
    h, probs, splits = torch.randn(96, 128).bfloat16(), torch.rand(96), torch.tensor([32, 0, 64])
    settings: dict[str, Any] = {"splits": splits, "columnwise": True}
    at_once = moe_ref.glu_and_quantize(
        h, Recipe(scaling), probs=probs, clamp=2.0, **settings, round_before_quantize=True
    ).quantized
    two_steps = moe_ref.quantize(moe_ref.glu(h, probs=probs, clamp=2.0), Recipe(scaling), **settings).quantized
    gradients = moe_ref.glu_backward(h[:, :64], h, probs=probs)
    gradient = moe_ref.glu_backward_and_quantize(
        h[:, :64], h, Recipe(scaling), probs=probs, **settings, round_before_quantize=True
    )
    back_after = moe_ref.quantize(gradients.d_h, Recipe(scaling), role="grad_output", **settings).quantized
    assert torch.equal(gradient.d_probs, gradients.d_probs)
    for name in READ:
        for columnwise in (False, True):
            read = getattr(moe_ref, name)
            assert torch.equal(read(at_once, columnwise=columnwise), read(two_steps, columnwise=columnwise))
            assert torch.equal(read(gradient.quantized, columnwise=columnwise), read(back_after, columnwise=columnwise))


def test_by_itself_it_is_quantised_from_float32_and_comes_back_in_the_dtype_of_h():
    h, probs = torch.randn(8, 64).bfloat16(), torch.rand(8)
    quantized = moe_ref.glu_and_quantize(h, Recipe("current"), probs=probs).quantized
    assert torch.equal(moe_ref.amax(quantized), moe_ref.glu(h.float(), probs=probs).abs().amax().reshape(1))
    assert moe_ref.dequantize(quantized).dtype == torch.bfloat16


def test_the_gradient_is_the_activations_and_zero_past_the_last_group():
    h, probs = (
        torch.randn(6, 8, dtype=torch.float64, requires_grad=True),
        torch.rand(6, dtype=torch.float64, requires_grad=True),
    )
    with torch.no_grad():
        h[4:] = torch.nan
    value = moe_ref.dequantize(
        moe_ref.glu_and_quantize(h, Recipe("current"), probs=probs, splits=torch.tensor([1, 3])).quantized
    )
    d_h, d_probs = torch.autograd.grad(value, [h, probs], torch.ones_like(value))
    expected = moe_ref.glu_backward(torch.ones(4, 4, dtype=torch.float64), h.detach()[:4], probs=probs.detach()[:4])
    assert torch.equal(d_h, torch.cat([expected.d_h, torch.zeros(2, 8)]))
    assert torch.equal(d_probs, torch.cat([expected.d_probs, torch.zeros(2)]))


# ---- honest variants


def built(activation: Callable[..., Tensor], backward: Callable[..., Any], quantizer: Any) -> list[Callable[..., Any]]:
    """The two functions of one kind: an unrounded activation, its gradient and a quantiser."""

    def quantized(x: Tensor, like: Tensor, recipe: Recipe, rounds: bool, forms: dict[str, Any]) -> tuple[Any, Any]:
        x = x.to(like.dtype) if rounds else x.float()
        x = torch.cat([x, x.new_zeros(len(like) - len(x), x.shape[1])])
        quantized, state = quantizer.quantize(x, recipe, **{name: y for name, y in forms.items() if y is not None})
        return InDtype(quantized, like.dtype), state

    def forward(
        h, recipe, *, splits=None, probs=None, rowwise=True, columnwise=False, state=None, round_before_quantize=False,
        **settings,
    ):  # fmt: skip
        end = len(h) if splits is None else int(splits.sum())
        a = activation(h[:end].double(), probs=None if probs is None else probs[:end].double(), **settings)
        forms = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state}
        return Quantization(*quantized(a, h, recipe, round_before_quantize, forms))

    def backward_and_quantize(
        d_out, h, recipe, *, splits=None, probs=None, rowwise=True, columnwise=False, state=None, noise=None,
        round_before_quantize=False, **settings,
    ):  # fmt: skip
        end = len(h) if splits is None else int(splits.sum())
        p = None if probs is None else probs[:end].double()
        d_h, d_probs = backward(d_out[:end].double(), h[:end].double(), probs=p, **settings)
        forms = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state, "noise": noise}
        if d_probs is not None:
            d_probs = torch.cat([d_probs.to(probs.dtype), probs.new_zeros(len(h) - end)])
        forms |= {"role": "grad_output"}
        return QuantizedGradients(*quantized(d_h, h, recipe, round_before_quantize, forms), d_probs)

    return [forward, backward_and_quantize]


class InDtype(SimpleNamespace):
    """What a quantiser made of a tensor in another dtype."""

    def __init__(self, quantized: Any, dtype: torch.dtype) -> None:
        super().__init__(quantized=quantized, dtype=dtype)


def in_float64(quantizer: Any, **declared: Any) -> SimpleNamespace:
    """Activations in float64, and another quantiser; without gradients."""
    gated = built(moe_ref.glu, moe_ref.glu_backward, quantizer)
    ungated = built(moe_ref.activation, moe_ref.activation_backward, quantizer)

    def reading(name: str) -> Callable[..., Tensor]:
        def read(result: InDtype, **form: Any) -> Tensor:
            value: Tensor = getattr(quantizer, name)(result.quantized, **form)
            return value.to(result.dtype) if name == "dequantize" else value

        return read

    names = dict(zip(FUNCTIONS, (gated[0], ungated[0], gated[1], ungated[1]), strict=True))
    return SimpleNamespace(
        **names, **{name: reading(name) for name in READ}, declares=lambda name: declared | {"differentiable": False}
    )


HONEST = {
    "the_reference": moe_ref,
    "in_float64": in_float64(moe_ref),
    "by_reciprocals": in_float64(Multiplies, scale_arithmetic="reciprocal"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", HONEST)
def test_honest_variants_are_accepted(name, function):
    cases = gate_cases(function, every=EVERY, draws=DRAWS)
    if name != "the_reference":
        high = [replace(case, law="") for case in cases if not case.illegal and not case.grads]
        cases = in_turn(high, name, HONEST)
    assert_accepted(cases, HONEST[name], statuses=WITH_UNSUPPORTED, share=1 / 3)


# ---- what is wrong in one place


def with_setting(**changes: Any) -> Callable[..., Any]:
    return lambda original, *args, **settings: original(*args, **settings | changes)


def without(name: str) -> Callable[..., Any]:
    return lambda original, *args, **settings: original(*args, **{key: x for key, x in settings.items() if key != name})


def regrouped(quantized: Quantized, change: Callable[[int, Scaled], Scaled]) -> Quantized:
    """What was quantised by rows, each group changed."""
    assert quantized.rowwise is not None
    form: Form = quantized.rowwise
    return Quantized(
        replace(form, groups=tuple(change(g, group) for g, group in enumerate(form.groups))), quantized.columnwise
    )


def prob_after_the_scale(original, h, recipe, *, probs, **settings):
    """The scale comes from values without their probs; the reported amax is right."""
    quantized, state = original(h, recipe, probs=probs, **settings)
    bare, _ = original(h, recipe, **settings)
    a = moe_ref.glu(h.float(), probs=probs)

    def change(g: int, group: Scaled) -> Scaled:
        scale = bare.form(False).groups[g].scale
        return Scaled(encode(a / scale, E4M3), scale, group.amax)

    return Quantization(regrouped(quantized, change), state)


def gates_in_the_amax(original, h, recipe, **settings):
    quantized, state = original(h, recipe, **settings)
    return Quantization(
        regrouped(quantized, lambda g, group: group._replace(amax=torch.maximum(group.amax, h.abs().amax().float()))),
        state,
    )


def one_code_off(original, *args, **settings):
    quantized = original(*args, **settings)

    def change(g: int, group: Scaled) -> Scaled:
        codes = group.codes.clone()
        codes[-1, -1] ^= 1
        return group._replace(codes=codes)

    return quantized._replace(quantized=regrouped(quantized.quantized, change))


def turned_blocks(original, h, recipe, *, rowwise=True, columnwise=False, **settings):
    quantized, state = original(h, recipe, rowwise=True, columnwise=True, **settings)
    assert quantized.columnwise is not None
    return Quantization(Quantized(replace(quantized.columnwise, columnwise=False), None), state)


def cuts_off(original, h, recipe, **settings):
    """Codes of what was cut to 16 bits instead of rounded."""
    quantized, state = original(h, recipe, **settings)
    a = (moe_ref.glu(h.float(), probs=settings.get("probs")).view(torch.int32) & -0x10000).view(torch.float32)
    return Quantization(
        regrouped(quantized, lambda g, group: group._replace(codes=encode(a / group.scale, E4M3))), state
    )


def forgets_the_amax(original, h, recipe, *, state, **settings):
    quantized, _ = original(h, recipe, state=state, **settings)
    return Quantization(quantized, state)


def reads_padding(original, h, recipe, *, splits, **settings):
    all_rows = torch.cat([splits[:-1], splits[-1:] + len(h) - splits.sum()])
    return original(h.nan_to_num(1, 1, 1), recipe, splits=all_rows, **settings)


def stops_gradients(original, h, recipe, **settings):
    return original(h.detach(), recipe, **settings)


def probs_not_masked(original, d_out, h, recipe, *, splits, probs, **settings):
    quantized = original(d_out, h, recipe, splits=splits, probs=probs, **settings)
    return quantized._replace(d_probs=moe_ref.glu_backward(d_out, h, probs=probs).d_probs)


def half_of_d_h(original, d_out, h, recipe, **settings):
    """Values have the gradient of gates."""
    quantized = original(d_out, h, recipe, **settings)
    width = h.shape[1] // 2
    return quantized._replace(
        quantized=regrouped(quantized.quantized, lambda g, x: x._replace(codes=torch.cat([x.codes[:, :width]] * 2, 1)))
    )


def wide_values(quantized, **settings):
    return moe_ref.dequantize(quantized, **settings).float()


changed = functools.partial(wrapped, "glu_and_quantize")
changed_back = functools.partial(wrapped, "glu_backward_and_quantize")
CASE = QuantizedActivationCase(
    function="glu_and_quantize", tokens=12, width=16, probs="float32", dtype="bfloat16", seed=1
)
GROUPS = replace(CASE, experts=3, counts=(5, 0, 7), tail=3)
BLOCKS = replace(CASE, scaling="block", width=150)
GRADIENT = replace(CASE, function="glu_backward_and_quantize")
SQUARE = replace(CASE, function="activation_and_quantize")
WRONG = [
    (CASE, changed(with_setting(round_before_quantize=True)), ("amax", "codes")),
    (replace(CASE, rounded=True), changed(without("round_before_quantize")), ("amax", "codes")),
    (CASE, changed(without("probs")), ("amax",)),
    (CASE, changed(prob_after_the_scale), ("scales",)),
    (CASE, changed(gates_in_the_amax), ("amax",)),
    (replace(CASE, clamp=4), changed(without("clamp")), ("amax",)),
    (replace(CASE, offset=8), changed(without("offset")), ("amax",)),
    (replace(CASE, alpha=1702), changed(without("alpha")), ("amax",)),
    (replace(CASE, interleave=4), changed(without("interleave")), ("amax",)),
    (replace(CASE, scaling="mxfp8", tokens=1, width=1), changed(turned_blocks), ("amax",)),
    *((replace(case, probs=""), wrapped(case.function, one_code_off), ("codes",)) for case in (CASE, BLOCKS, SQUARE,
     GRADIENT)),
    (replace(CASE, tokens=40), changed(cuts_off), ("codes",)),
    (replace(CASE, scaling="delayed"), changed(forgets_the_amax), ("state.amax_history",)),
    (GROUPS, changed(reads_padding), ("amax",)),
    (replace(CASE, grads="h+probs"), changed(stops_gradients), ("d_h",)),
    (replace(GROUPS, function="glu_backward_and_quantize"), changed_back(probs_not_masked), ("d_probs",)),
    (GRADIENT, changed_back(half_of_d_h), ("codes",)),
    (GRADIENT, changed_back(with_setting(round_before_quantize=True)), ("amax", "codes")),
    (replace(GRADIENT, clamp=4), changed_back(without("clamp")), ("amax", "codes")),
    (replace(SQUARE, kind="gelu"), wrapped("activation_and_quantize", with_setting(kind="gelu_tanh")),
     ("amax", "codes")),
    (CASE, reference(dequantize=wide_values), ("values",)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "wrong", "outputs"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_every_mistake_is_found_where_it_is(case, wrong, outputs):
    outputs_found = {output for output, _ in failures(case, wrong, 3)}
    assert outputs_found and outputs_found <= set(outputs)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_the_reference_passes_the_cases_that_find_mistakes(case):
    assert statuses(case, moe_ref, 2) == {"PASS"}


# ---- laws


def only_the_first_is_right(function: str) -> SimpleNamespace:
    """From the second call on, h counts as larger than it is."""
    calls: list[int] = []

    def wrapper(original, *args, **settings):
        calls.append(1)
        changed = [x * 1.25 if isinstance(x, Tensor) and len(calls) > 1 else x for x in args]
        return original(*changed, **settings)

    return wrapped(function, wrapper, deterministic=True)


LAWFUL = replace(CASE, experts=3, counts=(5, 3, 4), tail=2)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "law", ["neighbour_groups", "padding_values", "doubled_probs", "history", "determinism", "buffer_reuse"]
)
def test_a_law_is_broken_by_what_is_right_once_only(law, function):
    case = replace(LAWFUL, function=function, law=law)
    assert CONTRACTS[function].laws[law].applies(case)
    broken, lawful = outcome_of(case, only_the_first_is_right(function)), outcome_of(case, moe_ref)
    assert broken.status == "FAIL" and broken.finding["check"] == law
    assert lawful.status == "PASS"


# ---- what is asked


def test_rows_past_the_last_group_hold_what_must_reach_nothing():
    case = replace(GROUPS, tail=6)
    problem = CONTRACTS[case.function].problem(case)
    behind = problem.required["h"][case.tokens * case.unit :]
    assert not behind.isfinite().any() and not problem.settings["probs"][-6:].isfinite().any()
