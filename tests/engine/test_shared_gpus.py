"""Ranks that share a GPU: their worlds, their transport, and their place in the verdict."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.core.ranks import RankContext
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.engine.world import rank, torchrun, worlds
from conformance.engine.world.rank import RankAddress, backend_of
from conformance.engine.world.worlds import SHARED_TIMES, Worlds
from conformance.families.dispatch.cases import DispatchCase
from conformance.interface import Implementation
from conformance.report import terminal
from conformance.report.files import markdown
from tests.engine.verdict_helpers import Book
from tests.engine.world_fixtures import ShiftCase

pytestmark = pytest.mark.usefixtures("with_shift")
THREE_GPUS = {"device": "cuda", "ranks": 3, "shared_ranks": 4, "functions": {}}


# ---- what a rank says of its world


@pytest.mark.parametrize(
    ("ranks", "gpus", "name", "sentence"),
    [
        (2, 0, "", "gloo between CPUs"),
        (3, 3, "", "nccl over 3 GPUs"),
        (2, 1, "", "gloo, ranks share one GPU"),
        (3, 2, "", "gloo, ranks share 2 GPUs"),
        (4, 4, "symmetric memory", "symmetric memory over 4 GPUs"),
        (4, 1, "cuda ipc", "cuda ipc, ranks share one GPU"),
    ],
)
def test_a_transport_is_named_with_the_devices(ranks, gpus, name, sentence):
    context = RankContext(0, ranks, gpus=gpus)
    assert (context.transport(name), context.shares_gpu) == (sentence, "share" in sentence)


def test_nccl_is_for_ranks_with_own_gpus():
    assert [backend_of("cuda", shared) for shared in (False, True)] == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"]
    assert backend_of("cpu", False) == "gloo"


def test_ranks_learn_each_others_gpus_by_host_and_uuid(monkeypatch):
    store = dist.HashStore()
    store.set("gpu 0", "elsewhere GPU-a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))
    gpus = rank._gpus_of_all(store, RankAddress(1, 2, "127.0.0.1", 0))
    assert gpus == ["elsewhere GPU-a", f"{socket.gethostname()} GPU-a"]


def test_an_implementation_may_name_its_transport_and_need_not():
    assert Implementation(SimpleNamespace()).transport("shift", None) == ""
    named = SimpleNamespace(transport=lambda function, group: f"{function} by {group}")
    assert Implementation(named).transport("shift", "mail") == "shift by mail"


def test_outcomes_of_several_ranks_name_the_transport_and_others_do_not():
    cases = [
        ShiftCase(function="shift", ranks=2, rows=1),
        ShiftCase(function="shift", ranks=1, rows=1),
        DispatchCase(function="hybridep_dispatch", counts=(1, 1)),
    ]
    with Pool(ChildOptions("tests.engine.world_fixtures:RIGHT", "cpu")) as pool:
        outcomes = [outcome for _, outcome in pool.run(cases[:2])]
    assert [(x.status, x.transport) for x in outcomes] == [("PASS", "gloo between CPUs"), ("PASS", "")]
    with Pool(ChildOptions("moe_fast.dispatch.symmetric", "cpu")) as pool:
        ((_, outcome),) = pool.run(cases[2:])
    assert (outcome.status, outcome.transport) == ("PASS", "mapped file between CPUs")


# ---- how many ranks there are


@contextmanager
def prepared(description: dict[str, Any]) -> Iterator[Worlds]:
    formed = Worlds(ChildOptions("", "cpu"), None, "")
    formed.prepare(description, 10.0)
    yield formed
    formed.close()


def limits(formed: Worlds) -> tuple[int, int]:
    return formed.max_ranks, formed.shared_ranks


def test_ranks_share_gpus_only_where_there_are_too_few_and_get_more_time(monkeypatch):
    seconds: dict[int, float] = {}

    class Seen:
        def __init__(self, start: Any, patience: Any) -> None:
            self.patience = patience

        def run(self, case: ShiftCase, is_alone: bool) -> Outcome:
            seconds[case.ranks] = self.patience.allowed("shift")
            return Outcome("PASS")

        def close(self) -> None:
            pass

    monkeypatch.setattr(worlds, "World", Seen)
    with prepared(THREE_GPUS) as formed:
        statuses = [formed.run(ShiftCase(function="shift", ranks=ranks)).status for ranks in (1, 3, 4, 5)]
    assert statuses == ["PASS", "PASS", "PASS", "NOT_RUN"]
    assert seconds == {1: 10.0, 3: 10.0, 4: SHARED_TIMES * 10.0}


@pytest.mark.parametrize(
    ("gpus", "local", "expected"), [(4, 4, (4, 0)), (2, 4, (2, 4)), (1, 2, (1, 4)), (2, 2, (4, 0)), (8, 4, (4, 0))]
)
def test_under_torchrun_ranks_share_gpus_where_a_host_has_fewer_than_ranks(gpus, local, expected, monkeypatch):
    here = torchrun.TorchrunRank(0, 4, "127.0.0.1", 1, 0, True, local)
    monkeypatch.setattr(worlds, "torchrun_rank", lambda: here)
    monkeypatch.setattr(worlds, "RemoteRanks", lambda here: SimpleNamespace(dismiss=lambda: None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with prepared(THREE_GPUS | {"ranks": min(4, gpus)}) as formed:
        assert limits(formed) == expected
    with prepared({"device": "cpu", "ranks": 4, "shared_ranks": 0}) as formed:
        assert limits(formed) == (4, 0)


def test_the_space_knows_how_many_ranks_share_gpus():
    space = Space.of(THREE_GPUS)
    assert (space.ranks, space.shared_ranks, space.most_ranks, Space().most_ranks) == (3, 4, 4, 4)


# ---- the verdict

SHARED = {"transport": "gloo, ranks share one GPU", "shares_gpu": True}
APART = {"transport": "nccl over 2 GPUs"}


def test_a_function_judged_only_with_a_shared_gpu_is_marked_and_one_with_own_gpus_is_not(tmp_path):
    book = Book(tmp_path).all_pass()
    book.section("fixed-alltoall_dispatch", "alltoall_dispatch", "PASS", "NOT_OFFERED", **SHARED)
    book.section("fixed-alltoall_combine", "alltoall_combine", "PASS", **SHARED)
    book.section("drawn-alltoall_combine-1", "alltoall_combine", "PASS", "PASS", **APART)
    verdict = book.verdict()
    dispatch, both, none = (verdict.functions[name] for name in ("alltoall_dispatch", "alltoall_combine", "permute"))
    assert (dispatch.transports, dispatch.note) == ({"gloo, ranks share one GPU": 1}, "judged on one GPU only")
    assert (both.transports, both.note) == ({"gloo, ranks share one GPU": 1, "nccl over 2 GPUs": 2}, "")
    assert (none.transports, none.note) == ({}, "")
    assert verdict.record()["functions"]["alltoall_dispatch"]["note"] == "judged on one GPU only"
    printed = terminal.lines(verdict)
    assert "between ranks: alltoall_dispatch: gloo, ranks share one GPU; judged on one GPU only" in printed
    assert "between ranks: alltoall_combine: gloo, ranks share one GPU; nccl over 2 GPUs" in printed
    assert "alltoall_dispatch conformant · 12 cases, judged on one GPU only" in [" ".join(x.split()) for x in printed]
    rows = [line for line in markdown(verdict).splitlines() if line.startswith("| `alltoall")]
    assert rows[0].endswith("| 1 gloo, ranks share one GPU |") and "| conformant, judged on one GPU only |" in rows[0]
    assert rows[1].endswith("| 1 gloo, ranks share one GPU, 2 nccl over 2 GPUs |") and "only" not in rows[1]
