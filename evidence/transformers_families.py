"""Which families of Hugging Face transformers train with their experts by "moe_fast".

    python -m evidence.transformers_families                # a table of all, into the record
    python -m evidence.transformers_families mixtral zaya   # of some, printed

A family is a module of transformers.models with a class of experts that takes the registry's
implementations. Each is built tiny, with random weights, in float32; its loss and all gradients by
"moe_fast" are compared with those by "eager".
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers.models
from torch import Tensor, nn

import moe_fast.integrations.transformers as integration

DECORATOR = "@use_experts_implementation"
SIZES: dict[str, Any] = {  # of every configuration that has a field of this name
    **dict.fromkeys(("vocab_size", "hidden_size", "moe_hidden_size", "max_position_embeddings"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "top_k_experts"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "pad_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    "mlp_layer_types": ["sparse"],
    "mlp_only_layers": [],
}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16]},
    "gemma4": {"enable_moe_block": True},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "jamba": {"expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


class Outcome(NamedTuple):
    """A family: the largest difference of a gradient, in units of its tensor's largest; or why it is refused."""

    family: str
    experts: str
    worst: float | None
    refused: str


def families() -> Iterator[str]:
    """Every family of the installed transformers that takes the registry's implementations."""
    for module in pkgutil.iter_modules(transformers.models.__path__):
        path = Path(transformers.models.__path__[0]) / module.name / f"modeling_{module.name}.py"
        if path.exists() and any(line.startswith(DECORATOR) for line in path.read_text().splitlines()):
            yield module.name


def model_classes(family: str) -> Iterator[type[nn.Module]]:
    """The model classes of a family, language models first."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, transformers.PreTrainedModel) and each.__module__ == module.__name__
        and not each.__name__.endswith("PreTrainedModel")
    ]
    for ending in ("ForCausalLM", "TextModel", "Model", ""):
        yield from (each for each in classes if each.__name__.endswith(ending))


def tiny(family: str) -> nn.Module:
    model_class: Any = next(model_classes(family))
    config_class = model_class.config_class
    fields = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    settings = {name: size for name, size in SIZES.items() if name in fields} | OTHERS.get(family, {})
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


if __name__ == "__main__":
    import traceback, time
    for family in sys.argv[1:] or families():
        try:
            t=time.time()
            model = tiny(family)
            ids = torch.randint(2, 32, (2, 7), generator=torch.Generator().manual_seed(1))
            experts = [m for m in model.modules() if hasattr(m, "has_post_expert_norm")]
            if not experts: raise ValueError("no experts")
            res = {}
            for name in ("eager", "moe_fast"):
                model.set_experts_implementation(name); model.zero_grad()
                out = model(input_ids=ids, use_cache=False)[0]
                w = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
                loss = (out.float()*w).mean(); loss.backward()
                res[name] = loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            le, ge = res["eager"]; lf, gf = res["moe_fast"]
            assert ge.keys()==gf.keys(), ge.keys()^gf.keys()
            worst = max((((ge[n]-gf[n]).abs().max()/ge[n].abs().max().clamp_min(1e-30)).item(), n) for n in ge)
            eg = {n: float(ge[n].abs().max()) for n in ge if 'experts' in n}
            print(f"OK {family} {type(model).__name__} {le:.3e} {lf:.3e} worst {worst} experts {len(eg)} {min(eg.values()) if eg else None} {time.time()-t:.1f}s", flush=True)
        except Exception as e:
            tb = traceback.extract_tb(e.__traceback__)[-1]
            print(f"BAD {family} {type(e).__name__}: {str(e)[:200]!r} at {tb.filename.split('/')[-1]}:{tb.lineno} {tb.line[:100]}", flush=True)
