"""Transformer Engine's own Python references of its quantisers, read from its source."""

from collections.abc import Callable, Iterator
from enum import Enum
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import EITHER, OURS, Comparison, Known, compare, shrunk
from evidence.oracles.random_inputs import FLOATS, blocks
from evidence.oracles.source import load
from moe_ref.config import Recipe
from moe_ref.config.quantization import BLOCK, WHOLE_BLOCKS

PEER = "Transformer Engine's Python references of its quantisers"
PACKAGES: tuple[str, ...] = ()
SOURCE = "NVIDIA/TransformerEngine"

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ROLE = {"e4m3": "input", "e5m2": "grad_output"}  # of a hybrid recipe
NOT_FINITE = (
    "an infinity or a NaN in the block: the reference gives a scale of 0 or NaN, the kernel (compute_scale_from_amax, "
    "whose maximum passes over NaN) 1, or the scale of the other values"
)


Causes = Callable[[Tensor, Tensor], list[Known]]  # a function of x and of a result


class Part:
    """Codes and scales by rows, of moe_ref and of the peer, as functions of x."""

    def __init__(self, ours: Callable[[Tensor], tuple[Tensor, Tensor]], theirs: Callable[[Tensor], tuple]) -> None:
        self.ours, self.theirs = ours, theirs

    def compared(
        self, subject: str, x: Tensor, known_causes: Causes, *, per: int | None = None
    ) -> Iterator[Comparison]:
        """Codes and scales of x; `per` rows are independent of all others, None: none are."""
        ours, theirs = self.ours(x), self.theirs(x)
        for i, what in enumerate(("codes", "scales")):

            def differs_by(cause: str, i: int = i) -> Callable[[Tensor], bool]:
                def differs(rows: Tensor) -> bool:
                    mine, their_value = self.ours(rows)[i], self.theirs(rows)[i]
                    differences = compare(
                        "", mine, their_value, case=lambda at, _: "", known_causes=known_causes(rows, mine)
                    ).differences
                    return cause in [difference.cause for difference in differences]

                return differs

            def case(at: tuple[int, ...], cause: str, i: int = i, differs_by: Any = differs_by) -> str:
                first = at[0] * len(x) // len(ours[i])
                return shrunk(x if per is None else x[first // per * per :][:per], differs_by(cause))

            yield compare(f"{subject}: {what}", ours[i], theirs[i], case=case, known_causes=known_causes(x, ours[i]))


def of_rows(x: Tensor, mask: Callable[[Tensor], Tensor], result: Tensor) -> Tensor:
    """For a result with one row per block of rows of x: where a block has such a value."""
    return mask(x).reshape(len(result), -1).any(1)[:, None].expand(result.shape)


def reference(recipe: Recipe, role: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`moe_ref.quantize` by rows, of any number of rows."""
    multiple = BLOCK[recipe.scaling] if recipe.scaling in WHOLE_BLOCKS else 1

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        padding_rows = -len(x) % multiple
        q = moe_ref.quantize(torch.nn.functional.pad(x, (0, 0, 0, padding_rows)), recipe, role=role).quantized
        codes, scales = moe_ref.codes(q), moe_ref.scales(q)
        return codes[: len(x)], scales[: len(scales) - padding_rows]

    return quantized


def bad(x: Tensor) -> Tensor:
    """Where x has infinities or NaN."""
    return ~x.isfinite()


def block_scaling(tests: Path) -> Iterator[Comparison]:
    """1×128 and 128×128."""
    scale = load(tests / "quantize_scale_calc.py", ["scale_from_amax_tensor"])
    names = ["QuantizeResult", "CuBLASScaleMunger", "BlockwiseQuantizerReference"]
    helpers = {"scale_from_amax_tensor": scale.scale_from_amax_tensor}
    quantizer = load(tests / "blockwise_quantizer_reference.py", names, **helpers).BlockwiseQuantizerReference()
    for dtype, format, powers, square in product(FLOATS, FP8, (True, False), (False, True)):
        role = "weight" if square and format == "e4m3" else ROLE[format]
        if square and format == "e5m2":
            continue  # weights are E4M3
        recipe = Recipe("block", fp8_format="hybrid", power_of_two_scales=powers)
        tile = (128, 128) if square else (1, 128)

        def theirs(x: Tensor, format: str = format, powers: bool = powers, tile: tuple = tile) -> tuple:
            q = quantizer.quantize(x, FP8[format], pow_2_scales=powers, quant_tile_shape=tile, munge_scale_shapes=False)
            return q.data.view(torch.uint8), q.scale

        x = blocks(512, 128, dtype, torch.finfo(FP8[format]).max, special=not square)
        subject = f"block scaling, {tile[0]}×128, {'powers of two' if powers else 'float32 scales'}"
        yield from Part(reference(recipe, role), theirs).compared(
            subject, x, lambda x, out: [Known(NOT_FINITE, OURS, of_rows(x, bad, out))], per=tile[0]
        )


OVERFLOW = (
    "a scale that overflows: the reference takes the largest number of x's dtype, the kernel and the reference in "
    "Transformer Engine's tests the largest float32"
)


def current_scaling(source: Path) -> Iterator[Comparison]:
    """A scale for the tensor."""
    path = source / "transformer_engine/pytorch/custom_recipes/reference_current_scaling.py"
    utils = SimpleNamespace(HIGH_PRECISION_FLOAT_DTYPES=FLOATS)
    names = ["CurrentScalingTensorRef", "CurrentScalingQuantizerRef", "_scale_from_amax_tensor"]
    read = load(path, names, **stubs(utils))
    for dtype, format, powers in product(FLOATS, FP8, (False, True)):
        quantizer = read.CurrentScalingQuantizerRef(FP8[format], pow_2_scales=powers, columnwise=False)
        ours = reference(Recipe("current", fp8_format="hybrid", power_of_two_scales=powers), ROLE[format])

        def theirs(x: Tensor, quantizer: object = quantizer) -> tuple[Tensor, Tensor]:
            q = quantizer.quantize(x)  # type: ignore[attr-defined]
            return q.data.view(torch.uint8), q.scale

        subject = f"current scaling, {'powers of two' if powers else 'float32 scales'}"
        for row in blocks(64, 48, dtype, torch.finfo(FP8[format]).max):
            x = row[None]

            def known(x: Tensor, out: Tensor, largest: float = torch.finfo(FP8[format]).max) -> list[Known]:
                overflows = torch.isinf(largest / x.float().abs().amax()) & (x.dtype != torch.float32)
                return [
                    Known(NOT_FINITE, OURS, bad(x).any().expand(out.shape)),
                    Known(OVERFLOW, OURS, overflows.expand(out.shape)),
                ]

            yield from Part(ours, theirs).compared(subject, x, known)


MXFP8_NOT_FINITE = (
    "an infinity or a NaN in the block: the reference's scale is the code of a NaN, the kernel's 254 for an infinity, "
    "and that of the other values beside a NaN"
)


def mxfp8_squares(tests: Path) -> Iterator[Comparison]:
    """32×32."""
    names = ["_float_to_e8m0", "_e8m0_to_scale_inv", "_mxfp8_2d_quantize_reference", "MXFP8_BLOCK_SIZE", "FP8_E4M3_MAX"]
    read = load(tests / "test_mxfp8_2d_quantize.py", names)
    recipe = Recipe("mxfp8", two_dimensional_weights=True)
    for dtype in FLOATS:
        rows = blocks(64, 32, dtype, 448.0)
        for row in rows:
            x = row[None].expand(32, 32).contiguous()

            def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
                data, scale, _ = read._mxfp8_2d_quantize_reference(x)
                return data.view(torch.uint8), scale

            def known(x: Tensor, out: Tensor) -> list[Known]:
                return [Known(MXFP8_NOT_FINITE, OURS, bad(x).any().expand(out.shape))]

            yield from Part(reference(recipe, "weight"), theirs).compared("MXFP8, 32×32", x, known)


def nvfp4(source: Path) -> Iterator[Comparison]:
    """1×16 and 16×16, with Hadamard transform, 4over6 and row scaling."""
    folder = source / "transformer_engine/pytorch/custom_recipes"
    utils = load(folder / "reference_utils.py", ["HIGH_PRECISION_FLOAT_DTYPES", "Fp4Formats", "roundup_div"])
    names = ["cast_to_fp4x2", "cast_from_fp4x2", "get_wgrad_sign_vector", "NVFP4TensorRef", "NVFP4QuantizerRef"]
    quantizer = load(folder / "reference_nvfp4.py", names, **stubs(utils)).NVFP4QuantizerRef
    for name, options, theirs, role in NVFP4:
        nearest_rounding: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
        recipe = Recipe("nvfp4", **nearest_rounding | options)
        columnwise = bool(recipe.hadamard)
        quantizer_of_role = quantizer(utils.Fp4Formats.E2M1, rowwise=True, columnwise=columnwise, **theirs)
        for dtype in FLOATS if not columnwise else (torch.bfloat16,):
            yield from _nvfp4(name, recipe, role, quantizer_of_role, columnwise, dtype)


ZEROS = "-0 has code 0 in the reference, and in the kernel the code of -0"
EDGE = (
    "a transform at the edge of float32: whether a sum overflows depends on its order, and torch's bf16 product on a "
    "CPU flushes subnormal sums"
)
NVFP4_NOT_FINITE = (
    "an infinity or a NaN in the tensor: the reference's maximum carries it, the kernel's passes over NaN"
)


def _nvfp4(name: str, recipe: Recipe, role: str, quantizer: object, columnwise: bool, dtype: torch.dtype) -> Iterator:
    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        q = moe_ref.quantize(x, recipe, role=role, columnwise=columnwise).quantized
        turn = (lambda x: x.T) if columnwise else (lambda x: x)
        return turn(moe_ref.codes(q, columnwise=columnwise)), turn(moe_ref.scales(q, columnwise=columnwise))

    def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
        row, row_scale, column, column_scale, *_ = quantizer._quantize(x)  # type: ignore[attr-defined]
        packed, scale = (column, column_scale) if columnwise else (row, row_scale)
        return torch.stack([packed & 15, packed >> 4], 2).flatten(1), scale.view(torch.uint8)

    for row in blocks(24, 64, dtype, 6.0):
        x = row[None].expand(16, 64).contiguous()

        def known(x: Tensor, out: Tensor) -> list[Known]:
            value = ours(x)[0]
            zero = (value == 8) if out.shape == value.shape else torch.zeros_like(out, dtype=torch.bool)
            size = x.float().abs()
            edge = columnwise & ((size > 2.0**125) | ((size > 0) & (size < 2.0**-120))).any()
            return [
                Known(NVFP4_NOT_FINITE, OURS, bad(x).any().expand(out.shape)),
                Known(EDGE, EITHER, edge.expand(out.shape)),
                Known(ZEROS, OURS, zero),
            ]

        yield from Part(ours, theirs).compared(f"NVFP4, {name}", x, known)


SIXTEEN = {"quant_tile_shape": (16, 16)}
NVFP4: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("1×16", {}, {}, "input"),
    ("16×16", {}, SIXTEEN, "weight"),
    ("1×16, Hadamard transform", {"hadamard": True}, {"with_rht": True}, "input"),
    ("1×16, row-scaled", {"row_scaled_activation": True}, {"row_scaled_nvfp4": True}, "input"),
    *(
        (
            f"{'16×16' if role == 'weight' else '1×16'}, 4over6 by {error}, bound {bound}",
            {
                "four_over_six": "all",
                "four_over_six_error": error,
                "four_over_six_bound_256": "all" if bound == 256 else "none",
            },
            {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": error, "nvfp4_e4m3_max": bound, **tile},
            role,
        )
        for error in ("mae", "mse")
        for bound in (256, 448)
        for role, tile in (("input", {}), ("weight", SIXTEEN))
    ),
)


def stubs(utils: SimpleNamespace) -> dict[str, Any]:
    """The names that the references import, as far as they are used here."""
    return {"QuantizedTensorStorage": object, "Quantizer": _Quantizer, "reference_utils": utils, "gemm": _Gemm}


class _Quantizer:
    """What the references need of `Quantizer`."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _Gemm:
    """Names of a module that only their matrix products use."""

    MMParams = object

    class GEMMType(Enum):
        """The default of an argument."""

        FPROP = 0


def comparisons(source: Path) -> Iterator[Comparison]:
    """All quantisers."""
    tests = source / "tests/pytorch"
    yield from block_scaling(tests / "references")
    yield from current_scaling(source)
    yield from mxfp8_squares(tests)
    yield from nvfp4(source)
