"""Expert MLPs that differ in what the contract leaves open are accepted; every other difference is
found where it is.
"""

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
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from moe_ref.config import check_shared_experts
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import expert_slices, grouped_linear, linear
from tests.common.suite import assert_accepted, failures, gate_cases, in_turn, outcome_of, reference, statuses
from tests.experts.staged_mlp import staged, taken_apart

FUNCTIONS = ("grouped_mlp", "sequential_mlp", "shared_experts")


# ---- honest ones


def kept_wide(*tensors, **settings):
    """All in float64 by autograd, rounded once at the end: no stage is rounded on its way."""
    settings.pop("round_before_probs", None)
    call = taken_apart(*tensors, **settings)
    out = []
    for e, segment in enumerate(expert_slices(call.counts, len(call.rows))):
        x, p = call.rows[segment].double(), None if call.probs is None else call.probs[segment].double()
        if p is not None and call.probs_on_input:
            x, p = x * p[:, None], None
        h = x @ call.fc1[e].double().T + (0 if call.fc1_bias is None else call.fc1_bias[e].double())
        y = call.act(h, probs=p) @ call.fc2[e].double().T
        if call.fc2_bias is not None:
            y = y + call.fc2_bias[e].double() * (1 if p is None else p[:, None])
        out.append(y)
    past_the_end = call.rows[int(call.counts.sum()) :].new_zeros(()).double()
    return torch.cat([*out, past_the_end.expand(len(call.rows) - sum(map(len, out)), call.rows.shape[1])]).to(
        call.rows.dtype
    )


def shared_kept_wide(x, fc1, fc2, *, gate_weight=None, recompute=False, **activation):
    act = chosen_activation(activation.pop("kind", "swiglu"), **activation)
    check_shared_experts(x, fc1, fc2, gate_weight, act.keywords["kind"], activation.get("interleave"))
    y = act(x.double() @ fc1.double().T) @ fc2.double().T
    return (y if gate_weight is None else y * torch.sigmoid(x.double() @ gate_weight.double().T)).to(x.dtype)


HONEST = {
    "reference": moe_ref,
    "kept_wide": SimpleNamespace(grouped_mlp=kept_wide, sequential_mlp=kept_wide, shared_experts=shared_kept_wide),
}
ROUNDED = "rounded_before_the_probs"  # a golden case about a rounding that no wide stage has


@functools.cache
def cases_of(function: str):
    return [case for case in gate_cases(function, every=4) if not ranks_of(CONTRACTS[function], case)][::3]


def in_high_precision(case) -> bool:
    return not {"recipe", "state", "noise"} & set(CONTRACTS[case.function].problem(case).settings)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", HONEST)
def test_honest_experts_are_accepted(name, function):
    def offered(case) -> bool:
        return name == "reference" or (case.golden != ROUNDED and in_high_precision(case))

    assert_accepted(in_turn(filter(offered, cases_of(function)), name, HONEST), HONEST[name])


# ---- what is wrong in one place


def half(x):
    return x.bfloat16().to(x.dtype)


def layer(change) -> SimpleNamespace:
    """The reference's linear layer as `change(rows, weight, counts, bias)` calls it."""
    return SimpleNamespace(grouped_linear=lambda rows, weight, counts, bias=None: change(rows, weight, counts, bias))


HALF_WEIGHT = layer(lambda x, w, counts, bias: grouped_linear(x, half(w), counts, bias=bias))
HALF_HIDDEN = layer(lambda x, w, counts, bias: half(grouped_linear(x, w, counts, bias=bias)))
HALF_ACTIVATION = layer(lambda x, w, counts, bias: grouped_linear(half(x), w, counts, bias=bias))
NO_BIAS = layer(lambda x, w, counts, bias: grouped_linear(x, w, counts))


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

    def grouped_mlp(rows, *arguments, fc2_bias=None, probs=None, **settings):
        fc2_bias, probs = (fc2_bias, probs) if fc2_bias is None else change(fc2_bias, probs)
        return moe_ref.grouped_mlp(rows, *arguments, fc2_bias=fc2_bias, probs=probs, **settings)

    return SimpleNamespace(grouped_mlp=grouped_mlp)


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
    (MLP, staged(mistake="weighted_after_the_bias"), "out"),
    (MLP, staged(mistake="bias_not_weighted"), "out"),
    (MLP, staged(mistake="neighbours_bias"), "out"),
    (replace(MLP, align=4), staged(mistake="padding_kept"), "out"),
    (MLP, staged(HALF_HIDDEN), "out"),
    (MLP, staged(moe_ref, HALF_ACTIVATION), "out"),
    (MLP, staged(HALF_WEIGHT), "out"),
    (MLP, staged(NO_BIAS), "out"),
    (replace(MLP, kind="geglu"), without("kind"), "out"),
    (replace(MLP, clamp=4), without("clamp"), "out"),
    (replace(MLP, offset=8), without("offset"), "out"),
    (replace(MLP, width=6, interleave=2), without("interleave"), "out"),
    (replace(MLP, on_input=True), without("probs_on_input"), "out"),
    (MLP, without("probs"), "out"),
    (MLP, without("fc2_bias"), "out"),
    (GRADED, with_bias(lambda bias, probs: (NoGradient.apply(bias), probs)), "d_fc2_bias"),
    (GRADED, with_bias(lambda bias, probs: (bias.detach(), probs)), "d_fc2_bias"),
    (GRADED, with_bias(lambda bias, probs: (bias, NoGradient.apply(probs))), "d_probs"),
    (replace(SHARED, grads="gate_weight"), shared(lambda y, z: y * torch.sigmoid(z.detach())), "d_gate_weight"),
    (SHARED, shared(lambda y, z: y * z), "out"),
    (SHARED, shared(lambda y, z: y), "out"),
    (SHARED, shared(lambda y, z: y * torch.sigmoid(z.bfloat16().to(z.dtype))), "out"),
    (replace(SHARED, clamp=4, kind="reglu"), without("clamp", "shared_experts"), "out"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "implementation", "output"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_every_mistake_is_found_where_it_is(case, implementation, output):
    assert (output, "bound") in failures(case, implementation, 6)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, *_ in WRONG), ids=lambda case: case.id)
def test_the_reference_passes_the_cases_that_find_mistakes(case):
    assert statuses(case, moe_ref, 2) == {"PASS"}


@pytest.mark.parametrize("case", [MLP, replace(MLP, align=4), replace(MLP, on_input=True), LARGE, GRADED])
def test_the_stages_are_right_where_none_is_wrong(case):
    assert outcome_of(case, staged()).status == "PASS"


def test_a_large_result_that_is_cut_off_instead_of_rounded_is_found_by_its_ratios():
    """The worst case of three roundings in a row allows it."""

    def grouped_mlp(*tensors, **settings):
        out = kept_wide(*(x.float() if x.is_floating_point() else x for x in tensors), **settings)
        return (out.view(torch.int32) & ~0x1FFFF).view(torch.float32).bfloat16()

    outcome = outcome_of(replace(LARGE, bias2=""), reference(grouped_mlp=grouped_mlp))
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
