"""Rows that travel as codes and scales.

A token that is quantised before it is sent has the bits of a row that is quantised where it
arrives, in the reference and in the kernels.
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
        local * torch.exp2((torch.arange(len(local)) * 5 + rank) % 17 - 8.0)[:, None].to(dtype)
        for rank, local in enumerate(world.tokens)
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
    unquantized, expected = dispatched(world, None, align, num_rows), dispatched(world, recipe, align, num_rows)
    wire_form = moe_ref.quantize(torch.cat(world.tokens), recipe).quantized
    zeros = moe_ref.quantize(torch.zeros(1, world.hidden, dtype=torch.bfloat16), recipe).quantized
    for rank, (local, without) in enumerate(zip(expected, unquantized, strict=True)):
        num_used = int(local.tokens_per_expert.sum())
        source = local.handle.row_tokens[rank][:num_used]
        padding = (source == PADDING)[:, None]
        assert same(moe_ref.codes(local.rows)[:num_used], take_rows(moe_ref.codes(wire_form), source))
        assert same(
            moe_ref.scales(local.rows),
            torch.where(padding, moe_ref.scales(zeros), take_rows(moe_ref.scales(wire_form), source)),
        )
        assert not moe_ref.codes(zeros).any()
        assert same(local.probs, without.probs)
        assert (local.overflow, local.tokens_per_expert.tolist()) == (
            without.overflow,
            without.tokens_per_expert.tolist(),
        )


def test_the_gradient_is_a_combine_of_the_gradient_of_what_codes_stand_for():
    world = of(6, 2, torch.float32)
    for local in world.tokens:
        local.requires_grad_()
    expected = dispatched(world, RECIPES["any scale"], 4)
    cotangents = [torch.randn(moe_ref.dequantize(local.rows).shape) for local in expected]
    gradients = torch.autograd.grad([moe_ref.dequantize(local.rows) for local in expected], world.tokens, cotangents)
    combined = moe_ref.hybridep_combine(cotangents, [local.handle for local in expected])
    assert all(same(gradient, local.tokens) for gradient, local in zip(gradients, combined, strict=True))


@pytest.mark.parametrize("recipe", [Recipe("mxfp8"), Recipe("current"), "block"])
def test_a_recipe_whose_scales_are_not_of_the_wire_is_refused(recipe):
    world = of(1, 2)
    with pytest.raises(ValueError, match="recipe"):
        dispatched(world, recipe)
    with pytest.raises(ValueError, match="dtype"):
        moe_ref.hybridep_dispatch(
            [local.to(torch.uint8) for local in world.tokens], world.maps, recipe=RECIPES["any scale"]
        )


# ---- the kernels over as many slabs in one process


def sent_by_kernels(world: World, recipe: Recipe, align: int | None, num_rows: int, once: bool) -> tuple[list, list]:
    """(what each rank's steps return, the slabs)."""
    room = Room(world.ranks, world.experts, num_rows, world.hidden * world.tokens[0].element_size())
    memory = [
        torch.full((offsets(room)[""],), 0x7F, dtype=torch.uint8, device=there(world.tokens[0]).device)
        for _ in range(world.ranks)
    ]
    slabs = [slab_of(room, local, [x.data_ptr() for x in memory], lambda: None) for local in memory]
    transfer = Transfer(num_rows, align or 1, once, recipe=recipe)
    arguments = [
        (there(world.tokens[r]), there(world.maps[r]), there(world.probs[r]), transfer, slabs[r], r)
        for r in range(world.ranks)
    ]
    return in_step([send(*local) for local in arguments]), slabs


def differing_parts(world: World, recipe: Recipe, align: int | None, num_rows: int, got: list) -> list[str]:
    """What differs from the reference."""
    differing = []
    for local, (form, probs, counts, handle) in zip(dispatched(world, recipe, align, num_rows), got, strict=True):
        num_used = int(local.tokens_per_expert.sum())
        pairs = {
            "codes": (form.codes_MN[:num_used], moe_ref.codes(local.rows)[:num_used]),
            "scales": (form.scale[:num_used], moe_ref.scales(local.rows)),
            "probs": (probs[:num_used], local.probs[:num_used]),
            "counts": (counts, local.tokens_per_expert),
        }
        differing += [name for name, pair in pairs.items() if not same(*pair)]
        differing += ["overflow"] * (bool(handle.overflow_W[local.handle.rank]) != bool(local.overflow))
    return differing


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("name", "align", "num_rows"), [("any scale", None, 64), ("powers of two", 2, 8), ("a least amax", 1, 0)]
)
def test_kernels_send_the_references_codes_and_scales(name, align, num_rows, once):
    world, recipe = of(2 + num_rows, 3), RECIPES[name]
    got, slabs = sent_by_kernels(world, recipe, align, num_rows, once)
    assert differing_parts(world, recipe, align, num_rows, got) == []
    expert_rows = [torch.randn(num_rows, world.hidden).bfloat16() for _ in got]
    combined = moe_ref.hybridep_combine(
        expert_rows, [local.handle for local in dispatched(world, recipe, align, num_rows)]
    )
    pulled = in_step(
        [collect(there(expert_rows[rank]), None, handle, slabs[rank]) for rank, (*_, handle) in enumerate(got)]
    )
    assert all(same(tokens, local.tokens) for (tokens, _), local in zip(pulled, combined, strict=True))


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
    assert differing_parts(world, RECIPES["powers of two"], 4, 40, got) == []


def test_kernels_send_nan_and_infinities():
    world = of(4, 2, torch.float32)
    for local in world.tokens:
        local[::2, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40]).repeat(9)[
            : local[:1, ::3].shape[1]
        ]
    got, _ = sent_by_kernels(world, RECIPES["any scale"], 4, 40, True)
    assert differing_parts(world, RECIPES["any scale"], 4, 40, got) == []


# ---- the bytes of the ranks that only send and receive


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("hidden", [0, 1, 128, 300])
def test_bytes_of_zeros_are_a_row_of_zeros(hidden, recipe):
    tokens = torch.randn(5, hidden)
    record, of_zeros = wire.packed(there(tokens), recipe)
    form = wire.unpacked(torch.cat([record, torch.zeros_like(record[:2])]), of_zeros, hidden)
    expected = moe_ref.quantize(torch.cat([tokens, torch.zeros(2, hidden)]), recipe).quantized
    assert same(form.codes_MN, moe_ref.codes(expected))
    assert same(form.scale, moe_ref.scales(expected))
    assert record.shape[1] == hidden + 4 * -(-hidden // 128)


def test_an_amax_that_did_not_travel_is_not_known():
    form = wire.form_of(torch.zeros(2, 130, dtype=torch.uint8), torch.ones(2, 2))
    with pytest.raises(ValueError, match="amax does not travel"):
        amax(wire.rows_of(form, RECIPES["any scale"], torch.float32, torch.tensor([2]), torch.zeros(2, 130)))


# ---- twins


@pytest.mark.parametrize("defect", ["the scale of another row", "padding without scales", "codes of another scale"])
def test_a_wrong_scale_or_code_differs_from_the_reference(defect):
    world, recipe = of(3, 2), RECIPES["any scale"]
    got, _ = sent_by_kernels(world, recipe, 4, 40, True)
    assert differing_parts(world, recipe, 4, 40, got) == []
    for i, (form, probs, counts, handle) in enumerate(got):
        if defect == "the scale of another row":
            form = replace(form, scale=form.scale.roll(1, 0))
        elif defect == "padding without scales":
            form = replace(form, scale=torch.where((form.codes_MN != 0).any(1, keepdim=True), form.scale, 0.0))
        else:
            form = replace(form, codes_MN=form.codes_MN ^ 1)
        got[i] = (form, probs, counts, handle)
    assert set(differing_parts(world, recipe, 4, 40, got)) == {"codes" if defect.startswith("codes") else "scales"}


# ---- the suite


def case(**fields) -> DispatchCase:
    defaults = {
        "counts": (3, 0, 2),
        "local_experts": 2,
        "hidden": 130,
        "topk": 2,
        "probs": "float32",
        "seed": 1,
        "align": 4,
        "fp8": "fp8",
    }
    return DispatchCase(function="hybridep_dispatch", **defaults | fields)


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
        outcomes = [pool.worlds.run(case) for case in WORLDS]
    assert [(outcome.status, outcome.finding, outcome.reason) for outcome in outcomes] == [("PASS", None, "")] * len(
        WORLDS
    )


@pytest.mark.parametrize(("name", "output"), [("W01", "scales"), ("W02", "scales"), ("W03", "scales")])
def test_a_planted_defect_shows_where_it_should(name, output):
    with Pool(ChildOptions(f"conformance.mutants.planted:{name}.moe_ref", "cpu")) as pool:
        pool.start()
        outcomes = [pool.worlds.run(one_case) for one_case in (case(hidden=5, align=8), replace(case(), fp8=""))]
    assert [
        (outcome.status, outcome.finding and (outcome.finding["output"], outcome.finding["check"]))
        for outcome in outcomes
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
