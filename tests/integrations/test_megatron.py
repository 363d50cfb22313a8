"""moe_fast within Megatron-Core's own MoELayer."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("megatron.core")
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.megatron_step import update
from moe_fast.integrations import megatron as integration
from moe_fast.integrations import megatron_experts
from tests.common.fast import interpreted, record_reads

pytestmark = [interpreted, pytest.mark.usefixtures("megatron_world")]
HIDDEN, EXPERTS = 16, 4
GATED = {"gated_linear_unit": True, "activation_func": functional.silu}
CONFIGURATIONS = {
    "balanced": GATED | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "in groups, with a bias of experts and shared experts": GATED
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2}
    | {"moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 8},
    "clamped": {"gated_linear_unit": True, "activation_func": quick_gelu}
    | {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "not gated": {"activation_func": functional.gelu, "moe_router_pre_softmax": True},
    "of one expert, weighted before": GATED
    | {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "that recomputes activations": GATED
    | {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # where the gating puts its weight
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # without Transformer Engine 0.16 has none
    megatron_experts.warn_once.cache_clear()


@pytest.fixture
def installed(on_a_cpu):
    integration.install()
    yield
    integration.uninstall()


def layer_of(fused: bool, **settings):
    """Megatron's layer, with its fused options or without them."""
    torch.manual_seed(0)
    options = {"moe_permute_fusion": fused, "moe_router_fusion": fused, "moe_grouped_gemm": fused} | settings
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 8, "num_moe_experts": EXPERTS}
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, init_method_std=0.3, use_cpu_initialization=True,
        bias_activation_fusion=False, moe_token_dispatcher_type="allgather",
        **sizes | {"moe_router_topk": 2, "add_bias_linear": False} | options,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=fused)
    layer = spec.module(config, submodules=spec.submodules) if hasattr(spec, "module") else spec(config=config)
    layer.set_layer_number(1)
    return layer.train()


def number(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def losses_of(layer) -> list[Tensor]:
    """The losses of some steps, and the gradients of the last."""
    x, target = number(6, 2, HIDDEN, seed=1).requires_grad_(), number(6, 2, HIDDEN, seed=2)
    losses = []
    for _ in range(4):
        layer.zero_grad()
        x.grad = None
        loss = (layer(x)[0] - target).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        update(layer)
    return [torch.stack(losses), *gradients]


def assert_equal_but_rounding(results: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_layer_trains_as_without_moe_fast(name, recwarn):
    settings = CONFIGURATIONS[name]
    expected = losses_of(layer_of(False, **settings))
    integration.install()
    try:
        layer = layer_of(True, **settings)
        assert isinstance(layer.experts, integration.GroupedExperts)
        assert_equal_but_rounding(losses_of(layer), expected)
    finally:
        integration.uninstall()
    assert expected[0][-1] < expected[0][0]
    assert not [x for x in recwarn if "moe_fast" in str(x.message)]


def test_biases_of_experts_are_those_of_megatron(installed):
    """Without gradients: in 0.16 SequentialMLP with biases raises in place of computing them."""
    layers = [layer_of(fused, **GATED, add_bias_linear=True) for fused in (True, False)]
    with torch.no_grad():
        for layer in layers:
            for seed, parameter in enumerate(layer.parameters()):
                parameter.copy_(number(*parameter.shape, seed=seed))
        ours, theirs = (layer(number(6, 2, HIDDEN, seed=1))[0] for layer in layers)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "owner, name",
    [
        (integration.shim, "moe_permute"),
        (moe_utils, "fused_unpermute"),
        (megatron_experts, "grouped_mlp"),
        (moe_utils, "fused_topk_with_score_function"),
        (moe_utils, "fused_compute_score_for_moe_aux_loss"),
        (moe_utils, "fused_moe_aux_loss"),
    ],
)
def test_a_step_calls_moe_fast(owner, name, installed, monkeypatch):
    called, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: called.append(name) or function(*a, **k))
    losses_of(layer_of(True, **CONFIGURATIONS["balanced"]))
    assert called


def test_the_block_of_the_page_installs_moe_fast():
    page = (Path(__file__).parents[2] / "docs" / "use-in-training.md").read_text()
    block = re.search(r"\n## Megatron-Core\n.*?```python\n(.*?)```", page, re.DOTALL)
    try:
        exec(block.group(1), {})
        assert type(layer_of(True, **GATED).experts) is integration.GroupedExperts
    finally:
        integration.uninstall()


def test_parts_are_replaced_until_they_are_put_back():
    missing = object()
    before = [getattr(part.owner, part.name, missing) for part in integration.PARTS]
    integration.install()
    integration.install()
    replaced = [getattr(part.owner, part.name, missing) is part.replacement for part in integration.PARTS]
    integration.uninstall()
    after = [getattr(part.owner, part.name, missing) for part in integration.PARTS]
    assert all(is_ours or not part.check() for is_ours, part in zip(replaced, integration.PARTS, strict=True))
    assert sum(replaced) >= len(integration.PARTS) - 3 and after == before


@pytest.mark.parametrize("part", [part for part in integration.PARTS if part.without], ids=str)
def test_a_part_that_a_release_lacks_stays_and_one_warning_says_what_is_lost(part, monkeypatch):
    lacking = part._replace(check=lambda: False)
    monkeypatch.setattr(integration, "PARTS", (lacking,))
    before = getattr(part.owner, part.name, None)
    with pytest.warns(UserWarning, match=f"another {part}: {part.without}"):
        integration.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.install()
    assert getattr(part.owner, part.name, None) is before and not integration._replaced


def test_a_release_without_a_function_or_with_another_spec_is_recognised(monkeypatch):
    monkeypatch.delattr(moe_utils, "permute")
    monkeypatch.setattr(integration, "_local_experts", lambda self, grouped: (torch.nn.Linear, None))
    by_name = {part.name: part for part in integration.PARTS}
    assert not by_name["fused_permute"].check() and not by_name["grouped_mlp_modules"].check()


def test_an_option_that_moe_fast_lacks_runs_in_megatron_after_one_warning(installed):
    expected = losses_of(layer_of(False, activation_func=torch.tanh))
    with pytest.warns(UserWarning, match="which lack the activation") as caught:
        assert_equal_but_rounding(losses_of(layer_of(True, activation_func=torch.tanh)), expected)
    assert len([x for x in caught if "moe_fast" in str(x.message)]) == 1


def test_an_argument_that_moe_fast_lacks_runs_in_megatron_after_one_warning(installed):
    logits = number(5, EXPERTS, seed=3)
    expected = moe_utils.topk_routing_with_score_function(logits, 2)
    settings = dict.fromkeys(("num_groups", "group_topk", "scaling_factor", "expert_bias", "router_replay"))
    with pytest.warns(UserWarning, match="unexpected keyword argument 'router_replay'") as caught:
        for _ in range(2):
            routed = moe_utils.fused_topk_with_score_function(
                logits, 2, use_pre_softmax=False, score_function="softmax", **settings
            )
    assert len(caught) == 1
    assert all(torch.equal(x, y) for x, y in zip(routed, expected, strict=True))


def test_weights_of_all_experts_are_one_tensor_that_products_read_in_place(installed, monkeypatch):
    passed, product = [], megatron_experts.grouped_mlp

    def grouped_mlp(rows, counts, *weights, **settings):
        passed.append([x.data_ptr() for x in weights])
        return product(rows, counts, *weights, **settings)

    monkeypatch.setattr(megatron_experts, "grouped_mlp", grouped_mlp)
    layer = layer_of(True, **GATED).bfloat16().float()
    layer(number(6, 2, HIDDEN, seed=1))
    first = layer.experts.local_experts[0]
    assert passed == [[first.linear_fc1.weight.data_ptr(), first.linear_fc2.weight.data_ptr()]]


def test_weights_that_lie_apart_are_copied_and_train_the_same(installed):
    layer, apart = (layer_of(True, **GATED) for _ in range(2))
    for parameter in apart.parameters():
        parameter.data = parameter.data.clone()
    assert all(torch.equal(x, y) for x, y in zip(losses_of(apart), losses_of(layer), strict=True))


def test_hooks_of_a_linear_layer_run_before_its_weight_is_read(installed):
    layer = layer_of(True, **GATED)
    linear = layer.experts.local_experts[1].linear_fc1
    expected = layer(number(6, 2, HIDDEN, seed=1))[0]
    weight = linear.weight.detach().clone()
    linear.weight.data.zero_()

    def gather(module, _):
        module.weight.data.copy_(weight)

    linear.register_forward_pre_hook(gather)
    assert torch.equal(layer(number(6, 2, HIDDEN, seed=1))[0], expected)


def test_the_host_does_not_wait_for_the_experts(installed, monkeypatch):
    experts = layer_of(True, **GATED).experts
    rows, counts, probs = number(6, HIDDEN, seed=1), torch.tensor([1, 0, 3, 2]), number(6, seed=2).abs()
    experts(rows, counts, probs)
    reads = record_reads(monkeypatch)
    experts(rows, counts, probs)[0].sum().backward()
    assert reads == []


def test_checkpoints_are_those_of_sequential_experts(installed):
    ours, theirs = layer_of(True, **GATED), layer_of(False, **GATED)
    assert type(theirs.experts) is SequentialMLP
    state, expected = ({name: x for name, x in layer.state_dict().items() if x is not None} for layer in (ours, theirs))
    assert state.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in state.items())
    shards, expected = (layer.sharded_state_dict() for layer in (ours, theirs))
    assert shards.keys() == expected.keys()
    assert all(x.key == expected[name].key for name, x in shards.items())
