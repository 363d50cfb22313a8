"""Training goes on from files with the same bits: parameters, moments and the router's state."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moe_fast import MoELayer, normalize_master_parameters
from moe_ref.config import LayerConfig, RouterConfig
from tests.common.fast import interpreted, normal

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
HIDDEN, EXPERTS = 4, 3
GROUPED = [f"experts.linear_fc{i}.{name}" for i in (1, 2) for name in ("weight", "bias")]
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
States = dict[str, dict[str, Tensor]]  # by kind and name


def trainer(packed: bool, seed: int = 0) -> tuple[MoELayer, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    router = RouterConfig(num_experts=EXPERTS, topk=2, score_function="sigmoid", expert_bias=True, aux_loss_coeff=0.5)
    module = MoELayer(LayerConfig(router=router), HIDDEN, 5, init_std=0.5, bias=True, packed=packed)
    return module, torch.optim.AdamW(module.parameters(), lr=0.125)


def train(module: MoELayer, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    module(normal(6, HIDDEN, seed=step)).square().sum().backward()
    optimizer.step()
    module.finish_batch()


def moments(module: MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by kind and parameter."""
    return {f"{kind}.{name}": optimizer.state[x][kind] for name, x in module.named_parameters() for kind in MOMENTS}


def in_layout(state: dict[str, Tensor], packed: bool) -> dict[str, Tensor]:
    """Moments of grouped parameters as one tensor, or as one per expert."""
    for name in (f"{kind}.{name}" for kind in MOMENTS[:2] for name in GROUPED):
        state = normalize_master_parameters(state, name=name, num_experts=EXPERTS, packed=packed)
    return state


def through_distributed(saved: States, folder: Path) -> States:
    """What comes back from a checkpoint of torch.distributed."""
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    loaded = {kind: {name: torch.zeros_like(x) for name, x in state.items()} for kind, state in saved.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def through_safetensors(saved: States, folder: Path) -> States:
    """What comes back from a file per kind; views of one weight are saved as copies."""
    safetensors = pytest.importorskip("safetensors.torch")
    for kind, state in saved.items():
        safetensors.save_file({name: x.clone() for name, x in state.items()}, folder / f"{kind}.safetensors")
    return {kind: safetensors.load_file(folder / f"{kind}.safetensors") for kind in saved}


@pytest.mark.parametrize(("packed", "through"), [(True, through_distributed), (False, through_safetensors)])
def test_training_goes_on_with_the_same_bits_from_a_file_in_either_layout(packed, through, tmp_path):
    module, optimizer = trainer(packed)
    for step in range(2):
        train(module, optimizer, step)
    saved = {"module": module.state_dict(), "optimizer": in_layout(moments(module, optimizer), packed)}
    assert any(name.endswith("weight2") for state in saved.values() for name in state) is not packed
    loaded = through(saved, tmp_path)

    second, resumed = trainer(not packed, seed=1)
    train(second, resumed, 9)  # other parameters, moments and expert bias, all overwritten
    second.load_state_dict(loaded["module"])
    named = in_layout(loaded["optimizer"], True)
    for name, x in moments(second, resumed).items():
        x.copy_(named.pop(name))
    assert not named
    for trained in ((module, optimizer), (second, resumed)):
        train(*trained, step=2)
    tensors = [[*m.parameters(), m.router.expert_bias, *moments(m, o).values()]
               for m, o in ((module, optimizer), (second, resumed))]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def test_moments_that_are_not_loaded_show():
    module, optimizer = trainer(True)
    train(module, optimizer, 0)
    second, resumed = trainer(True)
    second.load_state_dict(module.state_dict())
    for trained in ((module, optimizer), (second, resumed)):
        train(*trained, step=1)
    assert not torch.equal(module.experts.linear_fc1.weight, second.experts.linear_fc1.weight)
