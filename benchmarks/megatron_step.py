"""A training step of Megatron-Core's own MoELayer, with and without moe_fast.

    python -m benchmarks.megatron_step           # milliseconds, memory and losses, on a GPU
    python -m benchmarks.megatron_step --quick   # checks tiny layers in float32, times nothing

One layer of Qwen3-30B-A3B, and one of DeepSeek-V3 with 32 of its 256 experts, in bfloat16, eager,
on one rank. Three versions take turns:

    moe_fast      after `moe_fast.integrations.megatron.install()`: permutation, router and experts
    grouped_gemm  Megatron's GroupedMLP (0.16 only); torch's grouped product in the place of the
                  package grouped_gemm that it imports
    sequential    Megatron's SequentialMLP, and its unfused permutation and router

A step has the forward, a squared error, and all gradients. The layers begin with equal weights, and
their losses of ten updates are compared. Packages beside torch and triton: megatron-core, and those
that it imports, numpy and packaging. A machine without a network needs their wheels, megatron-core
installed with --no-deps.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from benchmarks.common import DEVICE, table

VERSIONS = ("moe_fast", "grouped_gemm", "sequential")
STEPS = 10
RATE = 0.02  # of the weights' norm, that one update changes
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 768,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
    },
    "DeepSeek-V3, 32 experts": {
        "hidden_size": 7168,
        "moe_ffn_hidden_size": 2048,
        "num_moe_experts": 32,
        "moe_router_topk": 8,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_shared_expert_intermediate_size": 2048,
    },
}
TINY = {"hidden_size": 32, "moe_ffn_hidden_size": 16, "num_moe_experts": 8, "moe_router_topk": 4}
TINY_SHARED = {"moe_shared_expert_intermediate_size": 16}


def start() -> None:
    """A world of this process alone, and Megatron's random numbers."""
    from megatron.core import parallel_state, tensor_parallel

    if not distributed.is_initialized():
        backend = "gloo" if DEVICE == "cpu" else "nccl"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=DEVICE == "cpu")
    if DEVICE != "cpu":
        tensor_parallel.model_parallel_cuda_manual_seed(0)


@contextmanager
def megatron_of(version: str) -> Any:
    """Megatron as the version has it, for building a layer and for its steps.

    Raises:
        ImportError: this release of megatron-core lacks the version.
    """
    from megatron.core.transformer.moe import experts, moe_utils

    import moe_fast.integrations.megatron as integration

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # without Transformer Engine 0.16 has no such name, and no gating
    with ExitStack() as stack:
        if DEVICE == "cpu":  # the gating moves its weight to the current device
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
        if version == "moe_fast":
            integration.install()
            stack.callback(integration.uninstall)
        elif version == "grouped_gemm":
            if not hasattr(experts, "GroupedMLP"):
                raise ImportError("this release of megatron-core has no GroupedMLP")
            product = SimpleNamespace(gmm=torch_gmm)
            stack.enter_context(mock.patch.multiple(experts.gg, grouped_gemm=product, ops=product))
        yield


def torch_gmm(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
    """The product of the package grouped_gemm, by torch."""
    ends = counts.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    return nn.functional.grouped_mm(rows, weights.mT if trans_b else weights, offs=ends)


def layer_of(version: str, settings: dict[str, Any]) -> Any:
    """Megatron's MoELayer, built while `megatron_of` the version holds."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    ours, on_cpu = version == "moe_fast", DEVICE == "cpu"
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        ffn_hidden_size=settings["moe_ffn_hidden_size"],
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_activation_fusion=not on_cpu,  # torch.compile needs a compiler on a CPU
        bf16=True,  # GroupedMLP runs with this option alone, whatever the parameters' dtype
        params_dtype=torch.float32 if on_cpu else torch.bfloat16,
        use_cpu_initialization=on_cpu,
        init_method_std=settings["hidden_size"] ** -0.5,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather" if on_cpu else "alltoall",  # the latter has a stream of a GPU
        moe_grouped_gemm=version != "sequential",
        moe_permute_fusion=ours,
        moe_router_fusion=ours,
        **settings,
    )
    spec = get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    layer = spec.module(config, submodules=spec.submodules) if hasattr(spec, "module") else spec(config=config)
    layer.set_layer_number(1)
    return layer.to(DEVICE).train()


@torch.no_grad()
def copy_weights(layer: Any, source: Any) -> None:
    """The weights of a layer with SequentialMLP, for a layer with any experts."""
    tensors = dict(source.state_dict())
    experts = layer.experts
    if hasattr(experts, "weight1"):
        count = experts.num_local_experts
        for name, weight in (("linear_fc1", experts.weight1), ("linear_fc2", experts.weight2)):
            stacked = [tensors.pop(f"experts.local_experts.{i}.{name}.weight") for i in range(count)]
            weight.copy_(torch.stack(stacked).mT.reshape(weight.shape))
    state = layer.state_dict()
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            state[name].copy_(x)


def step_of(layer: Any, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """A training step: it returns the loss, and leaves the gradients. The parameters are listed
    once, as by an optimizer: a walk over the modules of all experts takes milliseconds.
    """
    leaves = [x, *layer.parameters()]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out, _ = layer(x)
        loss = (out.float() - target).square().mean()
        loss.backward()
        return loss.detach()

    return step


@torch.no_grad()
def update(layer: Any) -> None:
    """Each parameter minus a multiple of its gradient: all together by RATE of their norm."""
    pairs = [(x, x.grad) for x in layer.parameters() if x.grad is not None]
    weights, gradients = (torch.stack([t.float().norm() for t in ts]).norm() for ts in zip(*pairs, strict=True))
    for x, gradient in pairs:
        x.add_(gradient * -(RATE * weights / gradients))


def layers(settings: dict[str, Any]) -> dict[str, Any]:
    """A layer of each version that this release of megatron-core has, with equal weights."""
    built = {}
    with megatron_of("sequential"):
        first = layer_of("sequential", settings)
    for version in VERSIONS:
        try:
            with megatron_of(version):
                built[version] = first if version == "sequential" else layer_of(version, settings)
        except (ImportError, ValueError) as error:
            print(f"{version} is left out: {error}", flush=True)
            continue
        copy_weights(built[version], first)
    return built


def curve(version: str, layer: Any, step: Callable[[], Tensor]) -> list[float]:
    """The losses of STEPS steps, with an update after each."""
    losses = []
    with megatron_of(version):
        for _ in range(STEPS):
            losses.append(float(step()))
            update(layer)
    return losses


def distance(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(x - y) / abs(y) for x, y in zip(losses, expected, strict=True))


def measured(steps: dict[str, Callable[[], Tensor]], layer_by_version: dict[str, Any], blocks: int) -> list[list[str]]:
    """Lines with the median time and the memory beside the weights; versions take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for _ in range(blocks):
        for name, step in steps.items():
            with megatron_of(name):
                torch.cuda.reset_peak_memory_stats()
                resident = torch.cuda.memory_allocated()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                step()
                end.record()
                torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - resident)
            layer_by_version[name].zero_grad(set_to_none=True)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    ours = medians[VERSIONS[0]]
    return [[name, f"{ms:.2f}", f"{ms / ours:.2f}", f"{peaks[name] / 2**30:.2f}"] for name, ms in medians.items()]


def compare(name: str, settings: dict[str, Any], tokens: int, blocks: int) -> dict[str, list[float]]:
    """The curves of all versions; without `blocks` nothing is timed."""
    layer_by_version = layers(settings)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(tokens, 1, settings["hidden_size"], generator=generator).to(DEVICE) for _ in range(2))
    x = x.to(next(iter(layer_by_version.values())).config.params_dtype).requires_grad_()
    steps = {version: step_of(layer, x, target) for version, layer in layer_by_version.items()}
    curves = {}
    for version, step in list(steps.items()):
        try:
            curves[version] = curve(version, layer_by_version[version], step)
        except (AttributeError, RuntimeError) as error:
            if version != "grouped_gemm":  # its product depends on the release of torch
                raise
            print(f"{version} is left out: {str(error).splitlines()[0]}", flush=True)
            del steps[version]
    for version, losses in curves.items():
        far = distance(losses, curves["sequential"])
        print(f"{name}, {version}: {' '.join(f'{loss:.6f}' for loss in losses)} (differs by {far:.1e})", flush=True)
    if blocks:
        columns = ["version", "ms per step", "÷ moe_fast", "peak GiB beside the weights"]
        print(
            table(f"{name}, one layer, {tokens} tokens", columns, measured(steps, layer_by_version, blocks)), flush=True
        )
    return curves


def check(name: str) -> None:
    """Checks that tiny layers have one curve.

    Raises:
        AssertionError: the curves differ by more than float32 rounds, or do not fall.
    """
    shared = TINY_SHARED if "moe_shared_expert_intermediate_size" in MODELS[name] else {}
    curves = compare(name, MODELS[name] | TINY | shared, tokens=12, blocks=0)
    assert len(curves) > 1
    expected = curves["sequential"]
    assert expected[-1] < expected[0], "the layer does not learn"
    for losses in curves.values():
        assert distance(losses, expected) < 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=30, help="timed steps of each version")
    parser.add_argument("--quick", action="store_true", help="check tiny layers in float32, time nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron")
    start()
    for name, settings in MODELS.items():
        if options.quick:
            check(name)
        else:
            compare(name, settings, options.tokens, options.blocks)


if __name__ == "__main__":
    main()
