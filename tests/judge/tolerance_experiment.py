"""The experiment behind the judge of contractions: honest kernels, kernels with a planted bug, and the policies that others judge by.

Two layers, in emulated precision: the expert MLP in bf16, and a grouped contraction of block-scaled FP8. Every stage of a kernel
is a method, and every bug overrides one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.running import TRANSCENDENTAL, Running, contracted
from conformance.judge import Bounded
from conformance.judge.bound import HOPPER_FP8, ROUNDOFF, Accumulator, contraction_bound
from conformance.judge.ratios import row_wise

TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 256, 512, 256, 8, 2
BUGGY_EXPERT = 3  # where a bug hits one expert only
BUGGY_TOKEN = 17

# ---- contractions in several honest orders

ORDERS = (
    "one product",
    "blocks of 16",
    "blocks of 32",
    "blocks of 64",
    "blocks of 128",
    "split 2",
    "split 4",
    "tree",
    "backwards",
)


def contraction(
    a_MK: Tensor, b_NK: Tensor, order: str, keep: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """a · bᵀ in fp32, K cut into blocks that are added up in some order; `keep` is applied to every partial sum."""
    size = a_MK.shape[1]
    widths = {"one product": size, "split 2": -(-size // 2), "split 4": -(-size // 4), "one by one": 1}
    width = widths.get(order, int(order.split()[-1]) if order.startswith("blocks") else 32)
    parts = [a_MK[:, k : k + width] @ b_NK[:, k : k + width].T for k in range(0, size, width)]
    if order == "backwards":
        parts.reverse()
    if order == "tree":
        while len(parts) > 1:
            parts = [sum(parts[i : i + 2], a_MK.new_zeros(())) for i in range(0, len(parts), 2)]
    total = a_MK.new_zeros((len(a_MK), len(b_NK)))
    for part in parts:
        total = keep(total + part)
    return total


def rounded(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype).float()


def truncated(x: Tensor) -> Tensor:
    """bf16 by cutting the lower half off."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


# ---- the expert MLP in bf16


@dataclass(frozen=True)
class Layer:
    """Inputs as they are stored: bf16 values, fp32 probabilities."""

    x_TH: Tensor
    gate_up_EGH: Tensor  # G = 2 · WIDTH
    down_EHF: Tensor
    experts_TK: Tensor
    probs_TK: Tensor

    def slots(self, expert: int) -> tuple[Tensor, Tensor]:
        """The tokens of an expert, and in which of their slots it is."""
        tokens, slots = (self.experts_TK == expert).nonzero(as_tuple=True)
        return tokens, slots


@dataclass(frozen=True)
class Regime:
    """Sizes of the numbers."""

    x: float
    gate_up: float
    down: float
    spread: int = 0  # rows differ by up to 2^±spread


REGIMES = {
    "A": Regime(1.0, HIDDEN**-0.5, WIDTH**-0.5),  # unit scale
    "B": Regime(0.02, 0.02, 0.02),  # the inputs of sonic-moe's tests: outputs of 1e-5
    "C": Regime(1.0, HIDDEN**-0.5, WIDTH**-0.5, spread=6),  # rows of very different size
}


def layer(seed: int, regime: str) -> Layer:
    scale, source = REGIMES[regime], np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return source.standard_normal(shape)

    x = normal(TOKENS, HIDDEN) * scale.x * np.exp2(source.integers(-scale.spread, scale.spread + 1, (TOKENS, 1)))
    gate_up, down = normal(EXPERTS, 2 * WIDTH, HIDDEN) * scale.gate_up, normal(EXPERTS, HIDDEN, WIDTH) * scale.down
    experts = np.stack([source.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    probs = torch.softmax(torch.from_numpy(normal(TOKENS, TOPK)), 1).float()
    x_TH, gate_up_EGH, down_EHF = (rounded(torch.from_numpy(array)) for array in (x, gate_up, down))
    return Layer(x_TH, gate_up_EGH, down_EHF, torch.from_numpy(experts), probs)


class Kernel:
    """An honest expert MLP: fp32 sums, and h, a and y stored in bf16."""

    def __init__(self, order: str = "blocks of 32") -> None:
        self.order = order

    def __call__(self, inputs: Layer) -> Tensor:
        y_TH = torch.zeros(TOKENS, HIDDEN)
        for expert in range(EXPERTS):
            tokens, slots = inputs.slots(expert)
            x_RH, p_R = self.rows(inputs.x_TH[tokens], expert), self.probs(inputs.probs_TK[tokens, slots], expert)
            h_RG = self.store(self.contract(x_RH, inputs.gate_up_EGH[expert]))
            a_RF = self.store(self.activate(h_RG, p_R))
            y_TH = y_TH.index_add(0, tokens, self.down(a_RF, inputs.down_EHF, expert))
        return self.finish(self.store(y_TH)).bfloat16()

    def rows(self, x_RH: Tensor, expert: int) -> Tensor:
        return x_RH

    def probs(self, p_R: Tensor, expert: int) -> Tensor:
        return p_R

    def contract(self, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        return contraction(a_MK, b_NK, self.order)

    def activate(self, h_RG: Tensor, p_R: Tensor) -> Tensor:
        return torch.nn.functional.silu(h_RG[:, :WIDTH]) * h_RG[:, WIDTH:] * p_R[:, None]

    def down(self, a_RF: Tensor, down_EHF: Tensor, expert: int) -> Tensor:
        return self.store(self.contract(a_RF, down_EHF[expert]))

    def store(self, x: Tensor) -> Tensor:
        return rounded(x)

    def finish(self, y_TH: Tensor) -> Tensor:
        return y_TH


class AllZeros(Kernel):
    def finish(self, y_TH):
        return torch.zeros_like(y_TH)


class OneRowZero(Kernel):
    def finish(self, y_TH):
        return y_TH.index_fill(0, torch.tensor([BUGGY_TOKEN]), 0.0)


class SmallestRowZero(Kernel):
    def finish(self, y_TH):
        return y_TH.index_fill(0, y_TH.norm(dim=1).argmin()[None], 0.0)


class TenRowsNegated(Kernel):
    def finish(self, y_TH):
        return torch.cat([-y_TH[:10], y_TH[10:]])


class OneElementLarger(Kernel):
    """By a fifth: the largest of its row."""

    def finish(self, y_TH):
        wrong = y_TH.clone()
        wrong[5, y_TH[5].abs().argmax()] *= 1.2
        return wrong


class TwoRowsSwapped(Kernel):
    """Two tokens of one expert."""

    def rows(self, x_RH, expert):
        return torch.cat([x_RH[[1, 0]], x_RH[2:]]) if expert == BUGGY_EXPERT else x_RH


class AnotherExpertsWeight(Kernel):
    """For one token's second product."""

    def down(self, a_RF, down_EHF, expert):
        y_RH = super().down(a_RF, down_EHF, expert)
        if expert != BUGGY_EXPERT:
            return y_RH
        return torch.cat([super().down(a_RF[:1], down_EHF, (expert + 1) % EXPERTS), y_RH[1:]])


class ProbabilityForgotten(Kernel):
    """Of one token's slot."""

    def probs(self, p_R, expert):
        return torch.cat([torch.ones(1), p_R[1:]]) if expert == BUGGY_EXPERT else p_R


class ProbabilitiesShifted(Kernel):
    """By one row, in one expert."""

    def probs(self, p_R, expert):
        return p_R.roll(1) if expert == BUGGY_EXPERT else p_R


class TailDropped(Kernel):
    """The last 16 of the first contraction."""

    def rows(self, x_RH, expert):
        return torch.cat([x_RH[:, :-16], torch.zeros(len(x_RH), 16)], 1)


class TailOfOneExpertDropped(TailDropped):
    def rows(self, x_RH, expert):
        return super().rows(x_RH, expert) if expert == BUGGY_EXPERT else x_RH


class TilesHalved(Kernel):
    """Every other 16 columns of the activation: sonic-moe's issue 63 was of this kind."""

    def activate(self, h_RG, p_R):
        return super().activate(h_RG, p_R) * torch.where(torch.arange(WIDTH) // 16 % 2 == 1, 0.5, 1.0)


class LowAccumulator(Kernel):
    """Every partial sum in bf16."""

    def contract(self, a_MK, b_NK):
        return contraction(a_MK, b_NK, self.order, keep=rounded)


class Truncating(Kernel):
    """Instead of rounding to nearest."""

    def store(self, x):
        return truncated(x)


BUGS = (*Kernel.__subclasses__(), TailOfOneExpertDropped)


@dataclass(frozen=True)
class Truth:
    """What is right for one layer, and the same-precision reference."""

    value: Tensor
    reference: Tensor
    expected: Bounded


def truth(inputs: Layer) -> Truth:
    """The dense float64 formula with its running error, and the reference."""
    value, magnitude, bounded = running_layer(inputs)
    reference = Kernel("blocks of 64")(inputs)
    return Truth(value, reference, row_wise(bounded, reference, magnitude, TOPK * WIDTH))


def running_layer(inputs: Layer) -> tuple[Tensor, Tensor, Bounded]:
    """y, Σ|terms| and the bound: each stage brings along what the one before may be off by."""
    value, error, magnitude = (torch.zeros(TOKENS, HIDDEN, dtype=torch.float64) for _ in range(3))
    for expert in range(EXPERTS):
        tokens, slots = inputs.slots(expert)
        gate_up, down, x = (
            Running.of(t, torch.float32)
            for t in (inputs.gate_up_EGH[expert], inputs.down_EHF[expert], inputs.x_TH[tokens])
        )
        h = contracted(x, gate_up).with_rounding(torch.bfloat16)
        gate, up = (Running(h.value[:, part], h.error[:, part], h.dtype) for part in (slice(WIDTH), slice(WIDTH, None)))
        a = silu(gate) * up * Running.of(inputs.probs_TK[tokens, slots, None], torch.float32)
        a = a.with_rounding(torch.bfloat16)
        y = contracted(a, down).with_rounding(torch.bfloat16)
        value, error = (
            value.index_add(0, tokens, y.value),
            error.index_add(0, tokens, y.error + TOPK * ROUNDOFF[torch.float32] * (y.value.abs() + y.error)),
        )
        magnitude = magnitude.index_add(0, tokens, a.value.abs() @ down.value.abs().T)
    return value, magnitude, Running(value, error, torch.float32).bounded(torch.bfloat16)


def silu(g: Running) -> Running:
    """g / (1 + exp(-g)): |silu'| < 1.1; its own rounding grows with the exponential's argument."""
    value = torch.nn.functional.silu(g.value)
    own = (2 * g.value.abs() + 2 * TRANSCENDENTAL) * ROUNDOFF[torch.float32] * value.abs() + torch.finfo(
        torch.float32
    ).tiny
    return Running(value, 1.1 * g.error + own, g.dtype)


# ---- how others judge; each says whether it accepts y


def within(y: Tensor, right: Tensor, absolute: float, relative: float) -> bool:
    return bool(((y - right).abs() <= absolute + relative * right.abs()).all())


def nineteen_of_twenty(y: Tensor, right: Tensor) -> bool:
    """flashinfer-bench, MoE: an element is wrong if its absolute and its relative error are, and one in twenty may be."""
    d = (y - right).abs()
    return bool(((d > 1e-2) & (d / (right.abs() + 1e-8) > 1e-2)).double().mean() <= 0.05)


def calc_diff(y: Tensor, right: Tensor) -> float:
    """DeepGEMM's: 1 - 2⟨y, y*⟩ / (‖y‖² + ‖y*‖²)."""
    return float(1 - 2 * (y * right).sum() / (y * y + right * right).sum())


def twice_the_largest(y: Tensor, right: Tensor, reference: Tensor) -> bool:
    """FlashAttention's: the largest error of all is at most twice the reference's."""
    return bool((y - right).abs().max() <= 2 * (reference - right).abs().max() + 2 * right.abs().max() * 2.0**-24)


def relative_to_rms(y: Tensor, right: Tensor) -> bool:
    """triton_kernels': the largest and the root mean square of the error over max(rms of all, |y*|)."""
    error = (y - right).abs() / torch.maximum(right.abs(), right.square().mean().sqrt())
    return bool(error.max() <= 2e-2 and error.square().mean().sqrt() <= 4e-3)


Policy = Callable[[Tensor, Tensor, Tensor], bool]  # of y, y* and the reference, all float64
POLICIES: dict[str, Policy] = {
    "allclose 1e-2": lambda y, right, reference: within(
        y, right, 1e-2, 1e-2
    ),  # BackendBench, KernelBench in half precision
    "95 % within 1e-2": lambda y, right, reference: nineteen_of_twenty(y, right),
    "calc_diff 1e-3": lambda y, right, reference: calc_diff(y, right) < 1e-3,  # DeepGEMM, FP8
    "calc_diff 1e-5": lambda y, right, reference: calc_diff(y, right) < 1e-5,  # DeepGEMM, bf16
    "rtol 1.6e-2 atol 1e-5": lambda y, right, reference: within(
        y, right, 1e-5, 1.6e-2
    ),  # the table of torch.testing and Transformer Engine
    "atol 1.4e-2 rtol 2e-2": lambda y, right, reference: within(y, right, 1.4e-2, 2e-2),  # sonic-moe
    "2 × largest error": twice_the_largest,
    "2e-2 of rms": lambda y, right, reference: relative_to_rms(y, right),
}


# ---- a grouped contraction of block-scaled FP8: activations 1 × 128, weights 128 × 128

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
    tall, wide = -(-x.shape[0] // rows), -(-x.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(x, (0, wide * BLOCK - x.shape[1], 0, tall * rows - x.shape[0]))
    return padded.abs().reshape(tall, rows, wide, BLOCK).amax((1, 3))


def quantised(
    x: Tensor, rows: int, amax: Tensor | None = None, *, reciprocal: bool = False, saturate: bool = True
) -> tuple[Tensor, Tensor]:
    """E4M3 codes of x in blocks of `rows` × 128, and their fp32 scales; `amax` is given: somebody else's."""
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


def fourteen_bits(total_RN: Tensor, terms_RKN: Tensor) -> Tensor:
    """total + Σ_k terms, all cut off 14 bits below the largest of them, as one instruction of a Hopper matrix unit adds them."""
    largest_RN = torch.maximum(total_RN.abs(), terms_RKN.abs().amax(1))
    quantum_RN = torch.exp2(torch.frexp(largest_RN).exponent.double() - 14)
    return ((total_RN / quantum_RN).trunc() + (terms_RKN / quantum_RN[:, None]).trunc().sum(1)).mul(quantum_RN).float()


class NeverPromoted(BlockKernel):
    """14 bits through the whole contraction."""

    def add(self, total_RN, a_RK, b_NK, scale_RN):
        for k in range(0, a_RK.shape[1], INSTRUCTION):
            total_RN = fourteen_bits(
                total_RN, a_RK[:, k : k + INSTRUCTION, None] * b_NK[:, k : k + INSTRUCTION].T * scale_RN[:, None]
            )
        return total_RN


class NeighboursScale(BlockKernel):
    """Each row takes the scale of the block to the right."""

    def operands(self, inputs):
        return replace(inputs, a_scale_RB=inputs.a_scale_RB.roll(-1, 1))


class OneRowsScale(BlockKernel):
    """One row takes those of the row below."""

    def operands(self, inputs):
        below = torch.arange(len(inputs.a_RK))
        below[BUGGY_TOKEN] += 1
        return replace(inputs, a_scale_RB=inputs.a_scale_RB[below])


class TailsScale(BlockKernel):
    """The last, shorter block takes the scale of the one before."""

    def operands(self, inputs):
        return replace(inputs, a_scale_RB=torch.cat([inputs.a_scale_RB[:, :-1], inputs.a_scale_RB[:, -2:-1]], 1))


class OneWeightBlocksScale(BlockKernel):
    """One block of one expert's weight takes that of the block below."""

    def operands(self, inputs):
        scale = inputs.b_scale_EnB.clone()
        scale[1, 0, 2] = inputs.b_scale_EnB[1, 1, 2]
        return replace(inputs, b_scale_EnB=scale)


class AnotherExpertsScale(BlockKernel):
    """One expert's weight takes the scales of the next."""

    def operands(self, inputs):
        return replace(inputs, b_scale_EnB=inputs.b_scale_EnB[[0, 2, 2, 3]])


class ScaleTwice(BlockKernel):
    """In one expert."""

    def operands(self, inputs):
        scale = inputs.a_scale_RB
        return replace(inputs, a_scale_RB=torch.where((inputs.expert_R == 1)[:, None], scale * scale, scale))


class Fp8TailDropped(BlockKernel):
    """The last, shorter block is left out."""

    def operands(self, inputs):
        whole = inputs.a_RK.shape[1] // BLOCK * BLOCK
        return replace(inputs, a_RK=torch.where(torch.arange(inputs.a_RK.shape[1]) < whole, inputs.a_RK, 0.0))


class StaleAmax(BlockKernel):
    """The activations were quantised for the step before, which was smaller by a third."""

    def __init__(self, x_RK: Tensor, saturate: bool = True) -> None:
        super().__init__()
        codes, scale = quantised(x_RK, 1, largest(x_RK, 1) / 1.5, saturate=saturate)
        self.codes, self.scale = codes.float(), scale

    def operands(self, inputs):
        return replace(inputs, a_RK=self.codes, a_scale_RB=self.scale)


BLOCK_BUGS = (
    NeverPromoted,
    NeighboursScale,
    OneRowsScale,
    TailsScale,
    OneWeightBlocksScale,
    AnotherExpertsScale,
    ScaleTwice,
    Fp8TailDropped,
)


def block_truth(inputs: Blocks, declared: type[BlockKernel] = BlockKernel) -> Bounded:
    """What is right for a contraction of these codes and scales, where the accumulator of `declared` is declared."""
    a_RK = inputs.a_RK.double() * spread_out(inputs.a_scale_RB.double(), 1, inputs.a_RK.shape)
    b_ENK = inputs.b_ENK.double() * spread_out(inputs.b_scale_EnB.double(), BLOCK, inputs.b_ENK.shape)
    operands = [(a_RK[inputs.expert_R == expert], b_ENK[expert].T) for expert in range(FP8_EXPERTS)]
    value, magnitude = torch.cat([a @ b for a, b in operands]), torch.cat([a.abs() @ b.abs() for a, b in operands])
    terms = a_RK.shape[1]
    bounded = contraction_bound(value, magnitude, terms, torch.bfloat16, declared.accumulator)
    return row_wise(
        bounded, declared()(inputs), magnitude, terms, accumulator=declared.accumulator, groups=inputs.expert_R
    )
