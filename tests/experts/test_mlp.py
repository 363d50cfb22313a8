"""The experts of `moe_ref` beyond values: where they round, what they save, gradients that wait.

`evidence.formulations.experts` has the same functions row by row, for the cases of tests/evidence.
Results that were worked out by hand are golden cases of the suite.
"""

import pytest
import torch
from torch import Tensor

from moe_ref.config import Recipe
from moe_ref.experts.mlp import grouped_mlp, pad_segments, trim_segments
from moe_ref.experts.shared import shared_experts
from tests.common.fast import normal
from tests.layer.kept import alive_bytes

# ---- rounding: 515 is half way between 514 and 516; bfloat16 has 512, 516, 520


def bf16(value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[1,1]"""
    return torch.tensor([[value]], dtype=dtype)


def relu_mlp(x: float, w1: float, w2: float, **settings) -> float:
    """One row through relu experts of width 1 in bfloat16."""
    return grouped_mlp(bf16(x), torch.tensor([1]), bf16(w1)[None], bf16(w2)[None], kind="relu", **settings).item()


def test_fc1_rounds_before_the_activation_is_weighted():
    assert relu_mlp(5, 103, 1, probs=torch.tensor([1.5])) == 776  # 516·1.5 = 774 → 776, not 772


def test_first_bias_is_added_before_fc1_rounds():
    assert relu_mlp(5, 103, 1, fc1_bias=bf16(-1)) == 512  # 514 → 512; 516 - 1 would be 516


def test_second_bias_is_added_after_fc2_rounds():
    assert relu_mlp(5, 1, 103, fc2_bias=bf16(-1)) == 516  # 515 → 516, - 1 = 515 → 516; not 512


def test_second_bias_meets_the_prob_in_float32():
    # 129.504; in bfloat16 the prob would be 1
    assert relu_mlp(0, 0, 0, fc2_bias=bf16(129), probs=torch.tensor([1 + 2**-8])) == 130


def test_weighted_input_is_rounded():
    # 129.504 → 130; 388.5 would be 388
    assert relu_mlp(129, 3, 1, probs=torch.tensor([1 + 2**-8]), probs_on_input=True) == 390


def test_gradient_of_the_probs_adds_activation_and_bias_before_it_is_rounded():
    probs, counts = torch.ones(1).bfloat16().requires_grad_(), torch.tensor([1])
    w1, w2 = torch.tensor([[[256.0], [1.0]]]).bfloat16(), torch.ones(1, 1, 2).bfloat16()
    out = grouped_mlp(bf16(1), counts, w1, w2, kind="relu", probs=probs, fc2_bias=bf16(261, torch.float32))
    (d_probs,) = torch.autograd.grad(out, probs, bf16(1))
    assert d_probs.item() == 520  # 257 + 261 = 518 → 520; 256 + 260 = 516


def test_gradient_of_the_second_bias_is_summed_before_it_is_rounded():
    bias, probs, weight = bf16(0).requires_grad_(), torch.full((3,), 1 + 2**-8), bf16(0)[None]
    rows = torch.zeros(3, 1).bfloat16()
    out = grouped_mlp(rows, torch.tensor([3]), weight, weight, kind="relu", probs=probs, fc2_bias=bias)
    (d_bias,) = torch.autograd.grad(out, bias, torch.full((3, 1), 129.0).bfloat16())
    assert d_bias.item() == 388  # 3 · 129.504 = 388.51; each rounded, 3 · 130 = 390


def test_shared_gate_is_in_the_dtype_of_x():
    tensors = ([[1.0, 134.0]], [[0.0, 1.0]], [[0.0], [3.0]], [[3.0, 0.0]])
    x, w1, w2, gate_weight = (torch.tensor(x).bfloat16() for x in tensors)
    out = shared_experts(x, w1, w2, kind="relu", gate_weight=gate_weight)
    assert out[0, 1].item() == 384  # σ(3) → 0.953125, · 402 = 383.16 → 384; else 382.93 → 382


# ---- padding, what is saved, gradients that wait


def arguments(counts: list[int], hidden: int = 32, width: int = 32) -> tuple[Tensor, ...]:
    """Rows, counts and both weights, in bfloat16; all but the counts with a gradient."""
    shapes = ((sum(counts), hidden), (len(counts), 2 * width, hidden), (len(counts), hidden, width))
    rows, fc1, fc2 = (normal(*x, seed=i, dtype=torch.bfloat16).requires_grad_() for i, x in enumerate(shapes))
    return rows, torch.tensor(counts), fc1, fc2


def test_padding_stands_at_the_end_of_each_segment():
    x, counts = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([1, 0, 5])
    padded = pad_segments(x, counts, 4)
    assert padded.tolist() == [1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0]
    assert torch.equal(trim_segments(padded, counts, 4), x)
    assert torch.equal(pad_segments(x[:, None].expand(6, 2), counts, 4)[:, 1], padded)
    assert pad_segments(x[:0], counts * 0, 4).shape == (0,)


def test_padding_makes_uneven_experts_legal_for_blocks_along_tokens():
    recipe, tensors = Recipe("mxfp8"), arguments([5, 0, 33])
    with pytest.raises(ValueError, match=r"^splits is "):
        grouped_mlp(*tensors, recipe=recipe).sum().backward()
    out = grouped_mlp(*tensors, recipe=recipe, align=recipe.alignment)
    out.sum().backward()
    assert out.shape == tensors[0].shape and all(x.grad.any() for x in tensors if x.requires_grad)


def test_recomputation_saves_fewer_bytes():
    tensors = arguments([2, 0, 3])

    def saved(**settings) -> int:
        return alive_bytes(lambda: grouped_mlp(*tensors, **settings), tensors, lambda: None)

    assert saved() > saved(recompute="moe_act") > saved(recompute="moe")


def test_gradients_that_wait_are_those_of_the_backward_and_each_waits_once():
    rows, counts, fc1, fc2 = tensors = arguments([3, 4])
    expected = torch.autograd.grad(grouped_mlp(*tensors).sum(), [fc2, fc1])
    waiting: list = []
    grouped_mlp(*tensors, wgrads=waiting).sum().backward()
    assert fc1.grad is None and fc2.grad is None and rows.grad.any()
    assert all(torch.equal(wgrad(), x) for wgrad, x in zip(waiting, expected, strict=True))
    with torch.no_grad():
        grouped_mlp(*tensors, wgrads=waiting)
    assert len(waiting) == 2
    with pytest.raises(ValueError, match="wgrads is tuple"):
        grouped_mlp(rows, counts, fc1, fc2, wgrads=())
