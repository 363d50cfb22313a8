"""A training step of models of Hugging Face transformers by three implementations of their experts.

    python -m benchmarks.transformers_step           # tokens per second and peak memory, on a GPU
    python -m benchmarks.transformers_step --quick   # checks tiny models, times nothing

Configurations are cut to two layers: Qwen3-30B-A3B, gpt-oss-20b, and the layer of DeepSeek-V3 with
32 of its 256 experts. A step in bfloat16 has the forward, the loss and all gradients. Of each model
all versions, eager and compiled, take turns. A version that cannot run is left out with the reason.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import DEVICE, elapsed_us, table

OURS = "moe_fast"
IMPLEMENTATIONS = (OURS, "grouped_mm", "batched_mm")
SEQUENCE = 4096
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088},
    ),
    "DeepSeek-V3, 32 experts": (
        "deepseek_v3",
        {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 8}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280}
        | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
}
TINY = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16}
TINY_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
TINY |= {"intermediate_size": 16, "moe_intermediate_size": 16, **TINY_EXPERTS, "q_lora_rank": 8, "kv_lora_rank": 8}
TINY |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def model_of(family: str, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model of two layers with random weights.

    Raises:
        ImportError: transformers is missing, or another release than moe_fast takes.
    """
    importlib.import_module("moe_fast.integrations.transformers")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=2, use_cache=False, **settings)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def step_of(model: Any, forward: Callable[..., Any], tokens: Tensor, implementation: str) -> Callable[[], Tensor]:
    """A training step: it returns the loss, and leaves the gradients."""

    def step() -> Tensor:
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss: Tensor = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return step


def versions(model: Any, tokens: Tensor, compiled: bool) -> dict[str, Callable[[], Tensor]]:
    """The steps that run, each called twice; a sentence for each other."""
    running = {}
    for implementation in IMPLEMENTATIONS:
        forwards = {"eager": model} | ({"compiled": torch.compile(model)} if compiled else {})
        for mode, forward in forwards.items():
            step = step_of(model, forward, tokens, implementation)
            try:
                step(), step()
            except (RuntimeError, ValueError) as error:  # too little memory is a RuntimeError
                print(f"{implementation}, {mode} is left out: {str(error).splitlines()[0]}", flush=True)
                continue
            running[f"{implementation}, {mode}"] = step
    return running


def check(model: Any, tokens: Tensor) -> None:
    """Checks that the implementations have one loss and one gradient.

    Raises:
        AssertionError: they differ by more than float32 rounds.
    """
    results = []
    for step in versions(model, tokens, compiled=False).values():
        loss = step()
        results.append([loss, *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    assert len(results) == len(IMPLEMENTATIONS)
    for result in results[1:]:
        for x, y in zip(results[0], result, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def measured(steps: dict[str, Callable[[], Tensor]], tokens: int, blocks: int) -> list[list[str]]:
    """Lines with the median of tokens per second and the peak of memory; versions take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for _ in range(blocks):
        for name, step in steps.items():
            torch.cuda.reset_peak_memory_stats()
            seconds[name].append(elapsed_us(step) / 1e6)
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    first = {mode: rates.get(f"{OURS}, {mode}") for mode in ("eager", "compiled")}
    lines = []
    for name, rate in rates.items():
        rate_of_ours = first[name.rpartition(", ")[2]]
        lines.append(
            [name, f"{rate:.0f}", f"{rate_of_ours / rate:.2f}" if rate_of_ours else "", f"{peaks[name] / 2**30:.1f}"]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=15, help="steps of each version")
    parser.add_argument("--quick", action="store_true", help="check tiny models in float32, time nothing")
    options = parser.parse_args()
    for name, (family, settings) in MODELS.items():
        if options.quick:
            check(model_of(family, settings | TINY, torch.float32), torch.arange(14, device=DEVICE).view(2, 7))
            print(f"{name}: checked", flush=True)
            continue
        torch._dynamo.reset()  # no limit on compilations per model
        model = model_of(family, settings, torch.bfloat16)
        tokens = torch.randint(0, settings["vocab_size"], (options.tokens // SEQUENCE, SEQUENCE), device=DEVICE)
        lines = measured(versions(model, tokens, compiled=True), tokens.numel(), options.blocks)
        columns = ["version", "tokens per second", "moe_fast in the same mode ÷ it", "peak GiB"]
        print(table(f"{name}, two layers, {tokens.numel()} tokens", columns, lines), flush=True)
        del model


if __name__ == "__main__":
    main()
