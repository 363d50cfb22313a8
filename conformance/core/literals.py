"""Notation for golden values."""

from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.judge import Bounded, Exact, Expectation

Golden = dict[str, tuple[Problem, dict[str, Expectation]]]


def floats(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def ints(*values: int) -> Exact:
    return Exact(torch.tensor(values), "integers")


def flag(value: bool) -> Exact:
    return Exact(torch.tensor(value), "integers", flag=True)


def exactly(value: Tensor) -> Bounded:
    return Bounded(value.double(), torch.zeros_like(value.double()), torch.float32, torch.float32)
