"""Quantisers in `moe_fast` beyond the gate: each number of a format, reads, kept memory, errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from moe_fast.launch import tuning
from moe_fast.launch.backend import tl, triton
from moe_fast.quantization import _formats as kernels
from moe_ref.config import QuantizerState, Recipe
from moe_ref.quantization import formats
from moe_ref.quantization.quantize import HADAMARD_SIGNS
from moe_ref.quantization.quantize import hadamard as transform
from tests.common.fast import assert_same_error, interpreted, normal

pytestmark = interpreted
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
NEAREST: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
RECIPES = {
    "block": Recipe("block"),
    "block, any scale": Recipe("block", power_of_two_scales=False),
    "current": Recipe("current"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "mxfp8": Recipe("mxfp8", fp8_format="hybrid"),
    "mxfp8, square weights": Recipe("mxfp8", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4, vectors": Recipe("nvfp4", two_dimensional_weights=False, **NEAREST),
    "nvfp4, row-scaled": Recipe("nvfp4", row_scaled_activation=True, **NEAREST),
    "nvfp4, 4/6": Recipe("nvfp4", four_over_six="all", **NEAREST),
}
ROLES = ("input", "weight", "grad_output")
FORMATS = [formats.E4M3, formats.E5M2, formats.E2M1, formats.E8M0]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the sign of each zero; NaN equals NaN."""
    return bool((((a == b) & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())).all())


def assert_agree(x: Tensor, recipe: Recipe, **settings: Any) -> None:
    """Codes, scales and amax are the reference's, in every direction that is made."""
    got, expected = (namespace.quantize(x, recipe, **settings).quantized for namespace in (moe_fast, moe_ref))
    for columnwise in (False, True):
        if settings.get("columnwise" if columnwise else "rowwise", not columnwise):
            for read in ("codes", "scales", "amax"):
                a, b = (getattr(n, read)(q, columnwise=columnwise) for n, q in ((moe_fast, got), (moe_ref, expected)))
                assert a.shape == b.shape and same(a, b), (read, columnwise)


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
    """Every bfloat16, every number of the format, what lies halfway between two, and the neighbours
    of all of them in float32.
    """
    bf16_values = (torch.arange(2**16) << 16).to(torch.int32).view(FP32)
    values = formats.decode(torch.arange(format.max_code + 1, dtype=torch.uint8), format, dtype=FP64)
    halfway = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, halfway, halfway[-1:] + values[-1:] - values[-2:-1]]).to(FP32)
    near = torch.cat(
        [near, torch.nextafter(near, torch.tensor(math.inf)), torch.nextafter(near, torch.tensor(-math.inf))]
    )
    near = torch.cat([near, -near])
    return torch.cat([bf16_values, near, near.new_zeros(-len(near) % 1024)])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_codes_of_numbers_and_of_what_lies_between_are_right(format):
    x = numbers(format)
    out = torch.empty(len(x), dtype=torch.uint8)
    encode_kernel[(len(x) // 1024,)](x, out, FORMAT=format.name, BLOCK=1024)
    expected = formats.encode(x, format)
    # no amax is a NaN
    comparable = ~x.isnan() if format is formats.E8M0 else torch.ones_like(x, dtype=torch.bool)
    assert torch.equal(out[comparable], expected[comparable])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
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


@triton.jit
def random_kernel(x_ptr, noise_ptr, out_ptr, BLOCK: tl.constexpr):
    """Codes of a block of numbers, rounded by noise."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, kernels.encoded_randomly(tl.load(x_ptr + i), tl.load(noise_ptr + i)))


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_noise_decides_to_the_last_bit(dtype):
    """Rests of numbers, and the noise that equals them, and its neighbours."""
    bf16_values = (torch.arange(2**16) << 16).to(torch.int32).view(FP32)
    size = bf16_values.abs().double().clamp(max=6).nan_to_num(0)
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    remainder = (size / spacing - (size / spacing).floor()).to(dtype)
    for noise in (
        remainder,
        torch.nextafter(remainder, torch.zeros_like(remainder)),
        torch.nextafter(remainder, torch.ones_like(remainder)),
        torch.zeros_like(remainder),
    ):
        out = torch.empty(2**16, dtype=torch.uint8)
        random_kernel[(64,)](bf16_values, noise, out, BLOCK=1024)
        assert torch.equal(out, formats.encode(bf16_values, formats.E2M1, noise=noise))


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_every_bfloat16_is_cast_right(role):
    bf16_values = (torch.arange(2**16) << 16).to(torch.int32).view(FP32).to(BF16).view(256, 256)
    state = QuantizerState(torch.zeros(1, 3), torch.ones(1))
    assert_agree(bf16_values, RECIPES["delayed"], role=role, state=state)


@pytest.mark.parametrize("name", ["block", "block, any scale", "mxfp8"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_scales_are_right_for_an_amax_of_every_exponent(name, dtype):
    """One block per exponent, from the smallest subnormal: what just fits, and its neighbours."""
    just_fits = torch.tensor([1.0, 1.75, 1.75 * (1 + 2.0**-22), 1.75 * (1 - 2.0**-22)])
    fits = torch.exp2(torch.arange(-149, 128).double())[:, None] * just_fits
    x = torch.zeros(-(-fits.numel() // 32) * 32, 128)
    x[: fits.numel(), 5], x[: fits.numel(), 6] = fits.flatten().float(), -(fits.flatten() / 3).float()
    assert_agree(x.to(dtype), RECIPES[name])


def test_the_transform_adds_in_the_order_of_the_reference():
    """Of numbers that differ by 2^±12 and cancel, other orders of additions give other sums."""
    x = normal(64, 160) * torch.exp2(torch.randint(-12, 13, (64, 1), generator=torch.Generator().manual_seed(0)))
    terms = x.bfloat16().float().reshape(4, 16, -1)
    terms[:, 9:] = -terms[:, :7]  # of the first sum, which has no other signs
    x = (terms * torch.tensor(HADAMARD_SIGNS)[:, None]).reshape(64, -1).to(BF16)
    assert_agree(x, RECIPES["nvfp4"], rowwise=False, columnwise=True)
    late = sum((terms[:, i] / 4 for i in reversed(range(16))), start=torch.zeros(4, 160))
    assert not torch.equal(late.to(BF16), transform(x.T).T[::16])


# Forms of a launch


@pytest.mark.parametrize("name", ["groups", "rows", "columns", "transformed"])
def test_row_scaling_takes_the_tiles_of_a_gpu(name, monkeypatch):
    """Some are lower than a block of the transform, which row scaling does without."""
    sizes = replace(tuning.INTERPRETER.quantize, **{name: getattr(tuning.GPU.quantize, name)})
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, quantize=sizes))
    assert_agree(normal(32, 64, dtype=BF16), RECIPES["nvfp4, row-scaled"], columnwise=True)


def settings_of(name: str, role: str) -> dict[str, Any]:
    """Three groups of 64 rows, both directions where two exist; noise and state where needed."""
    noise = torch.full((2, 64, 32), 0.5) if name == "nvfp4" and role == "grad_output" else None
    state = QuantizerState(torch.zeros(3, 3), torch.ones(3)) if name == "delayed" else None
    both = {"splits": torch.tensor([32, 0, 32]), "columnwise": "row-scaled" not in name or role != "input"}
    return {"role": role, "noise": noise, "state": state, **both}


def test_the_lengths_of_groups_are_never_read(monkeypatch):
    calls = [(RECIPES[name], settings_of(name, role)) for name in RECIPES for role in ROLES]
    x = normal(64, 32, dtype=BF16)

    def refuse(*_):
        raise AssertionError("a value of the device was read")

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    package = moe_fast.quantization
    for kernel in (
        package._quantize.quantize_blocks_kernel,
        package._nvfp4.quantize_two_levels_kernel,
        package._group_scales.group_amax_kernel,
        package._group_scales.cast_groups_kernel,
        package._group_scales.two_levels_amax_kernel,
    ):
        monkeypatch.setattr(kernel, "run", lambda *_, **__: None)
    for recipe, settings in calls:
        moe_fast.quantize(x, recipe, **settings)
    with pytest.raises(AssertionError, match="was read"):
        moe_ref.quantize(x, calls[0][0], **calls[0][1])


def test_codes_do_not_keep_x_alive():
    x = normal(150, 160).requires_grad_()
    source = moe_fast.quantize(x, RECIPES["block"]).quantized.source
    assert source is not None and source.untyped_storage().nbytes() == x.element_size()


def test_both_directions_of_a_square_share_their_codes():
    quantized = moe_fast.quantize(normal(64, 32), RECIPES["nvfp4"], role="weight", columnwise=True).quantized
    assert quantized.rowwise is quantized.columnwise


# Errors


@pytest.mark.parametrize("name", RECIPES)
def test_a_direction_that_was_not_asked_for_raises(name):
    settings = settings_of(name, "weight") | {"rowwise": False, "columnwise": True}
    quantized = moe_fast.quantize(normal(64, 32), RECIPES[name], **settings).quantized
    for read in (moe_fast.codes, moe_fast.scales, moe_fast.amax, moe_fast.dequantize):
        with pytest.raises(ValueError, match="columnwise is False"):
            read(quantized)


def test_a_state_where_none_belongs_raises():
    assert_same_error("new_quantizer_state", RECIPES["block"], num_groups=0)
    assert_same_error("update_scales", QuantizerState(torch.zeros(1, 3), torch.ones(1)), RECIPES["block"])


def read_or_refused(reader: str, quantized: Any) -> Tensor | None:
    """What the reader returns; None if it raises ValueError about the splits."""
    try:
        return getattr(moe_fast, reader)(quantized)
    except ValueError as error:
        assert str(error).startswith("splits is ")
        return None


@pytest.mark.parametrize("splits", [[-32, 64], [64, 32], [2**40, 0], [2**62, 2**62]], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_illegal_splits_show_in_every_reader(name, splits):
    recipe, x = RECIPES[name], normal(64, 64, dtype=BF16)
    state = moe_fast.new_quantizer_state(recipe, num_groups=2)
    quantized = moe_fast.quantize(x, recipe, splits=torch.tensor(splits), state=state).quantized
    assert moe_fast.dequantize(quantized).isnan().all()
    for reader in ("scales", "amax"):
        read = read_or_refused(reader, quantized)
        assert read is None or read.isnan().all(), reader


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("mxfp8", "nvfp4"))])
def test_a_group_that_is_no_multiple_of_a_block_shows(name):
    quantized = moe_fast.quantize(normal(64, 64, dtype=BF16), RECIPES[name], splits=torch.tensor([24, 40])).quantized
    assert moe_fast.dequantize(quantized).isnan().all()
    assert read_or_refused("scales", quantized) is None
