"""Run before any test module: without a GPU, Triton's interpreter is chosen before its import."""

import pytest
import torch

import moe_fast as moe_fast
from conformance.engine.child import interpreting

interpreting.install()
torch.set_num_threads(1)  # small tensors are quicker without threads to wait for

LONGEST = ("mutants", "report", "engine", "judge", "experts", "honest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders with the longest tests first, so that no worker ends with one of them alone."""
    order = {folder: place for place, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(LONGEST)))
