"""Which families of Hugging Face transformers have a layer that `MoELayer.from_config` makes.

    python -m evidence.transformers_layers                # all of them, into the record
    python -m evidence.transformers_layers mixtral zaya   # a line for each of these

The families are those of `evidence.transformers_families`, and Llama 4. The MoE block of a tiny
random model is compared with the layer that is made of the model's configuration and has loaded the
block's weights: their outputs and the gradients of the tokens and of all weights in float32, and
the weights that the layer writes, which must be the block's to the last bit.
"""

import sys
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import fast_interpreter
from benchmarks.results import save
from evidence.transformers_families import LIMIT, STD, TOKENS, families, tiny_model
from moe_fast import MoELayer
from moe_fast.layer.huggingface import weights
from moe_ref.config import LayerParameters

GROUPS = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
OPTIONS: dict[str, dict[str, Any]] = {  # of families whose tiny model would leave a term of its layer unused
    "beam": GROUPS | {"num_experts": 8},
    "cohere2_moe": {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
    "deepseek_v3": GROUPS | {"n_routed_experts": 8},
    "dots1": {"norm_topk_prob": True},
    "glm4_moe": {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "laguna": {"moe_routed_scaling_factor": 2.5},
    "llama4": {"num_experts_per_tok": 1},
    "nemotron_h": {"moe_latent_size": 8, "moe_shared_expert_intermediate_size": 16, "routed_scaling_factor": 2.5},
}


class Outcome(NamedTuple):
    """What became of a family."""

    family: str
    block: str = ""  # the class of its MoE block
    worst: float = 0.0  # the largest difference, of the largest value of its tensor
    tensor: str = ""  # the output, or the tensor of that gradient
    refused: str = ""  # the sentence with which from_config refuses the configuration

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        return "agrees" if self.worst <= LIMIT else "differs"


def all_families() -> list[str]:
    return sorted([*families(), "llama4"])


def block_of(model: nn.Module) -> nn.Module:
    """The first MoE block, with random numbers in place of the zeros of its buffers."""
    block = next(module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module))
    for name, x in block.state_dict().items():
        if name.endswith("bias") and not x.any():
            x.copy_(STD * torch.randn(x.shape))
    return block


def outcome(family: str, **options: Any) -> Outcome:
    """The block of a family beside our layer, with other options than those of OPTIONS if some are
    given.

    Raises:
        AssertionError: the layer writes other weights than it has loaded.
    """
    model: Any = tiny_model(family, **options or OPTIONS.get(family, {}))
    model.set_experts_implementation("eager")
    block = block_of(model)
    name = type(block).__name__
    try:
        layer = MoELayer.from_config(model.config)
    except ValueError as error:
        return Outcome(family, name, refused=str(error))
    state = block.state_dict()
    layer.load_hf(state)
    saved = layer.to_hf()
    assert saved.keys() == state.keys(), saved.keys() ^ state.keys()
    assert all(torch.equal(x, state[key]) for key, x in saved.items())

    tokens, cotangent = (
        torch.randn(*TOKENS, layer.router.weight.shape[1], generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    result, expected = results_of(layer, tokens, cotangent), results_of_block(block, tokens, cotangent)
    differences = {key: float((result[key] - x).abs().max() / x.abs().max()) for key, x in expected.items()}
    tensor = max(differences, key=differences.__getitem__)
    return Outcome(family, name, differences[tensor], tensor)


def results_of(layer: MoELayer, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients by the names of transformers."""
    tokens = x.clone().requires_grad_()
    parameters = {name: p for name, p in layer.layer_parameters._asdict().items() if p is not None}
    output = layer(tokens)
    of_tokens, *gradients = torch.autograd.grad(output, [tokens, *parameters.values()], cotangent)
    named: dict[str, Any] = dict.fromkeys(LayerParameters._fields) | dict(zip(parameters, gradients, strict=True))
    assert layer.family is not None
    weight_gradients = weights.state_of(layer.family, layer.config, LayerParameters(**named), None)
    return {"output": output.detach(), "tokens": of_tokens} | weight_gradients


def results_of_block(block: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    tokens = x.clone().requires_grad_()
    parameters = {name: p for name, p in block.named_parameters() if p.requires_grad}
    output = block(tokens)
    output = (output[0] if isinstance(output, tuple) else output).reshape(x.shape)
    of_tokens, *gradients = torch.autograd.grad(output, [tokens, *parameters.values()], cotangent)
    return {"output": output.detach(), "tokens": of_tokens} | dict(zip(parameters, gradients, strict=True))


def record(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of docs/results/transformers-layers.json."""
    agreeing = [x for x in outcomes if x.verdict == "agrees"]
    rows = [["agrees", "", ", ".join(x.family for x in agreeing)]]
    rows += [[x.verdict, x.refused or f"{x.worst:.1e}", x.family] for x in outcomes if x.verdict != "agrees"]
    details = [
        [x.family, x.block, x.verdict, *(("", "") if x.refused else (f"{x.worst:.1e}", x.tensor))] for x in outcomes
    ]
    worst = max(x.worst for x in agreeing)
    return {
        "title": "Layers of transformers by MoELayer.from_config",
        "meaning": f"`MoELayer.from_config` makes the layer of {len(agreeing)} of {len(outcomes)} families of Hugging "
        f"Face transformers {transformers.__version__}. With the block's weights it has the block's output and all "
        f"gradients in float32: the largest difference is {worst:.1e} of the largest value. The others are refused by "
        "the name of what the layer lacks.",
        "tables": [{"title": "", "columns": ["verdict", "reason", "families"], "rows": rows}],
        "details": [
            {
                "title": "Differences from the blocks",
                "columns": ["family", "block", "verdict", "worst difference", "its tensor"],
                "rows": details,
            }
        ],
    }


def main(arguments: list[str]) -> int:
    """0 if no family differs."""
    fast_interpreter.install()
    torch.set_num_threads(1)  # small tensors are quicker without threads to wait for
    outcomes = []
    for family in arguments or all_families():
        outcomes.append(outcome(family))
        x = outcomes[-1]
        print(x.family, x.block, x.verdict, x.refused or f"{x.worst:.1e} {x.tensor}", flush=True)
    if not arguments:
        save("transformers-layers", record(outcomes), ["python -m evidence.transformers_layers"])
    return int(any(x.verdict == "differs" for x in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
