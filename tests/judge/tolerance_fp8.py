"""The tolerance experiment on a grouped contraction of block-scaled FP8."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.judge import Bounded
from conformance.judge.bound import HOPPER_FP8, Accumulator, contraction_bound
from conformance.judge.ratios import row_wise
from tests.judge.tolerance_experiment import BUGGY_TOKEN, contraction

BLOCK, FP8_WIDTH, FP8_OUT, FP8_EXPERTS = 128, 480, 256, 4  # the last of four blocks has 96 columns
E4M3_MAX = 448.0  # OCP OFP8 1.0
INSTRUCTION = 32  # products that a Hopper FP8 instruction adds
E4M3_OVERFLOW = 464.0  # from here a cast that does not saturate finds no finite neighbour


@dataclass(frozen=True)
class Blocks:
    """Operands as they are stored: what the codes mean, in fp32, and one scale a block."""

    a_RK: Tensor
    a_scale_RB: Tensor
    b_ENK: Tensor
    b_scale_EnB: Tensor  # n = ⌈N / 128⌉
    expert_R: Tensor


def spread_out(scale: Tensor, rows: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The scale of each element: blocks of `rows` × 128, the last ones cut to `shape`."""
    return scale.repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)[..., : shape[-2], : shape[-1]]


def largest(x: Tensor, rows: int) -> Tensor:
    """The largest magnitude of each block of `rows` × 128."""
    tall, column_blocks = -(-x.shape[0] // rows), -(-x.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(x, (0, column_blocks * BLOCK - x.shape[1], 0, tall * rows - x.shape[0]))
    return padded.abs().reshape(tall, rows, column_blocks, BLOCK).amax((1, 3))


def quantised(
    x: Tensor, rows: int, amax: Tensor | None = None, *, reciprocal: bool = False, saturate: bool = True
) -> tuple[Tensor, Tensor]:
    """E4M3 codes of x in blocks of `rows` × 128, and their fp32 scales, from `amax` if given."""
    scale = (largest(x, rows) if amax is None else amax) / E4M3_MAX
    divided = x * spread_out(1 / scale, rows, x.shape) if reciprocal else x / spread_out(scale, rows, x.shape)
    codes = divided.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    if not saturate:
        overflow = torch.full_like(divided, torch.nan).to(torch.float8_e4m3fn)
        codes = torch.where(divided.abs() >= E4M3_OVERFLOW, overflow.view(torch.uint8), codes.view(torch.uint8)).view(
            torch.float8_e4m3fn
        )
    return codes, scale


def activations(seed: int, rows: int = 256, width: int = FP8_WIDTH) -> Tensor:
    source = np.random.default_rng(seed)
    return torch.from_numpy(source.standard_normal((rows, width)) * np.exp2(source.integers(-3, 4, (rows, 1)))).float()


def blocks(seed: int, rows: int = 256, width: int = FP8_WIDTH) -> Blocks:
    source = np.random.default_rng(seed + 1)
    weight_ENK = torch.from_numpy(source.standard_normal((FP8_EXPERTS, FP8_OUT, width)) / width**0.5).float()
    unequal = torch.from_numpy(
        2.0 ** source.uniform(-1, 1, (FP8_EXPERTS, FP8_OUT // BLOCK, -(-width // BLOCK)))
    ).float()  # else scales hardly differ
    weight_ENK = weight_ENK * spread_out(unequal, BLOCK, weight_ENK.shape)
    codes_RK, a_scale_RB = quantised(activations(seed, rows, width), 1)
    b = [quantised(weight_NK, BLOCK) for weight_NK in weight_ENK]
    b_ENK, b_scale_EnB = torch.stack([codes.float() for codes, _ in b]), torch.stack([scale for _, scale in b])
    return Blocks(codes_RK.float(), a_scale_RB, b_ENK, b_scale_EnB, torch.arange(rows) * FP8_EXPERTS // rows)


class BlockKernel:
    """An honest contraction: fp32 sums inside a block, scaled and promoted after each."""

    accumulator = Accumulator(block=BLOCK)

    def __init__(self, order: str = "one product") -> None:
        self.order = order

    def __call__(self, inputs: Blocks) -> Tensor:
        inputs = self.operands(inputs)
        return torch.cat([self.expert(inputs, expert) for expert in range(FP8_EXPERTS)]).bfloat16()

    def operands(self, inputs: Blocks) -> Blocks:
        return inputs

    def expert(self, inputs: Blocks, expert: int) -> Tensor:
        rows = inputs.expert_R == expert
        total_RN = torch.zeros(int(rows.sum()), FP8_OUT)
        for block in range(inputs.a_scale_RB.shape[1]):
            k = slice(block * BLOCK, (block + 1) * BLOCK)
            scale_RN = inputs.a_scale_RB[rows, block, None] * inputs.b_scale_EnB[expert, :, block].repeat_interleave(
                BLOCK
            )
            total_RN = self.add(total_RN, inputs.a_RK[rows, k], inputs.b_ENK[expert, :, k], scale_RN)
        return total_RN

    def add(self, total_RN: Tensor, a_RK: Tensor, b_NK: Tensor, scale_RN: Tensor) -> Tensor:
        return total_RN + contraction(a_RK, b_NK, self.order) * scale_RN


class ScaledFirst(BlockKernel):
    """As honest: the activations are dequantised before they are multiplied, the weights after."""

    def add(self, total_RN, a_RK, b_NK, scale_RN):
        return total_RN + contraction(a_RK * scale_RN[:, :1], b_NK, self.order) * (scale_RN / scale_RN[:, :1])


class Hopper(BlockKernel):
    """Inside a block, sums of 14 bits: honest where it is declared."""

    accumulator = HOPPER_FP8

    def add(self, total_RN, a_RK, b_NK, scale_RN):
        inside_RN = torch.zeros_like(total_RN)
        for k in range(0, a_RK.shape[1], INSTRUCTION):
            inside_RN = fourteen_bits(inside_RN, a_RK[:, k : k + INSTRUCTION, None] * b_NK[:, k : k + INSTRUCTION].T)
        return total_RN + inside_RN * scale_RN


def fourteen_bits(total_RN: Tensor, terms_RKN: Tensor, bits: int = 14) -> Tensor:
    """total + Σ_k terms, all cut off 14 bits below the largest of them, as one instruction of a
    Hopper matrix unit adds them; products of factors of 16 bits are cut off after 26 bits.
    """
    largest_RN = torch.maximum(total_RN.abs(), terms_RKN.abs().amax(1))
    quantum_RN = torch.exp2(torch.frexp(largest_RN).exponent.double() - bits)
    total = ((total_RN / quantum_RN).trunc() + (terms_RKN / quantum_RN[:, None]).trunc().sum(1)).mul(quantum_RN)
    rounded = total.float()
    return torch.where(rounded.abs() > total.abs(), torch.nextafter(rounded, torch.zeros(())), rounded)  # towards zero


def never_promoted(kernel: BlockKernel, total_RN: Tensor, a_RK: Tensor, b_NK: Tensor, scale_RN: Tensor) -> Tensor:
    """14 bits through the whole contraction."""
    for k in range(0, a_RK.shape[1], INSTRUCTION):
        terms_RKN = a_RK[:, k : k + INSTRUCTION, None] * b_NK[:, k : k + INSTRUCTION].T * scale_RN[:, None]
        total_RN = fourteen_bits(total_RN, terms_RKN)
    return total_RN


def one_rows_scale(inputs: Blocks) -> Blocks:
    """One row takes the scales of the row below."""
    below = torch.arange(len(inputs.a_RK))
    below[BUGGY_TOKEN] += 1
    return replace(inputs, a_scale_RB=inputs.a_scale_RB[below])


def one_weight_blocks_scale(inputs: Blocks) -> Blocks:
    """One block of one expert's weight takes the scale of the block below."""
    scale = inputs.b_scale_EnB.clone()
    scale[1, 0, 2] = inputs.b_scale_EnB[1, 1, 2]
    return replace(inputs, b_scale_EnB=scale)


def scaled_twice(inputs: Blocks) -> Blocks:
    """The activations of one expert are scaled twice."""
    scale = inputs.a_scale_RB
    return replace(inputs, a_scale_RB=torch.where((inputs.expert_R == 1)[:, None], scale * scale, scale))


def without_the_last_block(inputs: Blocks) -> Blocks:
    """The last block of K, which is shorter, is left out."""
    first = inputs.a_RK.shape[1] // BLOCK * BLOCK
    return replace(inputs, a_RK=torch.where(torch.arange(inputs.a_RK.shape[1]) < first, inputs.a_RK, 0.0))


def scales_of(columns: Callable[[Tensor], Tensor]) -> Callable[[Blocks], Blocks]:
    """Activations with scales of other blocks."""
    return lambda inputs: replace(inputs, a_scale_RB=columns(inputs.a_scale_RB))


def bug(**stage: Callable[..., Any]) -> type[BlockKernel]:
    """The honest contraction with one stage replaced."""
    return type("Bug", (BlockKernel,), stage)


def of_operands(change: Callable[[Blocks], Blocks]) -> type[BlockKernel]:
    return bug(operands=lambda kernel, inputs: change(inputs))


BLOCK_BUGS = {
    "never promoted": bug(add=never_promoted),
    "scale of the next block": of_operands(scales_of(lambda scale: scale.roll(-1, 1))),
    "scale of the row below": of_operands(one_rows_scale),
    "last scale of the block before": of_operands(scales_of(lambda x: torch.cat([x[:, :-1], x[:, -2:-1]], 1))),
    "scale of the weight block below": of_operands(one_weight_blocks_scale),
    "scales of the next expert": of_operands(lambda x: replace(x, b_scale_EnB=x.b_scale_EnB[[0, 2, 2, 3]])),
    "scaled twice": of_operands(scaled_twice),
    "last block dropped": of_operands(without_the_last_block),
}


class StaleAmax(BlockKernel):
    """The activations were quantised for the step before, which was smaller by a third."""

    def __init__(self, x_RK: Tensor, saturate: bool = True) -> None:
        super().__init__()
        codes, scale = quantised(x_RK, 1, largest(x_RK, 1) / 1.5, saturate=saturate)
        self.codes, self.scale = codes.float(), scale

    def operands(self, inputs):
        return replace(inputs, a_RK=self.codes, a_scale_RB=self.scale)


def block_truth(inputs: Blocks, declared: type[BlockKernel] = BlockKernel) -> Bounded:
    """The right result for these codes and scales, with the accumulator of `declared`."""
    a_RK = inputs.a_RK.double() * spread_out(inputs.a_scale_RB.double(), 1, inputs.a_RK.shape)
    b_ENK = inputs.b_ENK.double() * spread_out(inputs.b_scale_EnB.double(), BLOCK, inputs.b_ENK.shape)
    operands = [(a_RK[inputs.expert_R == expert], b_ENK[expert].T) for expert in range(FP8_EXPERTS)]
    value, magnitude = torch.cat([a @ b for a, b in operands]), torch.cat([a.abs() @ b.abs() for a, b in operands])
    terms = a_RK.shape[1]
    bounded = contraction_bound(value, magnitude, terms, torch.bfloat16, declared.accumulator)
    return row_wise(
        bounded, declared()(inputs), magnitude, terms, accumulator=declared.accumulator, groups=inputs.expert_R
    )
