"""Test function of a world: `shift` returns the previous rank's tensor; and its failure modes."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.axes import size
from conformance.core.case import Case
from conformance.core.contract import Problem
from conformance.core.ranks import Collective
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload
from conformance.core.universal_laws import DETERMINISM, HISTORY
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from conformance.peers import reference_world


@dataclass(frozen=True, kw_only=True)
class ShiftCase(Case):
    ranks: int = size(at_least=1)
    rows: int = size("R", more=1)


class Shift(Collective[ShiftCase]):
    function, case_type = "shift", ShiftCase
    signature = Signature([Input("x", "RC", gradient=True)], [Output("out", "RC", of="x")])
    laws = {law.name: law for law in (HISTORY, DETERMINISM)}  # noqa: RUF012

    def ranks(self, case: ShiftCase) -> int:
        return case.ranks

    def calls(self, case: ShiftCase) -> list[Problem]:
        def drawn(name: str) -> list[Tensor]:
            return [payload(case.seed, f"{name} {r}", (case.rows, 3), "float32") for r in range(case.ranks)]

        if not case.grads:
            return [Problem("shift", {"x": x}) for x in drawn("x")]
        pairs = zip(drawn("x"), drawn("d_out"), strict=True)
        return [Problem("shift", {"x": x}, wanted=("x",), cotangents={"out": d_out}) for x, d_out in pairs]

    def right(self, case: ShiftCase, calls: list[Problem], declared: Mapping[str, Any]) -> list[dict[str, Expectation]]:
        out: list[dict[str, Expectation]] = [{"out": Exact(calls[r - 1].required["x"])} for r in range(case.ranks)]
        for r in range(case.ranks) if case.grads else ():
            out[r]["d_x"] = Exact(calls[(r + 1) % case.ranks].cotangents["out"])
        return out


def register() -> None:
    """Registers `shift` with the suite in this process."""
    ShiftCase.serves("shift")
    CONTRACTS["shift"] = Shift()


def forget() -> None:
    del Case.family["shift"], CONTRACTS["shift"]


if parent_process() is not None:  # in a rank
    register()


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any, step: int) -> Tensor:
        ctx.group, ctx.step = group, step
        all_of = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of, x.contiguous(), group=group)
        return all_of[(dist.get_rank(group) - step) % len(all_of)]

    @staticmethod
    def backward(ctx, d_out: Tensor):
        return _Shift.apply(d_out, ctx.group, -ctx.step), None, None


def shift(x: Tensor, *, group: Any) -> Tensor:
    return _Shift.apply(x, group, 1)


def _unless_rank_1(otherwise: Any) -> Any:
    def function(x: Tensor, *, group: Any) -> Tensor:
        return otherwise(x, group) if dist.get_rank(group) == 1 else shift(x, group=group)

    return SimpleNamespace(shift=function)


def _raise(x: Tensor, group: Any) -> Tensor:
    raise RuntimeError("no buffer")


RIGHT = SimpleNamespace(shift=shift)
RAISES = _unless_rank_1(_raise)
HANGS = _unless_rank_1(lambda x, group: time.sleep(1000))
DIES = _unless_rank_1(lambda x, group: os.abort())
DIES_WITH_THREE_ROWS = _unless_rank_1(lambda x, group: os.abort() if len(x) == 3 else shift(x, group=group))
ALONE = _unless_rank_1(lambda x, group: x)  # returns without joining the collective
WRONG = _unless_rank_1(lambda x, group: shift(x, group=group) + 1)


def _of_an_older_buffer() -> Any:
    """Rank 1 has two buffers, by turns: where the older call was longer, a row of it is left."""
    older: list[Tensor] = []

    def function(x: Tensor, group: Any) -> Tensor:
        out = shift(x, group=group)
        older.append(out)
        last = older[-3] if len(older) > 2 else out[:0]
        return torch.cat([out[:-1], last[-1:]]) if len(last) > len(out) > 0 else out

    return function


KEEPS = _unless_rank_1(_of_an_older_buffer())
DISAGREES = SimpleNamespace(
    shift=shift, supports=lambda function, group, **_: "no" if dist.get_rank(group) == 1 else None
)


# ---- differences between ranks


class OtherShift(Shift):
    """Another version of the suite: other inputs for the same case."""

    def calls(self, case: ShiftCase) -> list[Problem]:
        return super().calls(replace(case, seed=case.seed + 1))


OTHERWISE = SimpleNamespace(shift=lambda x, *, group, faster=False: shift(x, group=group))


def __getattr__(name: str) -> Any:
    """Failures on attribute access in a rank."""
    if name == "DIES_AT_ONCE":
        os.abort()
    if name == "OF_ANOTHER_SUITE":
        CONTRACTS["shift"] = OtherShift()
        return RIGHT
    raise AttributeError(name)


# ---- a dispatch that fails inside another function's case


def _dispatch_of_rank_1(otherwise: Any) -> Any:
    right = reference_world.collective("hybridep_dispatch")

    def dispatch(tokens: Tensor, routing_map: Tensor, *, group: Any, **settings: Any) -> Any:
        return otherwise() if dist.get_rank(group) == 1 else right(tokens, routing_map, group=group, **settings)

    return SimpleNamespace(hybridep_dispatch=dispatch, hybridep_combine=reference_world.collective("hybridep_combine"))


DISPATCH_DIES = _dispatch_of_rank_1(os.abort)
DISPATCH_HANGS = _dispatch_of_rank_1(lambda: time.sleep(1000))
