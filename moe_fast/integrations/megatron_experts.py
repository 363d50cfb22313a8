"""Experts of Megatron-Core by `moe_fast.experts.grouped_mlp`, with the parameters of its
SequentialMLP.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import functional

from moe_fast.experts import grouped_mlp

KINDS = {  # of each activation of Megatron: gated, and not gated
    functional.silu: ("swiglu", "silu"),
    functional.gelu: ("geglu_erf", "gelu"),
    functional.relu: ("reglu", "relu"),
    fast_gelu: ("geglu", "gelu_tanh"),
    quick_gelu: ("quick_geglu", "quick_gelu"),
    squared_relu: (None, "squared_relu"),
}
ABSENT = ("fp8", "fp4", "use_te_activation_func", "use_kitchen")  # options that moe_fast lacks here


@cache
def warn_once(message: str) -> None:
    """Warns at the first call with this message."""
    warnings.warn(message, stacklevel=3)


def _parameters_without_input(linear: type) -> type:
    """The linear layer, which returns its weight and its bias if it is called without an input.

    Such a call runs the hooks of a call: Megatron's wait for a gathered parameter is one.
    """

    def forward(self: Any, input_: Tensor | None = None, *arguments: Any, **settings: Any) -> Any:
        if input_ is None:
            return self.weight, self.bias
        return linear.forward(self, input_, *arguments, **settings)  # type: ignore[attr-defined]

    return type(linear.__name__, (linear,), {"forward": forward})


Column, Row = map(_parameters_without_input, (ColumnParallelLinear, RowParallelLinear))


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """The experts of a rank as grouped products, with the activation in one launch.

    Parameters, initial values and checkpoints are those of SequentialMLP. The weights of all
    experts lie in one tensor, which the products read. If an optimizer or a wrapper puts them
    elsewhere, each forward copies them into one. With options that moe_fast lacks, SequentialMLP
    computes, and one warning names the option.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, *arguments: Any, **settings: Any) -> None:
        submodules = replace(submodules, linear_fc1=Column, linear_fc2=Row)
        super().__init__(num_local_experts, config, submodules, *arguments, **settings)
        self._pack()

    def _apply(self, function: Callable[[Tensor], Tensor], *arguments: Any, **settings: Any) -> Any:
        """`function` of each parameter, as in `to`, `bfloat16` and `cuda`."""
        result = super()._apply(function, *arguments, **settings)
        self._pack()
        return result

    def _pack(self) -> None:
        for linears in self._linears():
            weights = [linear.weight for linear in linears]
            if any(weight.is_meta for weight in weights) or _joined(weights) is not None:
                continue
            for weight, data in zip(weights, torch.stack([weight.data for weight in weights]), strict=True):
                weight.data = data

    def _linears(self) -> tuple[list[Any], list[Any]]:
        experts = self.local_experts
        return [expert.linear_fc1 for expert in experts], [expert.linear_fc2 for expert in experts]

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        """(rows [R,H], None): each row's expert times its probability.

        Args:
            permuted_local_hidden_states: [R,H], sorted by expert.
            tokens_per_expert: [L] integers on any device. A tensor on the rows' device is best.
            permuted_probs: [R].
        """
        arguments = (permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        lacking = lacking_option(self.config) or next(iter(settings), None)
        if lacking is not None:
            warn_once(f"Megatron's SequentialMLP runs in the place of moe_fast's experts, which lack {lacking}")
            return super().forward(*arguments, **settings)  # type: ignore[no-any-return]
        (w1, b1), (w2, b2) = map(_stacked, self._linears())
        counts = tokens_per_expert.to(permuted_local_hidden_states.device, non_blocking=True)
        rows = grouped_mlp(
            permuted_local_hidden_states,
            counts,
            w1,
            w2,
            probs=permuted_probs,
            fc1_bias=b1,
            fc2_bias=b2,
            **settings_of(self.config),
        )
        return rows, None


def lacking_option(config: Any) -> str | None:
    """The first option of a configuration that moe_fast's experts lack."""
    for name in ABSENT:
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)!r}"
    if _kind(config) is None:
        return f"the activation {config.activation_func} with gated_linear_unit={config.gated_linear_unit}"
    return None


def _kind(config: Any) -> str | None:
    gated, plain = KINDS.get(config.activation_func, (None, None))
    return gated if config.gated_linear_unit else plain


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of `grouped_mlp` that Megatron's options ask for."""
    recomputed = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
    settings: dict[str, Any] = {
        "kind": _kind(config),
        "fp8_input_store": config.activation_func_fp8_input_store,
        "probs_on_input": config.moe_apply_probs_on_input,
        "recompute": "moe_act" if "moe_act" in recomputed else None,
    }
    if config.gated_linear_unit:
        settings |= {
            "offset": config.glu_linear_offset,
            "clamp": config.activation_func_clamp_value,
            "interleave": getattr(config, "moe_mlp_glu_interleave_size", None),
        }
    return settings


def _stacked(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights [L,…] and biases [L,…] of all experts. A layer is called only for its hooks,
    because a call of each of many experts takes the host longer than the products take a GPU.
    """
    pairs = [linear() if linear._forward_pre_hooks else (linear.weight, linear.bias) for linear in linears]
    weights, biases = zip(*pairs, strict=True)
    return Stacked.apply(*weights), None if biases[0] is None else torch.stack(biases)  # type: ignore[return-value]


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """One tensor of weights that lie one after another in memory; None if they do not."""
    first, count = weights[0].detach(), len(weights)
    step, address = first.numel() * first.itemsize, first.data_ptr()
    follows = [weight.data_ptr() for weight in weights] == [address + index * step for index in range(count)]
    in_one_storage = first.storage_offset() * first.itemsize + count * step <= first.untyped_storage().nbytes()
    if not follows or not in_one_storage or not all(weight.is_contiguous() for weight in weights):
        return None
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()))


class Stacked(torch.autograd.Function):
    """torch.stack, without a copy if the tensors lie one after another in memory."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        joined = _joined(weights)
        return torch.stack(weights) if joined is None else joined

    @staticmethod
    def backward(ctx: Any, d_stacked: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return d_stacked.unbind()
