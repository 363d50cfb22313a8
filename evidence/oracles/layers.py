"""A whole layer of another package next to `moe_ref`'s: output and all gradients, in float64."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import moe_ref
from evidence.oracles.compare import Comparison, compare
from evidence.oracles.random_inputs import generator
from moe_ref.config import LayerConfig, LayerParameters, RouterConfig

SHAPES = ((1, 4, 2, 2, 3), (5, 8, 4, 2, 12), (33, 16, 8, 3, 24))  # tokens, hidden, experts, chosen, width
RULE = "float64, within 2^-40 of the largest value"
WIDE = torch.float64


def parameters_of(hidden: int, experts: int, width: int, shared: int = 0) -> LayerParameters:
    """Random weights, with shared experts of that width if it is not 0."""
    draw = generator(hidden)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw, dtype=WIDE) / shape[-1] ** 0.5).requires_grad_()

    routed_weights = (weight(experts, hidden), weight(experts, 2 * width, hidden), weight(experts, hidden, width))
    shared_weights = {"shared_fc1_weight": weight(2 * shared, hidden), "shared_fc2_weight": weight(hidden, shared)} if shared else {}  # fmt: skip  # noqa: E501
    return LayerParameters(*routed_weights, **shared_weights)


def reference(parameters: LayerParameters, router: RouterConfig) -> Callable[[Tensor], Tensor]:
    """The reference's layer on one rank."""
    config = LayerConfig(router=router)

    def layer(x: Tensor) -> Tensor:
        states = [moe_ref.new_state(router)]
        return moe_ref.moe_layer([x], [parameters], config, states=states).output[0]

    return layer


def compared(
    subject: str,
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    mine: list[Tensor],
    their_weights: list[Tensor],
    sizes: tuple[int, ...],
    rounded: torch.dtype = WIDE,
) -> Iterator[Comparison]:
    """Output, and gradients of x and of both sides' weights, in the same order.

    Args:
        rounded: the widest dtype that the peer computes in somewhere; its precision is the bound.
    """
    room = 2.0**-40 if rounded == WIDE else 2.0**-16
    rule = RULE if rounded == WIDE else "float64 with a router of float32, within 2^-16 of the largest value"
    x = torch.randn(sizes[0], sizes[1], generator=generator(3), dtype=WIDE)
    results = []
    for layer, weights in ((ours, mine), (theirs, their_weights)):
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        cotangent = torch.randn(y.shape, generator=generator(4), dtype=WIDE)
        gradients = torch.autograd.grad(y, [inputs, *weights], cotangent)
        results.append({"output": y, **dict(zip((*NAMES, *SHARED), gradients, strict=False))})
    text = f"T={sizes[0]} H={sizes[1]} E={sizes[2]} K={sizes[3]} F={sizes[4]}"
    for name, value in results[0].items():
        their_value = results[1][name].reshape(value.shape)
        bound = room * their_value.abs().amax()
        yield compare(
            f"{subject}: {name}", value, their_value, case=lambda at, _: f"{text} at {at}", bound=bound, rule=rule
        )


NAMES = ("gradient of x", "gradient of the router's weight", "gradient of fc1", "gradient of fc2")
SHARED = ("gradient of the shared fc1", "gradient of the shared fc2")
