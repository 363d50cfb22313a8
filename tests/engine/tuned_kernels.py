"""Implementations whose `activation` ends in a tuned copy: right, or wrong in one configuration.

moe-conformance run --impl tests.engine.tuned_kernels:HONEST
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

import moe_ref


def copy_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count)
    if ADDED:  # the defect
        x += ADDED
    tl.store(y_ptr + offsets, x, mask=offsets < count)


def sum_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.load(y_ptr + offsets, mask=offsets < count) + tl.load(x_ptr + offsets, mask=offsets < count)
    tl.store(y_ptr + offsets, total + ADDED, mask=offsets < count)


def configs(*added: int, block: int = 64) -> list[triton.Config]:
    """A configuration for each number that it adds by mistake; the blocks differ."""
    return [triton.Config({"BLOCK": block << i, "ADDED": x}, num_warps=4 << i % 2) for i, x in enumerate(added)]


def many(*added: int) -> list[triton.Config]:
    """The same for a long list, of five blocks."""
    return [triton.Config({"BLOCK": 32 << i % 5, "ADDED": x}, num_stages=1 + i // 5) for i, x in enumerate(added)]


def tuned(listed: list[triton.Config], kernel: Callable = copy_kernel, **settings) -> triton.runtime.Autotuner:
    return triton.autotune(listed, key=["count"], **settings)(triton.jit(kernel))


def copied(kernel: triton.runtime.Autotuner) -> Callable[[Tensor], Tensor]:
    """The identity, whose forward and backward are copies by the kernel."""

    def copy(x: Tensor) -> Tensor:
        x, y = x.resolve_neg().contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return copy(x)

        @staticmethod
        def backward(ctx, grad):
            if torch.is_grad_enabled():
                raise RuntimeError("no second derivative")
            return copy(grad)

    return Copy.apply


def namespace(kernel: triton.runtime.Autotuner, **hooks) -> SimpleNamespace:
    """An implementation whose `activation` is the reference's, then the copy."""
    last = copied(kernel)

    def activation(h, *, probs=None, kind="squared_relu", round_before_probs=False):
        out = moe_ref.activation(h, probs=probs, kind=kind, round_before_probs=round_before_probs)
        return last(out)

    return SimpleNamespace(activation=activation, tuner=kernel, **hooks)


def refusing_last(listed, arguments, **settings):
    """An `early_config_prune` that refuses the last configuration."""
    return listed[:-1]


def asking_for_a_device(listed, arguments, **settings):
    """An `early_config_prune` that only works where there is a GPU."""
    torch.cuda.get_device_properties(0)
    return listed


def pruned(prune: Callable, *added: int) -> SimpleNamespace:
    return namespace(tuned(configs(*added), prune_configs_by={"early_config_prune": prune}))


def loop(*added: int, names: tuple[str, ...] = ("narrow", "wide", "vector")) -> SimpleNamespace:
    """A namespace with a tuner of its own: a kernel for each name, of which it uses the first."""
    kernels = {name: copied(tuned(configs(x))) for name, x in zip(names, added, strict=True)}
    used = [names[0]]

    def activation(h, *, probs=None, kind="squared_relu", round_before_probs=False):
        out = moe_ref.activation(h, probs=probs, kind=kind, round_before_probs=round_before_probs)
        return kernels[used[-1]](out)

    @contextlib.contextmanager
    def configured(function: str, name: str) -> Iterator[None]:
        used.append(name)
        try:
            yield
        finally:
            used.pop()

    def configurations(function: str) -> tuple[str, ...]:
        return names if function == "activation" else ()

    return SimpleNamespace(activation=activation, configurations=configurations, configured=configured, used=used)


HONEST = namespace(tuned(configs(0, 0, 0)))
THIRD_WRONG = namespace(tuned(configs(0, 0, 1)))
FIRST_WRONG = namespace(tuned(configs(1, 0, 0)))
LONG = namespace(tuned(many(*[0] * 20)))  # more than one case judges
LONG_LAST_WRONG = namespace(tuned(many(*[0] * 19, 1)))
LAST_REFUSED = pruned(refusing_last, 0, 0, 1)
WITHOUT_DEVICE = pruned(asking_for_a_device, 0, 0, 0)
LOOP = loop(0, 0, 0)
LOOP_THIRD_WRONG = loop(0, 0, 1)
