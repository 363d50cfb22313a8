"""The quantizers of `moe_fast` make the reference's codes, scales and amax bit by bit, and leave no memory unwritten."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from conformance.core.covering import covering
from conformance.core.tensors import laid_out
from moe_fast.launch import tuning
from moe_fast.launch.backend import tl, triton
from moe_fast.quantization import _formats as kernels
from moe_ref.config import QuantizerState, Recipe
from moe_ref.config.quantization import WHOLE_BLOCKS
from moe_ref.quantization import formats
from tests.quantization.quantization_cases import (
    BF16,
    DTYPES,
    FP32,
    FP64,
    RECIPES,
    SIZES,
    SPLITS,
    Problem,
    agrees,
    poisoned,
    problem_of,
    same,
)

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
FP8 = tuple(name for name in RECIPES if not name.startswith("nvfp4"))
BASIC = ("block", "current", "delayed", "mxfp8", "nvfp4")
AXES = {
    "recipe": FP8,
    "role": ("input", "weight", "grad_output"),
    "dtype": DTYPES,
    "splits": tuple(SPLITS),
    "columns": (
        32,
        160,
    ),  # one block of MXFP8; beyond one of block scaling, and beyond what a program with small tiles takes
    "directions": ((True, False), (False, True), (True, True)),
    "values": ("spread", "boundaries", "specials"),
    "layout": ("contiguous", "transposed", "strided", "shifted", "expanded"),
    "blocks": tuple(SIZES),
}
CASES = covering(AXES, lambda row: True)[0]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("row", CASES, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_everything_that_is_made_equals_the_reference(row, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, quantize=SIZES[row["blocks"]]))
    assert agrees(moe_fast, problem_of(**row))


def test_every_pair_of_settings_is_in_some_case():
    for a in AXES:
        for b in AXES:
            assert a == b or len({(str(row[a]), str(row[b])) for row in CASES}) == len(AXES[a]) * len(AXES[b]), (a, b)


@pytest.mark.parametrize("name", FP8)
def test_every_recipe_makes_both_directions_of_unusual_numbers_at_once(name):
    assert agrees(moe_fast, problem_of(name, values="specials", dtype=BF16, columns=32, seed=1))


# Numbers


@triton.jit
def encode_kernel(x_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a block of numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    code = kernels.encoded_up(tl.abs(x)) if FORMAT == "e8m0" else kernels.encoded(x, FORMAT, False)
    tl.store(out_ptr + i, code.to(tl.uint8))


@triton.jit
def decode_kernel(codes_ptr, out_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of a block of codes."""
    i = tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + i)
    tl.store(out_ptr + i, kernels.power_of_two(code) if FORMAT == "e8m0" else kernels.decoded(code, FORMAT))


def numbers(format: formats.Format) -> Tensor:
    """Every bfloat16, every number of the format, what lies halfway between two, and the neighbours of all of them in float32."""
    every = (torch.arange(2**16) << 16).to(torch.int32).view(FP32)
    values = formats.decode(torch.arange(format.max_code + 1, dtype=torch.uint8), format, dtype=FP64)
    halfway = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, halfway, halfway[-1:] + values[-1:] - values[-2:-1]]).to(FP32)
    near = torch.cat(
        [near, torch.nextafter(near, torch.tensor(math.inf)), torch.nextafter(near, torch.tensor(-math.inf))]
    )
    near = torch.cat([near, -near])
    return torch.cat([every, near, near.new_zeros(-len(near) % 1024)])


@pytest.mark.parametrize(
    "format", [formats.E4M3, formats.E5M2, formats.E2M1, formats.E8M0], ids=lambda format: format.name
)
def test_codes_of_numbers_and_of_what_lies_between_are_right(format):
    x = numbers(format)
    out = torch.empty(len(x), dtype=torch.uint8)
    encode_kernel[(len(x) // 1024,)](x, out, FORMAT=format.name, BLOCK=1024)
    right = formats.encode(x, format)
    known = ~x.isnan() if format is formats.E8M0 else torch.ones_like(x, dtype=torch.bool)  # no amax is a NaN
    assert torch.equal(out[known], right[known])


@pytest.mark.parametrize(
    "format", [formats.E4M3, formats.E5M2, formats.E2M1, formats.E8M0], ids=lambda format: format.name
)
def test_codes_mean_the_same_numbers(format):
    codes = torch.arange(16 if format is formats.E2M1 else 256, dtype=torch.uint8)
    codes = (
        codes[(codes & 0x7F) != format.infinity]
        if format is formats.E5M2
        else codes[:255]
        if format is formats.E8M0
        else codes
    )  # never met
    size = tuning.power_of_two(len(codes))
    padded, out = torch.nn.functional.pad(codes, (0, size - len(codes))), torch.empty(size)
    decode_kernel[(1,)](padded, out, FORMAT=format.name, BLOCK=size)
    assert same(out[: len(codes)], formats.decode(codes, format))


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_every_bfloat16_is_cast_right(role):
    every = (torch.arange(2**16) << 16).to(torch.int32).view(FP32).to(BF16).view(256, 256)
    problem = Problem(
        x=every,
        recipe=RECIPES["delayed"],
        role=role,
        splits=None,
        directions=(True, False),
        state=QuantizerState(torch.zeros(1, 3), torch.ones(1)),
    )
    assert agrees(moe_fast, problem)


@pytest.mark.parametrize("name", ["block", "block, any scale", "mxfp8"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_scales_are_right_for_an_amax_of_every_exponent(name, dtype):
    """A block an exponent, from the smallest subnormal on: what just fits, and its neighbours."""
    fits = torch.exp2(torch.arange(-149, 128).double())[:, None] * torch.tensor(
        [1.0, 1.75, 1.75 * (1 + 2.0**-22), 1.75 * (1 - 2.0**-22)]
    )
    x = torch.zeros(len(fits) * 4, 128)
    x[:, 5], x[:, 6] = fits.flatten().float(), -(fits.flatten() / 3).float()
    rows = (len(x) + 31) // 32 * 32
    x = torch.nn.functional.pad(x, (0, 0, 0, rows - len(x))).to(dtype)
    assert agrees(
        moe_fast, Problem(x=x, recipe=RECIPES[name], role="input", splits=None, directions=(True, False), state=None)
    )


# Places


@pytest.mark.parametrize("layout", ["wide_rows", "wide_columns"])
@pytest.mark.parametrize("name", BASIC)
def test_rows_and_columns_far_apart_are_read(name, layout):
    near = problem_of(name, splits="none", columns=32, dtype=BF16)
    near.x = near.x[:32]
    far = Problem(**{**vars(near), "x": laid_out(near.x, layout)})
    for direction in (False, True):
        made, right = (moe_fast.quantize(p.x, p.recipe, **p.call).quantized for p in (far, near))
        assert torch.equal(*(moe_fast.codes(q, columnwise=direction) for q in (made, right)))
        assert torch.equal(*(moe_fast.scales(q, columnwise=direction) for q in (made, right)))


@pytest.mark.parametrize("name", ["block", "current", "delayed", "mxfp8", "nvfp4", "nvfp4, row-scaled", "nvfp4, 4/6"])
def test_rows_behind_the_last_group_are_nobodys(name):
    problem = problem_of(name, columns=32, dtype=BF16)
    right = problem.results(moe_fast)
    end = int(problem.splits.sum())
    problem.x[end:-3], problem.x[-3:] = math.nan, 3e38
    assert all(same(a, b) for a, b in zip(right, problem.results(moe_fast), strict=True))
    assert (moe_fast.codes(moe_fast.quantize(problem.x, problem.recipe, **problem.call).quantized)[end:] == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (64, 0), (0, 0), (1, 1), (129, 3)])
@pytest.mark.parametrize("name", BASIC)
def test_the_smallest_sizes_are_right(name, rows, columns):
    if RECIPES[name].scaling in WHOLE_BLOCKS:
        rows, columns = rows // 32 * 32, columns // 32 * 32
    for splits in (None, torch.tensor([0, 0]), torch.tensor([rows])):
        problem = problem_of(name, splits="none", dtype=BF16)
        state = problem.state and QuantizerState(
            *(x.expand(len(splits) if splits is not None else 1, *x.shape[1:]).contiguous() for x in problem.state)
        )
        problem = Problem(**{**vars(problem), "x": problem.x[:rows, :columns], "splits": splits, "state": state})
        if min(rows, columns) or name != "nvfp4":  # the reference cannot cut nothing into squares of 16
            assert agrees(moe_fast, problem), splits


def test_many_groups_are_found():
    sizes = torch.arange(19) % 4 * 2
    problem = problem_of("block", splits="none", columns=32)
    for name in ("block", "current"):
        assert agrees(moe_fast, Problem(**{**vars(problem), "recipe": RECIPES[name], "splits": sizes}))


# The call


def test_the_device_is_not_asked_how_long_the_groups_are(monkeypatch):
    problems = [
        problem_of(name, role=role, columns=32, dtype=BF16, directions=(True, "row-scaled" not in name))
        for name in RECIPES
        for role in AXES["role"]
    ]

    def refuse(*_):
        raise AssertionError("a value of the device was read")

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(moe_fast.quantization._quantize.quantize_blocks_kernel, "run", lambda *_, **__: None)
    monkeypatch.setattr(moe_fast.quantization._nvfp4.quantize_two_levels_kernel, "run", lambda *_, **__: None)
    for kernel in ("group_amax_kernel", "cast_groups_kernel", "two_levels_amax_kernel"):
        monkeypatch.setattr(getattr(moe_fast.quantization._group_scales, kernel), "run", lambda *_, **__: None)
    for problem in problems:
        moe_fast.quantize(problem.x, problem.recipe, **problem.call)
    with pytest.raises(AssertionError, match="was read"):  # this would notice
        moe_ref.quantize(problems[0].x, problems[0].recipe, **problems[0].call)


@pytest.mark.parametrize("name", BASIC)
def test_two_calls_give_the_same_bits_and_inputs_stay_as_they_were(name):
    problem = problem_of(name, columns=32, dtype=BF16)
    held = [problem.x, problem.splits, *(problem.state or ())]
    before = [x.clone() for x in held]
    assert all(same(a, b) for a, b in zip(problem.results(moe_fast), problem.results(moe_fast), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_what_was_made_does_not_keep_x_alive():
    x = problem_of("block").x.requires_grad_()
    quantized = moe_fast.quantize(x, RECIPES["block"]).quantized
    assert quantized.source is not None and quantized.source.untyped_storage().nbytes() == x.element_size()


def test_a_direction_that_was_not_asked_for_raises():
    for name in RECIPES:
        problem = problem_of(name, directions=(False, True), splits="none", columns=32, role="weight")
        for namespace in (moe_fast, moe_ref):
            quantized = namespace.quantize(problem.x, problem.recipe, **problem.call)[0]
            for read in (namespace.codes, namespace.scales, namespace.amax, namespace.dequantize):
                with pytest.raises(ValueError, match="columnwise is False"):
                    read(quantized)


X = torch.zeros(64, 64)
ILLEGAL = [
    (X[0], "block", {}),
    (X.long(), "block", {}),
    (X, "block", {"role": "bias"}),
    (X, "block", {"rowwise": False}),
    (X, "block", {"splits": torch.zeros(2)}),
    (X, "block", {"splits": torch.zeros(0, dtype=torch.int64)}),
    (X, "block", {"state": QuantizerState(torch.zeros(1, 3), torch.ones(1))}),
    (X, "block", {"noise": torch.zeros(2, 64, 64)}),
    (X, "delayed", {}),
    (X, "delayed", {"state": QuantizerState(torch.zeros(2, 3), torch.ones(2))}),
    (X[:, :33], "mxfp8", {}),
    (X[:33], "mxfp8", {}),
    (X[:, :17], "nvfp4", {}),
]


@pytest.mark.parametrize(("x", "name", "settings"), ILLEGAL)
def test_an_illegal_call_raises_what_the_reference_raises(x, name, settings):
    messages = []
    for namespace in (moe_fast, moe_ref):
        with pytest.raises(ValueError) as raised:
            namespace.quantize(x, RECIPES[name], **settings)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# The memory of delayed scaling


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_the_next_scales_are_the_references(algorithm, length, role):
    recipe = Recipe("delayed", amax_history_len=length, amax_compute_algo=algorithm, margin=length)
    groups = 24
    values = torch.tensor([0.0, 0.0, 1.5, 448.0, 7.3, 1e-38, 3e38, math.inf, math.nan, 2.0**-149])
    generator = torch.Generator().manual_seed(length)
    history = values[torch.randint(0, len(values), (groups, length), generator=generator)]
    state = QuantizerState(history, torch.rand(groups, generator=generator))
    reduced = values[torch.randint(0, len(values), (groups,), generator=generator)]
    for given in (None, reduced):
        got, right = (
            namespace.update_scales(state, recipe, role=role, reduced_amax=given) for namespace in (moe_fast, moe_ref)
        )
        assert all(same(a, b) for a, b in zip(got, right, strict=True))


def test_a_state_of_any_strides_is_read():
    recipe = Recipe("delayed", amax_history_len=3)
    state, reduced = (
        QuantizerState(torch.tensor([[0.0, 2.0, 3.0], [1.0, 5.0, 0.5]]), torch.tensor([0.5, 2.0])),
        torch.tensor([0.0, 7.0]),
    )
    far = QuantizerState(laid_out(state.amax_history, "transposed"), laid_out(state.scale, "strided"))
    got = moe_fast.update_scales(far, recipe, reduced_amax=laid_out(reduced, "strided"))
    assert all(same(a, b) for a, b in zip(got, moe_ref.update_scales(state, recipe, reduced_amax=reduced), strict=True))


def test_the_first_state_is_the_references():
    for recipe in RECIPES.values():
        got, right = (namespace.new_quantizer_state(recipe, num_groups=3) for namespace in (moe_fast, moe_ref))
        assert (got is None) == (right is None) and all(same(a, b) for a, b in zip(got or (), right or (), strict=True))
    with pytest.raises(ValueError, match="num_groups"):
        moe_fast.new_quantizer_state(RECIPES["block"], num_groups=0)
    with pytest.raises(ValueError, match="only that has a state"):
        moe_fast.update_scales(QuantizerState(torch.zeros(1, 3), torch.ones(1)), RECIPES["block"])


# Twins: what `agrees` must not accept


def changed(**functions: Any) -> SimpleNamespace:
    """moe_fast, some of whose functions are others."""
    return SimpleNamespace(
        **{name: getattr(moe_fast, name) for name in ("quantize", "codes", "scales", "amax", "dequantize")} | functions
    )


def recast(change: Any) -> SimpleNamespace:
    """moe_fast that is given another x."""
    return changed(quantize=lambda x, recipe, **call: moe_fast.quantize(change(x), recipe, **call))


def recalled(**other: Any) -> SimpleNamespace:
    """moe_fast that is called with other settings, each a function of what was to be."""
    return changed(
        quantize=lambda x, recipe, **call: moe_fast.quantize(
            x, recipe, **{**call, **{name: of(call[name]) for name, of in other.items()}}
        )
    )


def reading(name: str, change: Any) -> SimpleNamespace:
    """moe_fast, one of whose results is changed."""

    def read(quantized: Any, **call: Any) -> Any:
        found = getattr(moe_fast, name)(quantized, **call)
        return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

    return changed(**{name: read})


def last_element(by: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        flat = x.flatten()
        return torch.cat([flat[:-1], by(flat[-1:])]).view(x.shape)

    return change


def neighbour(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, math.inf))


TWINS = {
    "one code in the last row is another": ("current", "fills", reading("codes", last_element(lambda x: x ^ 1))),
    "the minus of zero is lost": ("current", "ragged", recast(lambda x: torch.where(x == 0, 0.0, x))),
    "a NaN is no code of its own": ("current", "ragged", recast(lambda x: torch.where(x.isnan(), 0.0, x))),
    "subnormals are flushed": ("mxfp8", "fills", recast(lambda x: torch.where(x.abs() < 2.0**-126, 0 * x, x))),
    "x is rounded to bfloat16 first": ("block", "ragged", recast(lambda x: x.bfloat16().to(x.dtype))),
    "a scale beside the right one": ("block, any scale", "ragged", reading("scales", last_element(neighbour))),
    "an amax beside the right one": ("block", "ragged", reading("amax", last_element(neighbour))),
    "groups one row late": ("block", "ragged", recalled(splits=lambda s: torch.cat([s[:1] + 1, s[1:-1], s[-1:]]))),
    "no groups": ("current", "fills", recalled(splits=lambda s: torch.stack([s.sum(), *[s[0] * 0] * (len(s) - 1)]))),
    "the format of gradients": ("current", "ragged", recalled(role=lambda _: "grad_output")),
    "blocks of weights": ("block", "ragged", recalled(role=lambda _: "weight")),
    "scales not padded": ("block", "ragged", reading("scales", lambda x: x[..., :-1])),
    "the state as it was": (
        "delayed",
        "ragged",
        changed(quantize=lambda x, r, **call: (moe_fast.quantize(x, r, **call)[0], call["state"])),
    ),
    "an earlier scale ignored": (
        "delayed",
        "ragged",
        recalled(state=lambda s: QuantizerState(s.amax_history, torch.ones_like(s.scale))),
    ),
    "memory left unwritten": ("block", "ragged", reading("codes", torch.empty_like)),
    "values in float16": ("block", "ragged", reading("dequantize", lambda x: x.half().to(x.dtype))),
    "no gradient but that of one": ("block", "ragged", recast(lambda x: 2 * x - x.detach())),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_quantizer_is_noticed(name):
    recipe, splits, twin = TWINS[name]
    problem = problem_of(recipe, splits=splits, values="specials", columns=32 if recipe == "mxfp8" else 40)
    assert agrees(moe_fast, problem) and not agrees(twin, problem)


def test_a_wrong_rounding_of_codes_is_noticed(monkeypatch):
    """Ties away from zero; the quotient by way of a reciprocal; a scale of blocks that is a power of two too large."""
    x = numbers(formats.E4M3)
    assert not torch.equal(formats.encode(x * (1 + 2.0**-23), formats.E4M3), formats.encode(x, formats.E4M3))
    problem = problem_of("block, any scale", values="boundaries", columns=32)

    @triton.jit
    def approximate(numerator: tl.constexpr, denominator):
        return numerator * tl.div_rn(tl.full(denominator.shape, 1.0, tl.float32), denominator)

    assert agrees(moe_fast, problem)
    monkeypatch.setattr(moe_fast.quantization._quantize, "over", approximate)
    assert not agrees(moe_fast, problem)
