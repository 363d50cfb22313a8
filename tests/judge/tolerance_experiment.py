"""The experiment behind the judge of contractions: honest kernels, kernels with a planted bug, and
the policies that others judge by.

Two layers, in emulated precision: the expert MLP in bf16, and a grouped contraction of block-scaled
FP8. Every stage of a kernel is a method, and every bug replaces one.
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
BUGGY_EXPERT, BUGGY_TOKEN = 3, 17  # where a bug hits one expert or token only

# ---- contractions in several honest orders

BLOCKS = tuple(f"blocks of {size}" for size in (16, 32, 64, 128))
ORDERS = ("one product", *BLOCKS, "split 2", "split 4", "tree", "backwards")


def contraction(
    a_MK: Tensor, b_NK: Tensor, order: str, keep: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """a · bᵀ in fp32, K in blocks added in some order; `keep` is applied to every partial sum."""
    size = a_MK.shape[1]
    widths = {"one product": size, "split 2": -(-size // 2), "split 4": -(-size // 4), "one by one": 1}
    width = widths.get(order, int(order.split()[-1]) if order.startswith("blocks") else 32)
    partial_sums = [a_MK[:, k : k + width] @ b_NK[:, k : k + width].T for k in range(0, size, width)]
    if order == "backwards":
        partial_sums.reverse()
    if order == "tree":
        while len(partial_sums) > 1:
            partial_sums = [sum(partial_sums[i : i + 2], a_MK.new_zeros(())) for i in range(0, len(partial_sums), 2)]
    total = a_MK.new_zeros((len(a_MK), len(b_NK)))
    for partial in partial_sums:
        total = keep(total + partial)
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


def one_element_larger(kernel: Kernel, y_TH: Tensor) -> Tensor:
    """The largest element of one row is a fifth larger."""
    wrong_TH = y_TH.clone()
    wrong_TH[5, y_TH[5].abs().argmax()] *= 1.2
    return wrong_TH


def another_experts_weight(kernel: Kernel, a_RF: Tensor, down_EHF: Tensor, expert: int) -> Tensor:
    """One token's second product takes the weight of the next expert."""
    y_RH = Kernel.down(kernel, a_RF, down_EHF, expert)
    if expert != BUGGY_EXPERT:
        return y_RH
    return torch.cat([Kernel.down(kernel, a_RF[:1], down_EHF, (expert + 1) % EXPERTS), y_RH[1:]])


def tail_dropped(x_RH: Tensor) -> Tensor:
    """Without the last 16 of the first contraction."""
    return torch.cat([x_RH[:, :-16], torch.zeros(len(x_RH), 16)], 1)


def in_one_expert(change: Callable[[Tensor], Tensor]) -> Callable[[Kernel, Tensor, int], Tensor]:
    return lambda kernel, x, expert: change(x) if expert == BUGGY_EXPERT else x


def half_of_the_tiles(kernel: Kernel, h_RG: Tensor, p_R: Tensor) -> Tensor:
    """Every other 16 columns of the activation are halved, as in sonic-moe's issue 63."""
    return Kernel.activate(kernel, h_RG, p_R) * torch.where(torch.arange(WIDTH) // 16 % 2 == 1, 0.5, 1.0)


def bug(**stage: Callable[..., Tensor]) -> type[Kernel]:
    """The honest kernel with one stage replaced."""
    return type("Bug", (Kernel,), stage)


BUGS = {
    "all zeros": bug(finish=lambda kernel, y: torch.zeros_like(y)),
    "one row zero": bug(finish=lambda kernel, y: y.index_fill(0, torch.tensor([BUGGY_TOKEN]), 0.0)),
    "smallest row zero": bug(finish=lambda kernel, y: y.index_fill(0, y.norm(dim=1).argmin()[None], 0.0)),
    "ten rows negated": bug(finish=lambda kernel, y: torch.cat([-y[:10], y[10:]])),
    "one element larger": bug(finish=one_element_larger),
    "two rows of an expert swapped": bug(rows=in_one_expert(lambda x: torch.cat([x[[1, 0]], x[2:]]))),
    "another expert's weight": bug(down=another_experts_weight),
    "a probability forgotten": bug(probs=in_one_expert(lambda p: torch.cat([torch.ones(1), p[1:]]))),
    "probabilities shifted by one row": bug(probs=in_one_expert(lambda p: p.roll(1))),
    "tail dropped": bug(rows=lambda kernel, x, expert: tail_dropped(x)),
    "tail of one expert dropped": bug(rows=in_one_expert(tail_dropped)),
    "half of the tiles": bug(activate=half_of_the_tiles),
    "low accumulator": bug(contract=lambda kernel, a, b: contraction(a, b, kernel.order, keep=rounded)),
    "truncating": bug(store=lambda kernel, x: truncated(x)),
}


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
        gate, up = (Running(h.value[:, half], h.error[:, half], h.dtype) for half in (slice(WIDTH), slice(WIDTH, None)))
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
    rounding = (2 * g.value.abs() + 2 * TRANSCENDENTAL) * ROUNDOFF[torch.float32] * value.abs() + torch.finfo(
        torch.float32
    ).tiny
    return Running(value, 1.1 * g.error + rounding, g.dtype)


# ---- how others judge; each says whether it accepts y


def within(y: Tensor, exact: Tensor, absolute: float, relative: float) -> bool:
    return bool(((y - exact).abs() <= absolute + relative * exact.abs()).all())


def nineteen_of_twenty(y: Tensor, exact: Tensor) -> bool:
    """flashinfer-bench, MoE: an element is wrong if its absolute and its relative error are, and
    one in twenty may be.
    """
    d = (y - exact).abs()
    return bool(((d > 1e-2) & (d / (exact.abs() + 1e-8) > 1e-2)).double().mean() <= 0.05)


def calc_diff(y: Tensor, exact: Tensor) -> float:
    """DeepGEMM's: 1 - 2⟨y, y*⟩ / (‖y‖² + ‖y*‖²)."""
    return float(1 - 2 * (y * exact).sum() / (y * y + exact * exact).sum())


def twice_the_largest(y: Tensor, exact: Tensor, reference: Tensor) -> bool:
    """FlashAttention's: the largest error of all is at most twice the reference's."""
    return bool((y - exact).abs().max() <= 2 * (reference - exact).abs().max() + 2 * exact.abs().max() * 2.0**-24)


def relative_to_rms(y: Tensor, exact: Tensor) -> bool:
    """triton_kernels': maximum and RMS of the error over max(rms of all, |y*|)."""
    error = (y - exact).abs() / torch.maximum(exact.abs(), exact.square().mean().sqrt())
    return bool(error.max() <= 2e-2 and error.square().mean().sqrt() <= 4e-3)


Policy = Callable[[Tensor, Tensor, Tensor], bool]  # of y, y* and the reference, all float64


POLICIES: dict[str, Policy] = {
    # BackendBench, KernelBench in half precision
    "allclose 1e-2": lambda y, exact, _: within(y, exact, 1e-2, 1e-2),
    "95 % within 1e-2": lambda y, exact, _: nineteen_of_twenty(y, exact),
    "calc_diff 1e-3": lambda y, exact, _: calc_diff(y, exact) < 1e-3,  # DeepGEMM, FP8
    "calc_diff 1e-5": lambda y, exact, _: calc_diff(y, exact) < 1e-5,  # DeepGEMM, bf16
    # the table of torch.testing and Transformer Engine
    "rtol 1.6e-2 atol 1e-5": lambda y, exact, _: within(y, exact, 1e-5, 1.6e-2),
    # sonic-moe
    "atol 1.4e-2 rtol 2e-2": lambda y, exact, _: within(y, exact, 1.4e-2, 2e-2),
    "2 × largest error": twice_the_largest,
    "2e-2 of rms": lambda y, exact, _: relative_to_rms(y, exact),
}
