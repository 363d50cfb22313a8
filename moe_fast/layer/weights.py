"""The grouped linear layers of experts, with the names and shapes of Megatron's state dicts.

If the module is packed, the weight is [L,out,in] under the key `weight`, and the bias [L,out] under
`bias`; otherwise each expert has [out,in] under `weight0` … and [out] under `bias0` …
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_fast.dispatch.overlap import wait_for
from moe_fast.experts.delayed import Waiting
from moe_fast.parameters.names import normalize_parameters
from moe_fast.parameters.shards import merge_extra_state

State = dict[str, Any]


class GroupedLinear(nn.Module):
    """One weight [L,out,in] for all experts of a rank, and a bias [L,out] or None. They are saved
    packed or by expert, and loaded from both.
    """

    def __init__(
        self, experts: int, out: int, into: int, *, bias: bool = False, packed: bool = True, **tensor: Any
    ) -> None:
        super().__init__()
        self.packed = packed
        self.weight = nn.Parameter(torch.empty(experts, out, into, **tensor))
        self.bias = nn.Parameter(torch.empty(experts, out, **tensor)) if bias else None
        self.register_load_state_dict_pre_hook(_pack)
        self.register_state_dict_post_hook(_unpack)
        self.waiting: Waiting = []  # gradients of the weight, see `backward_dw`
        self.computed: list[Tensor | None] = []  # by `compute_dw`; None: `main_grad` has it
        self.factors: Waiting = []  # what another stream computes them of

    def compute_dw(self) -> None:
        """Compute the delayed gradients on a stream beside the backward's; `backward_dw` hands them
        to the weight.
        """
        self.factors += self.waiting
        while self.waiting:
            self.computed.append(self._next())

    def _next(self) -> Tensor | None:
        """The first delayed gradient; None if it was added to `main_grad`."""
        gradient, main = self.waiting.pop(0), getattr(self.weight, "main_grad", None)
        if main is None:
            return gradient()
        main.copy_(gradient(accumulate_into=main))
        return None

    def backward_dw(self) -> None:
        """Compute the weight's delayed gradients, one per backward, and add them to
        `weight.main_grad` if there is one, else to `weight.grad`. Autograd's hooks of the weight
        run once for each, as without a delay.

        If there is a `main_grad`, hooks find `weight.grad_added_to_main_grad` True and a gradient
        of zeros.

        Raises:
            RuntimeError: no gradient is delayed.
        """
        if not (self.computed or self.waiting):
            raise RuntimeError("backward_dw without a backward since the last one: no gradient waits")
        if self.factors:
            wait_for([x for x in self.computed if x is not None], self.weight.device)
            self.factors.clear()
        while self.computed or self.waiting:
            gradient = self.computed.pop(0) if self.computed else self._next()
            if gradient is not None:
                self.weight.backward(gradient)  # a leaf: the gradient is added, and hooks run
                continue
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            old_gradient, self.weight.grad = self.weight.grad, None
            self.weight.backward(torch.zeros_like(self.weight))
            self.weight.grad = old_gradient

    def extra_repr(self) -> str:
        shape, bias = tuple(self.weight.shape[1:]), self.bias is not None
        return f"experts={len(self.weight)}, shape={shape}, bias={bias}, packed={self.packed}"


class KeepsDtypes(nn.Module):
    """Buffers that keep their dtypes when the module is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        buffers = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, x in buffers.items():
            setattr(self, name, x.to(getattr(self, name).device))
        return self


def _pack(module: GroupedLinear, state: State, prefix: str, *_: Any) -> None:
    """Before loading: make weight of weight0 …, unless the state has a packed key. The same for
    bias and extra state.
    """
    _normalize(module, state, prefix, packed=True)
    merged = merge_extra_state(state, num_experts=len(module.weight), prefix=prefix)
    _become(state, merged)


def _unpack(module: GroupedLinear, state: State, prefix: str, _: Any) -> None:
    """After saving: replace weight by its views weight0 …, unless the module is packed. The same
    for bias.
    """
    _normalize(module, state, prefix, packed=module.packed)


def _normalize(module: GroupedLinear, state: State, prefix: str, packed: bool) -> None:
    """Bring the state into the module's layout. The caller's dict itself is changed, because torch
    passes it on.
    """
    experts, bias = len(module.weight), module.bias is not None
    normalized = normalize_parameters(state, num_experts=experts, packed=packed, prefix=prefix, bias=bias)
    _become(state, normalized)


def _become(state: State, new_state: State) -> None:
    for name in state.keys() - new_state.keys():
        del state[name]
    state.update(new_state)
