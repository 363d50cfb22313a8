"""Worlds on GPUs: one process at a time, whose pools share its turn."""

import subprocess
import sys

import pytest

from conformance.engine.world import turn

TRY = """
import fcntl, sys
with open(sys.argv[1], "w") as other:
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""


@pytest.fixture
def free(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(turn, "PATH", str(tmp_path / "gpus.lock"))


def is_free_to_another_process() -> bool:
    code = subprocess.run([sys.executable, "-c", TRY, turn.PATH], check=False).returncode
    assert code in (0, 3)
    return code == 0


@pytest.mark.usefixtures("free")
def test_two_pools_of_a_process_share_the_turn_that_another_process_waits_for():
    assert is_free_to_another_process()
    turn.take()
    turn.take()  # does not wait
    assert not is_free_to_another_process()
    turn.give_back()
    assert not is_free_to_another_process()
    turn.give_back()
    assert is_free_to_another_process()
