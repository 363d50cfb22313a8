"""The quicker interpreter gives the bits of Triton's own."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import moe_fast
from conformance.engine.child import interpreting
from conformance.judge.exact import bits
from moe_ref.config import Recipe

def results():
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randn((9, 40), generator=noise).requires_grad_()
    routing_map = torch.rand((9, 5), generator=noise) < 0.5
    probs = torch.rand((9, 5), generator=noise)
    moved = moe_fast.permute(tokens, routing_map, probs=probs, align=4)
    moved.rows.sum().backward()
    chosen = moe_fast.topk_routing(torch.randn((9, 5), generator=noise), topk=2)
    low = moe_fast.quantize(tokens.detach().bfloat16(), Recipe("block"), role="input").quantized
    return [moved.rows, moved.probs, tokens.grad, *chosen[:2], moe_fast.codes(low), moe_fast.scales(low)]

plain = results()
interpreting.install()
from triton.language.semantic import TritonSemantic
assert TritonSemantic.binary_op_sanitize_overflow_impl.__qualname__ != "TritonSemantic.binary_op_sanitize_overflow_impl"
assert all((bits(a.detach()) == bits(b.detach())).all() for a, b in zip(plain, results(), strict=True))
print("equal")
"""


def test_results_have_the_same_bits():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr
