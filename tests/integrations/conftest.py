"""Megatron-Core's process groups, for the tests of a module."""

from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture(scope="module")
def megatron_world() -> Iterator[None]:
    """A world of this process alone."""
    from megatron.core import parallel_state

    from benchmarks.megatron_step import start

    start()
    yield
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
