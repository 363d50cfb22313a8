"""The working directory gives the implementation, and nothing of the suite."""

import os
import subprocess
from pathlib import Path

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
