"""Hypothesis strategies for a project's own tests: cases of the suite, routing maps, logits.

They shrink as all strategies do: towards few tokens, few experts and plain settings.
"""

import random

import numpy as np
import torch
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import Collective
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.core.where import parsed
from conformance.interface import Implementation
from conformance.usage import UsageError, check_known

STEP = 1 / 8  # between logits: exact in every dtype down to E4M3, and ties are common


def cases(
    function: str, *, implementation: Implementation | None = None, where: str = "", device: str = "cpu"
) -> st.SearchStrategy[Case]:
    """Cases of `function` for one process, drawn as the gate draws them.

    Args:
        implementation: cases ask for no setting that it lacks; None: every setting.
        where: a predicate such as "dtype=bfloat16 and align in (16, 32)".
        device: cpu or cuda, where the cases will run.

    Raises:
        UsageError: an unknown function, one that ranks call together, or no predicate.
    """
    check_function(function)
    contract, predicate = CONTRACTS[function], parsed(where, "where")
    if problem := predicate.problem(contract):
        raise UsageError(f"where: {problem}")
    space = Space(device, ranks=1) if implementation is None else space_of(implementation, device)
    scope = Scope(contract, space)

    def moved(case: Case) -> Case:
        steered_case = predicate.steered(scope, case, random.Random(case.seed))
        return reject() if steered_case is None else steered_case

    return scope.drawn().map(moved)


def check_function(function: str) -> None:
    """Raise `UsageError` for an unknown function, or one that ranks call together."""
    check_known("function", [function], CONTRACTS)
    if isinstance(CONTRACTS[function], Collective):
        raise UsageError(f"function is {function!r}, which ranks call together; judge it by moe-conformance run")


def space_of(implementation: Implementation, device: str) -> Space:
    """The calls that the implementation accepts in this process."""
    functions = {
        name: {
            "declares": implementation.declares(name) if implementation.offers(name) else {},
            "without": implementation.lacks(name, dict.fromkeys(contract.optional)),
        }
        for name, contract in CONTRACTS.items()
    }
    return Space.of({"device": device, "functions": functions, "ranks": 1, "shared_ranks": 0})


def routing_maps(
    tokens: st.SearchStrategy[int] | int | None = None,
    experts: st.SearchStrategy[int] | int | None = None,
    topk: int | None = None,
) -> st.SearchStrategy[Tensor]:
    """Routing maps [T,E] bool: any, or with K experts for each token.

    Args:
        tokens, experts: T from 0 and E from 1, or strategies of them; None: up to 64 and 16.
        topk: K; E is then K at least. None: any number of experts, also none.
    """
    least = max(topk or 1, 1)
    rows, columns = _sizes(tokens, 0, 64), _sizes(experts, least, max(16, least))

    @st.composite
    def maps(draw: st.DrawFn) -> Tensor:
        shape = draw(rows), draw(columns)
        if topk is None:
            return torch.from_numpy(draw(arrays(np.bool_, shape)))
        chosen = st.lists(st.integers(0, shape[1] - 1), min_size=topk, max_size=topk, unique=True)
        out = torch.zeros(shape, dtype=torch.bool)
        for token in range(shape[0]):
            out[token, draw(chosen)] = True
        return out

    return maps()


def logits(
    tokens: st.SearchStrategy[int] | int | None = None,
    experts: st.SearchStrategy[int] | int | None = None,
    dtype: torch.dtype = torch.float32,
    most: int = 8,
) -> st.SearchStrategy[Tensor]:
    """Logits [T,E]: multiples of 1/8 within ±`most`, exact in every dtype; ties are common.

    Args:
        tokens, experts: as in `routing_maps`.
    """
    rows, columns, steps = _sizes(tokens, 0, 64), _sizes(experts, 1, 16), round(most / STEP)
    shapes = st.tuples(rows, columns)
    numbers = shapes.flatmap(lambda shape: arrays(np.int64, shape, elements=st.integers(-steps, steps)))
    return numbers.map(lambda eighths: (torch.from_numpy(eighths) * STEP).to(dtype))


def _sizes(sizes: st.SearchStrategy[int] | int | None, least: int, most: int) -> st.SearchStrategy[int]:
    if sizes is None:
        return st.integers(least, most)
    return st.just(sizes) if isinstance(sizes, int) else sizes
