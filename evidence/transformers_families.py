"""Which families of Hugging Face transformers train with experts by moe_fast.

    python -m evidence.transformers_families                # all of them, into the record
    python -m evidence.transformers_families mixtral zaya   # a line for each of these

A family is a module of transformers.models with a class of experts that takes implementations from
the registry. A model of each is built with one or two layers, 4 experts and random weights, in
float32. The loss is the squared distance of its output from random numbers. The loss and the
gradients of all parameters by "moe_fast" are compared with those by "eager".
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import transformers.models
from torch import Tensor, nn

import fast_interpreter
from benchmarks.results import save
from moe_fast.integrations.transformers import settings_of

DECORATOR = "@use_experts_implementation"
# Float32 rounds by 2⁻²⁴ = 6e-8, and a gradient passes through some ten sums on its way, in another
# order in each implementation.
LIMIT = 1e-5
TOKENS, VOCABULARY = (2, 7), 32
STD = 0.2  # of random weights: large enough for every nonlinearity to bend
ENDINGS = ("ForCausalLM", "TextModel", "Model")  # of classes of language models, the first that a family has
EXPERTS = ".experts."  # in the names of their parameters
SIZES: dict[str, Any] = {  # of every configuration that has a field of this name
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "moe_hidden_size", "max_position_embeddings", "mamba_n_heads"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input", "mamba_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_group", "topk_group", "n_shared_experts", "eos_token_id"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "pad_token_id"), 0),
    "mlp_layer_types": ["sparse"],
    "mlp_only_layers": [],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# With hyper-connections two layers: the streams after one are nearly parallel, so that the norm
# after them cancels most of the gradient of their mixture.
TWO: dict[str, Any] = {"num_hidden_layers": 2, "mlp_layer_types": ["sparse"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {  # what a family needs besides
    "deepseek_v4": TWO | {"mlp_layer_types": ["moe"] * 2},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm5_next": TWO | {"qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "hy_v4": TWO,
    "hy_v4_vl": TWO | {"rope_parameters": ROPE | {"mrope_section": [2, 2, 4]}},
    "jamba": {"expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


class Outcome(NamedTuple):
    """What became of a family; see `differences`."""

    family: str
    experts: str  # the names of its classes of experts
    loss: float = 0.0  # the difference of the losses, of the loss
    worst: float = 0.0  # the largest difference of a gradient
    parameter: str = ""  # the parameter of that gradient
    refused: str = ""  # the sentence with which moe_fast refuses it

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        return "agrees" if max(self.loss, self.worst) <= LIMIT else "differs"


def families() -> list[str]:
    """Every family of the installed transformers with experts that the registry serves."""
    folder = Path(transformers.models.__path__[0])
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    sources = {name: folder / name / f"modeling_{name}.py" for name in names}
    return [name for name, path in sources.items() if path.exists() and f"\n{DECORATOR}" in path.read_text()]


def model_class(family: str) -> Any:
    """A family's language model: with a head, else the text model of a larger one."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    models = [
        candidate
        for candidate in vars(module).values()
        if inspect.isclass(candidate)
        and issubclass(candidate, transformers.PreTrainedModel)
        and candidate.__module__ == module.__name__
    ]
    models = [model for model in models if not model.__name__.endswith("PreTrainedModel")]
    by_ending = ([model for model in models if model.__name__.endswith(end)] for end in ENDINGS)
    return next(some_models for some_models in by_ending if some_models)[0]


def tiny_model(family: str, **options: Any) -> nn.Module:
    """A model of a family with small sizes, these options, and random parameters."""
    language_model = model_class(family)
    fields = {name for base in language_model.config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    settings = {name: size for name, size in SIZES.items() if name in fields} | SPECIAL.get(family, {}) | options
    torch.manual_seed(0)
    model: nn.Module = language_model(language_model.config_class(**settings)).float()
    for parameter in model.parameters():
        noise = STD * torch.randn(parameter.shape)
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts that take implementations from the registry."""
    return [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]


def step(model: Any, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a training step, and the gradient of each parameter that has one."""
    tokens = torch.randint(2, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(input_ids=tokens, use_cache=False)[0]
    loss = nn.functional.mse_loss(output, torch.randn(output.shape, generator=torch.Generator().manual_seed(2)))
    loss.backward()
    return loss.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def differences(result: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each parameter's gradient.

    A parameter of experts has its own largest gradient as the unit. All others share one, the
    largest gradient of the model: that of a scalar, or of a key's norm, may be the small difference
    of large terms, which "eager" itself rounds by more than LIMIT of it.
    """
    of_model = max(float(gradient.abs().max()) for gradient in expected.values())
    units = {name: float(x.abs().max()) if EXPERTS in name else of_model for name, x in expected.items()}
    return {name: float((result[name] - x).abs().max()) / (units[name] or of_model) for name, x in expected.items()}


def outcome(family: str) -> Outcome:
    """A family's training step by "moe_fast" beside that by "eager".

    Raises:
        LookupError: no parameter of its experts has a gradient.
    """
    model = tiny_model(family)
    experts = experts_of(model)
    names = ", ".join(sorted({type(module).__name__ for module in experts}))
    try:
        for module in experts:
            settings_of(module)
    except ValueError as error:
        return Outcome(family, names, refused=str(error))
    (expected_loss, expected), (loss, gradients) = (step(model, name) for name in ("eager", "moe_fast"))
    reached = {name for name, gradient in expected.items() if EXPERTS in name and gradient.any()}
    if not reached or gradients.keys() != expected.keys():
        raise LookupError(f"{family}: gradients of {len(reached)} parameters of experts, and other parameters")
    worst = differences(gradients, expected)
    parameter = max(worst, key=worst.__getitem__)
    of_loss = float((loss - expected_loss).abs() / expected_loss.abs())
    return Outcome(family, names, of_loss, worst[parameter], parameter)


def record(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of docs/results/transformers.json."""
    agreeing = [x for x in outcomes if x.verdict == "agrees"]
    rows = [["agrees", "", names_of(agreeing)]] if agreeing else []
    for reason in sorted({x.refused for x in outcomes if x.refused}):
        rows.append(["refused", reason, names_of([x for x in outcomes if x.refused == reason])])
    rows += [["differs", f"{x.worst:.1e}", x.family] for x in outcomes if x.verdict == "differs"]
    details = [
        [
            x.family,
            x.experts,
            x.verdict,
            *(("", "", "") if x.refused else (f"{x.loss:.1e}", f"{x.worst:.1e}", x.parameter)),
        ]
        for x in outcomes
    ]
    columns = ["family", "experts", "verdict", "loss", "worst gradient", "its parameter"]
    worst = max(max(x.loss, x.worst) for x in agreeing)
    return {
        "title": "Families of transformers with experts by moe_fast",
        "meaning": f"{len(outcomes)} families of Hugging Face transformers {transformers.__version__} have experts "
        f'that take an implementation, and {len(agreeing)} of them train with "moe_fast". A tiny random model of each '
        f'has the loss and all gradients of "eager" in float32: the largest difference is {worst:.1e} of the largest '
        "gradient.",
        "tables": [{"title": "", "columns": ["verdict", "reason", "families"], "rows": rows}],
        "details": [{"title": "Differences from eager", "columns": columns, "rows": details}],
    }


def names_of(outcomes: list[Outcome]) -> str:
    return ", ".join(x.family for x in outcomes)


def main(arguments: list[str]) -> int:
    """0 if no family differs."""
    fast_interpreter.install()
    torch.set_num_threads(1)  # small tensors are quicker without threads to wait for
    outcomes = []
    for family in arguments or families():
        outcomes.append(outcome(family))
        x = outcomes[-1]
        print(x.family, x.verdict, x.refused or f"{x.loss:.1e} {x.worst:.1e} {x.parameter}", flush=True)
    if not arguments:
        save("transformers", record(outcomes), ["python -m evidence.transformers_families"])
    return int(any(x.verdict == "differs" for x in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
