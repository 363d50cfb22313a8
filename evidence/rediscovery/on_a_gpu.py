"""Judge the installed Transformer Engine by the checks that need a GPU, and keep what they find.

PYTHONPATH=.:te/site python -m evidence.rediscovery.on_a_gpu evidence/rediscovery/on_a_gpu.json
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from evidence.environments import ROOT, Unavailable
from evidence.rediscovery.rows import ROWS

SECONDS = 90  # of a check
KEPT = Path(__file__).with_name("on_a_gpu.json")


def finding_of(done: "subprocess.CompletedProcess[str]") -> str:
    """What a check's process found; "" if nothing.

    Raises:
        Unavailable: it did not run.
    """
    if done.returncode < 0:
        return f"the process ends by signal {-done.returncode}"
    line = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not line.startswith("FOUND"):
        raise Unavailable((done.stderr.splitlines() or ["no error"])[-1])
    return line.removeprefix("FOUND").strip()


def kept(release: str, name: str) -> str:
    """What a check on a GPU found in that release.

    Raises:
        Unavailable: no run of it is kept, or it did not run.
    """
    result = _runs(KEPT).get(release, {}).get("checks", {}).get(name)
    if result is None:
        raise Unavailable(f"no run of {release} on a GPU is kept")
    if "why" in result:
        raise Unavailable(f"the check does not run on {release}: {result['why']}")
    return str(result["found"])


def devices() -> str:
    """Where the kept runs ran."""
    return "; ".join(
        dict.fromkeys(f"{run_record['device']}, torch {run_record['torch']}" for run_record in _runs(KEPT).values())
    )


def _runs(path: Path) -> dict[str, Any]:
    """By release: the device, and what each check found."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def judge(path: Path, release: str, checks: Sequence[str]) -> None:
    """Run these checks, each in a process of its own, and add what they find to the file."""
    results: dict[str, dict[str, str]] = {}
    for check in checks:
        command = [sys.executable, "-m", "evidence.rediscovery.checks_gpu", check]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
            results[check] = {"found": finding_of(done)}
        except (Unavailable, subprocess.TimeoutExpired) as why:
            results[check] = {"why": str(why)}
        print(release, check, results[check], flush=True)
        run = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": results}
        path.write_text(json.dumps(_runs(path) | {release: run}, indent=1) + "\n")


def main() -> int:
    """Judge the installed package."""
    judge(Path(sys.argv[1]), version("transformer-engine"), [str(row.check) for row in ROWS if row.on_a_gpu])
    return 0


if __name__ == "__main__":
    sys.exit(main())
