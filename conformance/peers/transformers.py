"""Implementations of the experts in the registry of Hugging Face transformers, as `grouped_mlp`.

    moe-conformance run --impl conformance.peers.transformers:grouped_mm    # or another name of it

A name is "eager", one of `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`, or a package which
adds its own name to the registry when its module integrations.transformers is imported.

Each row is a token with one expert. Rows past the last segment have E, which is how transformers
marks an expert of another rank. A weight whose columns are contiguous is passed transposed, as
models store it that have `is_transposed`. Gates are methods of the package's own classes.
"""

import importlib
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

if not torch.cuda.is_available():  # before transformers imports Triton, which then decides how it runs kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers.activations import ACT2FN
from transformers.integrations import moe as registry
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from moe_ref.config import GATED, check_grouped_mlp, check_kind

ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "geglu_erf": "gelu",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "squared_relu": "relu2",
}
SLOPES = {"swiglu": 1.0, "quick_geglu": 1.702}  # α of u σ(αu)
VECTOR = 16  # bytes: strides of torch's grouped product are multiples of it
FORM = ("fc1_weight", "fc1_bias", "fc2_bias", "kind", "offset", "clamp", "alpha", "interleave")  # see `form_of`


class Form(NamedTuple):
    """How experts of transformers are built."""

    gated: bool = True
    clamped: bool = False
    sloped: bool = False  # u σ(αu) · (v + 1)
    pairs: bool = False  # gates and values alternate
    biased: bool = False
    transposed: bool = False


GATES: dict[Form, Any] = {  # with a gate of this form; its biases and strides may be any
    Form(): MixtralExperts,
    Form(clamped=True): DeepseekV4Experts,
    Form(clamped=True, sloped=True): MiniMaxM3VLExperts,
    Form(clamped=True, sloped=True, pairs=True): GptOssExperts,
}
# "eager" is a class's own forward, and has its form alone; that of GptOssExperts takes no E
FORWARDS: dict[Form, Any] = GATES | {Form(gated=False): NemotronHExperts, Form(transposed=True): AriaExperts}
del FORWARDS[Form(clamped=True, sloped=True, pairs=True)]


class Entry:
    """One implementation of the registry.

    Its scope has the gates that most models have; `supports` tells which others it takes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = "dtype!=float64 and scaling='' and offset=0 and alpha=0 and interleave=0"
        if name == "eager":
            self.scope += " and bias1='' and bias2=''"

    def supports(self, function: str, **arguments: Any) -> str | None:
        """What the interface cannot say, and what "eager" has no class for."""
        form = form_of(**{name: arguments[name] for name in FORM if name in arguments})
        if isinstance(form, str):
            return form
        if self.name == "eager" and form._replace(transposed=False) not in FORWARDS:
            return f"no class whose forward has the {form}"
        sides = {*arguments["fc1_weight"].shape[1:], *arguments["fc2_weight"].shape[1:]}
        odd = [n for n in sorted(sides) if n * arguments["rows"].element_size() % VECTOR]
        return f"{odd[0]} columns: no whole {VECTOR} bytes" if self.name == "grouped_mm" and odd else None

    def declares(self, function: str) -> dict[str, Any]:
        """Nothing reads the counts on the host. The package itself rounds after each operation, to
        the dtype of the rows.
        """
        of_package = self.name == "eager" or registry.ALL_EXPERTS_FUNCTIONS[self.name].__module__.startswith(
            "transformers."
        )
        return {"unchecked": ("tokens_per_expert",), "accumulator": "storage" if of_package else "float32"}

    def grouped_mlp(
        self, rows: Tensor, tokens_per_expert: Tensor, fc1_weight: Tensor, fc2_weight: Tensor,
        *, probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
        kind: str = "swiglu", offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
        interleave: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.grouped_mlp`."""
        check_kind(kind, offset, clamp, alpha, interleave)
        tensors = (rows, tokens_per_expert, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias)
        check_grouped_mlp(*tensors, interleave, kind, False, None, None)
        form = form_of(fc1_weight, fc1_bias, fc2_bias, kind, offset, clamp, alpha, interleave)
        assert isinstance(form, Form), form
        if self.name == "eager" and form not in FORWARDS:
            form = form._replace(transposed=False)
        build = experts_class(form)
        first = "gate_up_proj" if form.gated else "up_proj"
        weights = [x.mT if form.transposed else x for x in (fc1_weight, fc2_weight)]
        biases = [  # experts have both or none
            x if x is not None or not form.biased else weight.new_zeros(weight.shape[:2])
            for x, weight in ((fc1_bias, fc1_weight), (fc2_bias, fc2_weight))
        ]
        experts = build(
            num_experts=len(fc1_weight), has_gate=form.gated, has_bias=form.biased, is_transposed=form.transposed,
            is_concatenated=not form.pairs, has_post_expert_norm=False, _is_expert_parallel=True,
            act_fn=ACT2FN[ACTIVATIONS[kind]], down_proj=weights[1], down_proj_bias=biases[1],
            **{first: weights[0], f"{first}_bias": biases[0]},
            **dict.fromkeys(("limit", "swiglu_limit"), clamp),
            **dict.fromkeys(("alpha", "swiglu_alpha"), alpha or SLOPES.get(kind)),
        )  # fmt: skip
        ends = tokens_per_expert.cumsum(0)
        index = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)[:, None]
        weight = torch.where(index < len(ends), 1.0 if probs is None else probs[:, None], 0.0)
        run: Any = registry.ALL_EXPERTS_FUNCTIONS.get(self.name)
        if self.name == "eager":
            run = FORWARDS[form].forward.__wrapped__  # what the decorator replaces
        out: Tensor = run(experts, rows, index, weight if probs is None else weight.to(probs.dtype))
        return out


def form_of(
    fc1_weight: Tensor, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None, kind: str = "swiglu",
    offset: float = 0.0, clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
) -> Form | str:  # fmt: skip
    """The form of experts with these settings, or why there is none."""
    transposed = fc1_weight.stride(1) == 1 < fc1_weight.stride(2)
    biased = fc1_bias is not None or fc2_bias is not None
    if kind not in GATED:
        return Form(gated=False, biased=biased, transposed=transposed)
    pairs = interleave is not None and interleave != fc1_weight.shape[1] // 2
    form = Form(clamped=clamp is not None, sloped=offset == 1, pairs=pairs)
    if offset not in (0, 1) or (alpha is not None and not form.sloped) or (form.sloped and kind not in SLOPES):
        return f"a gate {kind} with offset {offset} and alpha {alpha}"
    if (pairs and interleave != 1) or form not in GATES:
        return f"no gate of transformers that has the {form}, with interleave {interleave}"
    return form._replace(biased=biased, transposed=transposed)


def experts_class(form: Form) -> Any:
    """A class without parameters, whose gate is the package's own."""
    gate = GATES.get(form._replace(gated=True, biased=False, transposed=False))
    assert gate is not None
    return type("Experts", (SimpleNamespace,), {"_apply_gate": gate._apply_gate})


def __getattr__(name: str) -> Entry:
    if name.startswith("_"):
        raise AttributeError(name)
    if name != "eager" and name not in registry.ALL_EXPERTS_FUNCTIONS:
        try:
            importlib.import_module(f"{name}.integrations.transformers")
        except ModuleNotFoundError as error:
            known = ", ".join(sorted(["eager", *registry.ALL_EXPERTS_FUNCTIONS]))
            raise AttributeError(f"transformers has no experts implementation {name!r}, only {known}") from error
    return Entry(name)
