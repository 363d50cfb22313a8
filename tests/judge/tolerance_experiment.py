"""The experiment behind the judge of contractions: honest kernels, kernels with a planted bug, and
the policies that others judge by.

Two layers, in emulated precision: the expert MLP in bf16, and a grouped contraction of block-scaled
FP8. Every stage of a kernel is a method, and every bug overrides one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.running import TRANSCENDENTAL, Running, contracted
from conformance.judge import Bounded
from conformance.judge.bound import ROUNDOFF
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
    """a · bᵀ in fp32, K in blocks added in some order; `keep` is applied to every partial sum."""
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
    """flashinfer-bench, MoE: an element is wrong if its absolute and its relative error are, and
    one in twenty may be.
    """
    d = (y - right).abs()
    return bool(((d > 1e-2) & (d / (right.abs() + 1e-8) > 1e-2)).double().mean() <= 0.05)


def calc_diff(y: Tensor, right: Tensor) -> float:
    """DeepGEMM's: 1 - 2⟨y, y*⟩ / (‖y‖² + ‖y*‖²)."""
    return float(1 - 2 * (y * right).sum() / (y * y + right * right).sum())


def twice_the_largest(y: Tensor, right: Tensor, reference: Tensor) -> bool:
    """FlashAttention's: the largest error of all is at most twice the reference's."""
    return bool((y - right).abs().max() <= 2 * (reference - right).abs().max() + 2 * right.abs().max() * 2.0**-24)


def relative_to_rms(y: Tensor, right: Tensor) -> bool:
    """triton_kernels': maximum and RMS of the error over max(rms of all, |y*|)."""
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
    # sonic-moe
    "atol 1.4e-2 rtol 2e-2": lambda y, right, reference: within(y, right, 1.4e-2, 2e-2),
    "2 × largest error": twice_the_largest,
    "2e-2 of rms": lambda y, right, reference: relative_to_rms(y, right),
}


# ---- a grouped contraction of block-scaled FP8: activations 1 × 128, weights 128 × 128
