"""Trains one model with the reference's layer and with moe_fast's layer, and compares the losses.

    python -m benchmarks.training --out docs/results/training.svg     # bf16, and FP8 by blocks

The model is that of `examples/train_moe.py`, with float32 parameters that each step casts to bf16.
Rounding differs between the two layers, so their losses part after some steps. They may part no
further than those of two seeds of the reference. Exit code 1 if they do. Needs matplotlib.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from conformance.peers import reference_layer
from examples.train_moe import Model, sentences
from moe_ref.config import Recipe

SIZES = {"words": 256, "dialects": 8, "length": 32, "batch": 32, "blocks": 2, "hidden": 256, "width": 256}
SIZES |= {"experts": 8, "topk": 2}
TINY = {"words": 8, "dialects": 2, "length": 4, "batch": 4, "blocks": 1, "hidden": 8, "width": 8}
TINY |= {"experts": 4, "topk": 2}
RECIPES = {"bf16": None, "FP8 block": Recipe("block")}
WINDOW = 10  # steps of a running mean: the loss of one step depends on its sentences


def losses(layer: str, recipe: Recipe | None, seed: int, sizes: dict[str, int], steps: int, device: str) -> list[float]:
    """The loss of each step; `layer` is "reference" or "moe_fast"."""
    options = argparse.Namespace(**sizes, recompute=None)
    torch.manual_seed(seed)
    model, noise = Model(options, None).to(device), torch.Generator().manual_seed(seed)
    for module in model.layers:
        module.config = replace(module.config, recipe=recipe, router_dtype="fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 / options.hidden**0.5, weight_decay=0.01)
    out = []
    with patch("moe_fast.layer.module.moe_layer", of_reference) if layer == "reference" else nullcontext():
        for _ in range(steps):
            words, dialects = (x.to(device) for x in sentences(options, noise))
            low = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
            logits: Tensor = torch.func.functional_call(model, low, (words[:-1], dialects))
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), words[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for module in model.layers:
                module.finish_batch()
            out.append(loss.detach())
    return torch.stack(out).tolist()


def of_reference(*arguments: Any, recompute: str | None = None, **settings: Any) -> Any:
    """The reference's layer, which keeps everything for the backward."""
    return reference_layer.moe_layer(*arguments, **settings)


def smooth(curve: list[float]) -> Tensor:
    return torch.tensor(curve).unfold(0, min(WINDOW, len(curve)), 1).mean(1)


def distance(first: list[float], second: list[float]) -> float:
    """The mean distance of the smoothed curves' logarithms: a loss falls by orders of magnitude."""
    return float((smooth(first).log() - smooth(second).log()).abs().mean())


def plot(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, len(curves), figsize=(11, 4), sharey=True, squeeze=False)
    for axes, (recipe, of_recipe) in zip(grid[0], curves.items(), strict=True):
        for name, curve in of_recipe.items():
            axes.semilogy(smooth(curve), "-" if "moe_fast" in name else "--", label=name, linewidth=1.2)
        axes.set_title(recipe)
        axes.set_xlabel("step")
    grid[0][0].set_ylabel(f"loss, mean of {WINDOW} steps")
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="the plot")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    device, sizes = "cuda" if torch.cuda.is_available() else "cpu", TINY if options.quick else SIZES
    curves: dict[str, dict[str, list[float]]] = {}
    apart = False
    for name, recipe in RECIPES.items():
        of_recipe = curves[name] = {}
        for layer in ("reference", "moe_fast"):
            begin = time.perf_counter()
            for seed in (0, 1):
                of_recipe[f"{layer}, seed {seed}"] = losses(layer, recipe, seed, sizes, options.steps, device)
            ends = ", ".join(f"{of_recipe[f'{layer}, seed {seed}'][-1]:.4f}" for seed in (0, 1))
            print(f"{name}, {layer}: last losses {ends}; {time.perf_counter() - begin:.0f} s", flush=True)
        seeds = distance(of_recipe["reference, seed 0"], of_recipe["reference, seed 1"])
        layers = [
            distance(of_recipe[f"reference, seed {seed}"], of_recipe[f"moe_fast, seed {seed}"]) for seed in (0, 1)
        ]
        apart |= max(layers) > seeds
        print(f"{name}: distance of the layers {max(layers):.4f}, of two seeds {seeds:.4f}", flush=True)
    if options.out:
        plot(curves, options.out)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
