"""MoE blocks of Hugging Face transformers: Mixtral, Qwen3, DeepSeek-V3; output and all gradients.

Weights are float64. Mixtral's and DeepSeek's routers compute in float32 whatever they are given.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from evidence.oracles.compare import Comparison
from evidence.oracles.layers import SHAPES, WIDE, compared, parameters_of, reference
from moe_ref.config import LayerParameters, RouterConfig

PEER = "Hugging Face transformers' MoE blocks"
PACKAGES = ("transformers==5.24.0",)
SOURCE = None


def block_of(name: str, config: SimpleNamespace, p: LayerParameters) -> tuple[Any, list[Tensor]]:
    """The block with these weights, and its own parameters in the order of ours."""
    folder, cls = BLOCKS[name]
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    block = getattr(module, cls)(config).to(WIDE)
    block_weights = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    our_weights = [p.router_weight, p.fc1_weight, p.fc2_weight]
    with torch.no_grad():
        for theirs, mine in zip(block_weights, our_weights, strict=True):
            theirs.copy_(mine)
        if p.shared_fc1_weight is not None and p.shared_fc2_weight is not None:
            gate, up = p.shared_fc1_weight.chunk(2)
            shared = block.shared_experts
            for theirs, mine in (
                (shared.gate_proj, gate),
                (shared.up_proj, up),
                (shared.down_proj, p.shared_fc2_weight),
            ):
                theirs.weight.copy_(mine)
    return block, block_weights


BLOCKS = {
    "Mixtral": ("mixtral", "MixtralSparseMoeBlock"),
    "Qwen3": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3MoE"),
}


def comparisons(source: Path | None) -> Iterator[Comparison]:
    """The three blocks, in three sizes each."""
    for name in BLOCKS:
        for sizes in SHAPES:
            tokens, hidden, experts, topk, width = sizes
            deepseek = name == "DeepSeek-V3"
            topk = 2 if deepseek else topk  # in one group: its two best count for it
            names = ("num_local_experts", "num_experts", "n_routed_experts")
            config = SimpleNamespace(
                num_experts_per_tok=topk, hidden_size=hidden, intermediate_size=width, moe_intermediate_size=width,
                hidden_act="silu", router_jitter_noise=0.0, norm_topk_prob=True, n_group=1, topk_group=1,
                routed_scaling_factor=2.5, n_shared_experts=1, _experts_implementation="eager",
                **dict.fromkeys(names, experts),
            )  # fmt: skip
            p = parameters_of(hidden, experts, width, shared=width if deepseek else 0)
            score: dict[str, Any] = {"score_function": "sigmoid", "scaling_factor": 2.5} if deepseek else {}
            router = RouterConfig(num_experts=experts, topk=topk, **score)
            block, block_weights = block_of(name, config, p)
            mine = [p.router_weight, p.fc1_weight, p.fc2_weight]

            def theirs(x: Tensor, block: Any = block) -> Tensor:
                return block(x[None])[0]

            both = (reference(p, router), theirs, mine, block_weights)
            yield from compared(name, *both, (tokens, hidden, experts, topk, width), torch.float32)
