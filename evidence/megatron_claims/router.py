"""megatron-core's own router, on a CPU, in one process.

    with one_rank():
        router = top_k_router(num_moe_experts=8, moe_router_topk=2)
        probs, routing_map = router(hidden_states)  # [S,B,H]

Three things of 0.16.1 stand in the way; each is removed in place, no arithmetic is touched.

    te_general_gemm      undefined without Transformer Engine: gating raises a NameError. Here None,
                         as the package's own extension module sets: gating takes its torch branch
    current_device       the constructor and gating ask for the CUDA device: here the CPU
    torch.compile        compiles the count for the expert bias: off during routing
"""

import contextlib
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

try:
    version = metadata.version("megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # four warnings: Transformer Engine and Apex are missing
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.transformer_config import TransformerConfig
except (ImportError, metadata.PackageNotFoundError) as error:
    raise ImportError(
        f"megatron-core cannot be imported ({error}); pip install --no-deps megatron-core==0.16.1"
    ) from None
if not version.startswith("0.16."):
    raise ImportError(
        f"megatron-core {version} is installed; this was written for 0.16.1: "
        "pip install --no-deps megatron-core==0.16.1"
    )

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None

SMALL = {
    "num_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "moe_ffn_hidden_size": 8,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
}
ON_CPU = {"use_cpu_initialization": True, "add_bias_linear": False}


class CpuRouter(TopKRouter):
    """TopKRouter with its way to a CPU cleared."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        with _cpu_as_current_device():
            super().__init__(config, pg_collection)

    def gating(self, input: Tensor) -> Tensor:
        with _cpu_as_current_device():
            return super().gating(input)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.compiler.set_stance("force_eager"):
            return super().routing(logits, padding_mask)


@contextlib.contextmanager
def one_rank() -> Iterator[ProcessGroupCollection]:
    """The package's process groups, each of this process alone, over gloo and a store in memory;
    none are left behind.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield moe_utils.get_default_pg_collection()
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def settings(**config: Any) -> TransformerConfig:
    """A small model's configuration, with `config` in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own defaults
        return TransformerConfig(**{**SMALL, **ON_CPU, **config})


def top_k_router(*, seed: int = 0, **config: Any) -> TopKRouter:
    """A router in training, its weights drawn from `seed`; inside `one_rank` only. The caller's
    generator stays as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CpuRouter(settings(**config), moe_utils.get_default_pg_collection())


def _cpu_as_current_device() -> contextlib.AbstractContextManager:
    return mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
