"""The layer: settings, parameters, results."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config.dispatch import PerRank, check_budget, check_expert_split, check_tokens
from moe_ref.config.experts import GATED
from moe_ref.config.permutation import check_align
from moe_ref.config.quantization import Recipe
from moe_ref.config.router import RouterConfig, RouterState, check_jitter, check_padding_mask
from moe_ref.config.rules import check_count, check_entries, is_count, require, require_shape

DISPATCHERS = ("allgather", "alltoall", "deepep", "hybridep")
SHARDING = ("allgather", "alltoall")  # those that know `expert_tensor_parallel`
PROGRAMS = ("num_sms", "num_blocks_permute", "num_blocks_unpermute")
ROWS_AGAIN = "permute"  # of a layer's recompute: its experts' rows; the other names are `grouped_mlp`'s
OF_EXPERTS = ("fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")  # parameters that differ between ranks


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The settings of a layer; `layer_config` makes one of Megatron's options.

    Raises:
        ValueError: an unknown dispatcher, no positive number of shards, a number of multiprocessors
            or blocks that is not positive or another dispatcher's; see `check_jitter` and
            `check_budget`.
    """

    router: RouterConfig
    router_dtype: str | None = None
    jitter_eps: float | None = None  # of the router's input, see `jitter`; in evaluation too
    dispatcher: str = "alltoall"
    expert_tensor_parallel: int = 1  # neighbouring ranks that share their experts, each with a shard of the width
    num_sms: int | None = None  # of hybridep: the most multiprocessors of its transfers, see `hybridep_dispatch`
    num_blocks_permute: int | None = None  # of hybridep: the most thread blocks of its dispatch's permutation
    num_blocks_unpermute: int | None = None  # the same of its combine
    num_rows: int | None = None  # room for the rows of a rank's experts, see `rank_budget`; None: for all
    kind: str = "swiglu"  # the activation, with its settings: see `grouped_mlp`
    offset: float = 0.0
    clamp: float | None = None
    interleave: int | None = None
    shared_interleave: int | None = None  # of the shared experts' activation
    fp8_input_store: bool = False
    probs_on_input: bool = False
    align: int | None = None  # experts pad their rows to a multiple of it
    recipe: Recipe | None = None  # of the routed experts' products

    def __post_init__(self) -> None:
        listed = self.dispatcher in DISPATCHERS
        require(listed, "dispatcher", repr(self.dispatcher), f"one of {', '.join(DISPATCHERS)}")
        shards = self.expert_tensor_parallel
        check_count("expert_tensor_parallel", shards)
        for name in PROGRAMS:
            most, hybrid = getattr(self, name), self.dispatcher == "hybridep"
            legal = "None or a positive integer" if hybrid else f"None with {self.dispatcher}: hybridep alone has it"
            require(most is None or (hybrid and is_count(most) and most >= 1), name, most, legal)
        if self.jitter_eps is not None:
            check_jitter(self.jitter_eps)
        if self.num_rows is not None:
            check_budget(None, self.num_rows)

    @property
    def dispatch(self) -> dict[str, Any]:
        """The settings of the dispatcher over ranks."""
        shards = self.expert_tensor_parallel if self.dispatcher in SHARDING else 1
        settings = {"num_rows": self.num_rows, "expert_tensor_parallel": None if shards == 1 else shards}
        return _given(settings | {"num_sms": self.num_sms, "num_blocks": self.num_blocks_permute})

    @property
    def combine(self) -> dict[str, Any]:
        """The settings of the way back."""
        return _given({"num_sms": self.num_sms, "num_blocks": self.num_blocks_unpermute})

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


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in settings.items() if x is not None}


class LayerParameters(NamedTuple):
    """The parameters of one rank, with its L = E/W experts, or its shards of more; N is the latent
    width, or H without one, F the width of a shard.
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


def split_experts(parameters: LayerParameters, ranks: int, config: LayerConfig | None = None) -> list[LayerParameters]:
    """Each rank's parameters: its share of the experts of a whole layer, and all others. With the
    config's `expert_tensor_parallel` also its shard of their width F: of each half of a gated fc1,
    of fc1's columns if they are interleaved, and of fc2's inputs.

    Raises:
        ValueError: a width that the shards do not divide; see `check_expert_split`.
    """
    shards = 1 if config is None else config.expert_tensor_parallel
    check_expert_split(len(parameters.fc1_weight), ranks, shards)
    width = parameters.fc2_weight.shape[2]
    require(width % shards == 0, "fc2_weight", f"of width {width}", f"of a multiple of {shards}, the shards")
    halves = 2 if shards > 1 and config is not None and config.kind in GATED and config.interleave is None else 1
    chunks = {name: x.chunk(ranks // shards) for name in OF_EXPERTS if (x := getattr(parameters, name)) is not None}
    split = []
    for rank in range(ranks):
        local_experts, shard = {name: x[rank // shards] for name, x in chunks.items()}, rank % shards
        if shards > 1:
            cut = {
                n: x.unflatten(1, (halves, -1)).chunk(shards, 2)[shard].flatten(1, 2)
                for n, x in local_experts.items()
                if n[:3] == "fc1"
            }
            local_experts |= cut | {"fc2_weight": local_experts["fc2_weight"].chunk(shards, 2)[shard]}
        split.append(parameters._replace(**local_experts))
    return split


def check_layer(
    x: PerRank[Tensor], parameters: PerRank[LayerParameters], config: LayerConfig, states: PerRank[RouterState],
    padding_mask: PerRank[Tensor] | None = None, noise: PerRank[Tensor] | None = None,
    linear_states: PerRank[Any] | None = None,
) -> None:  # fmt: skip
    """The rules of `moe_layer` that no stage has."""
    check_tokens(x)
    check_expert_split(config.router.num_experts, len(x), config.expert_tensor_parallel)
    for name, values in (
        ("parameters", parameters), ("states", states), ("padding_mask", padding_mask or x), ("noise", noise or x),
        ("linear_states", linear_states or x),
    ):  # fmt: skip
        check_entries(name, values, len(x))
    for rank_parameters in parameters:
        check_parameters(rank_parameters, config, len(x))
    for rank_mask, x_TH in zip(padding_mask or (), x, strict=False):
        check_padding_mask(rank_mask, x_TH.shape[0])
    for rank_noise, x_TH in zip(noise or (), x, strict=False):
        requirement = "None: there is no jitter" if config.jitter_eps is None else f"of {tuple(x_TH.shape)}"
        legal = config.jitter_eps is not None and rank_noise.shape == x_TH.shape
        require_shape(legal, "noise", rank_noise, requirement)
    stateful = config.recipe is not None and config.recipe.scaling == "delayed"
    missing = "given with a recipe of delayed scaling, and only with it: a pair for fc1 and fc2"
    value = "None" if linear_states is None else "given"
    require(stateful == (linear_states is not None), "linear_states", value, missing)


def check_recompute(recompute: str | Sequence[str] | None) -> tuple[bool, str | None]:
    """Whether the rows are permuted again, and what of the experts, by one name or several."""
    names = (recompute,) if isinstance(recompute, str) else tuple(recompute or ())
    legal = names == ("moe",) or all(name in (ROWS_AGAIN, "moe_act") for name in names)
    require(legal, "recompute", repr(recompute), f"None, 'moe', or {ROWS_AGAIN!r}, 'moe_act' or both in a tuple")
    return ROWS_AGAIN in names, next((name for name in names if name != ROWS_AGAIN), None)


def check_parameters(parameters: LayerParameters, config: LayerConfig, ranks: int) -> None:
    """The rank's share of the experts, and pairs of weights. Each shard would add a second bias."""
    shards = config.expert_tensor_parallel
    shape, local = tuple(parameters.fc1_weight.shape), config.router.num_experts * shards // ranks
    requirement = f"of {local} experts, {config.router.num_experts} over {ranks // shards} groups of ranks"
    no_bias = f"None with {shards} shards of each expert, each of which would add it"
    require(shards == 1 or parameters.fc2_bias is None, "fc2_bias", "given", no_bias)
    require(shape[:1] == (local,), "fc1_weight", f"of shape {shape}", requirement)
    for pair in (("latent_down", "latent_up"), ("shared_fc1_weight", "shared_fc2_weight")):
        present = [getattr(parameters, name) is not None for name in pair]
        require(present[0] == present[1], pair[1], "given" if present[1] else "None", f"given together with {pair[0]}")
