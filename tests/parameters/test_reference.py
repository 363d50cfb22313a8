"""Parameters of the reference: names, shards, extra states and upcycled layers do what they say."""

import itertools

import pytest
import torch

import moe_fast
import moe_ref
from moe_ref.config import LayerConfig, LayerParameters, RouterConfig

BOTH = pytest.mark.parametrize("package", [moe_ref, moe_fast], ids=["ref", "fast"])
E, M, N = 3, 2, 4
WEIGHT = torch.arange(float(E * M * N)).reshape(E, M, N)
INDEXED = {f"weight{e}": WEIGHT[e] for e in range(E)}
PACKED = {"weight": WEIGHT}
NOTHING_TO_DO = [  # the early returns: what the module is, what the state has
    (True, PACKED),
    (True, PACKED | INDEXED),
    (True, {"weight0": WEIGHT[0], "weight2": WEIGHT[2]}),
    (True, {}),
    (False, INDEXED),
    (False, PACKED | {"weight1": WEIGHT[1]}),
    (False, {"other": WEIGHT}),
]


def same(a, b) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in a)


@BOTH
@pytest.mark.parametrize(("packed", "state"), NOTHING_TO_DO)
def test_each_early_return_leaves_the_state_as_it_is(package, packed, state):
    copy = dict(state)
    result = package.normalize_parameters(state, num_experts=E, packed=packed)
    assert same(result, copy) and same(state, copy)


@BOTH
def test_each_layout_becomes_the_other_and_a_flat_weight_is_cut_by_rows(package):
    assert same(package.normalize_parameters(INDEXED, num_experts=E, packed=True), PACKED)
    assert same(package.normalize_parameters(PACKED, num_experts=E, packed=False), INDEXED)
    flat = {"weight": WEIGHT.flatten(0, 1)}
    assert same(package.normalize_parameters(flat, num_experts=E, packed=False), INDEXED)
    members = {"weight": list(WEIGHT)}  # of a quantised grouped tensor
    assert same(package.normalize_parameters(members, num_experts=E, packed=False), INDEXED)


@BOTH
def test_flat_rows_as_many_as_experts_are_ambiguous_and_become_vectors(package):
    result = package.normalize_parameters({"weight": WEIGHT[:, 0]}, num_experts=E, packed=False)
    assert result["weight1"].shape == (N,)


@BOTH
@pytest.mark.parametrize(
    ("weights", "reason"),
    [(WEIGHT[:2], r"weight is of shape \(2, 2, 4\)"), (list(WEIGHT[:2]), "weight is of 2 members")],
)
def test_a_packed_weight_that_the_experts_cannot_share_is_named(package, weights, reason):
    with pytest.raises(ValueError, match=reason):
        package.normalize_parameters({"weight": weights}, num_experts=E, packed=False)


@BOTH
def test_experts_of_several_shapes_are_not_stacked(package):
    with pytest.raises(ValueError, match="weight0 is one of shapes"):
        package.normalize_parameters(INDEXED | {"weight1": WEIGHT[1, :1]}, num_experts=E, packed=True)


@BOTH
def test_masters_are_found_by_their_name_at_a_dot_and_never_by_a_guess(package):
    def loaded(state, packed):
        return package.normalize_master_parameters(state, name="fc1.weight", num_experts=E, packed=packed)

    def under(prefix):
        return {f"{prefix}fc1.{name}": x for name, x in INDEXED.items()}

    assert same(loaded(under("a."), True), {"a.fc1.weight": WEIGHT})
    assert same(loaded(under("a.shared_"), True), under("a.shared_"))
    twice = under("a.") | under("b.")
    assert same(loaded(twice, True), twice)
    third = twice | {"c.fc1.weight": WEIGHT}
    assert same(loaded(third, False), third)
    mixed = {f"{'ab'[e % 2]}.fc1.weight{e}": WEIGHT[e] for e in range(E)}
    assert same(loaded(mixed, True), mixed)
    two_layers = {"fc1.weight": WEIGHT, "shared_fc1.weight": WEIGHT}
    assert set(loaded(two_layers, False)) == {"shared_fc1.weight", *(f"fc1.weight{e}" for e in range(E))}


@BOTH
def test_checkpoints_of_both_implementations_are_interchangeable_and_no_expert_may_be_missing(package):
    grouped = {f"linear_fc{i}.{name}": x for i in (1, 2) for name, x in INDEXED.items()} | {"router.weight": WEIGHT[0]}
    modules = package.convert_experts(grouped, num_experts=E, layout="sequential")
    assert set(modules) == {"router.weight"} | {
        f"local_experts.{e}.linear_fc{i}.weight" for e in range(E) for i in (1, 2)
    }
    assert same(package.convert_experts(modules, num_experts=E, layout="grouped"), grouped)
    del modules["local_experts.1.linear_fc2.weight"]
    with pytest.raises(ValueError, match=r"without local_experts\.1\.linear_fc2\.weight"):
        package.convert_experts(modules, num_experts=E, layout="grouped")


def whole_layer(experts=4, width=6, hidden=5):
    """Parameters of all ranks: fc1 of two halves."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"linear_fc1.weight": (experts, 2 * width, hidden), "linear_fc1.bias": (experts, 2 * width)}
    shapes |= {"linear_fc2.weight": (experts, hidden, width), "linear_fc2.bias": (experts, hidden)}
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def own(weights, rank, ranks, tensor_rank, tensor_ranks):
    """A rank's part: its experts; of each half of fc1 its rows, of fc2 its columns."""
    local = {name: x.chunk(ranks)[rank] for name, x in weights.items()}
    for name in ("linear_fc1.weight", "linear_fc1.bias"):
        halves = local[name].chunk(2, 1)
        local[name] = torch.cat([half.chunk(tensor_ranks, 1)[tensor_rank] for half in halves], 1)
    return local | {"linear_fc2.weight": local["linear_fc2.weight"].chunk(tensor_ranks, 2)[tensor_rank]}


@BOTH
@pytest.mark.parametrize(("ranks", "tensor_ranks"), [*itertools.product((1, 2, 4), (1, 3))])
def test_the_shards_of_all_ranks_are_the_whole_layer(package, ranks, tensor_ranks):
    weights = whole_layer()
    result = {name: torch.full_like(x, torch.nan) for name, x in weights.items()}
    for rank, tensor_rank in itertools.product(range(ranks), range(tensor_ranks)):
        settings = {"rank": rank, "ranks": ranks, "tensor_rank": tensor_rank, "tensor_ranks": tensor_ranks}
        for shard in package.shard_parameters(own(weights, *settings.values()), num_experts=4, gated=True, **settings):
            assert shard.shape == weights[shard.key].shape
            region = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.values.shape, strict=True))
            assert result[shard.key][region].isnan().all() == shard.writes
            result[shard.key][region] = shard.values
    assert same(result, weights)


@BOTH
@pytest.mark.parametrize("sizes", [(3, 0, 1, 4), (5,), (0, 0), (1, 1, 1, 1, 1)])
def test_a_master_cut_over_any_ranks_is_the_whole_again_with_as_many_entries_on_each(package, sizes):
    total = sum(sizes)
    members, master = list(torch.zeros(total).split(list(sizes))), torch.arange(1.0, total + 1)
    for cut in itertools.product(range(total + 1), repeat=2):
        ends = (0, *sorted(cut), total)
        result = [x.clone() for x in members]
        for first, last in itertools.pairwise(ends):
            entries = package.expand_shard(members, master[first:last], offset=first)
            assert [entry.member is member for entry, member in zip(entries, members, strict=True)] == [True] * len(
                sizes
            )
            for entry, out in zip(entries, result, strict=True):
                if entry.values is not None:
                    out[entry.start : entry.start + len(entry.values)] = entry.values
        assert torch.equal(torch.cat(result), master)


@BOTH
def test_a_rank_without_a_shard_has_every_entry_and_a_single_parameter_passes(package):
    members = [torch.zeros(2), torch.zeros(1)]
    assert [(e.values, e.start) for e in package.expand_shard(members, None)] == [(None, None)] * 2
    (entry,) = package.expand_shard(members[0], members[1], offset=7)
    assert entry == (members[0], members[1], 7)


@pytest.mark.parametrize("package", [moe_ref, moe_fast], ids=["ref", "fast"])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(("kind", "granularity", "topk"), [("relu", 2, 2), ("squared_relu", 4, 4), ("relu", 1, 2)])
def test_an_upcycled_layer_computes_what_the_dense_layer_does(package, kind, granularity, topk, pre_softmax):
    """Where routing weighs all experts alike: a copy's slices are chosen, and sum to the MLP."""
    generator = torch.Generator().manual_seed(3)
    x, fc1, fc2 = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (8, 5), (5, 8)))
    upcycled = package.upcycle(
        torch.zeros(8, 5, dtype=torch.float64), fc1, fc2, topk=topk, granularity=granularity, kind=kind,
        pre_softmax=pre_softmax,
    )  # fmt: skip
    h = torch.relu(x @ fc1.T)
    dense = (h**2 if kind == "squared_relu" else h) @ fc2.T
    router = RouterConfig(num_experts=8, topk=topk, score_function="softmax", pre_softmax=pre_softmax)
    parameters = LayerParameters(upcycled.router_weight, upcycled.fc1_weight, upcycled.fc2_weight)
    out = moe_ref.moe_layer(
        [x], [parameters], LayerConfig(router=router, kind=kind), states=[moe_ref.new_state(router)]
    )
    torch.testing.assert_close(out.output[0], dense)


@BOTH
def test_experts_of_a_copy_share_their_router_row(package):
    rows = torch.arange(12.0).reshape(6, 2)
    upcycled = package.upcycle(rows, torch.zeros(12, 2), torch.zeros(2, 6), topk=1, granularity=3)
    assert torch.equal(upcycled.router_weight, rows[[0, 0, 0, 1, 1, 1]])
