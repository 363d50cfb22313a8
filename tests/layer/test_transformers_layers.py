"""`MoELayer.from_config` with configurations of transformers: the layers of its families."""

import importlib
import inspect
import json

import pytest
import torch

from benchmarks.results import FOLDER
from moe_fast import MoELayer
from moe_fast.layer.huggingface import settings
from moe_fast.layer.huggingface.families import FAMILIES, LACKING
from moe_ref.config import RouterConfig
from tests.common.fast import interpreted
from tests.layer.ranks import on_ranks

pytest.importorskip("transformers")
evidence = importlib.import_module("evidence.transformers_layers")
tiny_model = evidence.tiny_model
pytestmark = interpreted

SIZES = {"hidden_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN = SIZES | {"model_type": "qwen3_moe", "norm_topk_prob": True, "hidden_act": "silu"}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3", "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "hidden_act": "silu",
}  # fmt: skip
OF_OTHER_MODULES = {"_experts_implementation", "_attn_implementation", "rms_norm_eps", "mlp_layer_types"}
SIZED = {"hidden_size", "moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
NOT_IN_TRANSFORMERS = {"kimi_k2": "deepseek_v3", "llama4_text": "llama4"}  # the family whose code a model runs
PUBLISHED_DEFAULTS = (  # presets whose options are the defaults of their class in transformers
    "deepseek-v3", "glm-4.5-air", "gpt-oss-120b", "llama-4", "minimax-m2", "mixtral-8x7b", "qwen1.5-moe-a2.7b",
    "qwen3-next-80b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("family", evidence.all_families())
def test_the_layer_of_a_family_is_its_block_or_is_refused_by_name(family):
    outcome = evidence.outcome(family)
    if tiny_model(family).config.model_type in LACKING:
        assert "it must be another: MoELayer lacks " in outcome.refused
    else:
        assert outcome.verdict == "agrees", outcome


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_the_layer_of_a_preset_is_the_block_with_its_options(preset):
    fields = settings.PRESETS[preset]["config"]
    options = {name: 16 if name in EXPERTS else x for name, x in fields.items() if name not in SIZED}
    family = NOT_IN_TRANSFORMERS.get(options.pop("model_type"), fields["model_type"])
    assert evidence.outcome(family, **options).verdict == "agrees"
    config = MoELayer.from_config(preset, device="meta").config
    assert config.router.num_experts == next(fields[name] for name in EXPERTS & fields.keys())


@pytest.mark.parametrize("preset", PUBLISHED_DEFAULTS)
def test_a_preset_has_the_options_of_the_published_model(preset):
    import transformers

    fields = settings.PRESETS[preset]["config"]
    defaults = transformers.AutoConfig.for_model(fields["model_type"])
    ours = {name: x for name, x in fields.items() if hasattr(defaults, name)}
    assert {name: getattr(defaults, name) for name in ours} == ours
    assert len(ours) >= 5


@pytest.mark.parametrize("family", evidence.all_families())
def test_every_option_that_a_block_reads_is_read(family, monkeypatch):
    model = tiny_model(family, **evidence.OPTIONS.get(family, {}))
    if model.config.model_type in LACKING:
        return
    used = options_of_block(evidence.block_of(model), model.config)
    readers = []
    made = settings.Options.__init__
    monkeypatch.setattr(settings.Options, "__init__", lambda self, x: made(self, x) or readers.append(self))
    MoELayer.from_config(model.config)
    spellings = {spelling: name for name, others in settings.SPELLINGS.items() for spelling in others}
    stored = {model.config.attribute_map.get(name, name) for name in used}
    unread = {spellings.get(name, name) for name in stored} - readers[0].read - OF_OTHER_MODULES
    # the groups of a choice that is "greedy", and a sum in float32 of two rounded terms
    without_effect = {"n_group", "topk_group"} if "topk_method" in stored else {"enable_moe_fp32_combine"}
    assert not unread - without_effect


def options_of_block(block, config) -> set[str]:
    """The options that the constructor of a block reads, and those of the modules that it makes."""

    class Recorder:
        def __init__(self):
            self.names = set()

        def __getattr__(self, name):
            self.names.add(name)
            return getattr(config, name)

    recorder = Recorder()
    arguments = {"layer_idx": 0} if "layer_idx" in inspect.signature(type(block).__init__).parameters else {}
    type(block)(recorder, **arguments)
    assert "hidden_size" in recorder.names
    return recorder.names


def test_the_record_has_the_verdict_of_every_family():
    record = json.loads((FOLDER / "transformers-layers.json").read_text())
    verdicts = {family: verdict for family, _, verdict, *_ in record["details"][0]["rows"]}
    refused = {x for x in evidence.all_families() if tiny_model(x).config.model_type in LACKING}
    expected = {family: "refused" if family in refused else "agrees" for family in evidence.all_families()}
    assert verdicts == expected, "stale: python -m evidence.transformers_layers"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (QWEN | {"model_type": "dbrx"}, "model_type is 'dbrx'; it must be one of qwen3_moe, "),
        (QWEN | {"model_type": "zaya"}, "model_type is 'zaya'; it must be another: MoELayer lacks a router of several"),
        (QWEN | {"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of silu, "),
        (QWEN | {"num_experts": [4, 8]}, r"num_experts is \[4, 8\]; it must be a positive integer"),
        (QWEN | {"n_routed_experts": 8}, "n_routed_experts is 8; it must be 4, as num_experts"),
        (QWEN | {"norm_topk_prob": None}, "norm_topk_prob is None; it must be True or False"),
        (QWEN | {"n_shared_experts": 1}, "n_shared_experts is 1; it must be left out: the layer of qwen3_moe does not"),
        (QWEN | {"shared_intermediate_size": 8}, "shared_intermediate_size is 8; it must be left out: the layer of"),
        (QWEN | {"mlp_bias": True}, "mlp_bias is True; it must be False or None: the layer has no other"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob is False with 2 experts a token and sigmoid; it must"),
        (DEEPSEEK | {"routed_scaling_factor": None}, "routed_scaling_factor is None; it must be a positive number"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'sigmoid'"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be 'noaux_tc'"),
        (DEEPSEEK | {"n_group": 2, "topk_group": 2}, "topk_group is 2; it must be 1, half of the 2 experts a token"),
        (DEEPSEEK | {"model_type": "mistral4", "n_group": 2}, "n_group is 2; it must be 1: groups of softmax with"),
        (DEEPSEEK | {"model_type": "axk2", "n_group": 2}, "n_group is 2; it must be None or 1"),
        (DEEPSEEK | {"model_type": "deepseek_v4", "mlp_layer_types": ["hash_moe"], "n_shared_experts": 1},
         r"mlp_layer_types is \['hash_moe'\]; it must be without 'hash_moe'"),
        (QWEN | {"model_type": "gpt_oss", "swiglu_alpha": 1.5, "swiglu_limit": 7.0, "intermediate_size": 8},
         "swiglu_alpha is 1.5; it must be 1.702: the layer's gate has no other slope"),
        (QWEN | {"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; it must be 0.0 or"),
        (QWEN | {"model_type": "cohere2_moe", "expert_selection_fn": "softmax", "n_shared_experts": 1,
                 "intermediate_size": 8, "shared_expert_combination_strategy": "average"},
         "shared_expert_combination_strategy is 'average'; it must be 'sum' or None"),
        ("qwen3-30b", "config is 'qwen3-30b'; it must be the path of a config.json, or one of deepseek-v2-lite, "),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_what_the_layer_lacks_is_refused_by_name(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoELayer.from_config(fields)


def test_a_config_its_dict_its_file_and_its_folder_describe_one_layer(tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, norm_topk_prob=True, dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    sources = (config, config.to_dict(), tmp_path, str(tmp_path / "config.json"), {"text_config": config.to_dict()})
    layers = [MoELayer.from_config(source) for source in sources]
    assert {str(layer) for layer in layers} == {str(layers[0])}
    assert all(layer.config.router == RouterConfig(num_experts=4, topk=2) for layer in layers)
    assert {layer.router.weight.dtype for layer in layers} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "nemotron_h"])
def test_weights_of_one_expert_each_are_loaded_and_saved(family):
    model = tiny_model(family, **evidence.OPTIONS.get(family, {}))
    stacked, separate = (MoELayer.from_config(model.config) for _ in range(2))
    state = {f"model.layers.3.mlp.{name}": x for name, x in evidence.block_of(model).state_dict().items()}
    stacked.load_hf(state | {"model.norm.weight": torch.ones(1)}, "model.layers.3.mlp.")
    saved = stacked.to_hf(per_expert=True)
    first = ("gate_proj", "up_proj", "down_proj") if family != "mixtral" else ("w1", "w3", "w2")
    assert [x for x in saved if ".0." in x] == [f"experts.0.{x}.weight" for x in first[family == "nemotron_h" :]]
    separate.load_hf(saved)
    again = separate.to_hf(per_expert=True)
    assert again.keys() == saved.keys()
    assert all(torch.equal(x, again[name]) for name, x in saved.items())
    assert all(torch.equal(x, state[f"model.layers.3.mlp.{name}"]) for name, x in separate.to_hf().items())


def test_weights_that_do_not_fit_are_refused_by_name():
    layer = MoELayer.from_config(QWEN)
    state = layer.to_hf()
    name = "experts.down_proj"
    with pytest.raises(ValueError, match=r"state_dict is with experts\.down_proj_scale_inv; it must be of the layer's"):
        layer.load_hf(state | {f"{name}_scale_inv": torch.ones(4)})
    with pytest.raises(
        ValueError, match=r"state_dict is without experts\.down_proj; it must be the state of the whole"
    ):
        layer.load_hf({key: x for key, x in state.items() if key != name})
    with pytest.raises(ValueError, match=r"fc2_weight is of shape \(1, 16, 8\); it must be of shape \(4, 16, 8\)"):
        layer.load_hf(state | {name: state[name][:1]})
    with pytest.raises(
        ValueError, match="per_expert is True; it must be False: checkpoints of the family have stacked"
    ):
        MoELayer.from_config("gpt-oss-20b", device="meta").to_hf(per_expert=True)
    with pytest.raises(ValueError, match="layer is without names of transformers; it must be made by from_config"):
        MoELayer(layer.config, 16, 8).to_hf()


def test_families_are_known_or_refused_and_not_both():
    assert not FAMILIES.keys() & LACKING.keys()
    assert {preset["config"]["model_type"] for preset in settings.PRESETS.values()} <= FAMILIES.keys()


def output_of(group, rank: int, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A rank's output for its half of the tokens."""
    layer = MoELayer.from_config(DEEPSEEK, group=group)
    layer.load_hf(state)
    assert layer.experts.linear_fc1.weight.shape[0] == 2
    with pytest.raises(ValueError, match="group is of 2 ranks; it must be of one rank: gather the experts before"):
        layer.to_hf()
    return layer(x.chunk(2)[rank]).detach()


def test_each_rank_loads_its_share_of_the_experts(tmp_path):
    layer = MoELayer.from_config(DEEPSEEK, init_std=0.3)
    torch.nn.init.normal_(layer.router.expert_bias, std=0.3)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    outputs = on_ranks(2, output_of, tmp_path, layer.to_hf(), x)
    torch.testing.assert_close(torch.cat(outputs), layer(x).detach())
