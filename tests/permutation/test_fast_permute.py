"""permute, unpermute and sort_chunks of `moe_fast` equal the reference's: values, gradients, and no memory left unwritten."""

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
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS = {
    "plain": {},
    "align": {"align": 8},
    "align 1": {"align": 1},
    "cut": {"num_rows": 21},
    "no rows": {"num_rows": 0},
    "more rows than routed": {"num_rows": 170},
    "cut, aligned": {"align": 8, "num_rows": 40},
    "more rows, aligned": {"align": 4, "num_rows": 320},
    "capacity": {"capacity": 3},
    "capacity 1": {"capacity": 1},
    "capacity above the tokens": {"capacity": 70},
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is full of ones: NaN in every float, -1 in every integer."""

    def poisoned(*arguments, **settings):
        fresh = EMPTY(*arguments, **settings)
        fresh.untyped_storage().fill_(0xFF)
        return fresh

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def small_blocks(monkeypatch):
    tile, rows = tuning.Tile(4, 16, 4), tuning.WholeRows(8, 16, 4)
    sizes = dict.fromkeys(("permute", "unpermute", "unpermute_backward", "sort_chunks", "multihot"), tile)
    metadata = tuning.Metadata(2, 64, 4, max_programs=5)
    steps = {"fill": tuning.Fill(2, 2, 3), "prob_columns": 2, "chunk_columns": 2}
    monkeypatch.setattr(
        tuning,
        "INTERPRETER",
        replace(tuning.INTERPRETER, metadata=metadata, unpermute_backward_probs=rows, **steps, **sizes),
    )


def dyadic(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Quarters from -4 to 4: their products and the sums here are exact."""
    return (torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


def random_map(num_tokens: int, num_experts: int, share: float = 0.3, seed: int = 0) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) < share


def assert_same(fast, slow) -> None:
    for place, (got, right) in enumerate(zip(fast, slow, strict=True)):
        if right is None or got is None:
            assert right is got, f"value {place}: {got} instead of {right}"
            continue
        assert got.shape == right.shape and (got.dtype == right.dtype or not right.is_floating_point())
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def pipeline(namespace, tokens: Tensor, routing_map: Tensor, probs: Tensor, **settings):
    """permute, then unpermute with probs: every output, and the gradient of every input through both."""
    tokens, probs = tokens.detach().requires_grad_(), probs.detach().requires_grad_()
    permuted = namespace.permute(tokens, routing_map, probs=probs, **settings)
    rows = permuted.rows.detach().requires_grad_()
    merged = namespace.unpermute(rows, permuted.row_map, probs=probs)
    summed = namespace.unpermute(rows, permuted.row_map)
    cotangents = [dyadic(*rows.shape, dtype=rows.dtype), dyadic(len(rows), dtype=probs.dtype)]
    gradients = torch.autograd.grad([permuted.rows, permuted.probs], [tokens, probs], cotangents)
    gradients += torch.autograd.grad(merged, [rows, probs], dyadic(*merged.shape, dtype=merged.dtype))
    gradients += torch.autograd.grad(summed, rows, dyadic(*summed.shape, dtype=summed.dtype))
    results = (*permuted[:2], *permuted[3:], merged, summed, *gradients)
    return [value if value is None else value.detach() for value in results]


def assert_pipelines_agree(*arguments, **settings) -> None:
    assert_same(pipeline(moe_fast, *arguments, **settings), pipeline(moe_ref, *arguments, **settings))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_pipeline_equals_the_reference_in_every_setting(settings):
    assert_pipelines_agree(dyadic(33, 20), random_map(33, 5), dyadic(33, 5, seed=1), **settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_pipeline_equals_the_reference_for_any_block_size(settings, small_blocks):
    assert_pipelines_agree(dyadic(19, 17), random_map(19, 3), dyadic(19, 3, seed=1), **settings)


@pytest.mark.parametrize("settings", [{"align": 16}, {"num_rows": 300}, {"capacity": 20}], ids=str)
def test_sizes_beyond_every_block_equal_the_reference(settings):
    assert_pipelines_agree(dyadic(100, 300), random_map(100, 20, 0.1), dyadic(100, 20, seed=1), **settings)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_pair_of_dtypes_equals_the_reference(dtype, probs_dtype):
    assert_pipelines_agree(dyadic(9, 6, dtype=dtype), random_map(9, 3), dyadic(9, 3, dtype=probs_dtype, seed=1))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 3, 0), (1, 1, 1), (5, 1, 3), (4, 33, 2)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"num_rows": 6}, {"capacity": 2}], ids=str)
def test_degenerate_shapes_equal_the_reference(shape, settings):
    num_tokens, num_experts, hidden = shape
    assert_pipelines_agree(
        dyadic(num_tokens, hidden),
        random_map(num_tokens, num_experts, 0.5),
        dyadic(num_tokens, num_experts),
        **settings,
    )


@pytest.mark.parametrize("settings", [{}, {"align": 4}, {"num_rows": 8}, {"capacity": 3}], ids=str)
@pytest.mark.parametrize("routed", ["none", "all", "one expert", "one token"])
def test_extreme_maps_equal_the_reference(settings, routed):
    routing_map = torch.zeros(6, 4, dtype=torch.bool)
    everywhere = {"none": [], "all": [...], "one expert": [(slice(None), 2)], "one token": [3]}
    for place in everywhere[routed]:
        routing_map[place] = True
    assert_pipelines_agree(dyadic(6, 5), routing_map, dyadic(6, 4, seed=1), **settings)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_any_non_zero_integer_routes(dtype):
    routing_map = torch.tensor([[2, 0, 1], [0, 0, 127], [1, 1, 0]], dtype=dtype)
    assert_pipelines_agree(dyadic(3, 4), routing_map, dyadic(3, 3, seed=1))


def test_inputs_may_have_any_strides():
    tokens, routing_map, probs = dyadic(18, 33)[::2].t(), random_map(6, 66).t()[::2], dyadic(5, 1).expand(5, 33).t()
    assert_pipelines_agree(tokens, routing_map[:, :5], probs, align=4)
    assert_pipelines_agree(tokens, routing_map[:, :5], probs, capacity=4)


def test_a_second_call_does_not_see_the_first():
    for seed in (0, 1, 0):
        assert_pipelines_agree(dyadic(8, 4, seed=seed), random_map(8, 3, seed=seed), dyadic(8, 3, seed=seed), align=2)


def test_rows_and_probs_are_copied_bit_by_bit():
    bits = torch.tensor(
        [[0x7FC01234, -0x80000000], [0x7F800001, -0x00400001]], dtype=torch.int32
    )  # NaNs with payloads, -0
    tokens, routing_map = bits.view(torch.float32), torch.tensor([[True, True], [False, True]])
    permuted = moe_fast.permute(tokens, routing_map, probs=tokens, num_rows=4)
    assert permuted.rows.view(torch.int32).tolist() == [*bits[[0, 0, 1]].tolist(), [0, 0]]
    assert permuted.probs.view(torch.int32).tolist() == [*bits[[0, 0, 1], [0, 1, 1]].tolist(), 0]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.complex64],
    ids=str,
)
def test_every_dtype_can_be_moved(dtype):
    storage = torch.randint(0, 2, (7, 3 * dtype.itemsize), dtype=torch.uint8)
    tokens, routing_map = storage.view(dtype), random_map(7, 3)
    for settings in ({"align": 4}, {"capacity": 3}):
        fast, slow = (
            namespace.permute(tokens, routing_map, **settings).rows.view(torch.uint8)
            for namespace in (moe_fast, moe_ref)
        )
        assert_same([fast], [slow])
    fast, slow = (
        namespace.sort_chunks(tokens, torch.tensor([2, 3]), torch.tensor([1, 0])).rows.view(torch.uint8)
        for namespace in (moe_fast, moe_ref)
    )
    assert_same([fast], [slow])


def test_a_pending_minus_is_carried_out():
    negated = torch.view_as_complex(dyadic(4, 3, 2)).conj().imag
    routing_map = random_map(4, 3)
    assert negated.is_neg()
    assert_pipelines_agree(negated, routing_map, negated)
    near = moe_fast.permute(negated.clone(), torch.ones(4, 1, dtype=torch.bool))
    assert_same([moe_fast.unpermute(negated, near.row_map)], [negated.clone()])


def test_float64_tokens_have_a_float64_gradient():
    tokens = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    rows = moe_fast.permute(tokens, torch.ones(2, 2, dtype=torch.bool)).rows
    (dtokens,) = torch.autograd.grad(
        rows, tokens, torch.tensor([[1.0], [1.0], [2.0**-40], [2.0**-40]], dtype=torch.float64)
    )
    assert dtokens.flatten().tolist() == [1 + 2.0**-40] * 2


def test_rows_without_a_token_never_reach_the_sum():
    permuted = moe_fast.permute(dyadic(5, 3), random_map(5, 4), align=4, num_rows=24)
    rows = torch.where((permuted.rows != 0).any(1, keepdim=True), permuted.rows, torch.nan)
    assert not moe_fast.unpermute(rows, permuted.row_map).isnan().any()


def test_sums_are_rounded_once():
    routing_map = torch.ones(1, 3, dtype=torch.bool)
    permuted = moe_fast.permute(torch.zeros(1, 1, dtype=torch.bfloat16), routing_map)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    assert moe_fast.unpermute(rows, permuted.row_map).item() == 258


def gradients(namespace, wanted: str, cotangent: str):
    """The gradients of `wanted` inputs when some outputs are unused or their cotangents are strided."""
    tokens, probs, routing_map = dyadic(6, 5), dyadic(6, 4, seed=1), random_map(6, 4)
    for name, value in (("tokens", tokens), ("probs", probs)):
        value.requires_grad_(name in wanted)
    permuted = namespace.permute(tokens, routing_map, probs=probs, align=4)
    merged = namespace.unpermute(permuted.rows, permuted.row_map, probs=probs)
    outputs = {"rows": permuted.rows, "row probs": permuted.probs, "merged": merged}
    outputs = {name: value for name, value in outputs.items() if value.requires_grad and name != cotangent}
    shapes = [value.shape for value in outputs.values()]
    if cotangent == "expanded":
        vectors = [torch.tensor(0.5).expand(shape) for shape in shapes]
    elif cotangent == "transposed":
        vectors = [dyadic(*reversed(shape)).t() if len(shape) == 2 else dyadic(2 * shape[0])[::2] for shape in shapes]
    else:
        vectors = [dyadic(*shape) for shape in shapes]
    inputs = [value for value in (tokens, probs) if value.requires_grad]
    return [outputs.keys(), torch.autograd.grad(list(outputs.values()), inputs, vectors, allow_unused=True)]


@pytest.mark.parametrize("wanted", ["tokens", "probs", "tokens and probs"])
@pytest.mark.parametrize("cotangent", ["full", "expanded", "transposed", "rows", "row probs", "merged"])
def test_gradients_hold_for_any_cotangent_and_any_choice_of_inputs(wanted, cotangent):
    (fast_outputs, fast), (slow_outputs, slow) = (
        gradients(moe_fast, wanted, cotangent),
        gradients(moe_ref, wanted, cotangent),
    )
    assert fast_outputs == slow_outputs
    zero = torch.zeros(())
    assert_same(
        [zero.expand(b.shape) if a is None and b is not None else a for a, b in zip(fast, slow, strict=True)], slow
    )


def wide(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Rows 2³⁰ elements apart, in memory that is never touched between them."""
    x = EMPTY(3 * 2**30 + 64, dtype=dtype).as_strided((num_rows, num_columns), (2**30, 1))
    return x.copy_(dyadic(num_rows, num_columns).abs())


@pytest.mark.parametrize("turned", [False, True], ids=["far rows", "far columns"])
def test_what_lies_far_apart_is_moved(turned):
    tokens = wide(4, 8, torch.uint8).t() if turned else wide(4, 8, torch.uint8)
    routing_map = random_map(len(tokens), 3, 0.6)
    assert_same(
        [moe_fast.permute(tokens, routing_map, align=2).rows],
        [moe_ref.permute(tokens.clone(), routing_map, align=2).rows],
    )
    sizes, order = torch.tensor([1, 2]), torch.tensor([1, 0])
    assert_same(moe_fast.sort_chunks(tokens, sizes, order), moe_ref.sort_chunks(tokens.clone(), sizes, order))


@pytest.mark.parametrize("turned", [False, True], ids=["far rows", "far columns"])
@pytest.mark.parametrize("settings", [{}, {"capacity": 3}], ids=str)
def test_a_map_and_probs_that_lie_far_apart_are_read(turned, settings):
    routing_map, probs = wide(4, 8, torch.uint8), wide(4, 8, torch.float16)
    routing_map, probs = (routing_map.t(), probs.t()) if turned else (routing_map, probs)
    assert_pipelines_agree(dyadic(len(probs), 3), routing_map, probs, **settings)


@pytest.mark.parametrize("turned", [False, True], ids=["far rows", "far columns"])
def test_what_lies_far_apart_is_summed(turned):
    far = wide(4, 8, torch.float16).t() if turned else wide(4, 8, torch.float16)
    near, routing_map = (
        dyadic(*far.shape, dtype=torch.float16).requires_grad_(),
        torch.ones(len(far), 1, dtype=torch.bool),
    )
    permuted = moe_fast.permute(near, routing_map)
    assert_same([moe_fast.unpermute(far, permuted.row_map)], [far.clone()])
    assert_same(torch.autograd.grad(permuted.rows, near, far), [far.clone()])
    probs = torch.full(routing_map.shape, 0.5, requires_grad=True)
    for rows, dout in ((near, far), (far.detach().requires_grad_(), near.detach())):
        merged = moe_fast.unpermute(rows, permuted.row_map, probs=probs)
        drows, dprobs = torch.autograd.grad(merged, [rows, probs], dout)
        assert_same([drows, dprobs], [dout / 2, (far.float() * near.float()).sum(1, keepdim=True)])


CHUNKS = {  # rows, sizes, order
    "none": (5, [], []),
    "empty ones": (6, [0, 4, 0, 2], [3, 0, 1, 2]),
    "rows behind": (90, [30, 0, 17, 1, 40], [4, 2, 0, 1, 3]),
    "no rows": (0, [0, 0], [1, 0]),
}


def sorted_chunks(namespace, num_rows: int, sizes: list[int], order: list[int], hidden: int, dtype: torch.dtype):
    rows, probs = dyadic(num_rows, hidden).requires_grad_(), dyadic(num_rows, dtype=torch.bfloat16).requires_grad_()
    result = namespace.sort_chunks(
        rows, torch.tensor(sizes, dtype=dtype), torch.tensor(order, dtype=dtype), probs=probs
    )
    return [
        *(x.detach() for x in result),
        *torch.autograd.grad(result, [rows, probs], [dyadic(*x.shape, dtype=x.dtype, seed=1) for x in result]),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_sorted_chunks_equal_the_reference(chunks, dtype):
    assert_same(sorted_chunks(moe_fast, *chunks, 140, dtype), sorted_chunks(moe_ref, *chunks, 140, dtype))


def test_sorted_chunks_equal_the_reference_for_any_block_size(small_blocks):
    assert_same(
        sorted_chunks(moe_fast, *CHUNKS["rows behind"], 33, torch.int64),
        sorted_chunks(moe_ref, *CHUNKS["rows behind"], 33, torch.int64),
    )


def test_many_chunks_equal_the_reference():
    sizes, order = [k % 3 for k in range(50)], [(7 * k) % 50 for k in range(50)]
    assert_same(
        sorted_chunks(moe_fast, 60, sizes, order, 3, torch.int64),
        sorted_chunks(moe_ref, 60, sizes, order, 3, torch.int64),
    )


@pytest.mark.parametrize(
    "sizes, order", [([2**40, -5, 3], [0, 1, 2]), ([2, 2], [7, -9]), ([3, 3, 3], [1, 1, 1])], ids=str
)
def test_illegal_chunks_stay_within_memory(sizes, order):
    rows = dyadic(4, 3).requires_grad_()
    result = moe_fast.sort_chunks(rows, torch.tensor(sizes), torch.tensor(order)).rows
    (drows,) = torch.autograd.grad(result.sum(), rows)
    assert torch.isfinite(result).all() and torch.isfinite(drows).all()


READS = ("item", "tolist", "nonzero", "__int__", "__index__", "__bool__", "__float__")


@pytest.mark.parametrize("settings, reads", [({"num_rows": 9}, 0), ({"capacity": 2}, 0), ({}, 1)], ids=str)
def test_the_device_is_read_once_or_not_at_all_when_the_rows_are_given(settings, reads, monkeypatch):
    seen = []
    for name in READS:
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda self, *rest, original=original: seen.append(self) or original(self, *rest)
        )
    tokens, probs = dyadic(4, 2).requires_grad_(), dyadic(4, 2).requires_grad_()
    permuted = moe_fast.permute(tokens, random_map(4, 2), probs=probs, **settings)
    merged = moe_fast.unpermute(permuted.rows, permuted.row_map, probs=probs)
    torch.autograd.grad([merged, permuted.probs], [tokens, probs], [merged.detach(), permuted.probs.detach()])
    assert len(seen) == reads


def test_what_does_not_require_a_gradient_gets_none():
    permuted = moe_fast.permute(
        torch.ones(3, 2, dtype=torch.int32), random_map(3, 2), probs=dyadic(3, 2).requires_grad_()
    )
    assert (permuted.rows.requires_grad, permuted.probs.requires_grad) == (False, True)
    integers = (permuted.tokens_per_expert, permuted.overflow)
    assert not any(value.requires_grad for value in integers)


def test_what_cannot_be_summed_is_refused_and_declared():
    permuted = moe_fast.permute(dyadic(3, 2), random_map(3, 2))
    rows = permuted.rows.double()
    assert "float64" in moe_fast.supports("unpermute", rows, permuted.row_map)
    with pytest.raises(ValueError, match=r"rows.*float64"):
        moe_fast.unpermute(rows, permuted.row_map)
    with pytest.raises(ValueError, match=r"tokens.*complex128"):
        moe_fast.permute(torch.zeros(3, 2, dtype=torch.complex128), random_map(3, 2))
    assert moe_fast.supports("permute", dyadic(3, 2), random_map(3, 2), probs=None) is None


@pytest.mark.parametrize(
    "settings", [{"align": 0}, {"capacity": 2, "align": 2}, {"num_rows": 3, "align": 2}, {"num_rows": -1}], ids=str
)
def test_illegal_settings_raise_as_the_reference_does(settings):
    messages = []
    for namespace in (moe_fast, moe_ref):
        with pytest.raises(ValueError) as caught:
            namespace.permute(dyadic(3, 2), random_map(3, 2), **settings)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
