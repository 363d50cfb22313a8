"""One process group, and a clean state for every claim."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def groups():
    from evidence.megatron_claims.router import one_rank

    with one_rank() as collection:
        yield collection


@pytest.fixture(autouse=True)
def clean():
    """Every test has its own random numbers, no replay objects and no loss scale of another's."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from evidence.megatron_claims.router import moe_utils

    torch.manual_seed(0)
    RouterReplay.clear_global_router_replay_instances()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
