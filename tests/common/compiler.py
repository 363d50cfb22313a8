"""A process in which Triton compiles for a GPU that need not be there; in this one it interprets.

    python -m tests.common.compiler

reads pickled calls, (module, function, arguments, settings), and answers each with (result, error).
"""

import atexit
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def compiled(function: Any, *arguments: Any, **settings: Any) -> Any:
    """`function(*arguments, **settings)` of that process, which imports torch and Triton once.

    Raises:
        AssertionError: with the traceback of what the function raised.
    """
    process = _process()
    pickle.dump((function.__module__, function.__qualname__, arguments, settings), process.stdin)
    process.stdin.flush()
    result, error = pickle.load(process.stdout)
    assert not error, error
    return result


@functools.cache
def _process() -> Any:
    folder = tempfile.TemporaryDirectory(prefix="compiled-kernels-")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder.name, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.common.compiler"],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    return process


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed is no answer
    while True:
        try:
            module, function, arguments, settings = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (getattr(importlib.import_module(module), function)(*arguments, **settings), "")
        except Exception:
            answer = (None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
