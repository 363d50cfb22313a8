"""Megatron-Core on a CPU: its routing functions, permutation, and a whole `MoELayer`.

Streams and events of CUDA, which its dispatchers make, are replaced by objects that do nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import Comparison, compare
from evidence.oracles.layers import SHAPES, WIDE, compared, parameters_of, reference
from evidence.oracles.random_inputs import generator
from evidence.oracles.te_router import SHAPES as ROUTED
from evidence.oracles.te_router import routing, scores
from moe_ref.config import LayerParameters, RouterConfig

PEER = "Megatron-Core's router, permutation and layer"
PACKAGES = ("megatron-core==0.16.1",)
SOURCE = None


def comparisons(source: Path | None) -> Iterator[Comparison]:
    """Router, permutation, layer."""
    from conformance.peers import megatron, megatron_router

    def chosen(logits: Tensor, topk: int, use_pre_softmax: bool, **settings: Any) -> Any:
        return megatron.topk_routing(logits, topk=topk, pre_softmax=use_pre_softmax, **settings)

    def counted(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
        scored = megatron.aux_loss_scores(logits, topk=topk, score_function=score)
        return scored.routing_map, scored.scores

    for (tokens, experts, topk), score in product(ROUTED, ("softmax", "sigmoid")):
        logits = torch.randn(tokens, experts, generator=generator(tokens))
        text = f"T={tokens} E={experts} K={topk} {score}"
        yield from routing(chosen, logits, topk, score, text)
        yield from scores(counted, logits, topk, score, text)
        yield from permuted(megatron, moe_ref.topk_routing(logits, topk=topk), text)
    megatron_router.one_rank()
    for sizes, dispatcher in product(SHAPES, ("allgather", "alltoall")):
        yield from layer(sizes, dispatcher)


def permuted(megatron: Any, routed: Any, text: str) -> Iterator[Comparison]:
    """Rows, weights, and rows brought back; whole numbers, whose sums are exact."""
    tokens = torch.randint(-8, 9, (len(routed.probs), 4), generator=generator(9)).float()
    sides = []
    for side in (moe_ref, megatron):
        out = side.permute(tokens, routed.routing_map, probs=routed.probs)
        brought_back = side.unpermute(out.rows, out.row_map, restore_shape=tuple(tokens.shape))
        sides.append({"rows": out.rows, "probs": out.probs, "rows brought back": brought_back})
    for name, value in sides[0].items():
        yield compare(f"permutation: {name}", value, sides[1][name], case=lambda at, _: f"{text} at {at}")


class Nothing(AbstractContextManager):
    """A stream or an event that does nothing."""

    def __init__(self, *arguments: Any) -> None: ...

    def __exit__(self, *arguments: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return Nothing

    def __call__(self, *arguments: Any) -> "Nothing":
        return self


def on_a_cpu() -> ExitStack:
    """No CUDA stream, and the CPU for the current device."""
    stack = ExitStack()
    for name in ("Stream", "current_stream", "stream"):
        stack.enter_context(mock.patch.object(torch.cuda, name, Nothing))
    stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
    return stack


def layer(sizes: tuple[int, ...], dispatcher: str) -> Iterator[Comparison]:
    """`MoELayer` with `SequentialMLP`, weights and router in float64."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    _, hidden, experts, topk, width = sizes
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, ffn_hidden_size=width, moe_ffn_hidden_size=width,
        num_moe_experts=experts, moe_router_topk=topk, moe_token_dispatcher_type=dispatcher, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, use_cpu_initialization=True,
        moe_router_load_balancing_type="none", moe_router_dtype="fp64", params_dtype=WIDE,
    )  # fmt: skip
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    p = parameters_of(hidden, experts, width)
    mine = [p.router_weight, p.fc1_weight, p.fc2_weight]
    with on_a_cpu():
        module = MoELayer(config, MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linear)))
        module_weights = with_weights(module, p)

        def theirs(x: Tensor) -> Tensor:
            return module(x[:, None])[0][:, 0]

        ours = reference(p, RouterConfig(num_experts=experts, topk=topk))
        yield from compared(f"layer, {dispatcher}", ours, theirs, mine, module_weights, sizes, torch.float32)


def with_weights(module: Any, p: LayerParameters) -> list[Tensor]:
    """Our weights as the module's, in which gradients of the experts come one by one."""
    experts = module.experts.local_experts
    all_weights = [x.detach().clone().requires_grad_() for x in (p.router_weight, p.fc1_weight, p.fc2_weight)]
    del module.router.weight
    module.router.weight = all_weights[0]
    for e, expert in enumerate(experts):
        for linear, weight in ((expert.linear_fc1, all_weights[1]), (expert.linear_fc2, all_weights[2])):
            del linear.weight
            linear.weight = weight[e]
    return all_weights
