"""Run before any test module: without a GPU, Triton's interpreter is chosen before its import."""

import gc
import os

import pytest
import torch

import fast_interpreter
import moe_fast as moe_fast

fast_interpreter.install()
torch.set_num_threads(1)  # small tensors are quicker without threads to wait for
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of commands that tests start

LONGEST = ("mutants", "report", "engine", "judge", "experts", "honest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders with the longest tests first, so that no worker ends with one of them alone."""
    order = {folder: position for position, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Collections of garbage walk what tests make: what is imported stays to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # as before, for what is done at the end of Python
