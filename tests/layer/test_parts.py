"""`route` and then `run_experts` give the bits of the whole layer."""

import pytest
import torch
from torch import Tensor

from moe_fast import MoELayer
from moe_ref.config import LayerConfig, Recipe, RouteOutput, RouterConfig
from tests.common.fast import interpreted, normal

HIDDEN = 8
ROUTER = RouterConfig(num_experts=4, topk=2, score_function="sigmoid", expert_bias=True, aux_loss_coeff=0.5)
EVERYTHING = {"latent": 4, "shared_width": 4, "shared_gate": True, "bias": True, "recompute": "moe_act"}


def layer(kind: type[MoELayer] = MoELayer, recipe: Recipe | None = None, **options) -> MoELayer:
    torch.manual_seed(0)
    return kind(LayerConfig(router=ROUTER, recipe=recipe), HIDDEN, 6, init_std=0.5, **options)


def trained(ours: MoELayer, in_parts: bool) -> list[Tensor]:
    """Outputs, gradients, losses and states of two steps."""
    results = []
    for step in range(2):
        x = normal(3, 2, HIDDEN, seed=step).requires_grad_()
        mask = torch.tensor([[False, True], [False, False], [False, False]])
        y = ours.run_experts(x, ours.route(x, mask)) if in_parts else ours(x, mask)
        y.backward(normal(3, 2, HIDDEN, seed=5))
        if ours.delay_wgrad:
            ours.backward_dw()
        ours.finish_batch()
        results += [y, x.grad, ours.losses.aux_loss]
    return results + [p.grad for p in ours.parameters()] + list(ours.buffers())


def differ(first: list[Tensor], second: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


CASES = [{}, EVERYTHING, {"delay_wgrad": True}, {"recipe": Recipe("delayed", amax_history_len=2)}]


@interpreted
@pytest.mark.parametrize("options", CASES, ids=["plain", "everything", "later", "delayed"])
def test_routing_and_then_running_the_experts_is_the_whole_layer(options):
    assert not differ(trained(layer(**options), True), trained(layer(**options), False))


class Detached(MoELayer):
    """The twin: the second part passes no gradient to the first."""

    def run_experts(self, x: Tensor, routed: RouteOutput) -> Tensor:
        return super().run_experts(x, routed._replace(probs=routed.probs.detach()))


class Twice(MoELayer):
    """The twin: the second part routes once more, and counts the tokens again."""

    def run_experts(self, x: Tensor, routed: RouteOutput) -> Tensor:
        self.route(x)
        return super().run_experts(x, routed)


@interpreted
@pytest.mark.parametrize("kind", [Detached, Twice])
def test_a_second_part_that_detaches_or_routes_again_is_found(kind):
    assert differ(trained(layer(kind), True), trained(layer(kind), False))


def test_a_layer_that_runs_again_as_a_whole_has_no_parts():
    ours, x = layer(recompute="moe"), normal(2, HIDDEN)
    for call in (lambda: ours.route(x), lambda: ours.run_experts(x, layer().route(x))):
        with pytest.raises(ValueError, match="recompute is 'moe'; it must be another for a layer that runs"):
            call()
