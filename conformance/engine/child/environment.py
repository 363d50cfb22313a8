"""The search path of the process from which children fork: the one of this program.

Multiprocessing starts that process as `python -c`, which looks for modules in the working directory
first. So it starts with the program's `sys.path` in its environment. The first module that it
imports is this one, which restores the environment.
"""

import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator

KEPT = "MOE_CONFORMANCE_ENVIRONMENT"  # the program's values of the variables below


_one_at_a_time = threading.Lock()  # a second thread would save the first thread's values


@contextlib.contextmanager
def same_modules() -> Iterator[None]:
    """Let a process that starts inside the block import the modules that this one would import."""
    with _one_at_a_time:
        folders = [str(folder) or os.getcwd() for folder in sys.path]
        changed = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)}
        earlier_values = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed | {KEPT: json.dumps(earlier_values)})
        try:
            yield
        finally:
            os.environ.pop(KEPT, None)
            _restore(earlier_values)


def _restore(earlier_values: dict[str, str | None]) -> None:
    for name, value in earlier_values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


if KEPT in os.environ:  # this process is the server
    _restore(json.loads(os.environ.pop(KEPT)))
    gc.disable()  # until `frozen` runs: a collection walks all objects that the import of torch has made
