"""permute_and_quantize: the reference is permute, then quantize; the suite accepts who does it
otherwise, and finds each classic mistake.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases
from conformance.families.fused import FAMILY
from conformance.families.fused.cases import PermutedQuantizationCase, permuting
from moe_ref.config import PermutedQuantization, QuantizerState, Recipe
from moe_ref.permutation.permute import PADDING
from moe_ref.quantization.quantize import turned
from tests.common.suite import assert_accepted, outcome_of, reference

EVERY = 12  # one of so many cases of the covering array

# six tokens, three experts: the last token and the last expert have nobody
ROUTING = (0b011, 0b001, 0b010, 0b011, 0b001, 0)
CURRENT = PermutedQuantizationCase(
    function="permute_and_quantize", tokens=6, experts=3, hidden=21, routing=ROUTING, align=5, seed=1
)
BLOCK = replace(CURRENT, scaling="block", hidden=150)
MXFP8 = replace(CURRENT, scaling="mxfp8", hidden=3, align=1)
DELAYED = replace(CURRENT, scaling="delayed")
SUMMED = replace(CURRENT, grads="tokens+probs", probs="float32")


# ---- the reference


def test_one_step_is_two():
    tokens, chosen = torch.randn(70, 64), torch.rand(70, 5) < 0.4
    probs, recipe = torch.rand(70, 5), Recipe("mxfp8")
    settings: dict[str, Any] = {"probs": probs, "align": 32, "num_rows": 256}
    one_step = moe_ref.permute_and_quantize(tokens, chosen, recipe, **settings, columnwise=True)
    permuted = moe_ref.permute(tokens, chosen, **settings)
    two_steps = moe_ref.quantize(permuted.rows, recipe, splits=permuted.tokens_per_expert, columnwise=True)
    for columnwise in (False, True):
        for read in (moe_ref.codes, moe_ref.scales, moe_ref.amax, moe_ref.dequantize):
            assert torch.equal(
                read(one_step.quantized, columnwise=columnwise), read(two_steps.quantized, columnwise=columnwise)
            )
    for name in ("probs", "tokens_per_expert", "pad_offsets", "overflow"):
        assert torch.equal(getattr(one_step, name), getattr(permuted, name))
    assert torch.equal(one_step.row_map.token_P, permuted.row_map.token_P)
    assert one_step.state is None


def test_the_gradient_is_that_of_permute():
    tokens, probs = torch.randn(9, 8, requires_grad=True), torch.rand(9, 3, requires_grad=True)
    chosen = torch.rand(9, 3) < 0.5
    permuted_codes = moe_ref.permute_and_quantize(tokens, chosen, Recipe("current"), probs=probs, align=4)
    value = moe_ref.dequantize(permuted_codes.quantized)
    d_value, d_probs = torch.randn_like(value), torch.randn(len(value))
    got = torch.autograd.grad([value, permuted_codes.probs], [tokens, probs], [d_value, d_probs])
    permuted = moe_ref.permute(tokens, chosen, probs=probs, align=4)
    expected = torch.autograd.grad([permuted.rows, permuted.probs], [tokens, probs], [d_value, d_probs])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_next_state_knows_every_expert():
    state = QuantizerState(torch.tensor([[9.0, 0], [0, 0]]), torch.tensor([2.0, 4.0]))
    tokens, chosen = torch.tensor([[1.0], [3.0], [99.0]]), torch.tensor([[1, 1], [0, 1], [0, 0]])
    permuted_codes = moe_ref.permute_and_quantize(tokens, chosen, Recipe("delayed", amax_history_len=2), state=state)
    assert permuted_codes.state is not None
    assert permuted_codes.state.amax_history.tolist() == [[9, 0], [3, 0]]
    assert torch.equal(moe_ref.scales(permuted_codes.quantized), 1 / state.scale)


@pytest.mark.parametrize(
    ("recipe", "settings", "word"),
    [
        (Recipe("mxfp8"), {}, "align"),
        (Recipe("mxfp8"), {"align": 48}, "align"),
        (Recipe("nvfp4"), {"capacity": 24}, "capacity"),
        (Recipe("nvfp4"), {"align": 16, "role": "grad_output"}, "stochastic_rounding"),
        (Recipe("current"), {"align": 4, "num_rows": 6}, "num_rows"),
        (Recipe("current"), {"rowwise": False}, "rowwise"),
        (Recipe("delayed"), {}, "state"),
        ("mxfp8", {}, "recipe"),
    ],
)
def test_an_illegal_call_is_refused_before_the_device_is_asked(recipe, settings, word):
    with pytest.raises(ValueError, match=word):
        moe_ref.permute_and_quantize(torch.zeros(4, 32), torch.ones(4, 2, dtype=torch.bool), recipe, **settings)


@pytest.mark.parametrize("namespace", ["moe_ref.fused", "moe_fast.fused"])
def test_a_namespace_of_fused_functions_offers_all_that_reads_their_results(namespace):
    offered = set(import_module(namespace).__all__)
    for contract in FAMILY.contracts:
        assert {contract.function, *contract.companions} <= offered


# ---- who does it otherwise


def in_steps(
    rows: Callable[..., Tensor] | None = None,
    splits: Callable[..., Tensor] | None = None,
    **changes: Callable[..., Any],
) -> SimpleNamespace:
    """permute, then quantize, with something done to the rows and splits in between, and to what is
    returned afterwards.
    """

    def permute_and_quantize(
        tokens, routing_map, recipe, *, probs=None, align=None, capacity=None, num_rows=None, **settings
    ):
        permuted = moe_ref.permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
        quantised = permuted.rows if rows is None else rows(permuted, tokens)
        sizes = permuted.tokens_per_expert if splits is None else splits(permuted, routing_map)
        out = PermutedQuantization(*moe_ref.quantize(quantised, recipe, splits=sizes, **settings), *permuted[1:])
        return out._replace(**{name: change(out) for name, change in changes.items()})

    return reference(permute_and_quantize=permute_and_quantize)


def test_two_steps_are_accepted():
    cases = covering_cases("permute_and_quantize", Space()).cases[::EVERY]
    assert_accepted(cases, in_steps())


def test_what_permute_may_leave_out_is_not_compared_with_the_one_step():
    """Without `num_rows` nothing overflows, and `overflow` may be None."""

    def permute(*inputs, **settings):
        out = moe_ref.permute(*inputs, **settings)
        return out if "num_rows" in settings else out._replace(overflow=None)

    case = replace(CURRENT, law="two_steps")
    assert outcome_of(case, reference(permute=permute)).status == "PASS"

    def doubled(*inputs, **settings):
        out = permute(*inputs, **settings)
        return out._replace(rows=2 * out.rows)

    assert outcome_of(case, reference(permute=doubled)).finding["check"] == "two_steps"


# ---- classic mistakes


def with_codes_of(out: PermutedQuantization, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The quantised rows with other codes: change(codes of a segment, whether rows are padding)."""
    sizes = out.tokens_per_expert.tolist()
    padding = (out.row_map.token_P == PADDING)[: sum(sizes)].split(sizes)

    def changed(form):
        pairs = zip(form.groups, padding, strict=True)
        groups = (
            group._replace(codes=turned(change(turned(group.codes, form.columnwise), rows), form.columnwise))
            for group, rows in pairs
        )
        return replace(form, groups=tuple(groups))

    quantized = out.quantized
    return replace(
        quantized,
        rowwise=quantized.rowwise and changed(quantized.rowwise),
        columnwise=quantized.columnwise and changed(quantized.columnwise),
    )


def loud_padding(permuted, tokens):
    """What was in the buffer before."""
    return torch.where((permuted.row_map.token_P == PADDING)[:, None], 64.0, permuted.rows)


def padding_of_zeros(out):
    return with_codes_of(out, lambda codes, padding: torch.where(padding[:, None], 0, codes))


def scales_one_row_late(out):
    form = out.quantized.rowwise
    return replace(
        out.quantized,
        rowwise=replace(form, groups=tuple(group._replace(scale=group.scale.roll(1, 0)) for group in form.groups)),
    )


def codes_one_row_late(out):
    return with_codes_of(out, lambda codes, padding: codes.roll(1, 0))


def unpadded(permuted, routing_map):
    return (routing_map != 0).sum(0)


def all_tokens(permuted, tokens):
    """A first row as large as any token, routed or not."""
    most = torch.where(tokens.isfinite(), tokens, 64).abs().amax()
    rows = permuted.rows.clone()
    rows[0, 0] = most
    return rows


def second_segment_one_row_late(permuted, routing_map):
    return permuted.tokens_per_expert + torch.tensor([1, -1, 0])


def first_row_only(permuted, tokens):
    """The gradient of a token comes from the first of its rows."""
    tokens_seen: set[int] = set()
    first = torch.tensor(
        [t >= 0 and not (t in tokens_seen or tokens_seen.add(t)) for t in permuted.row_map.token_P.tolist()]
    )
    return torch.where(first[:, None], permuted.rows, permuted.rows.detach())


def clipped_gradient(permuted, tokens):
    return torch.where(permuted.rows.abs() < permuted.rows.detach().abs().amax(), permuted.rows, permuted.rows.detach())


def other_experts_state(tokens, routing_map, recipe, *, state, **settings):
    return moe_ref.permute_and_quantize(
        tokens, routing_map, recipe, state=QuantizerState(state.amax_history, state.scale.roll(1)), **settings
    )


def forgets_what_was_seen(out):
    return out.state._replace(
        amax_history=torch.cat([torch.zeros_like(out.state.scale)[:, None], out.state.amax_history[:, 1:]], 1)
    )


def neighbours_row_map(out):
    return replace(out.row_map, token_P=out.row_map.token_P.roll(1))


MISTAKES = [
    (
        in_steps(rows=loud_padding, quantized=padding_of_zeros),
        replace(BLOCK, direction="columnwise"),
        "amax.columnwise",
    ),
    (in_steps(rows=loud_padding, quantized=padding_of_zeros), CURRENT, "amax"),
    (in_steps(rows=loud_padding), BLOCK, "amax"),
    (in_steps(quantized=scales_one_row_late), replace(BLOCK, values="rows"), "scales"),
    (in_steps(quantized=codes_one_row_late), BLOCK, "codes"),
    (in_steps(splits=unpadded), replace(CURRENT, values="rows"), "amax"),
    (in_steps(splits=second_segment_one_row_late), replace(BLOCK, direction="columnwise"), "amax.columnwise"),
    (in_steps(rows=all_tokens), CURRENT, "amax"),
    (reference(permute_and_quantize=other_experts_state), DELAYED, "scales"),
    (in_steps(state=forgets_what_was_seen), replace(DELAYED, values="huge"), "state.amax_history"),
    (in_steps(rows=first_row_only), SUMMED, "d_tokens"),
    (in_steps(rows=clipped_gradient), replace(SUMMED, grads="tokens"), "d_tokens"),
    (in_steps(probs=lambda out: out.probs.roll(1)), SUMMED, "probs"),
    (in_steps(row_map=neighbours_row_map), CURRENT, "row_sums"),
    (in_steps(overflow=lambda out: torch.zeros_like(out.overflow)), replace(CURRENT, slack=-1), "overflow"),
    (in_steps(tokens_per_expert=lambda out: out.tokens_per_expert - 1), CURRENT, "tokens_per_expert"),
]


@pytest.mark.parametrize(("namespace", "case", "output"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_classic_mistake_is_found_where_it_was_made(namespace, case, output):
    assert outcome_of(case, moe_ref).status == "PASS"
    finding = outcome_of(case, namespace).finding or {}
    assert finding.get("output") == output


# ---- what is asked


@pytest.mark.parametrize("scaling", ["current", "mxfp8", "nvfp4"])
def test_scalings_of_whole_blocks_always_have_an_alignment_or_a_capacity(scaling):
    unit = {"mxfp8": 32, "nvfp4": 16}.get(scaling, 1)
    case = replace(CURRENT, scaling=scaling, hidden=1, align=0)
    assert permuting(case).align == (unit if unit > 1 else 0)
    assert permuting(replace(case, align=3)).align == 3 * unit
    assert (permuting(replace(case, capacity=2)).align, permuting(replace(case, capacity=2)).capacity) == (
        0,
        2 * unit,
    )
    assert permuting(case).hidden == unit


def test_tokens_without_a_row_hold_what_must_reach_no_amax():
    problem = CONTRACTS["permute_and_quantize"].legal(replace(CURRENT, slack=-1, align=0))
    permuted = moe_ref.permute(
        problem.required["tokens"], problem.required["routing_map"], num_rows=problem.settings["num_rows"]
    )
    assert permuted.rows.isfinite().all()
    assert not problem.required["tokens"][-1].isfinite().any()
