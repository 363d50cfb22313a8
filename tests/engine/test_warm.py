"""What Triton does once is done once for all processes, and never ends one."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.engine.child.warm import warm_up


class FakeTriton:
    """A Triton that counts what it is asked for."""

    def __init__(self, interpret: bool = False, broken: bool = False) -> None:
        self.hashed = self.launched = 0
        self.broken = broken
        self.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=interpret))
        self.runtime = SimpleNamespace(cache=SimpleNamespace(triton_key=self._hash))

    def _hash(self) -> None:
        self.hashed += 1

    def jit(self, function: Any) -> Any:
        def launch() -> None:
            self.launched += 1
            if self.broken:
                raise RuntimeError("no C compiler")

        return {(1,): launch}


@pytest.mark.parametrize("broken", (False, True))
def test_each_process_hashes_and_one_launches(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Also where the launch fails: the implementation's first kernel reports that."""
    triton = FakeTriton(broken=broken)
    monkeypatch.setitem(sys.modules, "triton", triton)  # type: ignore[arg-type]
    warm_up(str(tmp_path))
    warm_up(str(tmp_path))
    assert (triton.hashed, triton.launched) == (2, 1)


def test_an_interpreter_needs_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = FakeTriton(interpret=True)
    monkeypatch.setitem(sys.modules, "triton", triton)  # type: ignore[arg-type]
    warm_up(str(tmp_path))
    assert (triton.hashed, triton.launched) == (0, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gpus", (0, 1))
def test_children_are_forked_with_torchs_compiler_where_there_is_a_gpu(gpus: int) -> None:
    """Each child would take a second to load it."""
    code = f"import torch, sys; torch.cuda._device_count_nvml = lambda: {gpus}; "
    code += "import conformance.engine.child.compilers; print('torch._dynamo' in sys.modules)"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [str(bool(gpus))]
