"""Expert MLPs that differ in what the contract leaves open are accepted; those that differ in anything else are found, and where."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.analysis.mlp_stages import clamp_vjp, clamped
from conformance.analysis.running import Running
from conformance.catalogue import CONTRACTS
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import covering_cases, drawn, shape_cases, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.experts.mlp import MlpCase
from conformance.families.experts.shared import SharedCase
from conformance.interface import Implementation
from moe_ref.config import check_grouped_mlp, check_shared_experts
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import grouped_linear, linear, segments
from moe_ref.experts.mlp import _wide, pad_segments

poison.install()

FUNCTIONS = ("grouped_mlp", "sequential_mlp", "shared_experts")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products are quicker without others to wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- honest ones


def kept_wide(
    rows,
    counts,
    fc1,
    fc2,
    *,
    probs=None,
    fc1_bias=None,
    fc2_bias=None,
    recompute=None,
    align=None,
    probs_on_input=False,
    **activation,
):
    """All in float64 by autograd, rounded once at the end: no stage is rounded on its way."""
    act = chosen_activation(
        activation.pop("kind", "swiglu"), **{name: x for name, x in activation.items() if name != "round_before_probs"}
    )
    shown = activation.get("interleave")
    check_grouped_mlp(
        rows, counts, fc1, fc2, probs, fc1_bias, fc2_bias, shown, act.keywords["kind"], probs_on_input, align, recompute
    )
    out = []
    for e, own in enumerate(segments(counts, len(rows))):
        x, p = rows[own].double(), None if probs is None else probs[own].double()
        if p is not None and probs_on_input:
            x, p = x * p[:, None], None
        h = x @ fc1[e].double().T + (0 if fc1_bias is None else fc1_bias[e].double())
        y = act(h, probs=p) @ fc2[e].double().T
        if fc2_bias is not None:
            y = y + fc2_bias[e].double() * (1 if p is None else p[:, None])
        out.append(y)
    behind = rows.new_zeros((len(rows) - int(counts.sum()), rows.shape[1]), dtype=torch.float64)
    return torch.cat([*out, behind]).to(rows.dtype)


def shared_kept_wide(x, fc1, fc2, *, gate_weight=None, recompute=False, **activation):
    act = chosen_activation(activation.pop("kind", "swiglu"), **activation)
    check_shared_experts(x, fc1, fc2, gate_weight, act.keywords["kind"], activation.get("interleave"))
    y = act(x.double() @ fc1.double().T) @ fc2.double().T
    return (y if gate_weight is None else y * torch.sigmoid(x.double() @ gate_weight.double().T)).to(x.dtype)


HONEST = {
    "reference": moe_ref,
    "kept_wide": SimpleNamespace(grouped_mlp=kept_wide, sequential_mlp=kept_wide, shared_experts=shared_kept_wide),
}
ROUNDED = "rounded_before_the_probs"  # a golden case whose rounding is its point: none of the wide stages has it


@functools.cache
def cases_of(function: str):
    every = [*fixed_cases(function, Space()), *covering_cases(function, Space()).cases, *shape_cases(function, Space())]
    every = [*every, *(case for seed in (11, 12, 13) for case in drawn(strategy(function, Space()), seed, 20))]
    return [case for case in every if not ranks_of(CONTRACTS[function], case)]


def in_high_precision(case) -> bool:
    return not {"recipe", "state", "noise"} & set(CONTRACTS[case.function].problem(case).settings)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", HONEST)
def test_honest_experts_are_accepted(name, function):
    cases = [
        case
        for case in cases_of(function)
        if name == "reference" or (case.golden != ROUNDED and in_high_precision(case))
    ]
    outcomes = {case.text: evaluate(case, Implementation(HONEST[name], name)) for case in cases}
    assert {
        text: x.finding or x.reason for text, x in outcomes.items() if x.status not in ("PASS", "UNINFORMATIVE")
    } == {}
    assert sum(x.status == "PASS" for x in outcomes.values()) > len(outcomes) / 2


# ---- what is wrong in one place


def experts(
    rows,
    counts,
    fc1,
    fc2,
    *,
    probs=None,
    fc1_bias=None,
    fc2_bias=None,
    recompute=None,
    align=None,
    probs_on_input=False,
    wrong="",
    **how,
):
    """The reference's stages in a row, one of them wrong."""
    act = chosen_activation(how.pop("kind", "swiglu"), **how)
    check_grouped_mlp(
        rows,
        counts,
        fc1,
        fc2,
        probs,
        fc1_bias,
        fc2_bias,
        how.get("interleave"),
        act.keywords["kind"],
        probs_on_input,
        align,
        recompute,
    )
    wide, total, every = _wide(rows, probs, fc2_bias), int(counts.sum()), len(rows)
    inner, own = counts, torch.repeat_interleave(torch.arange(len(counts)), counts)
    rows, p = rows[:total], None if probs is None else probs[:total].to(wide)
    if align is not None and wrong == "padding_kept":
        rows, p = pad_segments(rows, counts, align), None if p is None else pad_segments(p, counts, align)
        inner = -(-counts // align) * align
    if p is not None and probs_on_input:
        rows, p = (rows.to(wide) * p[:, None]).to(rows.dtype), None
    h = grouped_linear(
        rows,
        fc1.bfloat16().to(fc1.dtype) if wrong == "half_weight" else fc1,
        inner,
        bias=None if wrong == "no_first_bias" else fc1_bias,
    )
    h = h.bfloat16().to(h.dtype) if wrong == "half_hidden" else h
    a = act(h, probs=None if wrong == "probs_last" else p)
    a = a.bfloat16().to(a.dtype) if wrong == "half_activation" else a
    y = grouped_linear(a, fc2, inner)
    if len(y) != total:
        return torch.cat([y, y.new_zeros((max(every - len(y), 0), y.shape[1]))])[
            :every
        ]  # the padding is still between the experts
    if wrong == "probs_last" and p is not None:
        y = (y.to(wide) * p[:, None]).to(y.dtype)
    if fc2_bias is not None:
        bias = fc2_bias.to(wide)[(own + 1) % len(counts) if wrong == "neighbours_bias" else own]
        y = (y.to(wide) + (bias if p is None or wrong == "bias_not_weighted" else bias * p[:, None])).to(y.dtype)
    if wrong == "probs_after_the_bias" and p is not None and fc2_bias is not None:
        y = ((y.to(wide) - bias * p[:, None] + bias) * p[:, None]).to(y.dtype)
    return torch.cat([y, y.new_zeros((every - total, y.shape[1]))])


class NoGradient(torch.autograd.Function):
    """x itself, and no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


def with_bias(change):
    """The reference with another second bias."""

    def grouped_mlp(rows, *others, fc2_bias=None, probs=None, **settings):
        fc2_bias, probs = (fc2_bias, probs) if fc2_bias is None else change(fc2_bias, probs)
        return moe_ref.grouped_mlp(rows, *others, fc2_bias=fc2_bias, probs=probs, **settings)

    return SimpleNamespace(grouped_mlp=grouped_mlp)


def wrongly(name: str) -> SimpleNamespace:
    return SimpleNamespace(grouped_mlp=functools.partial(experts, wrong=name))


def without(name: str, function: str = "grouped_mlp") -> SimpleNamespace:
    def call(*tensors, **settings):
        return getattr(moe_ref, function)(*tensors, **{key: x for key, x in settings.items() if key != name})

    return SimpleNamespace(**{function: call})


def shared(change) -> SimpleNamespace:
    """The reference's output without a gate, and another gate."""

    def shared_experts(x, fc1, fc2, *, gate_weight=None, **settings):
        y = moe_ref.shared_experts(x, fc1, fc2, **settings)
        return y if gate_weight is None else change(y, linear(x, gate_weight))

    return SimpleNamespace(shared_experts=shared_experts)


MLP = MlpCase(
    function="grouped_mlp",
    tokens=12,
    experts=3,
    counts=(5, 0, 7),
    hidden=6,
    width=5,
    probs="float32",
    bias1="float32",
    bias2="float32",
)
GRADED = replace(MLP, grads="rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias")
LARGE = replace(MLP, tokens=130, counts=(60, 0, 70), hidden=65, width=33, dtype="bfloat16")
SHARED = SharedCase(function="shared_experts", tokens=9, hidden=6, width=5, gate=True)
WRONG = [
    (MLP, wrongly("probs_after_the_bias"), "out", "bound"),
    (MLP, wrongly("bias_not_weighted"), "out", "bound"),
    (MLP, wrongly("neighbours_bias"), "out", "bound"),
    (replace(MLP, align=4), wrongly("padding_kept"), "out", "bound"),
    (MLP, wrongly("half_hidden"), "out", "bound"),
    (MLP, wrongly("half_activation"), "out", "bound"),
    (MLP, wrongly("half_weight"), "out", "bound"),
    (MLP, wrongly("no_first_bias"), "out", "bound"),
    (replace(MLP, kind="geglu"), without("kind"), "out", "bound"),
    (replace(MLP, clamp=4), without("clamp"), "out", "bound"),
    (replace(MLP, offset=8), without("offset"), "out", "bound"),
    (replace(MLP, width=6, interleave=2), without("interleave"), "out", "bound"),
    (replace(MLP, on_input=True), without("probs_on_input"), "out", "bound"),
    (MLP, without("probs"), "out", "bound"),
    (MLP, without("fc2_bias"), "out", "bound"),
    (GRADED, with_bias(lambda bias, probs: (NoGradient.apply(bias), probs)), "d_fc2_bias", "bound"),
    (GRADED, with_bias(lambda bias, probs: (bias.detach(), probs)), "d_fc2_bias", "bound"),
    (GRADED, with_bias(lambda bias, probs: (bias, NoGradient.apply(probs))), "d_probs", "bound"),
    (
        replace(SHARED, grads="gate_weight"),
        shared(lambda y, z: y * torch.sigmoid(z.detach())),
        "d_gate_weight",
        "bound",
    ),
    (SHARED, shared(lambda y, z: y * z), "out", "bound"),
    (SHARED, shared(lambda y, z: y), "out", "bound"),
    (SHARED, shared(lambda y, z: y * torch.sigmoid(z.bfloat16().to(z.dtype))), "out", "bound"),
    (replace(SHARED, clamp=4, kind="reglu"), without("clamp", "shared_experts"), "out", "bound"),
]


@pytest.mark.parametrize(("case", "wrong", "output", "check"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_is_wrong_in_one_place_is_found_there(case, wrong, output, check):
    outcomes = [evaluate(replace(case, seed=seed), Implementation(wrong, "here")) for seed in range(6)]
    assert (output, check) in {(x.finding["output"], x.finding["check"]) for x in outcomes if x.status == "FAIL"}


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_the_cases_that_find_it_are_passed_by_the_reference(case):
    assert {
        evaluate(replace(case, seed=seed), Implementation(HONEST["reference"], "here")).status for seed in range(6)
    } == {"PASS"}


@pytest.mark.parametrize("case", [MLP, replace(MLP, align=4), replace(MLP, on_input=True), LARGE, GRADED])
def test_the_stages_are_right_where_none_is_wrong(case):
    assert evaluate(case, Implementation(wrongly(""), "here")).status == "PASS"


def test_a_large_result_that_is_cut_off_instead_of_rounded_is_found_by_its_ratios():
    """The worst case of three roundings in a row allows it."""

    def grouped_mlp(*tensors, **settings):
        out = kept_wide(*(x.float() if x.is_floating_point() else x for x in tensors), **settings)
        return (out.view(torch.int32) & ~0x1FFFF).view(torch.float32).bfloat16()

    outcome = evaluate(replace(LARGE, bias2=""), Implementation(SimpleNamespace(grouped_mlp=grouped_mlp), "here"))
    assert outcome.status == "FAIL" and outcome.finding["check"] in ("bound", "ratio")


# ---- the analysis itself


def test_a_number_that_may_lie_on_both_sides_of_a_bound_passes_or_not():
    x = Running(
        torch.tensor([1.0, 2.0, 2.1, 3.0], dtype=torch.float64),
        torch.full((4,), 0.2, dtype=torch.float64),
        torch.float32,
    )
    g = Running(torch.full((4,), 5.0, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), torch.float32)
    through = clamp_vjp(g, x, -torch.inf, 2.0)
    assert through.value.tolist() == [5, 5, 0, 0]
    assert through.error.tolist() == [0, 5, 5, 0]
    assert clamped(x, -torch.inf, 2.0).error.tolist() == [0.2, 0.2, 0.2, 0]


def test_an_exact_number_on_the_bound_passes():
    x = Running.of(torch.tensor([2.0, 2.5]), torch.float32)
    through = clamp_vjp(Running.of(torch.tensor([5.0, 5.0]), torch.float32), x, -2.0, 2.0)
    assert through.value.tolist() == [5, 0] and through.error.tolist() == [0, 0]
