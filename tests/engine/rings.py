"""Namespaces that compute in a ring, as kernels do under a float sanitizer: bits are integers.

A float32 is the integer of its bits, modulo 2³²: sums and products are exact, and in any order the
same. Each also has a twin that errs by one term, or rounds in between.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.judge.exact import bits
from moe_ref import permute
from moe_ref.permutation.permute import PADDING, RowMap


def embedded(x: Tensor) -> Tensor:
    """int64, from the bits."""
    return torch.from_numpy(bits(x).astype("int64"))


def as_float(x: Tensor) -> Tensor:
    """float32, from the last 32 bits."""
    return (x & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Not a homomorphism, as a cast to a smaller dtype is none."""
    return x ^ (x >> 16 & 0xFFFF)


def product(first: Tensor, second: Tensor, terms: slice, halves: bool) -> Tensor:
    """Σ left[m, k] right[n, k]."""
    products = embedded(first)[:, None, terms] * embedded(second)[None, :, terms] & 0xFFFFFFFF
    half = products.shape[2] // 2 if halves else 0
    return rounded(products[:, :, :half].sum(2)) + products[:, :, half:].sum(2)


def products(terms: slice = slice(None), halves: bool = False) -> SimpleNamespace:
    """`grouped_linear`, `grouped_dgrad` and `grouped_wgrad` over these terms of each sum.

    Args:
        halves: the sum of the first half of the terms is rounded.
    """

    def each(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        segments = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        out = [product(segment, matrix, terms, halves) for segment, matrix in zip(segments[:-1], matrices, strict=True)]
        return as_float(torch.cat([*out, torch.zeros(len(segments[-1]), matrices.shape[1], dtype=torch.int64)]))

    def grouped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return each(rows, weight, tokens_per_expert)

    def grouped_dgrad(d_out: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return each(d_out, weight.transpose(1, 2), tokens_per_expert)

    def grouped_wgrad(d_out: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        ends = tokens_per_expert.cumsum(0).tolist()
        segments = [slice(end - n, end) for end, n in zip(ends, tokens_per_expert.tolist(), strict=True)]
        return as_float(
            torch.stack([product(d_out[segment].T, rows[segment].T, terms, halves) for segment in segments])
        )

    functions = (grouped_linear, grouped_dgrad, grouped_wgrad)
    return SimpleNamespace(**{f.__name__: f for f in functions}, declares=lambda function: {"differentiable": False})


def sums(rounds: bool = False) -> SimpleNamespace:
    """`permute`, and `unpermute` without probabilities.

    Args:
        rounds: the sum of a token is rounded after each row.
    """

    def unpermute(rows: Tensor, row_map: RowMap, *, restore_shape: Any = None) -> Tensor:
        out = torch.zeros(row_map.num_tokens, rows.shape[1], dtype=torch.int64)
        for row, token in zip(embedded(rows), row_map.token_P.tolist(), strict=True):
            if token != PADDING:
                out[token] = rounded(out[token] + row) if rounds else out[token] + row
        return as_float(out)

    return SimpleNamespace(
        permute=permute, unpermute=unpermute, declares=lambda function: {"differentiable": function == "permute"}
    )
