"""One run on the workers of a Ray cluster: each judges shards, and their reports are merged.

A worker is a GPU, or as many cores as a run on a CPU uses. A shard is a run of its own process. The
shards of a worker that is lost run again on others, so the verdict is that of one machine. The
package and the implementation must be at the same place on every node, as on a shared file system.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conformance.core.case import case_from
from conformance.engine.options import Options
from conformance.engine.run import corpus, interrupt
from conformance.engine.run.merging import merge
from conformance.engine.run.verdict import Verdict
from conformance.interface import UsageError

SHARDS = 2  # shards of each worker: a lost worker costs half of its work
RETRIES = 3  # attempts of a shard whose worker is lost
CORES = 2  # cores of a worker without a GPU
OWN = ("report", "shard", "seconds", "baseline", "jobs", "corpus")  # options that differ from shard to shard
PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Answer:
    """What a shard's process said."""

    host: str
    report: str  # JSON; empty: there is none
    error: str


def judge_on(options: Options, address: str, say: Any = print) -> Verdict:
    """Judge on the cluster at `address`; "local": a new one of this machine; "auto": one that runs
    here, or a new one.

    Raises:
        UsageError: no Ray, no cluster, options of one machine, or what a shard of the run raises.
    """
    if options.shard or options.baseline:
        raise UsageError("--cluster takes neither --shard nor --baseline: compare the reports afterwards")
    ray = _connected(address)
    try:
        return _judged(ray, options, say)
    finally:
        ray.shutdown()


def _judged(ray: Any, options: Options, say: Any) -> Verdict:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    started, workers, needs = time.monotonic(), *workers_of(nodes, options)
    remote = ray.remote(run_shard).options(max_retries=RETRIES, **needs)
    ends_at = time.time() + options.seconds if options.seconds else 0.0
    count = SHARDS * workers
    say(f"{count} shards on {workers} workers")
    waiting = {
        remote.remote(command(options, f"{i + 1}/{count}"), os.getcwd(), options.corpus, ends_at): f"{i + 1}/{count}"
        for i in range(count)
    }
    reports: list[dict[str, Any]] = []
    try:
        with interrupt.interruptible():
            while waiting:
                (done,), _ = ray.wait(list(waiting))
                reports.append(_report(ray, done, waiting[done]))
                say(_line(waiting.pop(done), reports[-1]))
    except KeyboardInterrupt:
        for task in waiting:
            ray.cancel(task, force=True)
        if not reports:
            raise
    verdict = merge(reports, interrupt.reason() if waiting else "")
    verdict.seconds = time.monotonic() - started
    _save(verdict.failures, Path(options.corpus))
    return verdict


def _connected(address: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("--cluster needs Ray: pip install 'moe-conformance[cluster]'") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError) as error:
        if address != "auto":
            raise UsageError(f"--cluster {address}: {error}") from None
        ray.init(address="local", include_dashboard=False, **quiet)
    return ray


def workers_of(nodes: list[dict[str, float]], options: Options) -> tuple[int, dict[str, float]]:
    """The workers that fit into nodes of these resources, and what each needs of its node."""
    gpus, cpus = ([int(node.get(name, 0)) for node in nodes] for name in ("GPU", "CPU"))
    if options.device == "cuda" and not any(gpus):
        raise UsageError("--device is cuda; no node of the cluster has a GPU")
    if options.device != "cpu" and any(gpus):
        return sum(gpus), {"num_gpus": 1}
    cores = min(options.jobs or CORES, max(cpus))
    return sum(cpu // cores for cpu in cpus), {"num_cpus": cores}


def command(options: Options, shard: str) -> list[str]:
    """The command-line arguments of one shard."""
    run_flags = [word for option in fields(options) if option.name not in OWN for word in _flag(option, options)]
    jobs = ["--jobs", str(options.jobs)] if options.jobs else []
    return ["run", *run_flags, *jobs, "--shard", shard]


def _flag(option: Any, options: Options) -> list[str]:
    value = getattr(options, option.name)
    return [option.metadata["flag"], str(value)] if value != option.default else []


def run_shard(arguments: list[str], folder: str, corpus_folder: str, ends_at: float) -> Answer:
    """Run a shard in a process that ends with this worker; no later than `ends_at`, if not 0.

    It has a copy of the corpus: what one shard finds is no case of another.
    """
    with tempfile.TemporaryDirectory(prefix="moe-conformance-shard-") as folder_of_shard:
        path, shard_corpus = Path(folder_of_shard) / "verdict.json", Path(folder_of_shard) / "corpus"
        if (Path(folder) / corpus_folder).is_dir():
            shutil.copytree(Path(folder) / corpus_folder, shard_corpus)
        if Path(corpus_folder) != corpus.DEFAULT:  # which is not read
            arguments = [*arguments, "--corpus", str(shard_corpus)]
        limit = ["--seconds", f"{max(ends_at - time.time(), 1.0):.1f}"] if ends_at else []
        program = [sys.executable, "-P", "-m", "conformance", *arguments, *limit, "--report", str(path)]
        done = subprocess.run(program, cwd=folder, preexec_fn=_end_with_parent, capture_output=True, text=True)
        return Answer(socket.gethostname(), path.read_text() if path.exists() else "", done.stderr.strip())


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)


def _report(ray: Any, task: Any, shard: str) -> dict[str, Any]:
    try:
        answer: Answer = ray.get(task)
    except ray.exceptions.RayError as error:
        raise UsageError(f"the shard {shard} was lost {RETRIES + 1} times: {error}") from None
    if not answer.report:
        raise UsageError(f"the shard {shard}, on {answer.host}: {answer.error.splitlines()[-1:]}")
    return dict(json.loads(answer.report), host=answer.host)


def _line(shard: str, report: dict[str, Any]) -> str:
    cases, failures = report["cases"], len(report["failures"])
    return f"shard {shard} · {cases} cases in {report['seconds']:.0f} s on {report['host']} · {failures} failures"


def _save(failures: Iterable[dict[str, Any]], folder: Path) -> None:
    """The failing cases of other nodes, saved as this node would have saved them."""
    for failure in failures:
        path = folder / f"{failure['id']}.json"
        finding = {name: failure[name] for name in ("status", "finding")}
        failure["file"] = str(path) if path.exists() else corpus.try_save(folder, case_from(failure["case"]), finding)
