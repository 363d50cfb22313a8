"""The layer: settings, parameters, results."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config.dispatch import PerRank, check_budget, check_expert_split, check_tokens
from moe_ref.config.permutation import check_align
from moe_ref.config.quantization import Recipe
from moe_ref.config.router import RouterConfig, RouterState, check_jitter, check_padding_mask
from moe_ref.config.rules import require

DISPATCHERS = ("allgather", "alltoall", "deepep", "hybridep")
OF_EXPERTS = ("fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")  # parameters that differ between ranks


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The settings of a layer; `layer_config` makes one of Megatron's options.

    Raises:
        ValueError: an unknown dispatcher; see `check_jitter` and `check_budget`.
    """

    router: RouterConfig
    router_dtype: str | None = None
    jitter_eps: float | None = None  # of the router's input, see `jitter`; in evaluation too
    dispatcher: str = "alltoall"
    num_rows: int | None = None  # room for the rows of a rank's experts, see `rank_budget`; None: for all
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
        if self.jitter_eps is not None:
            check_jitter(self.jitter_eps)
        if self.num_rows is not None:
            check_budget(None, self.num_rows)

    @property
    def dispatch(self) -> dict[str, Any]:
        """The settings of the dispatcher over ranks."""
        return {} if self.num_rows is None else {"num_rows": self.num_rows}

    @property
    def experts(self) -> dict[str, Any]:
        """The settings of `grouped_mlp`."""
        products = {name: getattr(self, name) for name in ("interleave", "probs_on_input", "align", "recipe")}
        return self._activation | products

    @property
    def shared_experts(self) -> dict[str, Any]:
        """The settings of `shared_experts`."""
        return self._activation | {"interleave": self.shared_interleave}

    @property
    def _activation(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "offset", "clamp", "fp8_input_store")}


class LayerParameters(NamedTuple):
    """The parameters of one rank, with its L = E/W experts; N is the latent width, or H without
    one.
    """

    router_weight: Tensor  # [E,H]
    fc1_weight: Tensor  # [L,2F,N] for a gated kind, [L,F,N] for others
    fc2_weight: Tensor  # [L,N,F]
    router_bias: Tensor | None = None  # [E]
    latent_down: Tensor | None = None  # [N,H]; None: tokens travel as they are
    latent_up: Tensor | None = None  # [H,N]
    shared_fc1_weight: Tensor | None = None  # [2F,H] or [F,H]; None: no shared experts
    shared_fc2_weight: Tensor | None = None  # [H,F]
    shared_gate_weight: Tensor | None = None  # [1,H]
    fc1_bias: Tensor | None = None  # [L,2F] or [L,F]
    fc2_bias: Tensor | None = None  # [L,N], weighted like its row


class LayerOutput(NamedTuple):
    """Every intermediate of a layer, in the order of the pipeline; of the reference, one entry per
    rank.
    """

    logits: Any  # [T,E]
    routed: Any  # a RouteOutput
    dispatched: Any  # rows, probs and tokens_per_expert of the rank's own experts
    expert_rows: Any  # [P,N]
    combined: Any  # [T,N]
    shared: Any  # [T,H]; None without shared experts
    output: Any  # [T,H]


def rank_budget(num_tokens: int, *, topk: int, capacity_factor: float, align: int = 1) -> int:
    """⌊T·K·f⌋ rows, up to a multiple of `align`: f times what a rank's experts have where the load
    is even.

    Args:
        num_tokens: the most tokens of a rank; every rank has the same budget.
        capacity_factor: Megatron's `moe_expert_rank_capacity_factor`, exact as it is written.

    Raises:
        ValueError: a factor that is not positive; see `check_align`.

    Source: _HybridEPManager of megatron.core.transformer.moe.token_dispatcher.
    """
    check_align(align)
    require(capacity_factor > 0, "capacity_factor", capacity_factor, "positive")
    rows = int(num_tokens * topk * Fraction(str(capacity_factor)))
    return -(-rows // align) * align


def split_experts(parameters: LayerParameters, ranks: int) -> list[LayerParameters]:
    """Each rank's parameters: its share of the experts of a whole layer, and all others.

    Raises:
        ValueError: see `check_expert_split`.
    """
    check_expert_split(len(parameters.fc1_weight), ranks)
    given = {name: x.chunk(ranks) for name in OF_EXPERTS if (x := getattr(parameters, name)) is not None}
    return [parameters._replace(**{name: x[rank] for name, x in given.items()}) for rank in range(ranks)]


def check_layer(
    x: PerRank[Tensor], parameters: PerRank[LayerParameters], config: LayerConfig, states: PerRank[RouterState],
    padding_mask: PerRank[Tensor] | None = None, noise: PerRank[Tensor] | None = None,
) -> None:  # fmt: skip
    """The rules of `moe_layer` that no stage has."""
    check_tokens(x)
    check_expert_split(config.router.num_experts, len(x))
    for name, given in (
        ("parameters", parameters), ("states", states), ("padding_mask", padding_mask or x), ("noise", noise or x)
    ):  # fmt: skip
        require(len(given) == len(x), name, f"a list of {len(given)}", f"a list of {len(x)}, an entry per rank")
    for own in parameters:
        check_parameters(own, config, len(x))
    for own_mask, own_x in zip(padding_mask or (), x, strict=False):
        check_padding_mask(own_mask, own_x.shape[0])
    for own_noise, own_x in zip(noise or (), x, strict=False):
        wanted = "None: there is no jitter" if config.jitter_eps is None else f"of {tuple(own_x.shape)}"
        right = config.jitter_eps is not None and own_noise.shape == own_x.shape
        require(right, "noise", f"of shape {tuple(own_noise.shape)}", wanted)
    stateful = config.recipe is not None and config.recipe.scaling == "delayed"
    require(not stateful, "recipe", "of delayed scaling", "one without a state")


def check_parameters(parameters: LayerParameters, config: LayerConfig, ranks: int) -> None:
    """The rank's share of the experts, and pairs of weights."""
    shape, local = tuple(parameters.fc1_weight.shape), config.router.num_experts // ranks
    right = f"of {local} experts, {config.router.num_experts} over {ranks} ranks"
    require(shape[:1] == (local,), "fc1_weight", f"of shape {shape}", right)
    for pair in (("latent_down", "latent_up"), ("shared_fc1_weight", "shared_fc2_weight")):
        given = [getattr(parameters, name) is not None for name in pair]
        require(given[0] == given[1], pair[1], "given" if given[1] else "None", f"given together with {pair[0]}")
