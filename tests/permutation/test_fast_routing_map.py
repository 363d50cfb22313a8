"""The routing map's other forms in `moe_fast` equal the reference's: values, gradients, and no memory left unwritten."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from moe_fast.launch import tuning

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
EMPTY = torch.empty
SHAPES = [(0, 3), (1, 1), (7, 1), (33, 5), (70, 20), (5, 33)]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is full of ones: NaN in every float, -1 in every integer."""

    def poisoned(*arguments, **settings):
        fresh = EMPTY(*arguments, **settings)
        fresh.untyped_storage().fill_(0xFF)
        return fresh

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["default blocks", "small blocks"])
def blocks(request, monkeypatch):
    if request.param == "small blocks":
        small = {
            "metadata": tuning.Metadata(2, 64, 4, max_programs=5),
            "multihot": tuning.Tile(4, 2, 4),
            "multihot_rows": tuning.WholeRows(2, 64, 4),
        }
        monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, **small))


def random_map(num_tokens: int, num_experts: int, share: float = 0.3) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)) < share


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same(fast, slow) -> None:
    for got, right in zip(fast, slow, strict=True):
        assert (got.dtype, got.shape) == (right.dtype, right.shape)
        assert torch.equal(got, right)


def to_multihot(namespace, indices: Tensor, probs: Tensor, num_experts: int):
    probs = probs.detach().requires_grad_()
    result = namespace.indices_to_multihot(indices, probs, num_experts=num_experts)
    gradient = torch.autograd.grad(result.probs, probs, numbers(*result.probs.shape, dtype=probs.dtype))
    return [*(x.detach() for x in result), *gradient]


def to_indices(namespace, routing_map: Tensor, probs: Tensor, topk: int):
    probs = probs.detach().requires_grad_()
    result = namespace.multihot_to_indices(routing_map, probs, topk=topk)
    gradient = torch.autograd.grad(result.probs, probs, numbers(*result.probs.shape, dtype=probs.dtype))
    return [*(x.detach() for x in result), *gradient]


@pytest.mark.parametrize("align", [1, 3, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_padded_map_equals_the_reference(shape, align, blocks):
    routing_map = random_map(*shape)
    before = routing_map.clone()
    assert_same(moe_fast.pad_routing_map(routing_map, align=align), moe_ref.pad_routing_map(routing_map, align=align))
    assert torch.equal(routing_map, before), "the caller's map was written"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_empty_and_a_full_map_are_padded_like_the_reference(share):
    routing_map = random_map(6, 3, share)
    assert_same(moe_fast.pad_routing_map(routing_map, align=4), moe_ref.pad_routing_map(routing_map, align=4))


def test_maps_of_any_integer_and_stride_equal_the_reference():
    for dtype in (torch.uint8, torch.int32, torch.int64):
        routing_map = (random_map(12, 40).to(dtype) * 3).t()[::2, 1:6]
        assert_same(moe_fast.pad_routing_map(routing_map, align=4), moe_ref.pad_routing_map(routing_map, align=4))
        probs = numbers(5, 1).expand(5, 20).t()
        assert_same(to_indices(moe_fast, routing_map, probs, 2), to_indices(moe_ref, routing_map, probs, 2))


@pytest.mark.parametrize("topk", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_listed_experts_equal_the_reference(shape, topk, blocks):
    routing_map, probs = random_map(*shape), numbers(*shape)
    assert_same(to_indices(moe_fast, routing_map, probs, topk), to_indices(moe_ref, routing_map, probs, topk))


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scattered_slots_equal_the_reference_duplicates_included(shape, slots, blocks):
    num_tokens, num_experts = shape
    indices = torch.randint(-1, num_experts, (num_tokens, slots), generator=torch.Generator().manual_seed(0))
    probs = numbers(num_tokens, slots)
    assert_same(to_multihot(moe_fast, indices, probs, num_experts), to_multihot(moe_ref, indices, probs, num_experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype_of_probs_is_copied(dtype):
    indices, probs, routing_map = (
        torch.tensor([[0, 2], [1, -1]], dtype=torch.int32),
        numbers(2, 2, dtype=dtype),
        random_map(2, 2, 0.7),
    )
    assert_same(to_multihot(moe_fast, indices, probs, 3), to_multihot(moe_ref, indices, probs, 3))
    assert_same(to_indices(moe_fast, routing_map, probs, 2), to_indices(moe_ref, routing_map, probs, 2))


def test_indices_may_have_any_stride():
    indices, probs = torch.tensor([[0, 9, 2], [1, 9, -1]]).t()[::2].t(), numbers(2, 4)[:, ::2]
    assert_same(to_multihot(moe_fast, indices, probs, 3), to_multihot(moe_ref, indices, probs, 3))


def test_no_slots_route_nowhere():
    result = moe_fast.indices_to_multihot(torch.zeros(3, 0, dtype=torch.int64), numbers(3, 0), num_experts=4)
    assert not result.routing_map.any() and not result.probs.any()


def test_slots_outside_the_experts_are_empty():
    indices, probs = torch.tensor([[5, 2, -7], [2**40, 0, 3]]), numbers(2, 3).requires_grad_()
    result = moe_fast.indices_to_multihot(indices, probs, num_experts=3)
    (dprobs,) = torch.autograd.grad(result.probs.sum(), probs)
    assert result.routing_map.tolist() == [[False, False, True], [True, False, False]]
    assert dprobs.tolist() == [[0, 1, 0], [0, 1, 0]]


def test_probs_keep_their_bits():
    probs = torch.tensor([[0x7FC01234, -0x80000000]], dtype=torch.int32).view(torch.float32)  # a NaN with a payload, -0
    listed = moe_fast.multihot_to_indices(torch.ones(1, 2, dtype=torch.bool), probs, topk=3)
    scattered = moe_fast.indices_to_multihot(listed.indices, listed.probs, num_experts=2)
    assert torch.equal(scattered.probs.view(torch.int32), probs.view(torch.int32))


def test_probs_that_are_not_listed_are_never_read():
    probs = torch.full((2, 3), torch.nan)
    probs[0, 1] = 0.5
    routing_map = torch.tensor([[False, True, True], [False, False, False]])
    assert moe_fast.multihot_to_indices(routing_map, probs, topk=1).probs.tolist() == [[0.5], [0]]


def test_a_map_without_a_cotangent_has_no_gradient():
    probs = numbers(2, 3).requires_grad_()
    result = moe_fast.indices_to_multihot(torch.zeros(2, 3, dtype=torch.int64), probs, num_experts=2)
    assert not result.routing_map.requires_grad
    listed = moe_fast.multihot_to_indices(random_map(2, 3), probs, topk=2)
    assert not (listed.indices.requires_grad or listed.overflow.requires_grad)


@pytest.mark.parametrize("turned", [False, True], ids=["far rows", "far columns"])
def test_what_lies_far_apart_is_read(turned):
    far = EMPTY(3 * 2**30 + 64, dtype=torch.uint8).as_strided((4, 8), (2**30, 1))
    far.copy_(random_map(4, 8))
    far = far.t() if turned else far
    assert_same(moe_fast.pad_routing_map(far, align=4), moe_ref.pad_routing_map(far.clone(), align=4))
    probs, indices = numbers(*far.shape), far.view(torch.int8)
    assert_same(to_indices(moe_fast, far, probs, 2), to_indices(moe_ref, far.clone(), probs, 2))
    assert_same(to_multihot(moe_fast, indices, probs, 3), to_multihot(moe_ref, indices.clone(), probs, 3))


@pytest.mark.parametrize("align", [0, -1, None, 2.0, True])
def test_an_illegal_align_raises_as_the_reference_does(align):
    messages = []
    for namespace in (moe_fast, moe_ref):
        with pytest.raises(ValueError) as caught:
            namespace.pad_routing_map(random_map(2, 2), align=align)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("function", moe_fast.__all__)
def test_every_function_declares_what_it_promises(function):
    beside = (
        "declares",
        "supports",
        "expert_capacity",
        "new_state",
        "state_tensors",
        "state_from",
        "finish_batch",
    )  # no tensors to compute
    if function not in beside:
        assert function == "jitter" or moe_fast.declares(function)["deterministic"]
