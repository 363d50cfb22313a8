"""The layer as a module, with the names, shapes and initialisation of Megatron's `MoELayer`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from moe_fast.experts.delayed import delaying
from moe_fast.experts.mlp import run_again
from moe_fast.layer.call import Call
from moe_fast.layer.configured import arguments_and_family
from moe_fast.layer.huggingface import weights
from moe_fast.layer.huggingface.families import Family
from moe_fast.layer.layer import after_router, moe_layer, routed_by, sum_over
from moe_fast.layer.scaling import ScaledGroupedLinear
from moe_fast.layer.weights import GroupedLinear, KeepsDtypes
from moe_fast.router.route import finish_batch
from moe_ref.config import (
    GATED,
    LayerConfig,
    LayerParameters,
    RankGroup,
    Recipe,
    RouteOutput,
    RouterConfig,
    RouterLosses,
    RouterRanks,
    RouterState,
    check_expert_split,
    check_recompute,
    require,
    split_experts,
)
from moe_ref.config.state import new_state

INIT_STD = 0.02


class Router(KeepsDtypes):
    """The router's weight [E,H], its bias [E] or None, and its state, of which only `expert_bias`
    is saved, as in Megatron.

    The state keeps its dtypes when the module is cast: a bfloat16 counter stops at 256.
    """

    def __init__(self, config: RouterConfig, hidden: int, bias: bool, **tensor: Any) -> None:
        super().__init__()
        self.config, self.captured = config, False
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden, **tensor))
        self.bias = nn.Parameter(torch.empty(config.num_experts, **tensor)) if bias else None
        names = new_state(config, tensor.get("device"))._asdict()
        for name, x in names.items():
            if isinstance(x, Tensor):
                self.register_buffer(name, x, persistent=name == "expert_bias" and config.expert_bias)

    @property
    def state(self) -> RouterState:
        tensors = {name: getattr(self, name) for name in RouterState._fields if name != "replay_queue"}
        return RouterState(**tensors, replay_queue=())

    def keep(self, state: RouterState) -> None:
        """Make `state` the state of the next step. Once a CUDA graph or a graph of torch.compile
        has a step, the state is copied into the tensors that the graph reads and writes.
        """
        if torch.compiler.is_compiling():
            self.captured = True
        elif self.weight.is_cuda:
            self.captured |= torch.cuda.is_current_stream_capturing()
        for name in RouterState._fields:
            if name == "replay_queue" or getattr(state, name) is getattr(self, name):
                continue
            old, new = getattr(self, name), getattr(state, name)
            if torch.compiler.is_compiling() or self.captured:
                old.copy_(new.detach())
            else:
                setattr(self, name, new.detach())


class Experts(nn.Module):
    """The two grouped linear layers of this rank's experts."""

    def __init__(
        self, experts: int, columns: int, width: int, into: int, *, recipe: Recipe | None, **options: Any
    ) -> None:
        super().__init__()
        linear: Callable[..., GroupedLinear] = GroupedLinear
        if recipe is not None and recipe.scaling == "delayed":
            linear = partial(ScaledGroupedLinear, recipe=recipe)
        self.linear_fc1 = linear(experts, columns, into, **options)
        self.linear_fc2 = linear(experts, into, width, **options)

    @property
    def scaled(self) -> list[ScaledGroupedLinear]:
        """The layers that have delayed scaling: both of them or none."""
        return [linear for linear in (self.linear_fc1, self.linear_fc2) if isinstance(linear, ScaledGroupedLinear)]


class SharedExperts(nn.Module):
    """The MLP of all tokens, and its gate."""

    def __init__(self, columns: int, width: int, hidden: int, gate: bool, **tensor: Any) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, columns, bias=False, **tensor)
        self.linear_fc2 = nn.Linear(width, hidden, bias=False, **tensor)
        self.gate_weight = nn.Parameter(torch.empty(1, hidden, **tensor)) if gate else None


class MoELayer(nn.Module):
    """`moe_layer` with its parameters and the router's state.

    Args:
        config: the layer's settings; `from_config` makes a layer from Megatron's options.
        hidden, width: H and F; every rank holds E/W experts, or by the config a shard of the width
            of E · shards/W.
        latent: the width of tokens on their way to experts, or None for H.
        shared_width, shared_gate: F of the shared experts, None for none; whether they have a gate.
        bias, router_bias: whether the routed experts' layers and the router have biases, both as by
            Megatron's `add_bias_linear`.
        packed: save each grouped weight as one tensor [L,out,in], else as weight0 …; both load.
        group: the process group whose ranks share the experts; None: this rank has all.
        recompute: what is not saved for the backward, which computes it again: "moe_act" the
            output of the routed experts' activation, "permute" their rows, or both in a tuple;
            "moe" the whole layer; None: all is saved.
        delay_wgrad: the backward leaves the gradients of the routed experts' weights to
            `backward_dw`.
        overlap_wgrad: with `delay_wgrad`, compute them beside the dispatch's backward, on a GPU on
            a stream of its own; `backward_dw` waits for them.
        overlap_shared, shared_memory: as in `moe_layer`.

    Weights are normal with deviation `init_std`, biases 0; ranks draw different experts if their
    generators differ. All others must be equal on all ranks, which the caller sees to, as for any
    data-parallel parameter; `expert_parameters` names those that must not be averaged.

    With delayed scaling the experts' layers keep its states, and `finish_batch` makes the scales of
    the next step.
    """

    family: Family | None = None  # of transformers, whose names `load_hf` and `to_hf` have
    over_budget: Tensor  # [] bool: whether rows were dropped since it was last cleared, see `within_budget`

    def __init__(
        self, config: LayerConfig, hidden: int, width: int, *, latent: int | None = None,
        shared_width: int | None = None, shared_gate: bool = False, bias: bool = False, router_bias: bool = False,
        packed: bool = True, group: Any = None, recompute: str | Sequence[str] | None = None, delay_wgrad: bool = False,
        overlap_wgrad: bool = False, overlap_shared: bool = False, shared_memory: bool = False,
        init_std: float = INIT_STD, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks = 1 if group is None else dist.get_world_size(group)
        shards = config.expert_tensor_parallel
        check_expert_split(config.router.num_experts, ranks, shards)
        require(width % shards == 0, "width", width, f"a multiple of {shards}, the shards")
        check_recompute(recompute)
        tensor: dict[str, Any] = {"device": device, "dtype": dtype}
        halves = 2 if config.kind in GATED else 1
        self.config, self.group, self.losses = config, group, RouterLosses()
        require(delay_wgrad or not overlap_wgrad, "overlap_wgrad", overlap_wgrad, "False without delay_wgrad")
        self.recompute, self.delay_wgrad, self.overlap_wgrad = recompute, delay_wgrad, overlap_wgrad
        self.overlap_shared, self.shared_memory = overlap_shared, shared_memory
        self.register_buffer("over_budget", torch.zeros((), dtype=torch.bool, device=device), persistent=False)
        self.router = Router(config.router, hidden, router_bias, **tensor)
        local, local_width = config.router.num_experts * shards // ranks, width // shards
        options = tensor | {"bias": bias, "packed": packed, "recipe": config.recipe}
        self.experts = Experts(local, halves * local_width, local_width, latent or hidden, **options)
        self.fc1_latent_proj = self.fc2_latent_proj = self.shared_experts = None
        if latent is not None:
            self.fc1_latent_proj = nn.Linear(hidden, latent, bias=False, **tensor)
            self.fc2_latent_proj = nn.Linear(latent, hidden, bias=False, **tensor)
        if shared_width is not None:
            columns = halves * shared_width
            self.shared_experts = SharedExperts(columns, shared_width, hidden, shared_gate, **tensor)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else init_std)

    @classmethod
    def from_config(
        cls, config: Any, *, group: Any = None, num_tokens: int | None = None, shared_memory: bool = False,
        init_std: float | None = None, device: Any = None,
    ) -> "MoELayer":  # fmt: skip
        """The layer that a configuration describes; each option is used or refused by its name.

        Of Megatron's options, those of other parts of a training run, such as offloading or CUDA
        graphs, stay with the trainer (`OF_THE_TRAINER` of `moe_fast.layer.configured`), and the
        parameters have the names of Megatron's state dict. Of a model of transformers the layer is
        the MoE block, without its norm; losses over all layers stay with the model. `load_hf` and
        `to_hf` then have the names of transformers.

        Args:
            config: Megatron's options, as its `TransformerConfig` or as a `MoEConfig`; or a
                configuration of transformers, its dict, or the path of its `config.json`; or the
                name of a preset, such as "deepseek-v3" (`PRESETS` of
                `moe_fast.layer.huggingface.settings`).
            group: of EP · ETP ranks; None for one rank. With a configuration of transformers its
                ranks share the experts by the dispatcher "alltoall".
            init_std: of the initial weights; None: as the configuration of Megatron says, or the
                default of this class.
            num_tokens: the most tokens of a rank, which `moe_expert_rank_capacity_factor` needs.

        Raises:
            ValueError: an option that this layer does not have, or a group of another size.

        Example:
            >>> sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8}
            >>> mixtral = {"model_type": "mixtral", "num_experts_per_tok": 2, "hidden_act": "silu"}
            >>> layer = MoELayer.from_config(mixtral | sizes)
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        arguments, family = arguments_and_family(config, num_tokens, ranks)
        deviation = {} if init_std is None else {"init_std": init_std}
        layer = cls(**arguments | deviation, group=group, shared_memory=shared_memory, device=device)
        layer.family = family
        return layer

    @torch.no_grad()
    def load_hf(self, state_dict: Mapping[str, Tensor], prefix: str = "") -> None:
        """Load the weights of the layer of a model of transformers: of its module, or of a
        checkpoint with each expert's matrices apart. Each rank takes its share of the experts.

        Args:
            prefix: of the layer's names, for example "model.layers.3.mlp."; others are not read.

        Raises:
            ValueError: a weight is missing, has another shape, or is none of this layer's; the
                layer was not made of a configuration of transformers.
        """
        state = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
        parameters, score_bias = weights.parameters_of(self._named_family(), self.config, state)
        group = self.group
        ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        local_parameters = split_experts(parameters, ranks, self.config)[rank]
        pairs = list(zip(LayerParameters._fields, self.layer_parameters, local_parameters, strict=True))
        if score_bias is not None:
            pairs.append(("expert_bias", self.router.state.expert_bias, score_bias))
        for name, parameter, weight in pairs:
            value, expected = (None if x is None else tuple(x.shape) for x in (weight, parameter))
            require(value == expected, name, f"of shape {value}", f"of shape {expected}")
        for _, parameter, weight in pairs:
            if parameter is not None and weight is not None:
                parameter.copy_(weight)

    @torch.no_grad()
    def to_hf(self, *, per_expert: bool = False) -> dict[str, Tensor]:
        """The weights by their names in transformers, without the prefix of the layer. They share
        memory with the parameters where the layout is the same.

        Args:
            per_expert: the matrices of each expert apart, as many published checkpoints have them;
                otherwise stacked, as the module in transformers has them.

        Raises:
            ValueError: the experts are shared with other ranks; or see `load_hf`.
        """
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        require(ranks == 1, "group", f"of {ranks} ranks", "of one rank: gather the experts before they are written")
        detached = LayerParameters(*(None if x is None else x.detach() for x in self.layer_parameters))  # type: ignore[arg-type]
        return weights.state_of(
            self._named_family(), self.config, detached, self.router.state.expert_bias, per_expert=per_expert
        )

    def _named_family(self) -> Family:
        expected = "made by from_config with a configuration of transformers"
        require(self.family is not None, "layer", "without names of transformers", expected)
        assert self.family is not None
        return self.family

    @property
    def layer_parameters(self) -> LayerParameters:
        """The parameters, as `moe_layer` takes them."""
        down, up, shared = self.fc1_latent_proj, self.fc2_latent_proj, self.shared_experts
        return LayerParameters(
            router_weight=self.router.weight,
            router_bias=self.router.bias,
            fc1_weight=self.experts.linear_fc1.weight,
            fc2_weight=self.experts.linear_fc2.weight,
            latent_down=None if down is None else down.weight,
            latent_up=None if up is None else up.weight,
            shared_fc1_weight=None if shared is None else shared.linear_fc1.weight,
            shared_fc2_weight=None if shared is None else shared.linear_fc2.weight,
            shared_gate_weight=None if shared is None else shared.gate_weight,
            fc1_bias=self.experts.linear_fc1.bias,
            fc2_bias=self.experts.linear_fc2.bias,
        )

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters that only this rank has."""
        return [*self.experts.parameters()]

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The layer's output, in the shape of x: [T,H], or [S,B,H] with B sequences.

        The mask is [T] or [S,B], True for padding.

        `losses` then holds the router's losses of this call, detached: they are attached to the
        output, whose backward adds their gradients.
        """
        x_TH, mask, batch_size = _flat(x, padding_mask)
        run = partial(self._results, state=self.router.state, training=self.training, batch_size=batch_size)
        inputs = (x_TH, mask, *self.layer_parameters)
        # in a compiled graph the compiler chooses what is saved
        if self.recompute == "moe" and not torch.compiler.is_dynamo_compiling():
            # a rank that stopped before its last collective would leave the other ranks waiting
            with set_checkpoint_early_stop(self.group is None):
                output, state, losses, dropped = run_again(run, *inputs, random=self.config.jitter_eps is not None)
        else:
            output, state, losses, dropped = run(*inputs)
        self.router.keep(state)
        self.losses = losses
        self._note(dropped)
        return output.reshape(x.shape)

    def route(self, x: Tensor, padding_mask: Tensor | None = None) -> RouteOutput:
        """The first part of the layer, its router. `layer(x, mask)` has the bits of
        `layer.run_experts(x, layer.route(x, mask))`, so that each part can be captured in a CUDA
        graph of its own, as by Megatron's scope moe_router.

        The router's state and `losses` are then those after the call. The losses are attached to
        the probs of the result.

        Raises:
            ValueError: with `recompute` "moe", which runs both parts again together.
        """
        self._in_parts()
        x_TH, mask, batch_size = _flat(x, padding_mask)
        call = self._call(batch_size=batch_size, padding_mask=mask)
        call.check(x_TH)
        _, routed = routed_by(x_TH, call)
        self.router.keep(routed.state)
        self.losses = routed.losses
        return routed

    def run_experts(self, x: Tensor, routed: RouteOutput) -> Tensor:
        """The second part of the layer: its output for tokens that `route` has routed.

        Raises:
            ValueError: as `route`.
        """
        self._in_parts()
        with self._delaying():
            dispatched, *_, output = after_router(x.reshape(-1, x.shape[-1]), routed, self._call())
        self._note(self._dropped(dispatched))
        return output.reshape(x.shape)

    def _call(self, **options: Any) -> Call:
        """The arguments of a call of one part of the layer."""
        settings = self._settings(self.training) | options
        return Call(self.layer_parameters, self.config, self.router.state, self.training, **settings)

    def _in_parts(self) -> None:
        apart = self.recompute != "moe"
        require(apart, "recompute", repr(self.recompute), "another for a layer that runs in two parts")

    def _results(
        self, x_TH: Tensor, padding_mask: Tensor | None, *parameters: Tensor | None, training: bool, **settings: Any
    ) -> tuple[Tensor, RouterState, RouterLosses, Tensor | None]:
        """(output, router's state, losses, whether rows were dropped). It depends on its arguments
        alone, so that it may run again without counting a token twice.
        """
        settings |= self._settings(training)
        settings["training"], settings["padding_mask"] = training, padding_mask
        with self._delaying():
            out = moe_layer(x_TH, LayerParameters(*parameters), self.config, **settings)  # type: ignore[arg-type]
        return out.output, out.routed.state, out.routed.losses, self._dropped(out.dispatched)

    def _settings(self, training: bool) -> dict[str, Any]:
        """The settings of everything that follows the router."""
        settings = self._scales(training)
        settings["recompute"] = None if self.recompute == "moe" else self.recompute
        settings["group"], settings["shared_memory"] = self.group, self.shared_memory
        settings["overlap_shared"] = self.overlap_shared
        if self.overlap_wgrad and not torch.compiler.is_compiling():
            settings["in_dispatch_backward"] = self._compute_dw
        return settings

    def _scales(self, training: bool) -> dict[str, Any]:
        """The states of delayed scaling, and in training the amaxes that the products raise."""
        if not self.experts.scaled:
            return {}
        fc1, fc2 = self.experts.scaled
        counts = training and torch.is_grad_enabled()
        return {"linear_states": (fc1.state, fc2.state), "amaxes": (fc1.amaxes, fc2.amaxes) if counts else None}

    def _delaying(self) -> AbstractContextManager[None]:
        """The context in which the gradients of the experts' weights are delayed, if `delay_wgrad`.
        A backward that runs the forward again does so in a context of its own.
        """
        linears = (self.experts.linear_fc1, self.experts.linear_fc2) if self.delay_wgrad else ()
        return delaying({linear.weight: linear.waiting for linear in linears}) if linears else nullcontext()

    def _dropped(self, dispatched: Any) -> Tensor | None:
        """Whether this rank had too little room for its rows; None without a budget."""
        overflow: Tensor = dispatched.overflow
        return None if self.config.num_rows is None else overflow

    def _note(self, dropped: Tensor | None) -> None:
        if dropped is not None:
            self.over_budget.logical_or_(dropped)

    def _compute_dw(self) -> None:
        self.experts.linear_fc2.compute_dw()
        self.experts.linear_fc1.compute_dw()

    def backward_dw(self) -> None:
        """With `delay_wgrad`, after a backward: compute the gradients of the routed experts'
        weights, those of fc2 first; see `GroupedLinear.backward_dw`.

        Raises:
            RuntimeError: no gradient waits; in a graph of torch.compile none is delayed.
        """
        self.experts.linear_fc2.backward_dw()
        self.experts.linear_fc1.backward_dw()

    @torch.no_grad()
    def finish_batch(self, *, frozen: bool = False) -> None:
        """End a global batch: update the expert bias, restart the counters, and with delayed
        scaling compute the next scales from the amaxes.
        """
        for linear in self.experts.scaled:
            linear.update_scales()
        group = self.group
        ranks = RouterRanks() if group is None else _ranks(group)
        self.router.keep(finish_batch(self.router.state, self.config.router, frozen=frozen, ranks=ranks))


def _flat(x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """(x as [T,H], the mask as [T], the number of sequences)."""
    if padding_mask is not None:
        expected = tuple(x.shape[:-1])
        require(
            padding_mask.shape == expected, "padding_mask", f"of shape {tuple(padding_mask.shape)}", f"of {expected}"
        )
        padding_mask = padding_mask.reshape(-1)
    return x.reshape(-1, x.shape[-1]), padding_mask, x.shape[1] if x.dim() == 3 else 1


def _ranks(group: Any) -> RouterRanks:
    return RouterRanks(tp_dp_cp=RankGroup(dist.get_world_size(group), lambda x: sum_over(x, group)))
