"""Cases of the layer, and the tensors made from them.

Every logit is exact in the router's dtype, and the keys of the choice have gaps. So an honest
router has one map, whatever the order of its sums, and all that follows can be bounded given it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.core.axes import Changes, Choice, choice, declared, dtypes, flag, number, size, words
from conformance.core.case import Case
from conformance.core.shared_out import counts
from conformance.core.signature import FAR
from conformance.core.tensors import BITS, DTYPES, hashed, payload
from conformance.families.experts.cases import Name
from conformance.families.experts.cases_mlp import fc1_columns, weight_of
from conformance.families.experts.precision import recipe_of, state_tensors
from conformance.families.experts.precision_mlp import LAYERS
from conformance.families.quantization.cases import UNIT
from conformance.families.router.cases import SCORES, Scores, experts, groups, slots
from conformance.families.router.cases_route import KINDS, RouteCase, Sharing, Tokens, config_of
from moe_ref.config import DISPATCHERS, LayerConfig, RouterConfig
from moe_ref.router.scores import SCORES as FUNCTIONS
from moe_ref.router.selection import topk_routing

SIGNIFICAND = 24  # bits of an exact sum
CANDIDATES = 24  # candidate rows for each token
ROUTER_FIELDS = (
    *("experts", "topk", "sequences", "score", "groups", "group_topk", "scaling", "bias", "losses", "coeff"),
    *("capacity", "pad", "policy", "per_token", "divisor", "sinkhorn"),
)
KIND = ("", "squared_relu", "geglu")


@dataclass(kw_only=True)
class Padded(Choice):
    """A recipe, and to which multiple it pads an expert's rows."""

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        recipe = getattr(case, self.name)
        yield {self.name: recipe, "align": case.align}
        yield {self.name: recipe, "align": UNIT["mxfp8"] if recipe == "mxfp8" else 0}
        yield {self.name: self.default, "align": 0}


@dataclass(frozen=True, kw_only=True)
class LayerCase(Case):
    """A layer, its tokens, and the ranks that share its experts. Widths are in UNITs."""

    tokens: int = declared(Tokens(default=2, letter="T"))
    hidden: int = size("H", at_least=1, more=1)
    width: int = size("F", at_least=1, more=1)
    latent: int = number(0, 1, 3, 5, pairs=(3,))  # 0: none
    shared: int = number(0, 1, 2, 4, pairs=(2,))  # width of the shared experts; 0: none
    gate: bool = flag()  # of the shared experts
    experts: int = experts(default=2, doubles=True)
    topk: int = slots(spare=0)
    sequences: int = declared(Sharing(default=1, at_least=1, divides="tokens", pairs=(1, 2), argument="batch_size"))
    dtype: str = dtypes("float32", "bfloat16", also=("float16",))
    router_dtype: str = choice("", "fp32")
    router_bias: bool = flag()
    wide_router: bool = flag()  # the router's weight and bias in float32, with more bits than bfloat16
    score: str = declared(Scores(default="sigmoid", values=("sigmoid", *SCORES[:2], SCORES[3])))
    groups: int = groups()
    group_topk: int = number(0)
    scaling: int = number(0, 20)  # of the weights, in eighths
    bias: bool = flag()  # whether the expert bias is on
    losses: str = words("", *KINDS, repeat=False, of=("", *KINDS, "+".join(KINDS)))
    coeff: int = number(4, *range(1, 21), data=True)  # of each loss, in eighths
    capacity: int = number(0, *range(1, 9), given=True)  # capacity factor in quarters; 0: none
    pad: bool = flag()
    policy: str = choice("probs", "position")
    per_token: bool = flag()  # losses per token
    divisor: int = number(1, 2, 3, 4, pairs=(3,), data=True)  # of the losses
    sinkhorn: bool = choice(False, also=(True,))
    kind: str = declared(Name(default="", values=KIND))
    clamp: int = number(0, 4, 8, 56, pairs=(6,))  # of the gates, in eighths; 0: none
    offset: int = number(0, 8, -4, pairs=(8,))  # in eighths
    interleave: int = number(0, 1, 2, 3, pairs=(1,))  # 0: none
    shared_interleave: int = number(0, 1, 2, pairs=(2,))
    stored: bool = flag()  # fp8_input_store
    on_input: bool = flag()
    # scaling of the experts' products
    recipe: str = declared(Padded(default="", values=("", "current", "block", "mxfp8", "delayed")))
    align: int = number(0, 16, 32, 64, 256, pairs=(16, 32))  # rows of an expert, padded with a recipe; 0: not given
    dispatcher: str = choice(*DISPATCHERS)
    counts: tuple[int, ...] = counts()  # tokens per rank; empty: one process
    shards: int = number(1, 2)  # ranks that share their experts, each with a part of the width
    programs: int = number(0, 3, data=True)  # numbers of hybridep's multiprocessors and blocks; 0: not given
    budget: int = number(0, *range(1, 25), pairs=(5,))  # room for a rank's rows; 0: for all
    roomless: bool = choice(False, also=(True,))  # a budget that has no room for a row
    rerun: bool = flag(argument="rerun")  # with a budget: run again so that no row is dropped
    evaluation: bool = flag(argument="training")
    padding: int = number(0, 2, 5, pairs=(3,), of=("padding_mask",), given=True)  # tokens that are padding, per 8
    fc1_bias: bool = flag()
    fc2_bias: bool = flag()
    jitter: bool = flag()  # whether the router's input has jitter: its factors are ½ and 1
    stage: str = ""  # the only stage that is called, on the reference's inputs; empty: the layer

    variant: ClassVar[int] = 0
    override: ClassVar[str] = ""

    @property
    def unit(self) -> int:
        return UNIT.get(self.recipe, 1)

    @property
    def logit_dtype(self) -> str:
        return "float32" if self.router_dtype else self.dtype

    @property
    def world(self) -> int:
        return max(len(self.counts), 1)

    @property
    def sized(self) -> bool:
        """Whether the host knows all sizes.

        One rank knows a bound on its rows. Several ranks count what arrives, unless they have a
        budget. The rule that runs a layer again reads whether it must, and a plan has rounds.
        """
        return not self.rerun and bool(not self.counts or self.budget or self.roomless) and not self.sinkhorn

    def clash(self) -> str | None:
        if self.stage and self.stage not in self.stages:
            return f"stage is {self.stage!r}; the layer of this case has {', '.join(self.stages)}"
        if self.layout in FAR:
            return "the stages have cases of far inputs"
        if self.counts and self.layout != "contiguous":
            return "ranks have contiguous inputs"
        if self.shards < 1 or self.world % self.shards or self.experts % (self.world // self.shards):
            return f"experts is {self.experts}; {self.world} ranks in groups of {self.shards} must divide it"
        if self.shards > 1 and self.fc2_bias:
            return "each shard would add a second bias"
        if self.width * self.unit % (self.shards * max(self.interleave, 1)):
            return f"width is {self.width}; {self.shards} shards must divide it"
        if any(count % self.sequences for count in self.counts):
            return f"counts is {self.counts}: sequences must divide each count"
        if not self.tokens and not self.counts:
            return "one process needs tokens"
        if self.gate and not self.shared:
            return "gate is the shared experts', and there are none"
        if self.logit_dtype == "float16":
            return "a router of float16 rounds to float32"
        if self.router_bias and self.logit_dtype != "float32":
            return "with a bias, narrow logits may be rounded twice"
        if self.programs and (not self.counts or self.dispatcher != "hybridep"):
            return "hybridep over ranks alone has programs"
        if self.budget and self.pad:
            return "rows that fill a capacity may be any tokens, and take room of others"
        if self.roomless and (self.budget or self.pad):
            return "a budget of no row has no other number, and no row that fills a capacity"
        if self.rerun and not (self.budget or self.roomless):
            return "without a budget nothing runs again"
        if self.wide_router and self.logit_dtype != "float32":
            return "float32 parameters have logits in float32"
        gates = self.clamp or self.offset or self.interleave or self.shared_interleave
        if self.kind == "squared_relu" and gates:
            return "squared_relu has no gate, and so no clamp, offset or interleave"
        if self.stored and self.kind:
            return f"kind {self.kind!r} has no fp8_input_store"
        for name, width in (("interleave", self.width), ("shared_interleave", self.shared)):
            if getattr(self, name) and width * self.unit % getattr(self, name):
                return f"{name} is {getattr(self, name)}; it must divide the {width * self.unit} features"
        if self.recipe and self.pad:
            return "rows that fill a capacity may be any tokens, and have part in a scale"
        if self.on_input and self.pad and (self.fc1_bias or self.fc2_bias):
            return "rows that fill a capacity may be any tokens, and have a bias without a weight"
        if (self.recipe == "mxfp8") != (self.align == UNIT["mxfp8"]) or (self.align and not self.recipe):
            return "a recipe may pad rows; mxfp8 must, to 32"
        return route_case(self).clash()

    def arguments(self) -> tuple[str, ...]:
        return (*(("group",) if self.counts else ()), *self.scales)

    @property
    def scales(self) -> tuple[str, ...]:
        """The arguments of delayed scaling. Over ranks the reference has no amaxes."""
        scale_arguments = ("linear_states",) if self.counts else ("linear_states", "amaxes")
        return scale_arguments if self.recipe == "delayed" else ()

    @property
    def stages(self) -> tuple[str, ...]:
        """Functions and projections, in the order in which the layer runs them."""
        there: tuple[str, ...] = ("permute",)
        return_stages: tuple[str, ...] = ("unpermute",)
        if self.counts and self.dispatcher != "deepep":
            there, return_stages = (f"{self.dispatcher}_dispatch",), (f"{self.dispatcher}_combine",)
        elif self.counts:
            there, return_stages = ("deepep_dispatch", "permute"), ("unpermute", "deepep_combine")
        down, up = (("latent_down",), ("latent_up",)) if self.latent else ((), ())
        shared = ("shared_experts",) if self.shared else ()
        return ("gate", "route", *down, *there, "grouped_mlp", *return_stages, *up, *shared)


ONE_TOKEN = RouteCase(function="route", tokens=1)


def route_case(case: LayerCase) -> RouteCase:
    """The case's router."""
    return ONE_TOKEN.taking({"dtype": case.logit_dtype} | {name: getattr(case, name) for name in ROUTER_FIELDS})


def config_of_layer(case: LayerCase) -> LayerConfig:
    return LayerConfig(
        router=config_of(route_case(case)),
        router_dtype=case.router_dtype or None,
        jitter_eps=0.5 if case.jitter else None,
        dispatcher=case.dispatcher,
        num_rows=0 if case.roomless else case.budget or None,
        num_sms=case.programs or None,
        num_blocks_permute=case.programs or None,
        num_blocks_unpermute=case.programs or None,
        expert_tensor_parallel=case.shards,
        kind=case.kind or "swiglu",
        clamp=case.clamp / 8 or None,
        offset=case.offset / 8,
        interleave=case.interleave or None,
        shared_interleave=case.shared_interleave or None,
        fp8_input_store=case.stored,
        probs_on_input=case.on_input,
        align=case.align or None,
        recipe=recipe_of(Scaled(case)),
    )


class Scaled:
    """The case as the experts' products read it, with the `scaling` of the recipe."""

    def __init__(self, case: LayerCase, width: int | None = None, experts: int | None = None) -> None:
        self.case, self.scaling, self.kind = case, case.recipe, case.kind
        self.width, self.experts = width or case.width, experts or case.experts
        self.unit, self.variant, self.override = case.unit, case.variant, case.override
        self.dtype, self.seed, self.values = case.dtype, case.seed, ""


def parameters_of(case: LayerCase) -> dict[str, Tensor]:
    """All parameters of the layer by name, in the order of LayerParameters."""
    hidden, width = case.hidden * case.unit, case.width * case.unit
    inner = case.latent * case.unit or hidden
    scaled_case = Scaled(case)
    parameters = {
        "router_weight": router_weight_of(case),
        "fc1_weight": weight_of(scaled_case, "fc1_weight", fc1_columns(scaled_case), inner),
        "fc2_weight": weight_of(scaled_case, "fc2_weight", inner, width),
    }
    for name, has_bias, columns in (
        ("fc1_bias", case.fc1_bias, fc1_columns(scaled_case)),
        ("fc2_bias", case.fc2_bias, inner),
    ):
        parameters |= {name: payload(case.seed, name, (case.experts, columns), case.dtype)} if has_bias else {}
    if case.router_bias:
        parameters["router_bias"] = router_bias_of(case)
    single_expert = Scaled(case, experts=1)
    if case.latent:
        parameters["latent_down"] = weight_of(single_expert, "latent_down", inner, hidden)[0]
        parameters["latent_up"] = weight_of(single_expert, "latent_up", hidden, inner)[0]
    if case.shared:
        shared = Scaled(case, width=case.shared, experts=1)
        parameters["shared_fc1_weight"] = weight_of(shared, "shared_fc1_weight", fc1_columns(shared), hidden)[0]
        parameters["shared_fc2_weight"] = weight_of(shared, "shared_fc2_weight", hidden, case.shared * case.unit)[0]
    if case.gate:
        parameters["shared_gate_weight"] = weight_of(single_expert, "shared_gate_weight", 1, hidden)[0]
    return parameters


def linear_states_of(case: LayerCase) -> dict[str, Tensor]:
    """The states of delayed scaling of both linear layers, with a row per expert; empty for other
    recipes.
    """
    scaled_case = Scaled(
        case, experts=case.experts * case.shards
    )  # experts of all ranks, where the shards of one expert count as experts of their own
    return {name: x for layer in LAYERS for name, x in state_tensors(scaled_case, f"state.{layer}").items()}


def router_weight_of(case: LayerCase) -> Tensor:
    """The weight [E,H]: integers of few bits over a power of two, so that sums over H of products
    with x are exact.
    """
    hidden = case.hidden * case.unit
    room = SIGNIFICAND - BITS[DTYPES[case.dtype]] - 1 - (hidden - 1).bit_length() - case.jitter
    most = 2 ** min(max(room, 1), 10 if case.wide_router else 3) - 1
    number = hashed(case.seed, "router_weight", case.experts * hidden) % (2 * most + 1) - float(most)
    scale = 2.0 ** -(most.bit_length() - 1 + (hidden - 1).bit_length() // 2)
    return torch.from_numpy(number * scale).to(router_storage(case)).reshape(case.experts, hidden)


def router_bias_of(case: LayerCase) -> Tensor:
    """The bias [E]: multiples of 1/16 within ±1/2. Wide ones have more bits than bfloat16."""
    bias = torch.from_numpy(hashed(case.seed, "router_bias", case.experts) % 17 / 16 - 0.5)
    return (bias + 2.0**-8 * bias.abs() if case.wide_router else bias).to(router_storage(case))


def router_storage(case: LayerCase) -> torch.dtype:
    """The dtype of the router's parameters."""
    return DTYPES["float32" if case.wide_router else case.dtype]


def expert_bias_of(case: LayerCase) -> Tensor:
    """The bias [E] in float32: distinct multiples of 1/64 within ±1/4, plus 2^-12, which bfloat16
    would lose.
    """
    permutation = hashed(case.seed, "expert_bias", case.experts).argsort(kind="stable")
    return torch.from_numpy((permutation % 32 - 16) / 64 + 2.0**-12).float()


def logits_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The exact logits, rounded once to the router's dtype."""
    logits = x.double() @ weight.double().T
    return (logits if bias is None else logits + bias.double()).to(dtype)


def tokens_of(case: LayerCase, parameters: dict[str, Tensor], expert_bias: Tensor) -> Tensor:
    """The tokens [T,H] of all ranks.

    Each token is the candidate whose choice of experts has the widest margin.
    """
    shape = (case.tokens, case.hidden * case.unit)
    tried = torch.stack([payload(case.seed, f"x {i}", shape, case.dtype) for i in range(CANDIDATES)])
    weight, bias = parameters["router_weight"], parameters.get("router_bias")
    router_inputs = tried * factors_of(case, noise_of(case))
    logits = logits_of_rows(router_inputs.flatten(0, 1), weight, bias, DTYPES[case.logit_dtype])
    gap = margins(logits.double(), config_of(route_case(case)), expert_bias).reshape(CANDIDATES, case.tokens)
    best = gap.argmax(0) if case.tokens else torch.zeros(0, dtype=torch.int64)
    return tried[best, torch.arange(case.tokens)].contiguous()


def margins(logits: Tensor, config: RouterConfig, expert_bias: Tensor) -> Tensor:
    """[N] the least difference of scores that would change a choice: of the map, or of a loss."""
    score_first = config.score_function != "softmax" or config.pre_softmax
    score = FUNCTIONS[config.score_function](logits) if score_first else logits
    keys = score + expert_bias.double() if config.expert_bias else score
    gap = torch.minimum(_gap(score, config.topk), _gap(keys, config.topk))
    if config.num_groups and config.group_topk:
        by_group = keys.unflatten(1, (config.num_groups, -1))
        best = by_group.sort(dim=2, descending=True).values[..., : config.topk // config.group_topk].sum(2)
        settings: dict[str, Any] = {name: x for name, x in config.selection.items() if x is not None}
        settings |= {"expert_bias": expert_bias.double()} if config.expert_bias else {}
        chosen = topk_routing(logits, **settings).routing_map
        held = best >= best.sort(dim=1, descending=True).values[:, config.group_topk - 1 : config.group_topk]
        unchosen = held[..., None].expand_as(by_group).reshape(keys.shape) & ~chosen
        least = torch.where(chosen, keys, torch.inf).amin(1) - torch.where(unchosen, keys, -torch.inf).amax(1)
        gap = torch.minimum(gap, torch.minimum(_gap(best, config.group_topk), least))
    return gap


def _gap(keys: Tensor, count: int) -> Tensor:
    """The difference between the count-th largest key and the next one; infinite if all are
    chosen.
    """
    if count >= keys.shape[1]:
        return torch.full((len(keys),), torch.inf, dtype=keys.dtype)
    order = keys.sort(dim=1, descending=True).values
    return order[:, count - 1] - order[:, count]


def noise_of(case: LayerCase) -> Tensor:
    """[T,H] of all ranks: 0 and ½, so that with eps = ½ every product is exact."""
    shape = (case.tokens, case.hidden * case.unit)
    return (
        torch.from_numpy(hashed(case.seed, "noise", shape[0] * shape[1]) % 2 / 2).to(DTYPES[case.dtype]).reshape(shape)
    )


def factors_of(case: LayerCase, noise: Tensor) -> Tensor:
    """The factors of the router's input; ones without jitter."""
    return 0.5 + noise if case.jitter else torch.ones_like(noise)


def padding_of(case: LayerCase) -> Tensor:
    """[T] bool of all ranks, True for padding."""
    return torch.from_numpy(hashed(case.seed, "padding", case.tokens) % 8 < case.padding)


def shares(case: LayerCase, x: Tensor) -> list[Tensor]:
    """Each rank's rows."""
    return [rank_rows.clone() for rank_rows in x.split(list(case.counts))] if case.counts else [x]


def cotangent_of(case: LayerCase) -> Tensor:
    """[T,H] of all ranks."""
    return payload(case.seed, "d_output", (case.tokens, case.hidden * case.unit), case.dtype)
