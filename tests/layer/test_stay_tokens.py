"""Experts that gather their rows from tokens: the bits of the layer that writes the rows. Without a
Hopper the rows are written where a kernel would gather them; the kernel is judged on one.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_fast.experts import token_linear
from moe_fast.fused import token_mlp
from moe_fast.launch import operators
from moe_fast.layer import token_rows
from moe_fast.permutation.permute import move_to_rows
from moe_ref.config import LayerConfig, Recipe, RouterConfig
from moe_ref.config.state import new_state
from tests.common.activated import as_on_a_hopper
from tests.common.fast import interpreted, normal

pytestmark = interpreted
layers = importlib.import_module("moe_fast.layer.layer")
TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 13, 48, 32, 4, 2
BLOCK = Recipe("block")
PROBS = torch.zeros(TOKENS, EXPERTS)


LEAVES = ("x", "router.weight", "experts.linear_fc1.weight", "experts.linear_fc2.weight")


def results(
    recompute: Any = None, rows_in_loss: bool = False, grads: bool = True, expanded: bool = False,
    wanted: tuple[str, ...] = LEAVES, **options: Any,
) -> list[Tensor | None]:  # fmt: skip
    """The output, and the gradients of the input and the parameters.

    With `rows_in_loss` the loss also reads the experts' rows.
    """
    router = RouterConfig(num_experts=EXPERTS, topk=TOPK)
    config = LayerConfig(router=router, **({"recipe": BLOCK} | options))
    torch.manual_seed(0)
    layer = moe_fast.MoELayer(config, HIDDEN, WIDTH, init_std=0.5, dtype=torch.bfloat16)
    x = normal(TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16)
    leaves = {name: x if name == "x" else dict(layer.named_parameters())[name] for name in LEAVES}
    for name, leaf in leaves.items():
        leaf.requires_grad_(grads and name in wanted)
    state = new_state(router, x.device)
    with torch.set_grad_enabled(grads):
        out = moe_fast.moe_layer(x, layer.layer_parameters, config, state=state, recompute=recompute)
    if not grads:
        return [out.output]
    loss = out.output.float().sum() if expanded else (out.output * normal(TOKENS, HIDDEN, seed=2)).sum()
    loss = loss + (out.expert_rows.float() ** 2).sum() if rows_in_loss else loss
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.any() for name, leaf in leaves.items() if name in wanted)
    return [out.output, *(leaf.grad for leaf in leaves.values())]


def agree(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Both ways are taken, and have the same bits, also where no activation is written."""
    taken = []
    original = layers.rows_of_tokens
    monkeypatch.setattr(layers, "rows_of_tokens", lambda *a, **k: taken.append(a) or original(*a, **k))
    rows = results(**settings)
    assert not taken
    monkeypatch.setattr(token_rows, "can_gather", lambda tokens, recipe: True)
    monkeypatch.setattr(token_rows, "can_gather_activated", lambda *a: True)
    tokens = results(**settings)
    assert taken
    assert alike(rows, tokens)
    forms = as_on_a_hopper(monkeypatch)
    assert alike(rows, results(**settings))
    trained = settings.get("grads", True) and not settings.get("fp8_input_store")
    recomputed = "moe_act" in str(settings.get("recompute"))
    wants_weight = LEAVES[-1] in settings.get("wanted", LEAVES)
    assert (
        forms == ([(True, wants_weight and not recomputed)] + [(False, True)] * (recomputed and wants_weight)) * trained
    )


def alike(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"recompute": "permute"},
    {"recompute": ("permute", "moe_act")},
    {"recompute": "moe_act", "fp8_input_store": True},
    {"grads": False},
    {"grads": False, "kind": "geglu", "clamp": 2.0, "interleave": 2, "num_rows": 2 * TOKENS * TOPK},
    {"expanded": True, "num_rows": 2 * TOKENS * TOPK},
    {"num_rows": TOKENS, "kind": "squared_relu"},
    *({"wanted": (name,)} for name in LEAVES),
    {"wanted": LEAVES[:3], "recompute": "moe_act"},
    {"wanted": LEAVES[2:], "recompute": ("permute", "moe_act"), "rows_in_loss": True},
    {"recipe": None, "grads": False},
    {"recipe": None, "grads": False, "kind": "geglu", "clamp": 2.0, "num_rows": 2 * TOKENS * TOPK},
    {"recipe": None, "grads": False, "num_rows": TOKENS},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_experts_that_gather_tokens_have_the_bits_of_experts_that_read_rows(settings, monkeypatch):
    agree(monkeypatch, **settings)


@pytest.mark.parametrize("activation_written", [True, False])
def test_a_layer_that_gathers_tokens_is_recomputed_to_the_same_bits(activation_written, monkeypatch):
    monkeypatch.setattr(token_rows, "can_gather", lambda tokens, recipe: True)
    forms = [] if activation_written else as_on_a_hopper(monkeypatch)
    gradients = []
    for recompute in (None, "moe", ("permute", "moe_act")):
        torch.manual_seed(0)
        config = LayerConfig(router=RouterConfig(num_experts=EXPERTS, topk=TOPK), recipe=BLOCK)
        layer = moe_fast.MoELayer(config, HIDDEN, WIDTH, init_std=0.5, recompute=recompute, dtype=torch.bfloat16)
        x = normal(TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16).requires_grad_()
        layer(x).backward(normal(TOKENS, HIDDEN, seed=2, dtype=torch.bfloat16))
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(g.any() for g in gradients[0])
    assert all(torch.equal(a, b) for recomputed in gradients[1:] for a, b in zip(gradients[0], recomputed, strict=True))
    assert activation_written or forms == [(True, True)] * 3 + [(True, False), (False, True)]


def test_rows_of_other_tokens_are_found(monkeypatch):
    monkeypatch.setattr(
        token_mlp, "move_to_rows", lambda tokens, *arguments: move_to_rows(tokens.roll(1, 0), *arguments)
    )
    with pytest.raises(AssertionError):
        agree(monkeypatch, recipe=None, grads=False)


def test_a_gradient_of_other_tokens_is_found(monkeypatch):
    original = token_linear.move_to_rows

    def late(tokens: Tensor, *arguments: Any) -> Any:
        return original(tokens.roll(1, 0), *arguments)

    monkeypatch.setattr(token_linear, "move_to_rows", late)
    with pytest.raises(AssertionError):
        agree(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [{"align": 16}, {"probs_on_input": True}, {"recipe": Recipe("current")}, {"recipe": None}],
    ids=str,
)
def test_rows_are_written_where_no_kernel_can_gather_them(options, monkeypatch):
    monkeypatch.setattr(token_rows, "can_gather", lambda tokens, recipe: True)
    config = LayerConfig(router=RouterConfig(num_experts=EXPERTS, topk=TOPK), **({"recipe": BLOCK} | options))
    p = moe_fast.MoELayer(config, HIDDEN, WIDTH).layer_parameters
    tokens = normal(TOKENS, HIDDEN, seed=1)
    assert not token_rows.stay_tokens(tokens, PROBS, p, config, None)
    block_config = LayerConfig(router=config.router, recipe=BLOCK)
    assert token_rows.stay_tokens(tokens, PROBS, p, block_config, None)
    assert not any(token_rows.stay_tokens(tokens, PROBS, p, block_config, recompute) for recompute in ("moe", ("moe",)))
    monkeypatch.setattr(token_rows, "tracing", lambda: True)
    assert not operators.tracing() and not token_rows.stay_tokens(tokens, PROBS, p, block_config, None)
