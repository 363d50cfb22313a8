"""Checks of releases over several ranks, or of parts that need streams or Transformer Engine's
modules: stubs stand for those, and the release's own code is what runs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from evidence.rediscovery.ranks import on_ranks

CHECKS: dict[str, Callable[[], str]] = {}
LOGITS = torch.tensor([[2.0, -1, 0.5, 0], [-3, 1, 0, 4], [0.25, 0, 2, -2], [1, 3, -1, 0]])


def check(function: Callable[[], str]) -> Callable[[], str]:
    """A check, by its name."""
    CHECKS[function.__name__] = function
    return function


def settings(**options: Any) -> Any:
    """The release's configuration."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    small = {
        "num_layers": 1, "hidden_size": 4, "num_attention_heads": 2, "use_cpu_initialization": True,
        "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    return TransformerConfig(**(small | options))


@check
def k05() -> str:
    """Two pipeline stages, one without a bias, have the same parameter groups."""

    def groups(rank: int) -> list[str]:
        from megatron.core import optimizer

        chunk = torch.nn.Linear(2, 2, bias=rank == 0)
        chunk.ddp_config = SimpleNamespace(use_custom_fsdp=False)  # type: ignore[assignment]
        param_groups = optimizer._get_param_groups([chunk], None, None, 1.0, 1e-3, 1e-3, None, None)  # type: ignore[attr-defined]
        return sorted(f"weight decay × {group['wd_mult']:g}" for group in param_groups)

    first, second = on_ranks(2, groups, pipeline_model_parallel_size=2)
    return "" if first == second else f"stage 0 has groups of {', '.join(first)}; stage 1 of {', '.join(second)}"


@check
def e01() -> str:
    """Rows that no expert changes come back to their tokens: TP = 2, EP = 2, two local experts."""

    def returned(rank: int) -> tuple[list[float], list[float]]:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe import token_dispatcher

        config = settings(
            num_moe_experts=4, moe_router_topk=1, moe_router_pre_softmax=True, tensor_model_parallel_size=2,
            expert_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True,
        )  # fmt: skip
        first_expert = parallel_state.get_expert_model_parallel_rank() * 2
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher(2, [first_expert, first_expert + 1], config)
        first, third = 1 + rank % 3, 1 + (rank + 1) % 3
        counts = first, 4 - first, third, 4 - third  # gloo gathers equal sizes: 4 rows for each pair of experts
        routing_map = torch.nn.functional.one_hot(torch.arange(4).repeat_interleave(torch.tensor(counts)), 4).bool()
        tokens = (torch.arange(8.0) + 100 * rank)[:, None, None].expand(-1, 1, 4).contiguous()
        with mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host, create=True):
            rows, *_ = dispatcher.token_permutation(tokens, routing_map.float(), routing_map)
            returned_rows, _ = dispatcher.token_unpermutation(rows / 2)  # summed over the ranks that share an expert
        return tokens[:, 0, 0].tolist(), returned_rows.reshape(-1, 4)[:, 0].tolist()

    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    for rank, (sent_tokens, returned_tokens) in enumerate(on_ranks(4, returned, **sizes)):
        mismatches = [
            (sent_value, returned_value)
            for sent_value, returned_value in zip(sent_tokens, returned_tokens, strict=True)
            if sent_value != returned_value
        ]
        if mismatches:
            first = f"{mismatches[0][0]:g} is {mismatches[0][1]:g}"
            return f"rank {rank}: {len(mismatches)} of {len(sent_tokens)} tokens are others': {first}"
    return ""


def _to_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """As the releases' own from 0.12 on, which leaves tensors of a CPU as they are."""
    return x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x


@check
def l01() -> str:
    """A grouped MLP whose padding is a plain module has a sharded state."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    def sharded(rank: int) -> list[str]:
        grouped_mlp = SimpleNamespace(
            _modules={"fp8_padding": torch.nn.Module()},  # as Transformer Engine's: without sharded_state_dict
            config=SimpleNamespace(gated_linear_unit=False),
            num_local_experts=1,
        )
        return list(TEGroupedMLP.sharded_state_dict(grouped_mlp))

    try:
        on_ranks(1, sharded)
    except RuntimeError as error:
        return str(error)
    return ""


@check
def h04() -> str:
    """Overlapped shared experts clamp what they activate, as others do."""
    config = settings(
        num_moe_experts=2, moe_shared_expert_intermediate_size=4, moe_shared_expert_overlap=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, activation_func_clamp_value=1.0,
        bias_activation_fusion=False,
    )  # fmt: skip

    def outputs(rank: int) -> tuple[list[float], list[float]]:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        shared_mlp = SharedExpertMLP(config, submodules, False, get_default_pg_collection())
        for weight in shared_mlp.parameters():
            weight.data.fill_(1.0)
        x = torch.ones(1, 1, 4)  # 4 before the activation
        shared_mlp.pre_forward_comm(x)
        shared_mlp.linear_fc1_forward_and_act()
        shared_mlp.linear_fc2_forward()
        shared_mlp.post_forward_comm()
        return shared_mlp.get_output().flatten().tolist(), shared_mlp(x).flatten().tolist()

    overlapped, without_overlap = on_ranks(1, outputs)[0]
    if overlapped == without_overlap:
        return ""
    return f"overlapped they return {overlapped[0]:.4g}, without overlap {without_overlap[0]:.4g} for the same input"


@check
def a14() -> str:
    """A stage without a router tracks the losses of as many layers as a stage with one."""

    def tracked(rank: int) -> list[int]:
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.router import TopKRouter

        tracker, sizes = moe_utils.get_moe_layer_wise_logging_tracker(), []
        losses: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
        config = settings(num_layers=2, mtp_num_layers=1, num_moe_experts=4, moe_router_topk=2, **losses)
        router = TopKRouter(config, moe_utils.get_default_pg_collection())
        router.set_layer_number(1)
        router.train().routing(LOGITS.clone().requires_grad_()[:, None])
        sizes.append(len(tracker.pop("load_balancing_loss")["values"]))
        real = torch.zeros
        with (
            mock.patch.object(torch, "zeros", lambda *size, device=None, **options: real(*size, **options)),
            mock.patch.object(moe_utils, "reduce_aux_losses_tracker_across_ranks", lambda *_, **__: None),
        ):
            options: dict[str, Any] = {"force_initialize": True, "track_names": ["load_balancing_loss"]}
            moe_utils.track_moe_metrics(1.0, 0, num_layers=2, mtp_num_layers=1, **options)
        return [*sizes, len(tracker["load_balancing_loss"]["values"])]

    router, none = on_ranks(1, tracked)[0]
    return "" if router == none else f"a stage without routers tracks {none} layers, one with routers {router}"


@check
def a07() -> str:
    """The gradient of a balancing loss per token is the same on one rank and shared out to two."""

    def gradient(ranks: int) -> list[list[float]]:
        def own(rank: int) -> list[list[float]]:
            from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
            from megatron.core.transformer.moe.router import TopKRouter

            config = settings(
                num_moe_experts=4, moe_router_topk=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0,
                calculate_per_token_loss=True, tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1,
            )  # fmt: skip
            router = TopKRouter(config, get_default_pg_collection())
            router.set_layer_number(1)
            logits = LOGITS.chunk(ranks)[rank].clone().requires_grad_()
            probs, _ = router.train().routing(logits[:, None])
            probs.backward(torch.zeros_like(probs))  # what is left is the loss's gradient
            assert logits.grad is not None
            return logits.grad.tolist()

        return [row for rows in on_ranks(ranks, own, tensor_model_parallel_size=ranks) for row in rows]

    one_rank, two = torch.tensor(gradient(1)), torch.tensor(gradient(2))
    if torch.allclose(one_rank, two):
        return ""
    return f"shared out to two ranks, the gradient is {float(two.norm() / one_rank.norm()):.3g} × that of one rank"


@check
def j10() -> str:
    """The gradient of an expert's weight is summed over all ranks that hold it: TP = 2, ETP = 1."""

    def summed_over(rank: int) -> int:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        config = settings(num_moe_experts=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
        tensor_group = parallel_state.get_expert_tensor_parallel_group()
        placed: dict[str, Any] = {
            "config": config,
            "init_method": torch.nn.init.ones_,
            "is_expert": True,
            "tp_group": tensor_group,
        }
        weight: Any = ColumnParallelLinear(4, 4, bias=False, **placed).weight
        dense, expert = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
        return torch.distributed.get_world_size(dense if weight.allreduce else expert)

    ranks = on_ranks(2, summed_over, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    return "" if ranks == [2, 2] else f"two ranks hold an expert's weight, and its gradient is summed over {ranks[0]}"


@check
def n05() -> str:
    """A schedule that overlaps AlltoAll keeps the rows that one local expert needs again."""
    from inspect import signature

    from megatron.core.models.gpt.fine_grained_callables import should_free_input

    words = {"num_local_experts": 1} if "num_local_experts" in signature(should_free_input).parameters else {}
    config = settings(num_moe_experts=2, expert_model_parallel_size=2, bf16=True, params_dtype=torch.bfloat16)
    freed = should_free_input("mlp", True, config, **words)
    return "the input of the experts is freed, which is what one local expert's products saved" if freed else ""
