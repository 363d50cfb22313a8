"""Defects of the layer's options: each stage has them, and a layer that joins stages forgets one.

Options of the gates, of the losses, and parameters of the router that are wider than the tokens.
"""

from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to
from conformance.mutants.kinds.layouts import numbered_in_bytes, read_unstrided
from defects.layer.wrappers import ORIGIN, Stage, in_stages, stages
from moe_ref.config import LayerConfig, LayerParameters


def _without(*names: str) -> Stage:
    """A stage that does not get these options."""

    def stage(right: Stage, *arguments: Any, **settings: Any) -> Any:
        return right(*arguments, **{name: x for name, x in settings.items() if name not in names})

    return stage


def _unclamped_if_interleaved(shared: Stage, *arguments: Any, **settings: Any) -> Any:
    return shared(*arguments, **settings | ({"clamp": None} if settings.get("interleave") else {}))


def _configured(**changes: Any) -> Wrapper:
    """The layer with other settings."""

    def planted(layer: Wrapper, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
        return layer(x, p, replace(config, **{name: of(config) for name, of in changes.items()}), **settings)

    return planted


def _narrow(name: str) -> Wrapper:
    """The router's parameter is rounded to the dtype of the tokens."""

    def planted(layer: Wrapper, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any) -> Any:
        own = getattr(p, name)
        changed = {} if own is None else {name: with_values(own, rounded_to(x.dtype))}
        return layer(x, p._replace(**changed), *rest, **settings)

    return planted


# ---- shards of experts


def _mean_of_shards(layer: Wrapper, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
    """Partial sums of shards are averaged, as gradients of data-parallel ranks are."""
    shards = config.expert_tensor_parallel
    with stages(layer, grouped_mlp=lambda mlp, *rows, **more: mlp(*rows, **more) / shards):
        return layer(x, p, config, **settings)


def _probs_of_one_shard(layer: Wrapper, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
    """Right forward; the router learns from the first shard of each expert alone."""
    calls = count()

    def mlp(right: Stage, *rows: Any, probs: Tensor, **more: Any) -> Any:
        first = next(calls) % config.expert_tensor_parallel == 0
        return right(*rows, probs=probs if first else probs.detach(), **more)

    with stages(layer, grouped_mlp=mlp):
        return layer(x, p, config, **settings)


# ---- delayed scaling


def _states_exchanged(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    state = settings.get("state")
    return mlp(*rows, **settings | ({} if state is None else {"state": state[::-1]}))


def _no_amax_of_gradients(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    seen = settings.get("amaxes")
    lost = seen and tuple(own._replace(grad_output=own.grad_output.clone()) for own in seen)
    return mlp(*rows, **settings | ({"amaxes": lost} if lost else {}))


# ---- a layer that runs again


def _counted_twice(layer: Wrapper, *arguments: Any, state: Any, **settings: Any) -> Any:
    """The second run starts from the state that the first has left."""
    if not settings.get("rerun"):
        return layer(*arguments, state=state, **settings)
    first = layer(*arguments, state=state, **settings | {"rerun": False})
    return layer(*arguments, state=first.routed.state, **settings)


def _each_rank_alone(within_budget: Stage, run: Stage, config: LayerConfig, *rest: Any) -> Any:
    """A rank that has dropped no row keeps its first results."""
    few, free = run(config), run(replace(config, num_rows=None))
    over = [bool(part.overflow) for part in few.dispatched]
    outputs = [again if dropped else first for first, again, dropped in zip(few.output, free.output, over, strict=True)]
    return free._replace(output=outputs)


def _added_to_the_first(within_budget: Stage, run: Stage, config: LayerConfig, *rest: Any) -> Any:
    """Gradients of the first run stay."""
    few, free = run(config), run(replace(config, num_rows=None))
    both = [again + (first - first.detach()) for first, again in zip(few.output, free.output, strict=True)]
    return free._replace(output=both)


# ---- what the backward computes again


def _copied_by_another_map(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    """The rows that the backward copies are in another order."""
    again = settings.get("rows_again")
    return mlp(*rows, **settings | ({} if again is None else {"rows_again": lambda: again().flip(0)}))


def _unstrided(*names: str) -> Wrapper:
    """Strides of these parameters are not read."""

    def planted(layer: Wrapper, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any) -> Any:
        return layer(x, p._replace(**{name: read_unstrided(getattr(p, name)) for name in names}), *rest, **settings)

    return planted


def _roomy_alone(layer: Wrapper, x: Tensor, p: LayerParameters, config: LayerConfig, **settings: Any) -> Any:
    return layer(x, p, config if "group" in settings else replace(config, num_rows=None), **settings)


def _tokens_past_256(layer: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    return layer(numbered_in_bytes(x) if len(x) > 256 else x, *rest, **settings)


def _still_without_noise(layer: Wrapper, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
    eps = None if settings.get("noise") is None else config.jitter_eps
    return layer(x, p, replace(config, jitter_eps=eps), **settings)


def _again(settings: dict[str, Any]) -> bool:
    return bool(settings.get("recompute") or settings.get("rows_again"))


def _exchanged_again(right: Stage, *arguments: Any, **settings: Any) -> Any:
    exchange = settings.get("state") is not None and _again(settings)
    return (_states_exchanged if exchange else _as_it_is)(right, *arguments, **settings)


def _as_it_is(right: Stage, *arguments: Any, **settings: Any) -> Any:
    return right(*arguments, **settings)


class _Twice(list[Any]):
    """Gradients that wait; each is doubled in the list of the caller."""

    def __init__(self, waiting: list[Any]) -> None:
        super().__init__()
        self.waiting = waiting

    def append(self, wgrad: Any) -> None:
        self.waiting.append(lambda *into, **named: 2 * wgrad(*into, **named))


def _twice_again(right: Stage, *arguments: Any, **settings: Any) -> Any:
    waiting = settings.get("wgrads")
    doubled = {"wgrads": _Twice(waiting)} if waiting is not None and _again(settings) else {}
    return right(*arguments, **settings | doubled)


_PLANTED: tuple[tuple[str, str, Wrapper], ...] = (
    (
        "ML34",
        "interleaved gates of shared experts are not clamped",
        in_stages(shared_experts=_unclamped_if_interleaved),
    ),
    (
        "ML37",
        "shared experts are interleaved as the routed ones",
        _configured(shared_interleave=lambda config: config.interleave),
    ),
    ("ML38", "the backward does not read the stored codes", _configured(fp8_input_store=lambda config: False)),
    ("ML42", "a wider bias of the router is rounded to the tokens' dtype", _narrow("router_bias")),
    ("ML43", "a wider weight of the router is rounded to the tokens' dtype", _narrow("router_weight")),
    (
        "ML44",
        "a layer that drops rows does not run again",
        in_stages(within_budget=lambda right, run, config, *x: run(config)),
    ),
    ("ML45", "a layer that runs again counts its tokens twice", _counted_twice),
    ("ML46", "each rank decides by itself whether a layer runs again", in_stages(within_budget=_each_rank_alone)),
    ("ML47", "gradients of a layer's first run stay when it runs again", in_stages(within_budget=_added_to_the_first)),
    ("ML48", "shards of an expert are averaged", _mean_of_shards),
    ("ML49", "the gradient of probabilities is one shard's", _probs_of_one_shard),
    ("ML50", "rows that are permuted again are saved nonetheless", in_stages(grouped_mlp=_without("rows_again"))),
    ("ML51", "the rows that the backward permutes have another order", in_stages(grouped_mlp=_copied_by_another_map)),
    ("ML52", "the activation is saved, though it is computed again", in_stages(grouped_mlp=_without("recompute"))),
    ("ML53", "the states of both linear layers are exchanged", in_stages(grouped_mlp=_states_exchanged)),
    ("ML54", "the backward measures no amax", in_stages(grouped_mlp=_no_amax_of_gradients)),
    ("ML55", "strides of the latent space are not read", _unstrided("latent_down", "latent_up")),
    ("ML56", "strides of the shared experts are not read", _unstrided("shared_fc1_weight", "shared_fc2_weight")),
    ("ML57", "strides of the router are not read", _unstrided("router_weight", "router_bias")),
    ("ML58", "tokens past 256 are the first ones", _tokens_past_256),
    ("ML59", "without a group a budget has no effect", _roomy_alone),
    ("ML60", "a budget of no row is none", _configured(num_rows=lambda config: config.num_rows or None)),
    ("ML61", "without noise there is no jitter", _still_without_noise),
    (
        "ML62",
        "what is computed again with delayed scales has the other layer's",
        in_stages(grouped_mlp=_exchanged_again),
    ),
    ("ML63", "gradients that wait count twice where the backward computes again", in_stages(grouped_mlp=_twice_again)),
)
DEFECTS = tuple(Defect(name, title, ORIGIN, {"moe_layer": wrapper}) for name, title, wrapper in _PLANTED)
