"""Experts whose activation is quantised where it is computed: the bits of those that write it.
Without a Hopper two launches stand for the kernel.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_fast import grouped_mlp
from moe_ref.config import Recipe
from tests.common.activated import as_on_a_hopper, quantised
from tests.common.fast import interpreted, normal

pytestmark = interpreted
ROWS, HIDDEN, WIDTH, COUNTS = 40, 48, 32, (11, 0, 17, 5)
BLOCK = Recipe("block")
LEAVES = ("rows", "probs", "fc1", "fc2")


def results(
    wanted: tuple[str, ...] = LEAVES, rows_again: bool = False, delayed: bool = False, **settings: Any
) -> list[Tensor]:
    """The experts' rows, and the gradients that are wanted; of weights maybe delayed."""
    bf16 = {"dtype": torch.bfloat16}
    tensors = {"rows": normal(ROWS, HIDDEN, seed=1, **bf16), "probs": normal(ROWS, seed=2).sigmoid()}
    tensors |= {"fc1": normal(4, 2 * WIDTH, HIDDEN, seed=3, **bf16), "fc2": normal(4, HIDDEN, WIDTH, seed=4, **bf16)}
    leaves = {name: x.requires_grad_(name in wanted) for name, x in tensors.items()}
    weights, copy = (leaves["fc1"], leaves["fc2"]), leaves["rows"].detach().clone()
    settings = {"recipe": BLOCK, "probs": leaves["probs"], "rows_again": copy.clone if rows_again else None} | settings
    waiting: list[Any] = []
    settings |= {"wgrads": waiting} if delayed else {}
    out = grouped_mlp(leaves["rows"], torch.tensor(COUNTS), *weights, **settings)
    used = sum(COUNTS)  # zeros past them, or nothing
    if wanted:
        (out[:used] * normal(used, HIDDEN, seed=5)).sum().backward()
    if delayed:
        leaves["fc2"].grad, leaves["fc1"].grad = (wgrad() for wgrad in waiting)
    assert [name for name, x in leaves.items() if x.grad is not None] == list(wanted)
    return [out[:used], *(x.grad if "fc" in name else x.grad[:used] for name, x in leaves.items() if name in wanted)]


def agree(monkeypatch: pytest.MonkeyPatch, kernel: Any = quantised, **settings: Any) -> list[tuple[bool, bool]]:
    """Both have the same bits; the forms that were asked for."""
    expected = results(**settings)
    forms = as_on_a_hopper(monkeypatch, kernel)
    assert all(torch.equal(a, b) for a, b in zip(expected, results(**settings), strict=True))
    return forms


BOTH = [(True, True)]
SETTINGS: list[tuple[dict[str, Any], list[tuple[bool, bool]]]] = [
    ({}, BOTH),
    ({"recompute": "moe_act"}, [(True, False), (False, True)]),
    ({"recompute": "moe_act", "wanted": ("rows",)}, [(True, False)]),
    ({"recompute": "moe"}, BOTH * 2),
    ({"rows_again": True, "recompute": "moe_act"}, [(True, False), (False, True)]),
    ({"align": 16, "probs_on_input": True}, BOTH),
    ({"probs": None, "wanted": ("rows", "fc1", "fc2")}, BOTH),
    ({"kind": "quick_geglu", "offset": 1.0, "clamp": 2.0, "round_before_probs": True}, BOTH),
    ({"wanted": ()}, [(True, False)]),
    ({"wanted": ("probs",)}, [(True, False)]),
    ({"wanted": ("fc1",)}, [(True, False)]),
    ({"wanted": ("fc2",)}, BOTH),
    ({"fp8_input_store": True}, []),
    ({"delayed": True}, []),
    ({"recipe": Recipe("current")}, []),
    ({"recipe": replace(BLOCK, backward_override="high_precision")}, []),
    ({"recipe": None}, []),
]


@pytest.mark.parametrize(("settings", "forms"), SETTINGS, ids=str)
def test_quantising_the_activation_where_it_is_computed_changes_no_bit(settings, forms, monkeypatch):
    assert agree(monkeypatch, **settings) == forms


@pytest.mark.parametrize("columns", [False, True])
def test_codes_of_other_rows_are_found(columns, monkeypatch):
    """In the forward, and in the backward that makes them again."""

    def with_other_probs(rows: Any, recipe: Any, splits: Any, rowwise: bool, columnwise: bool, **options: Any) -> Any:
        if columnwise == columns:
            rows = replace(rows, probs=rows.probs.roll(1))
        return quantised(rows, recipe, splits, rowwise, columnwise, **options)

    with pytest.raises(AssertionError):
        agree(monkeypatch, with_other_probs, recompute="moe_act")


def test_tensors_that_a_backward_saves_are_read_once(monkeypatch):
    as_on_a_hopper(monkeypatch)
    for recompute in (None, "moe_act"):
        read: list[int] = []
        saved: list[Tensor] = []

        def pack(x: Tensor, saved: list[Tensor] = saved) -> int:
            saved.append(x)
            return len(saved) - 1

        def unpack(i: int, saved: list[Tensor] = saved, read: list[int] = read) -> Tensor:
            read.append(i)
            return saved[i]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            results(recompute=recompute)
        assert read and len(set(read)) == len(read)
        shapes = [tuple(x.shape) for x in saved if x.dtype == torch.bfloat16]
        assert (ROWS, WIDTH) not in shapes, "the activation is kept"
