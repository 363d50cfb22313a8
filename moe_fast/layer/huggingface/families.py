"""The families of transformers, by `model_type`: how each one's MoE layer reads its configuration
and names its weights.

The names are those of transformers 5.24, whose modules stack the experts' weights. `LACKING` names
the term that the layer of a family has and ours does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STACKED = ("gate_proj", "up_proj", "down_proj")  # one expert's matrices, where checkpoints have them apart
NUMBERED = ("w1", "w3", "w2")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The layer of a family. Options have the names of `moe_fast.layer.huggingface.settings`, in
    which several spellings are one.
    """

    score: str = "softmax"  # the score function, or the option that names it
    normalised: bool | None = True  # the weights sum to 1; None: as norm_topk_prob says
    router_dtype: str | None = None  # of the logits
    groups: bool = False  # experts are chosen in the best groups: n_group and topk_group
    scale: bool = False  # weights are multiplied by routed_scaling_factor
    probs_on_input: bool = False  # weights multiply what the experts read
    width: str = "moe_intermediate_size"
    gated: bool = True
    limit: bool = False  # swiglu_limit bounds gate and value
    slope: bool = False  # the gate is u σ(αu) with swiglu_alpha, and the value has 1 added
    interleave: int | None = None
    transposed: bool = False  # experts' weights are stored as [E,in,out]
    biases: bool = False  # experts' products and the router have biases
    latent: bool = False  # moe_latent_size
    shared_width: tuple[str, ...] = ()  # options whose product is the width of the shared experts; (): none
    legal: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the only values of these options
    of_other_modules: tuple[str, ...] = ()  # options of a dense MLP beside the layer
    # names of weights
    router: str = "gate"
    score_bias: str | None = None  # of the bias that has part in the choice alone
    shared: str = "shared_experts"
    shared_gate: str | None = None
    shared_packed: bool = False  # the shared gate_proj and up_proj are one gate_up_proj
    expert_names: tuple[str, str, str] = STACKED  # the names where each expert has its own matrices


_TIMES = ("moe_intermediate_size", "n_shared_experts")
_NO_NOISE = {"router_jitter_noise": (0.0, None)}
_QWEN = Family(normalised=None)
_SHARED_QWEN = replace(
    _QWEN, shared_width=("shared_expert_intermediate_size",), shared="shared_expert", shared_gate="shared_expert_gate"
)
_MIXTRAL = Family(width="intermediate_size", legal=_NO_NOISE, expert_names=NUMBERED)
_SIGMOID = Family(
    score="sigmoid", normalised=None, router_dtype="fp32", groups=True, scale=True,
    score_bias="gate.e_score_correction_bias",
)  # fmt: skip
_DEEPSEEK = replace(_SIGMOID, shared_width=_TIMES)
_DEEPSEEK_V2 = Family(
    normalised=False, router_dtype="fp32", scale=True, shared_width=_TIMES,
    legal={"topk_method": ("greedy",), "norm_topk_prob": (False, None)},
)  # fmt: skip
_GRANITE = Family(width="intermediate_size", router="router")
_GPT_OSS = Family(
    width="intermediate_size", router="router", transposed=True, biases=True, limit=True, slope=True, interleave=1
)
_OLMOE = replace(_QWEN, width="intermediate_size")

FAMILIES = {
    **dict.fromkeys(("qwen3_moe", "mellum", "qwen3_omni_moe_text"), _QWEN),
    "qwen3_vl_moe_text": replace(_QWEN, normalised=True),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen4_exp_text", "qwen3_omni_moe_talker_text"), _SHARED_QWEN),
    "qwen3_5_moe_text": replace(_SHARED_QWEN, normalised=True),
    "lara_mini": replace(_SHARED_QWEN, shared_gate=None, router_dtype="fp32"),
    "flint": replace(_SHARED_QWEN, shared_gate=None, router_dtype="fp32", score="sigmoid"),
    **dict.fromkeys(("olmoe", "flex_olmo"), _OLMOE),
    **dict.fromkeys(("mixtral", "minimax"), _MIXTRAL),
    "jamba": replace(_GRANITE, normalised=False),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        replace(_GRANITE, of_other_modules=("shared_intermediate_size",)),
    ),
    "aria_text": replace(
        _GRANITE, transposed=True, shared_width=("intermediate_size", "n_shared_experts"),
        legal={"hidden_act": ("silu",)},
    ),
    "hunyuan_v1_moe": Family(
        width="intermediate_size", router="gate.wg", router_dtype="fp32", shared="shared_mlp",
        shared_width=("intermediate_size",),
    ),
    "gpt_oss": _GPT_OSS,
    "openai_privacy_filter": replace(_GPT_OSS, interleave=None, router_dtype="fp32"),
    "llama4_text": Family(
        score="sigmoid", normalised=False, probs_on_input=True, width="intermediate_size", router="router",
        transposed=True, shared="shared_expert", shared_width=("intermediate_size",), legal=_NO_NOISE,
    ),
    **dict.fromkeys(
        (
            "deepseek_v3", "deepseek_v32", "kimi_k2", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text",
            "glm_moe_dsa", "bailing_hybrid", "kimi_linear", "solar_open", "exaone_moe",
        ),
        _DEEPSEEK,
    ),
    "axk2": replace(_DEEPSEEK, legal={"n_group": (None, 1)}),
    "dots3_note_text": replace(_DEEPSEEK, shared_width=("shared_experts_intermediate_size", "n_shared_experts")),
    "glm5_next_text": replace(_DEEPSEEK, limit=True, legal={"hidden_act": ("silu",)}),
    "mimo_v2_flash": _SIGMOID,
    "beam": _SIGMOID,
    "nemotron_h": replace(
        _SIGMOID, gated=False, latent=True, shared_width=("moe_shared_expert_intermediate_size",),
        legal={"n_shared_experts": (1, None)},
    ),
    "mistral4": replace(_DEEPSEEK, score="softmax", score_bias=None, router_dtype=None),
    "mistral_large4_text": replace(_DEEPSEEK, score="softmax", score_bias=None, normalised=True),
    "afmoe": Family(
        score="sigmoid", scale=True, router="router.gate", score_bias="expert_bias", shared_width=_TIMES
    ),
    "hy_v3": replace(_DEEPSEEK, normalised=True, groups=False, score_bias="e_score_correction_bias"),
    "laguna": Family(
        score="sigmoid", scale=True, score_bias="gate.e_score_correction_bias",
        shared_width=("shared_expert_intermediate_size",),
        legal={"moe_router_logit_softcapping": (0.0, None), "moe_apply_router_weight_on_input": (False, None)},
    ),
    "minimax_m2": replace(_MIXTRAL, score="sigmoid", score_bias="e_score_correction_bias"),
    "minimax_m3_vl_text": replace(
        _MIXTRAL, score="sigmoid", score_bias="gate.e_score_correction_bias", scale=True, limit=True, slope=True,
        shared_width=("shared_intermediate_size",), shared_packed=True,
    ),
    "deepseek_v4": replace(
        _DEEPSEEK, score="scoring_func", normalised=True, groups=False, router_dtype=None, limit=True,
        shared_width=("moe_intermediate_size",), expert_names=NUMBERED,
        legal={"n_shared_experts": (1,), "norm_topk_prob": (True,)},
    ),
    "cohere2_moe": Family(
        score="expert_selection_fn", normalised=None, width="intermediate_size",
        shared_width=("intermediate_size", "n_shared_experts"),
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"), _DEEPSEEK_V2),
}  # fmt: skip

_SOFTMAX_BIAS = "a bias of softmax's scores in the choice"
_NORM_OF_ROUTER = "a norm and a scale of the router's input, and a scale of each expert's weights"
LACKING = {
    "axk1": "a norm of the layer's output (post_mlp_layernorm)",
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe_text"), _SOFTMAX_BIAS),
    **dict.fromkeys(("gemma4_text", "diffusion_gemma_text"), _NORM_OF_ROUTER),
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), "shared experts without the bound of the routed ones (swiglu_limit)"),
    "inkling_text": "a router that also weighs the shared experts",
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), "a gate whose value is capped smoothly"),
    "kolibri1": "a bias of the logits, not of the scores, in the choice",
    "lfm2_moe": "1e-6, and not 1e-20, added to the sum that weights are divided by",
    "muse_spark_text": "a norm of the latent tokens and of each expert's output",
    "phimoe": "the choice of experts by sparsemixer",
    "zaya": "a router of several layers, which reads the router of the layer before, and an expert that does nothing",
}
