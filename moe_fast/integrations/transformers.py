"""moe_fast as an implementation of the experts of Hugging Face transformers.

    import moe_fast.integrations.transformers
    model.set_experts_implementation("moe_fast")  # or experts_implementation= of from_pretrained

The import adds "moe_fast" to the registry of experts implementations, `ALL_EXPERTS_FUNCTIONS`. The
experts then run as `permute`, `grouped_mlp` and `unpermute` on the model's parameters in place: a
transposed weight is read through its strides. The host never waits for the device.

Experts that need what moe_fast lacks raise `ValueError` in their first forward, which is when
transformers first calls an implementation. `settings_of` raises the same error without a forward.
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_fast.experts import grouped_mlp
from moe_fast.permutation import permute, unpermute

try:
    import transformers
    from transformers.activations import ACT2FN
    from transformers.integrations import moe as registry
except ImportError as error:
    raise ImportError(f"moe_fast.integrations.transformers needs transformers 5.24: {error}") from error

NAME = "moe_fast"
# Private parts of transformers, read in 5.24. The decorator of an experts class sets an attribute
# for each of its parameters, which are compared with STATED when this module is imported. GATE is
# the method between the two products: `index_of_gate` calls it, and compares its result with
# formulas. An attribute of LIMITS or SLOPES is read only if that result depends on it.
STATED = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}
GATE = "_apply_gate"
LIMITS = {"limit": 1.5, "swiglu_limit": 1.25}  # each with the value that `index_of_gate` gives it
SLOPES = {"alpha": 1.3, "swiglu_alpha": 0.7}


def _kinds(names: dict[str, str]) -> dict[Any, str]:
    """The kind for the class of each of these activations of transformers."""
    return {type(ACT2FN[name]): kind for name, kind in names.items()} | {nn.functional.silu: names["silu"]}


_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
GATED = _kinds(
    {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu_erf", "quick_gelu": "quick_geglu", "relu": "reglu"}
    | dict.fromkeys(_TANH, "geglu")
)
PLAIN = _kinds(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"}
    | {"relu2": "squared_relu"}
    | dict.fromkeys(_TANH, "gelu_tanh")
)


class Gate(NamedTuple):
    """f(u) · (v + offset), with u and v as in `moe_fast.glu`.

    `curve` is "act_fn" where f is the experts' activation, "silu" where f(u) = u σ(u), or the name
    of the attribute α of f(u) = u σ(αu). `limit` names the attribute that bounds u and v.
    """

    curve: str
    limit: str | None
    offset: float
    interleave: int | None

    def __call__(self, experts: Any, h_PF2: Tensor) -> Tensor:
        """The formula, with the attributes of these experts."""
        u, v = (h_PF2[:, ::2], h_PF2[:, 1::2]) if self.interleave else h_PF2.chunk(2, dim=-1)
        if self.limit is not None:
            bound = getattr(experts, self.limit)
            u, v = u.clamp(max=bound), v.clamp(-bound, bound)
        if self.curve == "act_fn":
            return experts.act_fn(u) * (v + self.offset)
        slope = 1.0 if self.curve == "silu" else getattr(experts, self.curve)
        return u * torch.sigmoid(slope * u) * (v + self.offset)


GATES = tuple(map(Gate._make, product(("act_fn", "silu", *SLOPES), (None, *LIMITS), (0.0, 1.0), (None, 1))))


@torch.compiler.assume_constant_result  # a graph is for one class of experts, and has the index as a constant
def index_of_gate(method: Callable[[Any, Tensor], Tensor]) -> int:
    """The place in GATES of the one that a class's method computes, or -1."""
    return _index_by_values(method)


@cache
def _index_by_values(method: Callable[[Any, Tensor], Tensor]) -> int:
    """`index_of_gate`: the method is called once with 60 numbers from -3 to 3, for experts whose
    attributes are those of LIMITS and SLOPES and whose activation is tanh.
    """
    experts = SimpleNamespace(act_fn=torch.tanh, **LIMITS, **SLOPES)
    h_PF2 = (torch.arange(60, dtype=torch.float64, device="cpu") * 37 % 61 / 10 - 3).view(2, 30)
    try:
        result = method(experts, h_PF2)
    except (AttributeError, TypeError):  # it reads another attribute, or calls the activation otherwise
        return -1
    for index, gate in enumerate(GATES):
        expected = gate(experts, h_PF2)
        # a method may compute in float32, whose unit roundoff is 6e-8
        if result.shape == expected.shape and torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-6):
            return index
    return -1


def settings_of(experts: nn.Module) -> dict[str, Any]:
    """The settings of `grouped_mlp` for these experts.

    Raises:
        ValueError: moe_fast lacks something that they need.
    """
    activation: Any = getattr(experts, "act_fn", None)
    kind_of = activation if isinstance(activation, FunctionType) else type(activation)
    if experts.has_post_expert_norm:
        raise _refusal(experts, "a norm of each expert's output")
    if not experts.has_gate:
        if kind_of not in PLAIN:
            raise _refusal(experts, f"the activation {activation}")
        return {"kind": PLAIN[kind_of]}
    index = index_of_gate(getattr(type(experts), GATE, None))
    if index < 0:
        raise _refusal(experts, f"the gate that {GATE} computes")
    gate = GATES[index]
    settings: dict[str, Any] = {"kind": "swiglu", "offset": gate.offset, "interleave": gate.interleave}
    if gate.curve in SLOPES:
        settings["alpha"] = float(getattr(experts, gate.curve))
    elif gate.curve == "act_fn":
        if kind_of not in GATED:
            raise _refusal(experts, f"the activation {activation}")
        settings["kind"] = GATED[kind_of]
    if gate.limit is not None:
        settings["clamp"] = float(getattr(experts, gate.limit))
    return settings


def _refusal(experts: nn.Module, lacking: str) -> ValueError:
    return ValueError(f'moe_fast does not run {type(experts).__name__}, which needs {lacking}: use "grouped_mm"')


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output for each token, weighted and summed.

    A slot of `top_k_index` that holds E = `num_experts` names an expert of another rank, and is
    skipped. If a token has the same expert in two slots, the expert's weight is the sum of both.
    Under autocast the tokens and weights are cast as torch casts them for a linear layer.

    Args:
        hidden_states: [T,H].
        top_k_index: [T,K] integers from 0 to E.
        top_k_weights: [T,K] floating point.
    """
    settings = settings_of(self)
    fc1 = "gate_up_proj" if self.has_gate else "up_proj"
    weights = [getattr(self, fc1), self.down_proj]
    b1, b2 = (getattr(self, f"{fc1}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
    w1, w2 = ((x.mT if self.is_transposed else x).to(dtype) for x in weights)

    columns = (hidden_states.shape[0], self.num_experts + 1)  # the last one is of other ranks' experts
    index = top_k_index.long()
    probs = top_k_weights.new_zeros(columns).scatter_add(1, index, top_k_weights)[:, :-1]
    routing_map = torch.zeros(columns, dtype=torch.bool, device=index.device).scatter(1, index, True)[:, :-1]

    permuted = permute(hidden_states.to(dtype), routing_map, probs=probs, num_rows=index.numel())
    rows = grouped_mlp(
        permuted.rows, permuted.tokens_per_expert, w1, w2, probs=permuted.probs, fc1_bias=b1, fc2_bias=b2, **settings
    )
    return unpermute(rows, permuted.row_map).to(hidden_states.dtype)


def _checked(decorator: Callable[..., Any]) -> None:
    """Raise ImportError unless the decorator of experts classes is one that this module knows."""
    parameters = set(inspect.signature(decorator).parameters) - {"experts_class", "experts_interface"}
    if parameters != STATED:
        raise ImportError(
            "moe_fast.integrations.transformers needs transformers 5.24: "
            f"experts of {transformers.__version__} also differ in {', '.join(sorted(parameters ^ STATED))}"
        )


_checked(registry.use_experts_implementation)
registry.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
