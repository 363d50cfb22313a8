"""Experts that recompute their rows in the backward pass instead of saving them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from moe_ref.config import Recipe
from tests.common.fast import interpreted, normal
from tests.layer.kept import alive_bytes

each_package = pytest.mark.parametrize("namespace", [moe_ref, pytest.param(moe_fast, marks=interpreted)])
COUNTS = (20, 0, 28)
ROWS, HIDDEN, WIDTH = sum(COUNTS), 16, 4


def experts(namespace: Any, rows: Tensor, leaves: list[Tensor], **settings: Any) -> Tensor:
    fc1, fc2, probs = leaves
    return namespace.grouped_mlp(rows, torch.tensor(COUNTS), fc1, fc2, probs=probs, **settings)


def drawn() -> list[Tensor]:
    """Rows, both weights and probs."""
    shapes = ((ROWS, HIDDEN), (3, 2 * WIDTH, HIDDEN), (3, HIDDEN, WIDTH), (ROWS,))
    return [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def gradients(namespace: Any, spoil: bool, make_rows: Any = None, **settings: Any) -> list[Tensor]:
    """With `spoil` the rows are NaN when the backward runs; `again` makes them of their values."""
    x, *leaves = drawn()
    rows = x * 1
    options_of_rows = {} if make_rows is None else {"rows_again": partial(make_rows, rows.detach().clone())}
    out = experts(namespace, rows, leaves, **settings, **options_of_rows)
    if spoil:
        rows.data.fill_(torch.nan)  # no change that autograd counts
    return list(torch.autograd.grad(out, [x, *leaves], normal(ROWS, HIDDEN, seed=9)))


OPTIONS = [{}, {"probs_on_input": True, "recompute": "moe_act"}, {"align": 16, "recipe": Recipe("current")}]


@each_package
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "probs on input", "padded codes"])
def test_the_backward_reads_rows_that_are_made_again_and_no_others(namespace, options):
    expected = gradients(namespace, False, **options)
    got = gradients(namespace, True, torch.clone, **options)
    assert all(x.any() and torch.equal(x, y) for x, y in zip(expected, got, strict=True))
    assert not torch.equal(gradients(namespace, True, torch.neg, **options)[1], expected[1])


@each_package
def test_rows_that_are_saved_are_read(namespace):
    assert any(x.isnan().any() for x in gradients(namespace, True))


@each_package
@pytest.mark.parametrize("options", [*OPTIONS[:1], OPTIONS[2]], ids=["plain", "padded codes"])
def test_neither_rows_nor_their_codes_are_kept(namespace, options):
    def saved(**options_of_rows: Any) -> int:
        x, *leaves = drawn()
        run = lambda: experts(namespace, x * 1, leaves, **options, **options_of_rows)  # noqa: E731
        run()  # the first call fills caches
        return alive_bytes(run, [x, *leaves], lambda: moe_fast.permute(torch.zeros(1, 1), torch.ones(1, 1) > 0))

    size = ROWS * HIDDEN * (1 if "recipe" in options else 4)
    assert saved(rows_again=lambda: drawn()[0].detach()) <= saved() - size


@each_package
@pytest.mark.parametrize(("settings", "expected"), [
    ({"rows_again": 1}, "rows_again is int; it must be a function without arguments, or None"),
    ({"rows_again": drawn, "recompute": "moe"}, "rows_again is given with recompute 'moe'"),
])  # fmt: skip
def test_illegal_calls_say_why(namespace, settings, expected):
    x, *leaves = drawn()
    with pytest.raises(ValueError, match=expected):
        experts(namespace, x, leaves, **settings)


@each_package
def test_experts_one_by_one_refuse_rows_of_all(namespace):
    x, *leaves = drawn()
    with pytest.raises(ValueError, match="rows_again is given"):
        namespace.sequential_mlp(x, torch.tensor(COUNTS), *leaves[:2], rows_again=drawn)
