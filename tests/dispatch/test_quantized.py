"""Rows that travel as codes and scales: quantised before they are sent or where they arrive, the
bits are the same; and the kernels make them.
"""

from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.dispatch.cases import DispatchCase
from moe_fast.dispatch import wire
from moe_fast.dispatch.slabs import Room, offsets, slab_of
from moe_fast.dispatch.steps import Transfer, collect, send
from moe_fast.launch import tuning
from moe_fast.quantization.quantized import amax
from moe_ref.config import Recipe
from moe_ref.permutation.rows import PADDING, take_rows
from tests.dispatch.test_symmetric import World, in_step, same, there

RECIPES = {
    "any scale": Recipe("block", power_of_two_scales=False),
    "powers of two": Recipe("block"),
    "a least amax": Recipe("block", power_of_two_scales=False, amax_epsilon=1.5),
}
SETTINGS = [(None, 64), (4, 64), (2, 8), (1, 0)]  # align, num_rows: with room, and without


def of(seed: int, ranks: int, dtype: torch.dtype = torch.bfloat16, hidden: int = 133) -> World:
    """Tokens of very different sizes: a scale of another row is a wrong one."""
    world = World(seed, ranks, dtype, hidden=hidden)
    world.tokens = [
        own * torch.exp2((torch.arange(len(own)) * 5 + rank) % 17 - 8.0)[:, None].to(dtype)
        for rank, own in enumerate(world.tokens)
    ]
    return world


def dispatched(world: World, recipe: Recipe | None, align: int | None = None, num_rows: int | None = None) -> list:
    return moe_ref.hybridep_dispatch(
        world.tokens, world.maps, probs=world.probs, align=align, num_rows=num_rows, recipe=recipe
    )


# ---- the reference


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("align", "num_rows"), [(None, None), *SETTINGS])
def test_codes_and_scales_that_travel_as_bytes_are_those_of_the_rows(align, num_rows, recipe):
    """Quantised once per token, sent as bytes, permuted there; padding is quantised zeros."""
    world = of(5, 3)
    plain, right = dispatched(world, None, align, num_rows), dispatched(world, recipe, align, num_rows)
    sent = moe_ref.quantize(torch.cat(world.tokens), recipe).quantized
    zeros = moe_ref.quantize(torch.zeros(1, world.hidden, dtype=torch.bfloat16), recipe).quantized
    for rank, (own, without) in enumerate(zip(right, plain, strict=True)):
        inside = int(own.tokens_per_expert.sum())
        source = own.handle.row_tokens[rank][:inside]
        padding = (source == PADDING)[:, None]
        assert same(moe_ref.codes(own.rows)[:inside], take_rows(moe_ref.codes(sent), source))
        assert same(
            moe_ref.scales(own.rows),
            torch.where(padding, moe_ref.scales(zeros), take_rows(moe_ref.scales(sent), source)),
        )
        assert not moe_ref.codes(zeros).any()
        assert same(own.probs, without.probs)
        assert (own.overflow, own.tokens_per_expert.tolist()) == (without.overflow, without.tokens_per_expert.tolist())


def test_the_gradient_is_a_combine_of_the_gradient_of_what_codes_stand_for():
    world = of(6, 2, torch.float32)
    for own in world.tokens:
        own.requires_grad_()
    right = dispatched(world, RECIPES["any scale"], 4)
    cotangents = [torch.randn(moe_ref.dequantize(own.rows).shape) for own in right]
    gradients = torch.autograd.grad([moe_ref.dequantize(own.rows) for own in right], world.tokens, cotangents)
    back = moe_ref.hybridep_combine(cotangents, [own.handle for own in right])
    assert all(same(gradient, own.tokens) for gradient, own in zip(gradients, back, strict=True))


@pytest.mark.parametrize("recipe", [Recipe("mxfp8"), Recipe("current"), "block"])
def test_a_recipe_whose_scales_are_not_of_the_wire_is_refused(recipe):
    world = of(1, 2)
    with pytest.raises(ValueError, match="recipe"):
        dispatched(world, recipe)
    with pytest.raises(ValueError, match="dtype"):
        moe_ref.hybridep_dispatch(
            [own.to(torch.uint8) for own in world.tokens], world.maps, recipe=RECIPES["any scale"]
        )


# ---- the kernels over as many slabs in one process


def sent_by_kernels(world: World, recipe: Recipe, align: int | None, num_rows: int, once: bool) -> tuple[list, list]:
    """(what each rank's steps return, the slabs)."""
    room = Room(world.ranks, world.experts, num_rows, world.hidden * world.tokens[0].element_size())
    memory = [
        torch.full((offsets(room)[""],), 0x7F, dtype=torch.uint8, device=there(world.tokens[0]).device)
        for _ in range(world.ranks)
    ]
    slabs = [slab_of(room, own, [x.data_ptr() for x in memory], lambda: None) for own in memory]
    transfer = Transfer(num_rows, align or 1, once, recipe=recipe)
    given = [
        (there(world.tokens[r]), there(world.maps[r]), there(world.probs[r]), transfer, slabs[r], r)
        for r in range(world.ranks)
    ]
    return in_step([send(*own) for own in given]), slabs


def wrong(world: World, recipe: Recipe, align: int | None, num_rows: int, got: list) -> list[str]:
    """What differs from the reference."""
    found = []
    for own, (form, probs, counts, handle) in zip(dispatched(world, recipe, align, num_rows), got, strict=True):
        inside = int(own.tokens_per_expert.sum())
        pairs = {
            "codes": (form.codes_MN[:inside], moe_ref.codes(own.rows)[:inside]),
            "scales": (form.scale[:inside], moe_ref.scales(own.rows)),
            "probs": (probs[:inside], own.probs[:inside]),
            "counts": (counts, own.tokens_per_expert),
        }
        found += [name for name, pair in pairs.items() if not same(*pair)]
        found += ["overflow"] * (bool(handle.overflow_W[own.handle.rank]) != bool(own.overflow))
    return found


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("name", "align", "num_rows"), [("any scale", None, 64), ("powers of two", 2, 8), ("a least amax", 1, 0)]
)
def test_kernels_send_the_references_codes_and_scales(name, align, num_rows, once):
    world, recipe = of(2 + num_rows, 3), RECIPES[name]
    got, slabs = sent_by_kernels(world, recipe, align, num_rows, once)
    assert wrong(world, recipe, align, num_rows, got) == []
    made = [torch.randn(num_rows, world.hidden).bfloat16() for _ in got]
    back = moe_ref.hybridep_combine(made, [own.handle for own in dispatched(world, recipe, align, num_rows)])
    pulled = in_step([collect(there(made[rank]), None, handle, slabs[rank]) for rank, (*_, handle) in enumerate(got)])
    assert all(same(tokens, own.tokens) for (tokens, _), own in zip(pulled, back, strict=True))


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.float32, 0), (torch.float16, 1), (torch.float64, 128), (torch.float32, 300)]
)
def test_kernels_send_rows_of_any_width_and_dtype(dtype, hidden, monkeypatch):
    monkeypatch.setattr(
        tuning,
        "INTERPRETER",
        replace(tuning.INTERPRETER, symmetric=replace(tuning.INTERPRETER.symmetric, tokens=2, columns=256)),
    )
    world = of(3, 2, dtype, hidden)
    got, _ = sent_by_kernels(world, RECIPES["powers of two"], 4, 40, True)
    assert wrong(world, RECIPES["powers of two"], 4, 40, got) == []


def test_kernels_send_what_is_no_number():
    world = of(4, 2, torch.float32)
    for own in world.tokens:
        own[::2, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40]).repeat(9)[: own[:1, ::3].shape[1]]
    got, _ = sent_by_kernels(world, RECIPES["any scale"], 4, 40, True)
    assert wrong(world, RECIPES["any scale"], 4, 40, got) == []


# ---- the bytes of the ranks that only send and receive


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("hidden", [0, 1, 128, 300])
def test_bytes_of_zeros_are_a_row_of_zeros(hidden, recipe):
    tokens = torch.randn(5, hidden)
    record, of_zeros = wire.packed(there(tokens), recipe)
    form = wire.unpacked(torch.cat([record, torch.zeros_like(record[:2])]), of_zeros, hidden)
    right = moe_ref.quantize(torch.cat([tokens, torch.zeros(2, hidden)]), recipe).quantized
    assert same(form.codes_MN, moe_ref.codes(right))
    assert same(form.scale, moe_ref.scales(right))
    assert record.shape[1] == hidden + 4 * -(-hidden // 128)


def test_an_amax_that_did_not_travel_is_not_known():
    form = wire.form_of(torch.zeros(2, 130, dtype=torch.uint8), torch.ones(2, 2))
    with pytest.raises(ValueError, match="amax does not travel"):
        amax(wire.rows_of(form, RECIPES["any scale"], torch.float32, torch.tensor([2]), torch.zeros(2, 130)))


# ---- twins


@pytest.mark.parametrize("defect", ["the scale of another row", "padding without scales", "codes of another scale"])
def test_a_defect_is_noticed(defect):
    world, recipe = of(3, 2), RECIPES["any scale"]
    got, _ = sent_by_kernels(world, recipe, 4, 40, True)
    assert wrong(world, recipe, 4, 40, got) == []
    for i, (form, probs, counts, handle) in enumerate(got):
        if defect == "the scale of another row":
            form = replace(form, scale=form.scale.roll(1, 0))
        elif defect == "padding without scales":
            form = replace(form, scale=torch.where((form.codes_MN != 0).any(1, keepdim=True), form.scale, 0.0))
        else:
            form = replace(form, codes_MN=form.codes_MN ^ 1)
        got[i] = (form, probs, counts, handle)
    assert set(wrong(world, recipe, 4, 40, got)) == {"codes" if defect.startswith("codes") else "scales"}


# ---- the suite


def case(**fields) -> DispatchCase:
    plain = {
        "counts": (3, 0, 2),
        "local_experts": 2,
        "hidden": 130,
        "topk": 2,
        "probs": "float32",
        "seed": 1,
        "align": 4,
        "fp8": "fp8",
    }
    return DispatchCase(function="hybridep_dispatch", **plain | fields)


WORLDS = [
    case(grads="tokens+probs", law="history"),
    case(fp8="powers", dtype="bfloat16", slack=-1, law="determinism"),
    case(fp8="least", slack=2, grads="tokens", values="special", layout="transposed", layout_of="d_rows"),
    case(align=0, unused="rows", grads="tokens+probs", layout="strided", layout_of="d_probs"),
    case(counts=(4, 3), topk=4, dtype="float16", law="buffer_reuse"),
]


@pytest.mark.parametrize("name", ["moe_ref", "moe_fast", "moe_fast.dispatch.symmetric"])
def test_ranks_pass(name):
    with Pool(ChildOptions(name, "cpu")) as pool:
        pool.start()
        outcomes = [pool.worlds.run(each) for each in WORLDS]
    assert [(found.status, found.finding, found.reason) for found in outcomes] == [("PASS", None, "")] * len(WORLDS)


@pytest.mark.parametrize(("name", "output"), [("W01", "scales"), ("W02", "scales"), ("W03", "scales")])
def test_a_planted_defect_shows_where_it_should(name, output):
    with Pool(ChildOptions(f"conformance.mutants.planted:{name}.moe_ref", "cpu")) as pool:
        pool.start()
        outcomes = [pool.worlds.run(each) for each in (case(hidden=5, align=8), replace(case(), fp8=""))]
    assert [
        (found.status, found.finding and (found.finding["output"], found.finding["check"])) for found in outcomes
    ] == [
        ("FAIL", (output, "exact")),
        ("PASS", None),
    ]


def test_rows_and_codes_are_different_cases_of_one_function():
    problem = CONTRACTS["hybridep_dispatch"].legal(case(grads="tokens+probs", layout="transposed", layout_of="d_rows"))
    assert (set(problem.cotangents), problem.layouts) == ({"dequantized", "probs"}, {"d_dequantized": "transposed"})
    assert "recipe" not in CONTRACTS["hybridep_dispatch"].legal(case(fp8="")).settings
    assert not [
        name
        for name in ("dense", "in_flight", "relabelling", "fused", "adjointness")
        if CONTRACTS["hybridep_dispatch"].laws[name].applies(case())
    ]
