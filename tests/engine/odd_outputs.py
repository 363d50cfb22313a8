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


ODDITIES: dict[str, tuple[Callable[[Tensor], Any], str]] = {  # and how the finding begins
    "sparse": (lambda x: x.detach().to_sparse(), "rows has the layout torch.sparse_coo"),
    "compressed": (lambda x: x.detach().to_sparse_csr(), "rows has the layout torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x.detach().unbind())), "rows is a nested tensor"),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x.detach(), 1.0, 0, torch.quint8),
        "rows is a quantised tensor of torch.quint8",
    ),
    "mkldnn": (lambda x: x.detach().to_mkldnn(), "rows has the layout torch._mkldnn"),
    "negated": (lambda x: torch._neg_view(-x.detach()), "rows is a lazily negated view"),
    "conjugated": (lambda x: x.detach().to(torch.complex64).conj(), "rows has dtype torch.complex64"),
    "complex": (lambda x: x.detach().to(torch.complex128), "rows has dtype torch.complex128"),
    "freed": (_freed, "rows has a storage smaller than itself"),
    "meta": (lambda x: x.to("meta"), "rows is on meta, the inputs are on cpu"),
    "refuses": (
        lambda x: x.detach().as_subclass(Refuses),
        "rows is a Refuses that cannot be read: RuntimeError: no torch here",
    ),
    "wrapper": (lambda x: Wrapper(x.detach()), "rows is a Wrapper that cannot be read: "),
    "array": (lambda x: x.detach().numpy(), "rows is a ndarray, not a tensor"),
    "none": (lambda x: None, "rows is None; the reference returns a tensor"),
    "number": (lambda x: 3, "rows is a int, not a tensor"),
    "transposed": (lambda x: x.detach().T.contiguous(), "rows has shape (2, 4); the reference's is (4, 2)"),
    "raises": (Raises.apply, ""),  # without gradients
}
WHOLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda out: None, "call returned NoneType without rows"),
    "one_number": (lambda out: 3, "call returned int without rows"),
    "text": (lambda out: "rows", "call returned str without rows"),
    "too_short": (lambda out: tuple(out)[:2], "call returned 2 values; it must return 6"),
    "too_long": (lambda out: (*out, None), "call returned 7 values; it must return 6"),
    "numbered": (lambda out: dict(enumerate(out)), "call returned dict without rows"),
}


def __getattr__(name: str) -> Any:
    if name in ODDITIES:
        return SimpleNamespace(permute=lambda *args, **settings: _odd(name, permute(*args, **settings)))
    if name in WHOLE:
        return SimpleNamespace(permute=lambda *args, **settings: WHOLE[name][0](permute(*args, **settings)))
    raise AttributeError(name)


def _odd(name: str, out: Any) -> Any:
    return out._replace(rows=ODDITIES[name][0](out.rows))
