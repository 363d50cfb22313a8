"""What decides which modules a child imports is the same in every thread, and gone afterwards."""

import os
import threading
import time

from conformance.engine.child.environment import same_modules


def test_threads_that_start_children_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    environments = []

    def start() -> None:
        with same_modules():
            environments.append(os.environ["PYTHONSAFEPATH"])
            time.sleep(0.01)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert environments == ["1"] * 4
    assert os.environ["PYTHONPATH"] == "before" and "PYTHONSAFEPATH" not in os.environ
