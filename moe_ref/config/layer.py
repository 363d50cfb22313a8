"""The layer: settings, parameters, results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config.dispatch import PerRank, check_expert_split, check_tokens
from moe_ref.config.quantization import Recipe
from moe_ref.config.router import RouteOutput, RouterConfig, RouterState
from moe_ref.config.rules import require

DISPATCHERS = ("allgather", "alltoall", "deepep", "hybridep")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The settings of a layer; `layer_config` makes one of Megatron's options.

    Raises:
        ValueError: an unknown dispatcher.
    """

    router: RouterConfig
    router_dtype: str | None = None
    dispatcher: str = "alltoall"
    kind: str = "swiglu"  # the activation, with its settings: see `grouped_mlp`
    offset: float = 0.0
    clamp: float | None = None
    interleave: int | None = None
    shared_interleave: int | None = None  # of the shared experts' activation
    fp8_input_store: bool = False
    probs_on_input: bool = False
    align: int | None = None  # experts pad their rows to a multiple of it
    recipe: Recipe | None = None  # of the routed experts' products; one without a state

    def __post_init__(self) -> None:
        known = self.dispatcher in DISPATCHERS
        require(known, "dispatcher", repr(self.dispatcher), f"one of {', '.join(DISPATCHERS)}")

    @property
    def experts(self) -> dict[str, Any]:
        """The settings of `grouped_mlp`."""
        others = {name: getattr(self, name) for name in ("interleave", "probs_on_input", "align", "recipe")}
        return self._activation | others

    @property
    def shared_experts(self) -> dict[str, Any]:
        """The settings of `shared_experts`."""
        return self._activation | {"interleave": self.shared_interleave}

    @property
    def _activation(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "offset", "clamp", "fp8_input_store")}


class LayerParameters(NamedTuple):
    """The parameters of a layer, the experts of all ranks together; N is the latent width, or H without one."""

    router_weight: Tensor  # [E,H]
    fc1_weight: Tensor  # [E,2F,N] for a gated kind, [E,F,N] for others
    fc2_weight: Tensor  # [E,N,F]
    router_bias: Tensor | None = None  # [E]
    latent_down: Tensor | None = None  # [N,H]; None: tokens travel as they are
    latent_up: Tensor | None = None  # [H,N]
    shared_fc1_weight: Tensor | None = None  # [2F,H] or [F,H]; None: no shared experts
    shared_fc2_weight: Tensor | None = None  # [H,F]
    shared_gate_weight: Tensor | None = None  # [1,H]


class LayerOutput(NamedTuple):
    """Every intermediate of a layer, in the order of the pipeline; one entry per rank."""

    logits: PerRank[Tensor]  # [T,E]
    routed: PerRank[RouteOutput]
    dispatched: PerRank[Any]  # rows, probs and tokens_per_expert of the rank's own experts
    expert_rows: PerRank[Tensor]  # [P,N]
    combined: PerRank[Tensor]  # [T,N]
    shared: PerRank[Tensor] | None  # [T,H]; None without shared experts
    output: PerRank[Tensor]  # [T,H]


def check_layer(
    x: PerRank[Tensor], parameters: LayerParameters, config: LayerConfig, states: PerRank[RouterState]
) -> None:
    """The rules of `moe_layer` that no stage has."""
    check_tokens(x)
    check_expert_split(config.router.num_experts, len(x))
    shape = tuple(parameters.fc1_weight.shape)
    require(shape[:1] == (config.router.num_experts,), "fc1_weight", f"of shape {shape}", "of the router's experts")
    require(len(states) == len(x), "states", f"a list of {len(states)}", f"a list of {len(x)}, an entry per rank")
    for pair in (("latent_down", "latent_up"), ("shared_fc1_weight", "shared_fc2_weight")):
        given = [getattr(parameters, name) is not None for name in pair]
        require(given[0] == given[1], pair[1], "given" if given[1] else "None", f"given together with {pair[0]}")
    stateful = config.recipe is not None and config.recipe.scaling == "delayed"
    require(not stateful, "recipe", "of delayed scaling", "one without a state")
