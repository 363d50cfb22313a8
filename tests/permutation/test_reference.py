"""`moe_ref` beyond values: where it rounds, what it never reads or writes, what it imports."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.judge.exact import bits

MAP = torch.tensor(
    [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool
)  # expert 2 and token 2 are idle
INDICES = torch.tensor([[2, -1], [0, 2], [1, 1]])
LAYOUTS = [
    {},
    {"align": 2},
    {"num_rows": 4},
    {"num_rows": 8},
    {"align": 4, "num_rows": 8},
    {"capacity": 2},
    {"capacity": 6},
]
SMALL_FLOATS = [(torch.bfloat16, 256.0), (torch.float16, 2048.0)]  # the first n with n + 1 = n
WIDTH = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype).requires_grad_()
    )


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and np.array_equal(bits(x), bits(y))


# Gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_permute_are_its_derivatives(layout):
    assert torch.autograd.gradcheck(
        lambda x, p: moe_ref.permute(x, MAP, probs=p, **layout)[:2], (numbers(4, 2), numbers(4, 4))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_unpermute_are_its_derivatives(layout):
    rows, _, row_map, *_ = moe_ref.permute(torch.zeros(4, 2), MAP, **layout)
    assert torch.autograd.gradcheck(
        lambda x, p: moe_ref.unpermute(x, row_map, probs=p), (numbers(*rows.shape), numbers(4, 4))
    )
    assert torch.autograd.gradcheck(lambda x: moe_ref.unpermute(x, row_map), numbers(*rows.shape))


def test_gradients_of_sort_chunks_are_its_derivatives():
    sizes, order = torch.tensor([2, 0, 1, 1]), torch.tensor([3, 0, 1, 2])
    assert torch.autograd.gradcheck(
        lambda x, p: moe_ref.sort_chunks(x, sizes, order, probs=p), (numbers(5, 2), numbers(5))
    )


def test_gradients_of_the_converters_are_their_derivatives():
    assert torch.autograd.gradcheck(
        lambda p: moe_ref.indices_to_multihot(INDICES, p, num_experts=3).probs, numbers(3, 2)
    )
    assert torch.autograd.gradcheck(lambda p: moe_ref.multihot_to_indices(MAP, p, topk=2).probs, numbers(4, 4))


# Rounding


def nine_terms(dtype: torch.dtype, large: float) -> Tensor:
    """`large` and eight ones: summed in `dtype` they give `large`, in float32 `large` + 8."""
    return torch.tensor([large, *[1.0] * 8], dtype=dtype)


@pytest.mark.parametrize(("dtype", "large"), SMALL_FLOATS)
def test_sum_of_rows_is_taken_in_float32(dtype, large):
    row_map = moe_ref.permute(torch.zeros(1, 1, dtype=dtype), torch.ones(1, 9) > 0).row_map
    for probs in (None, torch.ones(1, 9, dtype=dtype)):
        assert moe_ref.unpermute(nine_terms(dtype, large)[:, None], row_map, probs=probs).tolist() == [[large + 8]]


@pytest.mark.parametrize(("dtype", "large"), SMALL_FLOATS)
def test_gradient_of_tokens_is_summed_in_float32(dtype, large):
    tokens = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    rows = moe_ref.permute(tokens, torch.ones(1, 9) > 0).rows
    (gradient,) = torch.autograd.grad(rows, tokens, nine_terms(dtype, large)[:, None])
    assert gradient.dtype == dtype and gradient.tolist() == [[large + 8]]


@pytest.mark.parametrize(("dtype", "large"), SMALL_FLOATS)
def test_gradient_of_probs_is_summed_over_the_hidden_size_in_float32(dtype, large):
    row_map = moe_ref.permute(torch.zeros(1, 9, dtype=dtype), torch.ones(1, 1) > 0).row_map
    probs = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    out = moe_ref.unpermute(nine_terms(dtype, large)[None], row_map, probs=probs)
    (gradient,) = torch.autograd.grad(out, probs, torch.ones_like(out))
    assert gradient.dtype == dtype and gradient.tolist() == [[large + 8]]


@pytest.mark.parametrize(("dtype", "large"), SMALL_FLOATS)
def test_sum_is_rounded_only_once(dtype, large):
    terms = torch.tensor([large, 1, 2**-8], dtype=dtype)  # just above the tie with large + 2
    row_map = moe_ref.permute(torch.zeros(1, 1), torch.ones(1, 3) > 0).row_map
    assert moe_ref.unpermute(terms[:, None], row_map).tolist() == [[large + 2]]
    tokens = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(moe_ref.permute(tokens, torch.ones(1, 3) > 0).rows, tokens, terms[:, None])
    assert gradient.tolist() == [[large + 2]]


def test_products_are_not_rounded_before_they_are_added():
    row_map = moe_ref.permute(torch.zeros(1, 1), torch.ones(1, 2) > 0).row_map
    rows, probs = torch.tensor([[1 + 2**-7], [-1 - 2**-6]]).bfloat16(), torch.tensor([[1 + 2**-7, 1]]).bfloat16()
    assert moe_ref.unpermute(rows, row_map, probs=probs).item() == 2**-14  # 1 + 2^-6 + 2^-14


def test_probs_are_not_rounded_to_the_dtype_of_the_rows():
    row_map = moe_ref.permute(torch.zeros(1, 1), torch.ones(1, 1) > 0).row_map
    rows, probs = (
        torch.tensor([[129.0]], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([[1 + 2**-8]]),
    )  # 129.504; 1 + 2^-8 would round to 1
    out = moe_ref.unpermute(rows, row_map, probs=probs)
    assert out.dtype == torch.bfloat16 and out.item() == 130
    assert torch.autograd.grad(out, rows, torch.full_like(out, 129))[0].item() == 130


def test_float64_is_never_narrowed():
    fine = torch.tensor([[1 + 2**-50], [2**-52]], dtype=torch.float64, requires_grad=True)
    row_map = moe_ref.permute(torch.zeros(1, 1), torch.ones(1, 2) > 0).row_map
    assert moe_ref.unpermute(fine, row_map).item() == 1 + 2**-50 + 2**-52
    probs = torch.tensor([[1 + 2**-51, 1]], dtype=torch.float64, requires_grad=True)
    out = moe_ref.unpermute(fine, row_map, probs=probs)
    d_rows, d_probs = torch.autograd.grad(out, [fine, probs], torch.ones_like(out))
    assert torch.equal(d_rows, probs.T) and torch.equal(d_probs, fine.T)


def test_one_float64_input_is_enough_to_sum_in_float64():
    row_map = moe_ref.permute(torch.zeros(1, 1), torch.ones(1, 3) > 0).row_map
    probs = torch.tensor([[1, 2**-40, -1]], dtype=torch.float64)
    out = moe_ref.unpermute(torch.ones(3, 1), row_map, probs=probs)
    assert out.dtype == torch.float32 and out.item() == 2**-40


def test_rows_are_added_in_the_order_of_their_experts():
    noise = torch.Generator().manual_seed(0)
    routing_map, probs = torch.rand(6, 8, generator=noise) < 0.7, torch.rand(6, 8, generator=noise)
    row_map = moe_ref.permute(torch.zeros(6, 5), routing_map, align=4).row_map
    rows = torch.randn(len(row_map.token_P), 5, generator=noise)
    expected = torch.zeros(6, 5)
    for row, token, expert in zip(rows, row_map.token_P.tolist(), row_map.expert_P.tolist(), strict=True):
        if token >= 0:
            expected[token] += probs[token, expert] * row
    assert torch.equal(moe_ref.unpermute(rows, row_map, probs=probs), expected)


# Maps


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_an_integer_map_means_routed_where_it_is_not_zero(dtype):
    cells = torch.tensor([[0, 3], [7, 0], [1, 1]], dtype=dtype)
    probs = numbers(3, 2).detach()
    for layout in ({"align": 2}, {"capacity": 1}, {"num_rows": 3}):
        integer, boolean = (moe_ref.permute(probs, x, probs=probs, **layout) for x in (cells, cells != 0))
        assert all(torch.equal(a, b) for a, b in zip(integer[:2], boolean[:2], strict=True))
        assert torch.equal(integer.tokens_per_expert, boolean.tokens_per_expert)
    assert torch.equal(*(moe_ref.pad_routing_map(x, align=3).routing_map != 0 for x in (cells, cells != 0)))
    assert torch.equal(*(moe_ref.multihot_to_indices(x, probs, topk=1).indices for x in (cells, cells != 0)))


# Bits


def every_code(dtype: torch.dtype) -> Tensor:
    """[T,H] all bit patterns of a 1- or 2-byte dtype, special patterns of a wider one."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype).reshape(32, 8)
    if dtype.itemsize == 2:
        return torch.arange(2**16).to(torch.int16).view(dtype).reshape(32, 2048)
    sign = -(2 ** (8 * dtype.itemsize - 1))
    odd = torch.tensor([0.0, 1.0, torch.inf, torch.nan], dtype=dtype).view(WIDTH[dtype.itemsize])
    positive = torch.cat(
        [odd, odd[2:3] + 1, odd[3:] + 77, torch.ones_like(odd[:2])]
    )  # signalling NaN, NaN with a payload, subnormal
    return torch.cat([positive, positive + sign]).view(dtype).reshape(4, 4)


MOVED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*MOVED, torch.uint8])
def test_permute_moves_every_code_bit_by_bit(dtype):
    tokens = every_code(dtype)
    rows = moe_ref.permute(tokens, torch.ones(len(tokens), 2) > 0, align=64).rows
    assert all(
        same_bits(segment[: len(tokens)], tokens) and not bits(segment[len(tokens) :]).any()
        for segment in rows.chunk(2)
    )


@pytest.mark.parametrize("dtype", MOVED)
def test_probs_are_moved_bit_by_bit(dtype):
    probs = every_code(dtype)
    moved = moe_ref.permute(torch.zeros(len(probs), 1), torch.ones(probs.shape) > 0, probs=probs).probs
    assert same_bits(moved.reshape(probs.shape[::-1]), probs.T)


@pytest.mark.parametrize("dtype", MOVED)
def test_sort_chunks_moves_every_code_bit_by_bit(dtype):
    rows = every_code(dtype)
    moved, probs = moe_ref.sort_chunks(rows, torch.tensor([3, len(rows) - 3]), torch.tensor([1, 0]), probs=rows[:, 0])
    back = torch.arange(len(rows)).roll(3)
    assert np.array_equal(bits(moved)[back], bits(rows)) and np.array_equal(bits(probs)[back], bits(rows[:, 0]))


@pytest.mark.parametrize("dtype", MOVED[2:])
def test_the_converters_move_every_code_bit_by_bit(dtype):
    probs = every_code(dtype)[:, :8]
    experts = probs.shape[1]
    indices, listed, _ = moe_ref.multihot_to_indices(torch.ones(probs.shape) > 0, probs, topk=experts)
    assert same_bits(listed, probs)
    assert same_bits(moe_ref.indices_to_multihot(indices, listed, num_experts=experts).probs, probs)


@pytest.mark.parametrize("dtype", MOVED[2:])
def test_gradients_that_are_only_moved_keep_their_values(dtype):
    rows = torch.zeros(4, 4, dtype=dtype, requires_grad=True)
    moved = moe_ref.sort_chunks(rows, torch.tensor([3, 1]), torch.tensor([1, 0])).rows
    cotangent = every_code(dtype)[:4, :4]
    assert torch.equal(torch.autograd.grad(moved, rows, cotangent)[0].nan_to_num(), cotangent.roll(-1, 0).nan_to_num())


# Reads and writes


def poisoned(x: Tensor, read: Tensor) -> Tensor:
    """x where `read` is set, NaN elsewhere; requires a gradient."""
    return torch.where(read, x.detach(), torch.nan).requires_grad_()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpermute_never_reads_padding_rows_nor_unrouted_probs(layout):
    permuted = moe_ref.permute(torch.ones(4, 2), MAP, probs=torch.ones(4, 4), **layout)
    here = permuted.rows[:, 0] != 0
    used = torch.ones_like(MAP) if "capacity" in layout else MAP  # capacity: unrouted fillers
    rows, probs = poisoned(numbers(*permuted.rows.shape), here[:, None]), poisoned(numbers(4, 4), used)
    out = moe_ref.unpermute(rows, permuted.row_map, probs=probs)
    d_rows, d_probs = torch.autograd.grad(out, [rows, probs], torch.ones_like(out))
    assert not any(x.isnan().any() for x in (out, d_rows, d_probs))
    assert (d_rows[~here] == 0).all() and (d_probs[~used] == 0).all()


def test_a_token_without_rows_is_exactly_zero():
    row_map = moe_ref.permute(torch.ones(4, 2), MAP, align=4).row_map
    out = moe_ref.unpermute(torch.full((12, 2), torch.inf), row_map)
    assert not bits(out[2]).any() and out[[0, 1, 3]].isinf().all()


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if "capacity" not in x])
def test_permute_never_reads_idle_tokens_unrouted_probs_nor_the_gradient_of_padding(layout):
    tokens, probs = poisoned(numbers(4, 2), MAP.any(1)[:, None]), poisoned(numbers(4, 4), MAP)
    permuted = moe_ref.permute(tokens, MAP, probs=probs, **layout)
    here = moe_ref.permute(torch.ones(4, 2), MAP, **layout).rows != 0
    cotangents = [poisoned(torch.ones(here.shape), here), poisoned(torch.ones(len(here)), here[:, 0])]
    gradients = torch.autograd.grad(permuted[:2], [tokens, probs], [c.double() for c in cotangents])
    assert not any(x.isnan().any() for x in (*permuted[:2], *gradients))
    assert (gradients[0][2] == 0).all() and (gradients[1][~MAP] == 0).all()


def test_the_converters_never_read_slots_and_cells_that_are_empty():
    slots, cells = poisoned(numbers(3, 2), INDICES >= 0), poisoned(numbers(4, 4), MAP)
    for probs, out in (
        (slots, moe_ref.indices_to_multihot(INDICES, slots, num_experts=3).probs),
        (cells, moe_ref.multihot_to_indices(MAP, cells, topk=4).probs),
    ):
        (gradient,) = torch.autograd.grad(out, probs, torch.ones_like(out))
        assert not out.isnan().any() and (gradient[probs.isnan()] == 0).all()


@pytest.mark.parametrize(("dtype", "experts"), [(torch.int8, 200), (torch.uint8, 3)])
def test_a_dtype_of_indices_may_be_too_narrow_for_the_number_of_experts_or_for_an_empty_slot(dtype, experts):
    out = moe_ref.indices_to_multihot(torch.tensor([[2, 0]], dtype=dtype), torch.ones(1, 2), num_experts=experts)
    assert out.routing_map.nonzero().tolist() == [[0, 0], [0, 2]]


def test_of_repeated_indices_only_the_last_slot_is_read():
    probs = torch.tensor([[torch.nan, 0.5]], requires_grad=True)
    out = moe_ref.indices_to_multihot(torch.tensor([[1, 1]]), probs, num_experts=2).probs
    assert out.tolist() == [[0, 0.5]] and torch.autograd.grad(out.sum(), probs)[0].tolist() == [[0, 1]]


def merge(rows: Tensor, probs: Tensor):
    return moe_ref.unpermute(rows, moe_ref.permute(torch.ones(4, 2), MAP, align=2).row_map, probs=probs)


CALLS = {
    "permute": lambda x, p, m: moe_ref.permute(x[:4], m, probs=p, align=2)[:2],
    "permute to a capacity": lambda x, p, m: moe_ref.permute(x[:4], m, probs=p, capacity=2)[:2],
    "unpermute": lambda x, p, m: [merge(x, p)],
    "sort_chunks": lambda x, p, m: moe_ref.sort_chunks(
        x, m[:, 3].long(), m[:, 3].long().argsort(), probs=p[:2].reshape(-1)
    ),
    "pad_routing_map": lambda x, p, m: moe_ref.pad_routing_map(m, align=4),
    "indices_to_multihot": lambda x, p, m: moe_ref.indices_to_multihot(m[:, :2].long(), p[:, :2], num_experts=2)[1:],
    "multihot_to_indices": lambda x, p, m: moe_ref.multihot_to_indices(m, p, topk=2)[1:2],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_callers_inputs_are_never_changed(call):
    inputs = [numbers(8, 2), numbers(4, 4), MAP.clone()]
    before = [x.detach().clone() for x in inputs]
    outputs = [x for x in call(*inputs) if x.requires_grad]
    cotangents = [torch.ones_like(x) for x in outputs]
    if outputs:
        torch.autograd.grad(outputs, inputs[:2], cotangents, allow_unused=True)
    assert all(same_bits(x, y) for x, y in zip(inputs, before, strict=True))
    assert all((x == 1).all() for x in cotangents)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_outputs_share_no_memory_with_the_inputs(call):
    inputs = [numbers(8, 2).detach(), numbers(4, 4).detach(), MAP.clone()]
    memory = {x.untyped_storage().data_ptr() for x in inputs}
    assert not memory & {x.untyped_storage().data_ptr() for x in call(*inputs)}


# The docstring's example


def test_the_example_of_a_row_map_holds():
    routed = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]])
    out = moe_ref.permute(torch.zeros(4, 1), routed, align=2)
    assert out.row_map.token_P.tolist() == [0, 1, 1, -1, 0, 2]
    assert out.row_map.expert_P.tolist() == [0, 0, 1, 1, 2, 2]
    assert (out.tokens_per_expert.tolist(), out.pad_offsets.tolist()) == ([2, 2, 2], [0, 0, 1])


# Loading


@pytest.fixture(scope="module")
def loaded() -> list[list[str]]:
    """`moe_ref` modules of a fresh process: after importing config, then after one function."""
    show = "print(*sorted(m for m in sys.modules if m.startswith('moe_ref')))"
    program = f"import sys, moe_ref.config; {show}; moe_ref.pad_routing_map; {show}"
    lines = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line.split() for line in lines]


def test_config_loads_nothing_else_of_the_reference(loaded):
    assert [name for name in loaded[0] if not name.startswith("moe_ref.config")] == ["moe_ref"]


def test_a_function_loads_its_family_when_it_is_asked_for(loaded):
    asked = {name for name in loaded[1] if not name.startswith("moe_ref.config")}
    assert asked - {"moe_ref", "moe_ref.rounding"} == {name for name in asked if name.startswith("moe_ref.permutation")}


def test_every_function_is_found_where_the_package_says():
    assert all(getattr(moe_ref, name).__name__ == name for name in moe_ref.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'moe_ref' has no attribute 'permuet'"):
        _ = moe_ref.permuet
