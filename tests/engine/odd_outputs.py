"""A permutation whose results are right, and no plain tensors: `tests.engine.odd_outputs:sparse`.

Every function of `ODDITIES` makes an odd tensor of a right one.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ref.permutation.permute import permute


class Refuses(Tensor):
    """Raises in every torch function."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("no torch here")


class Wrapper(Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, x: Tensor):
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        raise RuntimeError("no backward")


def _freed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


ODDITIES: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.detach().to_sparse(),
    "compressed": lambda x: x.detach().to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor(list(x.detach().unbind())),
    "quantised": lambda x: torch.quantize_per_tensor(x.detach(), 1.0, 0, torch.quint8),
    "mkldnn": lambda x: x.detach().to_mkldnn(),
    "negated": lambda x: torch._neg_view(-x.detach()),
    "conjugated": lambda x: x.detach().to(torch.complex64).conj(),
    "complex": lambda x: x.detach().to(torch.complex128),
    "freed": _freed,
    "meta": lambda x: x.to("meta"),
    "refuses": lambda x: x.detach().as_subclass(Refuses),
    "wrapper": lambda x: Wrapper(x.detach()),
    "array": lambda x: x.detach().numpy(),
    "none": lambda x: None,
    "number": lambda x: 3,
    "transposed": lambda x: x.detach().T.contiguous(),
    "raises": Raises.apply,
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda out: None,
    "one_number": lambda out: 3,
    "text": lambda out: "rows",
    "too_short": lambda out: tuple(out)[:2],
    "too_long": lambda out: (*out, None),
    "numbered": lambda out: dict(enumerate(out)),
}


def __getattr__(name: str) -> Any:
    if name in ODDITIES:
        return SimpleNamespace(permute=lambda *args, **settings: _odd(name, permute(*args, **settings)))
    if name in WHOLE:
        return SimpleNamespace(permute=lambda *args, **settings: WHOLE[name](permute(*args, **settings)))
    raise AttributeError(name)


def _odd(name: str, out: Any) -> Any:
    return out._replace(rows=ODDITIES[name](out.rows))
