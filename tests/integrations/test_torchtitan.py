"""moe_fast as the routed experts of torchtitan."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.common.fast import interpreted
from tests.layer.ranks import on_ranks

pytest.importorskip("torchtitan")
integration = importlib.import_module("moe_fast.integrations.torchtitan")
moe = importlib.import_module("torchtitan.models.common.moe")
gpt_oss = importlib.import_module("torchtitan.models.gpt_oss.moe")
dispatchers = importlib.import_module("torchtitan.models.common.token_dispatcher")
Linear = importlib.import_module("torchtitan.models.common.linear").Linear
FeedForward = importlib.import_module("torchtitan.models.common.feed_forward").FeedForward
ShardingConfig = importlib.import_module("torchtitan.protocols.sharding").ShardingConfig

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:.*CPU autocast:UserWarning")]
DIM, WIDTH, EXPERTS, TOPK = 16, 32, 4, 2  # torch's grouped product takes multiples of 16 bytes
ROUNDOFF = 2.0**-8  # of bfloat16, in which torchtitan's experts compute
STEPS, RATE = 6, 0.05  # steps so small that the roundings of a step do not grow in the next ones
PAGE = (Path(__file__).parents[2] / "docs" / "use-in-training.md").read_text()
KINDS = {"swiglu": moe.GroupedExperts, "gpt-oss": gpt_oss.GptOssGroupedExperts}
LOCAL, ALL_TO_ALL = dispatchers.LocalTokenDispatcher, dispatchers.AllToAllTokenDispatcher


def layer_config(kind: str = "swiglu", dispatcher=LOCAL, **options):
    """The configuration of a small MoE layer, its dispatcher with these options."""
    linear = {"bias": False, "param_init": {"weight": nn.init.zeros_}}
    experts = KINDS[kind].Config(dim=DIM, hidden_dim=WIDTH, num_experts=EXPERTS)
    return moe.MoE.Config(
        num_experts=EXPERTS,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=dispatcher.Config(num_experts=EXPERTS, top_k=TOPK, **options)
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS, top_k=TOPK, route_norm=True, route_scale=2.5,
            gate=Linear.Config(in_features=DIM, out_features=EXPERTS, **linear),
        ),
        shared_experts=FeedForward.Config(
            w1=Linear.Config(in_features=DIM, out_features=WIDTH, **linear),
            w2=Linear.Config(in_features=WIDTH, out_features=DIM, **linear),
            w3=Linear.Config(in_features=DIM, out_features=WIDTH, **linear),
        ),
    )  # fmt: skip


def converted(config):
    return integration.MoEFastConverter.Config().build().convert(config)


def pair(kind: str = "swiglu", dispatcher=LOCAL) -> tuple[nn.Module, nn.Module]:
    """torchtitan's layer with random weights, and the converted one with the same weights."""
    theirs, ours = layer_config(kind, dispatcher).build(), converted(layer_config(kind, dispatcher)).build()
    for number, parameter in enumerate(theirs.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    for layer in (theirs, ours):
        layer._init_self_buffers()
    ours.load_state_dict(theirs.state_dict())
    # torchtitan's experts of gpt-oss return bfloat16; its dispatcher takes only the tokens' dtype
    theirs.routed_experts.inner_experts.register_forward_hook(lambda _, inputs, rows: rows.type_as(inputs[0]))
    return theirs, ours


def draw(seed: int) -> Tensor:
    return torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(seed))


def losses(layer: nn.Module) -> list[float]:
    """The losses of a few steps of training on fixed targets."""
    optimizer, course = torch.optim.SGD(layer.parameters(), lr=RATE), []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(layer(draw(1)), draw(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        course.append(float(loss.detach()))
    return course


def difference(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two losses of a step."""
    return max(abs(x - y) / y for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dispatcher", [LOCAL, ALL_TO_ALL], ids=["local", "alltoall"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_layer_trains_with_the_same_losses(kind, dispatcher):
    theirs, ours = (losses(layer) for layer in pair(kind, dispatcher))
    assert theirs[-1] < 0.7 * theirs[0]
    assert difference(ours, theirs) <= ROUNDOFF


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_gate_and_value_exchanged_does_not(kind):
    theirs, ours = pair(kind)
    experts = ours.routed_experts.inner_experts
    weight = experts.w13 if kind == "swiglu" else experts.mlp1_weight_EGD
    weight.data = weight.data.view(EXPERTS, WIDTH, 2, DIM).flip(2).reshape(weight.shape)
    assert difference(losses(ours), losses(theirs)) > 10 * ROUNDOFF


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_torchtitans_to_the_rounding_of_bfloat16(kind):
    results = []
    for layer in pair(kind):
        x = draw(1).requires_grad_()
        output = layer(x)
        output.backward(draw(3))
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        if "routed_experts.inner_experts.w13" in gradients:  # by its names in checkpoints
            w13 = gradients.pop("routed_experts.inner_experts.w13")
            gradients |= {f"routed_experts.inner_experts.w{i}_EFD": w13[:, :, i // 2] for i in (1, 3)}
        results.append({"output": output.detach(), "x": x.grad} | gradients)
    theirs, ours = results
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert float((ours[name] - expected).norm()) <= 2 * ROUNDOFF * float(expected.norm()), name


def test_checkpoints_and_initial_values_keep_their_names():
    theirs, ours = pair()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    config = layer_config()
    values = {"w1_EFD": 1.0, "w2_EDF": 2.0, "w3_EFD": 3.0}
    experts = converted(config).routed_experts.inner_experts
    experts.param_init = {name: lambda x, value=value: nn.init.constant_(x, value) for name, value in values.items()}
    experts.sharding_config = ShardingConfig(state_shardings=dict.fromkeys(values, "placement"))
    module = experts.build()
    module.init_states()
    assert {name: (float(x.min()), float(x.max())) for name, x in module.state_dict().items()} == {
        name: (value, value) for name, value in values.items()
    }
    assert module._sharding_config.state_shardings == {"w13": "placement", "w2_EDF": "placement"}


def test_what_is_not_covered_is_refused_by_name():
    class OtherExperts(moe.GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(moe.GroupedExperts.Config):
            pass

    config = layer_config()
    config.routed_experts.inner_experts = OtherExperts.Config(dim=DIM, hidden_dim=WIDTH, num_experts=EXPERTS)
    with pytest.raises(
        ValueError, match=r"routed_experts.inner_experts is a .*OtherExperts; it must be GroupedExperts"
    ):
        converted(config)
    with pytest.raises(ValueError, match="token_dispatcher is a TorchAO") as refused:
        converted(layer_config(dispatcher=dispatchers.TorchAOTokenDispatcher, pad_multiple=16))
    assert f"    ValueError: {refused.value}\n" in PAGE
    with pytest.raises(ValueError, match="GroupedExperts; it must be GroupedExperts or GptOssGroupedExperts"):
        converted(converted(layer_config()))
    with pytest.raises(ValueError, match=r"Linear.Config has no RoutedExperts that moe_fast could replace"):
        converted(Linear.Config(in_features=1, out_features=1, bias=False))


@pytest.mark.parametrize("kind", KINDS)
def test_checked_types_of_tensors_are_refused_by_name(kind, monkeypatch):
    experts = pair(kind)[1].routed_experts.inner_experts
    monkeypatch.setattr(integration, "is_type_checking", lambda: True)
    with pytest.raises(ValueError, match=r"debug.spmd_typechecking is True; it must be False: operators of moe_fast"):
        experts(draw(1)[0], torch.tensor([9, 0, 0, 0]))


def test_without_torchtitan_the_import_says_what_is_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "moe_fast.integrations.torchtitan")
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    with pytest.raises(ImportError, match=r"moe_fast.integrations.torchtitan needs torchtitan 0\.3: "):
        importlib.import_module("moe_fast.integrations.torchtitan")


def output_of(group, rank: int, state: dict[str, Tensor]) -> Tensor:
    """The output of a rank that has half of the experts, for its sequence."""
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
    config = converted(layer_config(dispatcher=ALL_TO_ALL))
    config.routed_experts.inner_experts.num_experts = EXPERTS // 2
    layer = config.build()
    layer._init_self_buffers()
    layer.tokens_per_expert_E = torch.zeros(EXPERTS)
    layer.expert_bias_E = torch.zeros(EXPERTS)
    share = {name: x.chunk(2)[rank] if ".inner_experts." in name else x for name, x in state.items()}
    layer.load_state_dict(share)
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    return layer(draw(1)[rank : rank + 1]).detach()


def test_over_ranks_the_experts_follow_torchtitans_exchange(tmp_path):
    _, ours = pair(dispatcher=ALL_TO_ALL)
    outputs = on_ranks(2, output_of, tmp_path, ours.state_dict())
    expected = ours(draw(1)).detach()
    assert float((torch.cat(outputs) - expected).norm()) <= ROUNDOFF * float(expected.norm())
