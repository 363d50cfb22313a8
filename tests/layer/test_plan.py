"""The plan of the experts' tiles that permute makes: the one that the products would make."""

from dataclasses import replace

import pytest
import torch

import moe_fast
from moe_fast.experts import segments
from moe_fast.experts.segments import make_plan
from moe_fast.launch import tuning
from moe_fast.permutation.permute import permute_in_tiles
from moe_ref.config import LayerConfig, LayerParameters, Recipe, RouterConfig
from moe_ref.config.state import new_state
from tests.common.fast import interpreted, normal

pytestmark = interpreted
TILE = tuning.for_device(torch.device("cpu")).grouped.scaled


def map_of(tokens: int, experts: int, share: float) -> torch.Tensor:
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(experts))
    return drawn < share * torch.linspace(0, 2, experts)


def differences(
    routing_map: torch.Tensor, num_rows: int, align: int | None, tile_rows: int, product_rows: int
) -> list[str]:
    """The tensors of the plan of `tile_rows` that differ from the products' plan of `other`."""
    tokens = normal(len(routing_map), 2)
    permuted, tiles = permute_in_tiles(tokens, routing_map, align=align, num_rows=num_rows, tile_rows=tile_rows)
    expected = make_plan(permuted.tokens_per_expert, num_rows, replace(TILE, rows=product_rows))
    used = int(expected.total_2[0])
    pairs = {
        "tiles": (tiles.tile_4C[:, :used], expected.tile_4C[:, :used]),
        "segments": (tiles.segment_4L[:3], expected.segment_3L),
        "counts": (tiles.segment_4L[3], permuted.tokens_per_expert),
        "totals": (tiles.total_2, expected.total_2),
    }
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


@pytest.mark.parametrize(
    ("tokens", "experts", "share", "num_rows", "align"),
    [
        (60, 4, 0.5, 240, None),  # room for all, and past them
        (60, 21, 0.5, 400, None),  # the last experts' rows are dropped, in the middle of one
        (60, 21, 0.5, 304, 16),  # experts with padding, cut at a multiple
        (60, 40, 0.05, 2400, 8),  # experts without a row, several programs
        (0, 3, 0.5, 5, None),
    ],
)
def test_permute_cuts_the_tiles_of_the_products(tokens, experts, share, num_rows, align):
    """The twin: tiles of other rows differ, if there is a row."""
    routing_map = map_of(tokens, experts, share)
    for rows in (4, 64):
        assert differences(routing_map, num_rows, align, rows, rows) == []
    assert ("totals" in differences(routing_map, num_rows, align, 4, 64)) == bool(tokens)


@pytest.mark.parametrize("recipe", [None, Recipe("block")], ids=["bf16", "block"])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_makes_no_other_plan_and_has_the_same_bits(recipe, training, monkeypatch):
    """The twin: a layer whose permute makes none."""
    router = RouterConfig(num_experts=4, topk=2)
    layer_config = LayerConfig(router=router, recipe=recipe)
    weights = [normal(4, 64, seed=1), normal(4, 64, 64, seed=2), normal(4, 64, 32, seed=3)]
    x, *weights = (y.bfloat16().requires_grad_(training) for y in (normal(40, 64), *weights))
    plans, make = [], segments._make_plan
    monkeypatch.setattr(segments, "_make_plan", lambda *of: plans.append(of) or make(*of))

    def results() -> list[torch.Tensor]:
        out = moe_fast.moe_layer(x, LayerParameters(*weights), layer_config, state=new_state(router)).output
        grads = torch.autograd.grad(out, [x, *weights], torch.ones_like(out)) if training else []
        return [out.detach(), *grads]

    first = results()
    assert plans == []
    monkeypatch.setattr("moe_fast.layer.layer.first_tile", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))
    assert len(plans) == 1
