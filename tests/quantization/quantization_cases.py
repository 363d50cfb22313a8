"""Tensors to quantise, calls to make, and what two quantizers must agree on.

Values lie where a rounding, a saturation or a maximum is decided: beside powers of two and what just fits, among subnormals, at zeros of both
signs, NaN and infinities; and rows differ in size by 2^±12.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core.tensors import laid_out
from moe_fast.launch import tuning
from moe_ref.config import QuantizerState, Recipe
from moe_ref.config.quantization import WHOLE_BLOCKS

EMPTY = torch.empty
BF16, FP16, FP32, FP64 = DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
NEAREST: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
RECIPES = {
    "block": Recipe("block"),
    "block, any scale": Recipe("block", power_of_two_scales=False, two_dimensional_weights=False),
    "block, epsilon": Recipe("block", amax_epsilon=0.3, fp8_format="hybrid"),
    "current": Recipe("current"),
    "current, powers": Recipe("current", power_of_two_scales=True, amax_epsilon=1e-3, fp8_format="e4m3"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "mxfp8": Recipe("mxfp8", fp8_format="hybrid"),
    "mxfp8, square weights": Recipe("mxfp8", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4, vectors": Recipe("nvfp4", two_dimensional_weights=False, **NEAREST),
    "nvfp4, row-scaled": Recipe("nvfp4", row_scaled_activation=True, **NEAREST),
    "nvfp4, 4/6": Recipe("nvfp4", four_over_six="all", **NEAREST),
    "nvfp4, 4/6 squared": Recipe(
        "nvfp4", four_over_six="all", four_over_six_bound_256="weights", four_over_six_error="mse", **NEAREST
    ),
    "nvfp4, 4/6 vectors": Recipe(
        "nvfp4", two_dimensional_weights=False, four_over_six="weights", four_over_six_bound_256="none"
    ),
    "nvfp4, 4/6 row-scaled": Recipe("nvfp4", four_over_six="activations", row_scaled_activation=True, **NEAREST),
}
SPLITS = {  # of 150 rows; and of 128 where groups must consist of whole blocks, of which half for NVFP4
    "none": (None, None),
    "ragged": ([0, 11, 0, 130, 3, 0], [0, 32, 0, 64, 0]),
    "fills": ([3, 0, 147], [32, 0, 96]),
    "empty": ([0, 0], [0, 0]),
    "one": ([150], [128]),
}
SIZES = {
    "default": tuning.INTERPRETER.quantize,
    "small": tuning.Quantize(
        *(tuning.Walk(tokens, 64, 4, steps, 2) for tokens, steps in ((32, 2), (32, 3), (32, 3), (32, 2), (16, 2)))
    ),
    "large": tuning.Quantize(*(tuning.Walk(256, columns, 4, 1, 1) for columns in (256, 512, 512, 512, 512))),
}


def poisoned(*arguments, **settings):
    """Fresh memory full of ones: a code of NaN, and NaN in every float."""
    fresh = EMPTY(*arguments, **settings)
    if fresh.untyped_storage().nbytes() < 2**24:
        fresh.untyped_storage().fill_(0xFF)
    return fresh


# What is quantised


def spread(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Normal numbers, in rows that differ by 2^±12."""
    exponent = torch.randint(-12, 13, (rows, 1), generator=generator).double()
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * torch.exp2(exponent)


def boundaries(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Largest numbers of formats, and powers of two, times a power of two; and their neighbours in float32 and bfloat16."""
    base = torch.tensor(
        [448.0, 57344.0, 6.0, 1.0, 2688.0, 17.0, 9.0, 5.0], dtype=torch.float64
    )  # the last are ties of some format
    step = torch.tensor([0.0, 0.0, 2.0**-23, -(2.0**-24), 2.0**-7, -(2.0**-8)], dtype=torch.float64)
    pick = torch.randint(len(base) * len(step), (rows, columns), generator=generator)
    value = base[pick // len(step)] * (1 + step[pick % len(step)])
    sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2.0 - 1
    exponent = torch.randint(-9, 3, (rows, columns), generator=generator) + torch.randint(
        -6, 7, (rows, 1), generator=generator
    )
    return value * sign * torch.exp2(exponent.double())


def specials(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Zeros of both signs, subnormals, NaN, infinities and the largest numbers, some in rows of their own."""
    rare = torch.tensor(
        [
            0.0,
            -0.0,
            2.0**-149,
            -(2.0**-127),
            1e-40,
            2.0**-126,
            3e-36,
            -6e-8,
            65504.0,
            3.38e38,
            math.nan,
            math.inf,
            -math.inf,
        ]
    )
    pick = torch.randint(0, len(rare), (rows, columns), generator=generator)
    seldom = torch.randint(0, 60, (rows, columns), generator=generator) == 0
    x = torch.where(seldom, rare[pick].double(), spread(rows, columns, generator))
    tiny = rare[pick % 6].double() * torch.randint(1, 9, (rows, columns), generator=generator)
    kind = torch.randint(0, 8, (rows, 1), generator=generator)
    return torch.where(
        kind == 0, tiny, torch.where(kind == 1, rare[pick[:, :1]].double(), torch.where(kind == 2, -0.0, x))
    )


MAKERS = {"spread": spread, "boundaries": boundaries, "specials": specials}


class Problem(SimpleNamespace):
    """x and a call's settings."""

    noise: Tensor | None = None

    @property
    def call(self) -> dict[str, Any]:
        rowwise, columnwise = self.directions
        return {
            "role": self.role,
            "splits": self.splits,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "state": self.state,
            "noise": self.noise,
        }

    @property
    def cotangent(self) -> Tensor:
        """Numbers that add up exactly, of any strides."""
        rows, columns = self.x.shape
        return ((torch.arange(rows)[None, :] * 3 + torch.arange(columns)[:, None]) % 5 - 2.0).T

    def results(self, namespace: Any) -> list[Tensor]:
        """Everything that can be seen of what was made, the state and the gradient."""
        x = self.x.detach().requires_grad_()
        q, state = namespace.quantize(x, self.recipe, **self.call)
        seen = [] if state is None else list(state)
        for columnwise in (False, True):
            if self.directions[columnwise]:
                value = namespace.dequantize(q, columnwise=columnwise)
                seen += [read(q, columnwise=columnwise) for read in (namespace.codes, namespace.scales, namespace.amax)]
                seen += namespace.scales(q, columnwise=columnwise, layout="gemm")
                seen += [value.detach(), *torch.autograd.grad(value, x, self.cotangent.to(x.dtype), retain_graph=True)]
        return seen


def problem_of(
    recipe="block",
    *,
    role="input",
    dtype=FP32,
    splits="ragged",
    columns=160,
    directions=(True, True),
    values="spread",
    layout="contiguous",
    seed=0,
    **_,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    settings = RECIPES[recipe]
    whole = settings.scaling in WHOLE_BLOCKS
    rows, sizes = 128 if whole else 150, SPLITS[splits][whole]
    if settings.scaling == "nvfp4":  # ragged: the rest of x is no whole block
        rows, sizes = 67 if splits == "ragged" else 64, sizes and [size // 2 for size in sizes]
    state = None
    if settings.scaling == "delayed":
        groups = 1 if sizes is None else len(sizes)
        history = torch.randint(0, 5, (groups, 3), generator=generator) / 2  # the step has seen something already
        state = QuantizerState(history, torch.exp2(torch.randint(-3, 4, (groups,), generator=generator)) * 1.1)
    x = laid_out(MAKERS[values](rows, columns, generator).to(dtype), layout)
    noise = None
    if settings.stochastic_rounding and role == "grad_output":
        noise = laid_out(torch.rand(2, *x.shape, generator=generator, dtype=FP64).to(dtype).clamp(max=0.995), layout)
    given = None if sizes is None else torch.tensor(sizes, dtype=torch.int32 if columns == 160 else torch.int64)
    return Problem(x=x, recipe=settings, role=role, splits=given, directions=directions, state=state, noise=noise)


def same(a: Tensor, b: Tensor) -> bool:
    """Of one shape and dtype, and equal to the sign of each zero; a NaN equals a NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((((a == b) & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())).all())


def agrees(namespace: Any, problem: Problem) -> bool:
    results, right = problem.results(namespace), problem.results(moe_ref)
    return len(results) == len(right) and all(same(a, b) for a, b in zip(results, right, strict=True))
