"""A run on a cluster has the verdict of one machine, also when a worker is lost in the middle."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from conformance.engine.options import Options
from conformance.engine.run import cluster
from conformance.engine.run.cluster import Answer, command, judge_on, run_shard, workers_of
from conformance.engine.run.session import judge
from conformance.interface import UsageError

DEFECT = "conformance.mutants.planted:P21.moe_ref.permutation"
WORKERS = 2


def options(folder: Path, **settings) -> Options:
    return Options(DEFECT, profile="smoke", device="cpu", jobs=1, corpus=str(folder), function="permute", **settings)


def losing_one(mark: Path) -> Callable[..., Answer]:
    """`run_shard`, but the first worker that calls it is lost while its shard runs."""

    def run(*arguments: Any) -> Answer:
        with contextlib.suppress(FileExistsError):
            mark.touch(exist_ok=False)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return run_shard(*arguments)

    return run


def test_two_workers_of_which_one_is_lost_give_the_verdict_of_one_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_cpus=WORKERS))
    monkeypatch.setattr(cluster, "SHARDS", 1)
    monkeypatch.setattr(cluster, "run_shard", losing_one(tmp_path / "lost"))
    printed: list[str] = []
    spread = judge_on(options(tmp_path / "spread"), "local", printed.append)
    on_one_machine = judge(options(tmp_path / "alone"))
    assert (tmp_path / "lost").exists()
    assert printed[0] == f"{WORKERS} shards on {WORKERS} workers" and len(printed) == 1 + WORKERS
    for name in ("verdict", "exit_code", "cases", "problems"):
        assert getattr(spread, name) == getattr(on_one_machine, name), name
    assert spread.verdict == "NOT CONFORMANT"
    assert spread.functions["permute"].counts == on_one_machine.functions["permute"].counts
    assert {x["id"] for x in spread.failures} >= {x["id"] for x in on_one_machine.failures}
    assert {path.stem for path in (tmp_path / "spread").glob("*.json")} >= {x["id"] for x in spread.failures}


def test_a_shard_gets_the_options_of_the_run(tmp_path):
    run_options = options(tmp_path, seed=3, where="align=16", seconds=9.0, report=["x.json"])
    wanted = ["--impl", DEFECT, "--where", "align=16", "--run-seed", "3", "--shard", "2/8"]
    arguments = command(run_options, "2/8")
    assert arguments[0] == "run" and "--report" not in arguments and "--seconds" not in arguments
    assert all(word in arguments for word in wanted)


@pytest.mark.parametrize("settings", [{"shard": "1/2"}, {"baseline": __file__}])
def test_options_of_one_machine_are_refused(tmp_path, settings):
    with pytest.raises(UsageError, match="neither --shard nor --baseline"):
        judge_on(options(tmp_path, **settings), "local")


def test_without_ray_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"moe-conformance\[cluster\]"):
        judge_on(options(tmp_path), "local")


@pytest.mark.parametrize(
    ("nodes", "settings", "workers"),
    [
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}], {"device": "auto"}, (8, {"num_gpus": 1})),
        ([{"CPU": 64.0}, {"CPU": 3.0}], {"device": "auto", "jobs": 0}, (33, {"num_cpus": 2})),
        ([{"CPU": 64.0, "GPU": 8.0}], {"device": "cpu", "jobs": 8}, (8, {"num_cpus": 8})),
        ([{"CPU": 1.0}, {"CPU": 3.0}], {"device": "cpu", "jobs": 4}, (1, {"num_cpus": 3})),
    ],
)
def test_a_worker_is_a_gpu_or_the_cores_of_a_run(nodes, settings, workers):
    assert workers_of(nodes, Options(DEFECT, **settings)) == workers


def test_a_gpu_that_no_node_has_is_an_error():
    with pytest.raises(UsageError, match="no node of the cluster has a GPU"):
        workers_of([{"CPU": 4.0}], Options(DEFECT, device="cuda"))
