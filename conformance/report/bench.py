"""Runs the benchmarks of a checkout, and compares their ratios with those of an earlier report.

The benchmarks are scripts of the repository and not part of the wheel: an installed package named
`benchmarks` would hide that folder of other projects.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from conformance.report.delivery import deliver
from conformance.report.ratios import Report, compared, read
from conformance.usage import UsageError, check_known, check_writable

NAMES = ("permutation", "router", "quantization", "experts", "fused", "layer", "growth")
OF_RANKS = ("dispatch", "layer_ranks")  # run over several GPUs; without a GPU over two processes
OWN_TOKENS = ("growth", *OF_RANKS)  # each of these has its own numbers of tokens
CHECKOUT = Path(__file__).parents[2]
DIFFERS = 1  # exit code
SAME = ("device", "tokens")  # fields that must be equal for a comparison


def bench(only: Sequence[str], report: str, baseline: str, root: Path = CHECKOUT) -> int:
    """Run the benchmarks: on a GPU all shapes are timed, without one tiny shapes are only checked.

    Args:
        only: names of benchmarks; empty: all, on one GPU those of one.
        report, baseline: JSON files to write and to compare with; empty: none.
        root: the checkout.

    Returns:
        0; 1 if a benchmark found a wrong result; 5 if a ratio fell by more than FALL.

    Raises:
        UsageError: no checkout, an unknown name, too few GPUs, a report or baseline that cannot be
            used here.
    """
    if not (root / "benchmarks").is_dir():
        raise UsageError(f"bench needs a checkout of the repository: {root} has no folder benchmarks")
    check_known("--only", only, NAMES + OF_RANKS)
    timed = torch.cuda.is_available()
    single_gpu = timed and torch.cuda.device_count() == 1
    for name in only:
        if single_gpu and name in OF_RANKS:
            raise UsageError(f"--only {name}: it needs two GPUs or more, and here is one")
    for flag, file in (("--report", report), ("--baseline", baseline)):
        if file and not timed:
            raise UsageError(f"{flag} {file}: bench needs a GPU to time anything; without one it checks tiny shapes")
    if report:
        check_writable(report)
    chosen = tuple(only) or (NAMES if single_gpu else NAMES + OF_RANKS)
    old = read(baseline, SAME, "bench") if baseline else None
    new = measured(chosen, root) if timed else None
    if new is None:
        print("no GPU: the benchmarks check tiny shapes, and time nothing", flush=True)
        return DIFFERS if [name for name in chosen if not _ran(name, ["--quick"], root)] else 0
    code = DIFFERS if {*new["benchmarks"]} != {*chosen} else compared(old, new, chosen, SAME) if old else 0
    return deliver(code, [report] if report else [], lambda path: json.dumps(new, indent=1) + "\n")


def measured(chosen: Sequence[str], root: Path) -> Report:
    """The figures of the benchmarks that ran; one with a wrong result has none."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    out: Report = {"device": torch.cuda.get_device_name(), "tokens": 8192, **versions, "benchmarks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            path = Path(folder) / f"{name}.json"
            tokens = [] if name in OWN_TOKENS else ["--tokens", str(out["tokens"])]
            if _ran(name, [*tokens, "--json", str(path)], root):
                out["benchmarks"][name] = json.loads(path.read_text())
    return out


def _ran(name: str, arguments: list[str], root: Path) -> bool:
    """Whether the benchmark ended well. Its output goes to that of the command."""
    print(f"{name}:", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=root, env=environment).returncode == 0
