"""Triton's interpreter computes bfloat16 as a GPU does, under the suite."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance.core.case import case_from
from conformance.engine.child.evaluate import evaluate
from conformance.interface import Implementation
from fast_interpreter import mended
from moe_fast.launch.backend import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
EDGES = [1 + 2**-8 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-9), 3.4e38, 1e-40, torch.inf, torch.nan, -0.0]


@triton.jit
def cast_kernel(x_ptr, y_ptr, z_ptr, c_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(x_ptr + i)
    y = x.to(tl.bfloat16)
    tl.store(y_ptr + i, y)
    tl.store(z_ptr + i, x)
    tl.store(c_ptr + i, tl.where(i < 3, y, 0.5))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_casts_stores_and_constants_round_to_nearest_even():
    x = torch.cat([torch.tensor(EDGES), torch.randn(1024 - len(EDGES))])
    cast, stored, chosen = (torch.zeros(1024, dtype=torch.bfloat16) for _ in range(3))
    cast_kernel[(1,)](x, cast, stored, chosen, 1024)
    for y in (cast, stored):
        assert torch.equal(y.nan_to_num(7), x.bfloat16().nan_to_num(7)) and torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    assert torch.equal(chosen, torch.where(torch.arange(1024) < 3, cast, 0.5))


def test_products_of_bfloat16_are_products_of_numbers():
    a, b = (torch.randint(-8, 8, (16, 16)).bfloat16() for _ in range(2))
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, c, 16)
    assert torch.equal(c, a.float() @ b.float())


def interpreter(cast) -> SimpleNamespace:
    handle = lambda data, dtype: SimpleNamespace(data=data, dtype=dtype)  # noqa: E731
    builder = SimpleNamespace(cast_impl=lambda src, dtype: handle(cast(src.data), dtype))
    return SimpleNamespace(tl=tl, TensorHandle=handle, interpreter_builder=builder)


def test_an_interpreter_that_truncates_is_noticed():
    assert mended.truncates(interpreter(lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)))
    assert not mended.truncates(interpreter(mended.rounded))


@triton.jit
def lacking_kernel(x_ptr):
    tl.inline_asm_elementwise("", "=r,r", [tl.load(x_ptr)], dtype=tl.int32, is_pure=True, pack=1)


def lacking(tokens, routing_map):
    lacking_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


def wrong(tokens, routing_map):
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(("permute", "is_of_the_interpreter"), [(lacking, True), (wrong, False)])
def test_a_finding_that_only_the_interpreter_can_show_says_so(permute, is_of_the_interpreter):
    case = case_from({"function": "permute", "tokens": 2, "experts": 2, "hidden": 1})
    finding = evaluate(case, Implementation(SimpleNamespace(permute=permute))).finding
    assert finding["check"].startswith("raises")
    assert ("Triton's interpreter lacks it, a GPU may not" in finding["message"]) is is_of_the_interpreter, finding
