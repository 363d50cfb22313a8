"""What tests of dispatchers in one process call with."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from conformance.core.ranks import RankContext


@pytest.fixture
def one_rank() -> Iterator[RankContext]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankContext(0, 1, dist.group.WORLD)
    dist.destroy_process_group()
