"""The compiler's watch: kernels are named, and compiled by one process at a time."""

import multiprocessing
import time
from types import SimpleNamespace

from conformance.engine.child.compiling import Compiler

KERNEL = SimpleNamespace(name="kernel")


def _compile(folder: str, key: str, seconds: float, out) -> None:
    compiler = Compiler(folder)
    compiler._begin(key=key, fn=KERNEL)
    begun = time.monotonic()
    time.sleep(seconds)
    compiler._end(key=key, fn=KERNEL)
    out.put((begun, time.monotonic(), compiler.take(), compiler.take()))


def _both(folder, *keys: str) -> list[tuple]:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    processes = [context.Process(target=_compile, args=(str(folder), key, 0.3, out)) for key in keys]
    for process in processes:
        process.start()
    results = sorted(out.get(timeout=20) for _ in processes)
    for process in processes:
        process.join()
    return results


def test_the_second_process_waits_for_the_first(tmp_path):
    (_, ended, first, nothing), (begun, *_, second, _) = _both(tmp_path, "a", "a")
    assert begun >= ended
    assert first == second and len(first) == 1 and first[0].startswith("kernel ") and nothing == []


def test_other_kernels_are_compiled_at_the_same_time(tmp_path):
    (_, ended, first, _), (begun, *_, second, _) = _both(tmp_path, "a", "b")
    assert begun < ended
    assert first != second


def test_a_compilation_that_fails_lets_the_others_go_on(tmp_path):
    failing, other = Compiler(str(tmp_path)), Compiler(str(tmp_path))
    failing._begin(key="a", fn=KERNEL)
    assert failing.take() == []  # the case has ended, by an error
    other._begin(key="a", fn=KERNEL)
    other._end(key="a", fn=KERNEL)
    assert len(other.take()) == 1
