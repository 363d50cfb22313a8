"""The compiler's watch: kernels are named, and compiled by one process at a time."""

import multiprocessing
import sys
import time
from types import ModuleType, SimpleNamespace

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from conformance.engine.child.compiling import Compiler, hash_callees_first, kernels_of

KERNEL = SimpleNamespace(name="kernel")


def _compile(folder: str, key: str, during, out) -> None:
    compiler = Compiler(folder)
    compiler._begin(key=key, fn=KERNEL)
    begun = time.monotonic()
    during()
    ended = time.monotonic()
    compiler._end(key=key, fn=KERNEL)
    out.put((begun, ended, compiler.take(), compiler.take()))


CONTEXT = multiprocessing.get_context("fork")


def _both(folder, *keys: str, during) -> list[tuple]:
    out = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=_compile, args=(str(folder), key, during, out)) for key in keys]
    for process in processes:
        process.start()
    results = sorted(out.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    return results


def test_the_second_process_waits_for_the_first(tmp_path):
    (_, ended, first, nothing), (begun, *_, second, _) = _both(tmp_path, "a", "a", during=lambda: time.sleep(0.3))
    assert begun >= ended
    assert first == second and len(first) == 1 and first[0].startswith("kernel ") and nothing == []


def test_other_kernels_are_compiled_at_the_same_time(tmp_path):
    meeting = CONTEXT.Barrier(2, timeout=600)  # passed if both compile
    (_, _, first, _), (_, _, second, _) = _both(tmp_path, "a", "b", during=meeting.wait)
    assert first != second


def test_a_compilation_that_fails_lets_the_others_go_on(tmp_path):
    failing, second = Compiler(str(tmp_path)), Compiler(str(tmp_path))
    failing._begin(key="a", fn=KERNEL)
    assert failing.take() == []  # the case has ended, by an error
    second._begin(key="a", fn=KERNEL)
    second._end(key="a", fn=KERNEL)
    assert len(second.take()) == 1


class Function:
    """A kernel as Triton 3.6 hashes it: `constants` are known after the first use of the key."""

    def __init__(self, finder: type, callee: "Function | None" = None) -> None:
        self.finder, self.callee, self.constants = finder, callee, {}

    @property
    def cache_key(self) -> str:
        sources = self.finder()
        if self.callee:
            sources._update_hash(self.callee)
        self.constants = sources.constants | {"BLOCK": 4}
        return f"kernel {self.constants if not self.callee else sources.constants}"


def finder_of_triton() -> type:
    class Finder:
        def __init__(self) -> None:
            self.constants: dict[str, int] = {}

        def _update_hash(self, func: Function) -> None:
            self.constants.update(func.constants)
            assert func.cache_key

    return Finder


def keys_of_a_caller(finder: type) -> set[str]:
    """Its key in a process that meets the caller first, and in one that meets the callee first."""
    fresh, met = Function(finder), Function(finder)
    assert met.cache_key
    return {Function(finder, fresh).cache_key, Function(finder, met).cache_key}


def test_the_hash_of_a_kernel_does_not_depend_on_the_kernels_before_it():
    unpatched, finder = finder_of_triton(), finder_of_triton()
    for _ in range(2):  # a second time changes nothing
        hash_callees_first(finder)
    assert len(keys_of_a_caller(unpatched)) == 2
    assert len(keys_of_a_caller(finder)) == 1


def halved(x):
    return x / 2


def halving_kernel(x):
    halved(x)


def tuned_kernel(x):
    return x


def host_function(x):
    return halving_kernel(x)


def test_kernels_are_those_that_no_other_one_calls(monkeypatch):
    package, elsewhere = ModuleType("fused"), ModuleType("fused_by_others")
    for function in (halved, halving_kernel, tuned_kernel):
        monkeypatch.setattr(function, "__module__", "fused")
    tuned = Autotuner.__new__(Autotuner)
    tuned.fn = JITFunction(tuned_kernel)
    package.halved, package.halving_kernel = JITFunction(halved), JITFunction(halving_kernel)
    package.tuned, package.host_function = tuned, host_function
    elsewhere.kernel = package.halving_kernel  # imported from there
    monkeypatch.setitem(sys.modules, "fused", package)
    monkeypatch.setitem(sys.modules, "fused_by_others", elsewhere)
    assert kernels_of("fused") == ["halving_kernel", "tuned_kernel"]
    assert kernels_of("fused_by_others") == []


def test_a_triton_that_loads_its_front_end_late_is_watched_too(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.compiler.code_generator", raising=False)
    assert Compiler(str(tmp_path)).take() == []
