"""The working directory gives the implementation, and nothing of the suite."""

import os
import subprocess
import threading
import time
from pathlib import Path

from conformance.engine.child.environment import same_modules

KERNELS = """
import os, sys

import conformance, moe_ref

assert conformance.__file__.startswith({installed!r}) and moe_ref.__file__.startswith({installed!r})
assert os.environ["PYTHONPATH"] == {installed!r}
assert not set(os.environ) & {{"PYTHONSAFEPATH", "MOE_CONFORMANCE_ENVIRONMENT"}}
indices_to_multihot = moe_ref.indices_to_multihot
"""


def test_folders_named_like_the_packages_are_not_imported(installed, tmp_path):
    for name in ("conformance", "moe_ref", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    (tmp_path / "my_kernels.py").write_text(KERNELS.format(installed=str(installed)))
    done = judged(installed, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CONFORMANT   1 function" in done.stdout
    assert "wrong package" not in done.stdout + done.stderr


def judged(installed: Path, place: Path) -> subprocess.CompletedProcess:
    command = [str(installed / "bin" / "moe-conformance"), "run", "--impl", "my_kernels", "--profile", "smoke"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        command,
        cwd=place,
        env=environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_threads_that_start_children_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    inside = []

    def start() -> None:
        with same_modules():
            inside.append(os.environ["PYTHONSAFEPATH"])
            time.sleep(0.01)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == ["1"] * 4
    assert os.environ["PYTHONPATH"] == "before" and "PYTHONSAFEPATH" not in os.environ
