"""The two oracles, `moe_ref` and `moe_ref.permutation.second_oracle`, say the same, and both say what was worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.contract import Opaque, Problem
from conformance.families.permutation import FAMILY
from conformance.interface import named_outputs
from conformance.judge import judge
from conformance.judge.exact import bits
from moe_ref.permutation import second_oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
GOLDEN = [(name, case) for name in FAMILY.golden if hasattr(second_oracle, name) for case in FAMILY.golden[name]]
modest = settings(max_examples=40, deadline=None, database=None, derandomize=True)


def quarters(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Multiples of 1/4 from -4 to 4, zero included: every sum and product here is exact in float32."""
    return (torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


@st.composite
def maps(draw) -> Tensor:
    """One bit a cell: empty experts, idle tokens, tokens that go everywhere, one expert, no tokens."""
    tokens, experts = draw(st.sampled_from([0, 1, 2, 3, 4, 7])), draw(st.sampled_from([1, 2, 3, 5]))
    mask = draw(st.integers(0, 2 ** (tokens * experts) - 1))
    return torch.tensor([mask >> i & 1 for i in range(tokens * experts)], dtype=torch.bool).reshape(tokens, experts)


LENGTHS = {
    "as long as needed": st.just({}),
    "aligned": st.fixed_dictionaries({"align": st.integers(1, 5)}),
    "fixed rows": st.fixed_dictionaries({"num_rows": st.integers(0, 20)}),
    "fixed rows, aligned": st.builds(
        lambda align, blocks: {"align": align, "num_rows": align * blocks}, st.integers(1, 5), st.integers(0, 8)
    ),
    "capacity": st.fixed_dictionaries({"capacity": st.sampled_from([1, 2, 3, 4, 9])}),
}
each_length = pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    attached = [(x, quarters(place, *x.shape)) for place, x in enumerate(outputs) if x.requires_grad]
    if not attached:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad([x for x, _ in attached], inputs, [d for _, d in attached], allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found, strict=True)]


def assert_bit_equal(reference, other) -> None:
    for right, got in zip(reference, other, strict=True):
        assert (right is None) == (got is None)
        if right is not None:
            assert right.shape == got.shape and right.dtype == got.dtype
            assert np.array_equal(bits(right), bits(got)), (right, got)


def assert_equal(reference: list[Tensor], other: list[Tensor]) -> None:
    for right, got in zip(reference, other, strict=True):
        assert torch.equal(right, got), (right, got)


def without_row_map(permuted) -> list[Tensor]:
    return [x for name, x in permuted._asdict().items() if name != "row_map"]


@each_length
@modest
@given(st.data(), maps(), st.sampled_from(DTYPES), st.booleans())
def test_permute_agrees_bit_by_bit(length, data, routing_map, dtype, with_probs):
    chosen = data.draw(length)
    tokens = quarters(1, len(routing_map), 2, dtype=dtype)
    probs = quarters(2, *routing_map.shape, dtype=torch.float32) if with_probs else None
    right, got = (oracle.permute(tokens, routing_map, probs=probs, **chosen) for oracle in (moe_ref, second_oracle))
    assert_bit_equal(without_row_map(right), without_row_map(got))


@each_length
@modest
@given(st.data(), maps())
def test_gradients_of_permute_agree(length, data, routing_map):
    chosen = data.draw(length)
    tokens, probs = quarters(1, len(routing_map), 2).requires_grad_(), quarters(2, *routing_map.shape).requires_grad_()
    found = []
    for oracle in (moe_ref, second_oracle):
        permuted = oracle.permute(tokens, routing_map, probs=probs, **chosen)
        found.append(gradients([permuted.rows, permuted.probs], [tokens, probs]))
    assert_equal(*found)


@each_length
@modest
@given(st.data(), maps(), st.sampled_from(DTYPES), st.sampled_from([None, *DTYPES]))
def test_unpermute_agrees_bit_by_bit(length, data, routing_map, dtype, probs_dtype):
    chosen = data.draw(length)
    tokens = torch.zeros(len(routing_map), 2)
    probs = None if probs_dtype is None else quarters(2, *routing_map.shape, dtype=probs_dtype)
    permuted = [oracle.permute(tokens, routing_map, **chosen) for oracle in (moe_ref, second_oracle)]
    rows = quarters(3, *permuted[0].rows.shape, dtype=dtype)
    assert_bit_equal(
        [moe_ref.unpermute(rows, permuted[0].row_map, probs=probs)],
        [second_oracle.unpermute(rows, permuted[1].row_map, probs=probs)],
    )


@each_length
@modest
@given(st.data(), maps(), st.booleans())
def test_gradients_of_unpermute_agree(length, data, routing_map, with_probs):
    chosen = data.draw(length)
    tokens, probs = torch.zeros(len(routing_map), 2), quarters(2, *routing_map.shape).requires_grad_()
    found = []
    for oracle in (moe_ref, second_oracle):
        permuted = oracle.permute(tokens, routing_map, **chosen)
        rows = quarters(3, *permuted.rows.shape).requires_grad_()
        out = oracle.unpermute(rows, permuted.row_map, probs=probs if with_probs else None)
        found.append(gradients([out], [rows, probs]))
    assert_equal(*found)


@modest
@given(st.integers(0, 2**32 - 1))
def test_sums_of_inexact_terms_agree_bit_by_bit(seed):
    noise = torch.Generator().manual_seed(seed)
    routing_map = torch.rand(6, 8, generator=noise) < 0.7
    probs, permuted = (
        torch.rand(6, 8, generator=noise),
        [oracle.permute(torch.zeros(6, 5), routing_map, align=4) for oracle in (moe_ref, second_oracle)],
    )
    rows = torch.randn(permuted[0].rows.shape, generator=noise)
    assert_bit_equal(
        *(
            [oracle.unpermute(rows, p.row_map, probs=probs)]
            for oracle, p in zip((moe_ref, second_oracle), permuted, strict=True)
        )
    )


@modest
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_sort_chunks_agrees_in_values_and_gradients(sizes, behind, random):
    order = random.sample(range(len(sizes)), len(sizes))
    rows, probs = (
        quarters(1, sum(sizes) + behind, 2).requires_grad_(),
        quarters(2, sum(sizes) + behind).requires_grad_(),
    )
    right, got = (
        oracle.sort_chunks(rows, torch.tensor(sizes), torch.tensor(order), probs=probs)
        for oracle in (moe_ref, second_oracle)
    )
    assert_bit_equal(right, got)
    assert_equal(gradients(list(right), [rows, probs]), gradients(list(got), [rows, probs]))


@modest
@given(maps(), st.integers(1, 9))
def test_pad_routing_map_agrees(routing_map, align):
    assert_bit_equal(
        moe_ref.pad_routing_map(routing_map, align=align), second_oracle.pad_routing_map(routing_map, align=align)
    )


@modest
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_indices_to_multihot_agrees_in_values_and_gradients(experts, slots, tokens, seed, dtype):
    indices = torch.randint(
        -1, experts, (tokens, slots), generator=torch.Generator().manual_seed(seed)
    )  # repeats included
    assert_bit_equal(
        *(
            oracle.indices_to_multihot(indices, quarters(seed, tokens, slots, dtype=dtype), num_experts=experts)
            for oracle in (moe_ref, second_oracle)
        )
    )
    probs = quarters(seed, tokens, slots).requires_grad_()
    assert_equal(
        *(
            gradients([oracle.indices_to_multihot(indices, probs, num_experts=experts).probs], [probs])
            for oracle in (moe_ref, second_oracle)
        )
    )


@modest
@given(maps(), st.integers(1, 7), st.sampled_from(DTYPES))
def test_multihot_to_indices_agrees_in_values_and_gradients(routing_map, topk, dtype):
    assert_bit_equal(
        *(
            oracle.multihot_to_indices(routing_map, quarters(1, *routing_map.shape, dtype=dtype), topk=topk)
            for oracle in (moe_ref, second_oracle)
        )
    )
    probs = quarters(1, *routing_map.shape).requires_grad_()
    assert_equal(
        *(
            gradients([oracle.multihot_to_indices(routing_map, probs, topk=topk).probs], [probs])
            for oracle in (moe_ref, second_oracle)
        )
    )


@pytest.mark.parametrize("oracle", [moe_ref, second_oracle], ids=["reference", "second"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_an_integer_map_means_routed_where_it_is_not_zero(oracle, dtype):
    numbers = torch.tensor([[0, 3], [7, 0], [1, 1]], dtype=dtype)
    tokens, probs = quarters(1, 3, 2), quarters(2, 3, 2)
    for chosen in ({"align": 2}, {"capacity": 1}, {"num_rows": 3}):
        assert_bit_equal(
            *(without_row_map(oracle.permute(tokens, x, probs=probs, **chosen)) for x in (numbers, numbers != 0))
        )
    assert_bit_equal(oracle.pad_routing_map(numbers, align=3), oracle.pad_routing_map(numbers != 0, align=3))
    assert_bit_equal(
        oracle.multihot_to_indices(numbers, probs, topk=1), oracle.multihot_to_indices(numbers != 0, probs, topk=1)
    )


@pytest.mark.parametrize("oracle", [moe_ref, second_oracle], ids=["reference", "second"])
@pytest.mark.parametrize(("name", "case"), GOLDEN, ids=[f"{name}-{case}" for name, case in GOLDEN])
def test_golden_case_holds(oracle, name, case):
    problem, expected = FAMILY.golden[name][case]
    observed = answer(oracle, problem)
    assert [judge(output, right, observed[output]) for output, right in expected.items()] == [None] * len(expected)


def answer(oracle, problem: Problem) -> dict[str, Tensor]:
    """The problem taken literally: its call, and the gradients that it asks for."""
    inputs = problem.required | problem.settings
    inputs |= {name: inputs[name].clone().requires_grad_() for name in problem.wanted}
    for name, value in inputs.items():
        if isinstance(value, Opaque) and problem.producer:
            inputs[name] = answer(oracle, problem.producer)[value.field_name]
    called = getattr(oracle, problem.function)(
        *(inputs[name] for name in problem.required), **{name: inputs[name] for name in problem.settings}
    )
    outputs = named_outputs(called, CONTRACTS[problem.function].outputs)
    if problem.wanted:
        asked = [inputs[name] for name in problem.wanted]
        found = torch.autograd.grad(
            [outputs[name] for name in problem.cotangents], asked, list(problem.cotangents.values())
        )
        outputs |= {f"d_{name}": gradient for name, gradient in zip(problem.wanted, found, strict=True)}
    return outputs
