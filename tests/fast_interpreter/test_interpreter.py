"""The faster interpreter gives the bits and the errors of Triton's own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction

import fast_interpreter
from fast_interpreter import probe
from tests.common.fast import interpreted

FOLDER = Path(__file__).parent

# A function that Triton's types need is not the one that the patches are for.
ANOTHER_TRITON = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
import fast_interpreter
from tests.fast_interpreter.kernels import arithmetic

unwrap_shape = tl.core._unwrap_shape
def another(shape):
    return unwrap_shape(shape)
tl.core._unwrap_shape = another
before = tl.core.tensor.__init__
active = fast_interpreter.install()
assert tl.core.tensor.__init__ is before
print(*(name for name, on in active.items() if on))
print(arithmetic(torch.float32, torch.int32))
print(fast_interpreter.sentence())
"""

needs_its_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.9."), reason="the faster interpreter is for Triton 3.9"
)


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=FOLDER.parents[1]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """The results of the same kernels without and with the patches."""
    return {kind: json.loads(_python("-m", "tests.fast_interpreter.kernels", kind)) for kind in ("plain", "quick")}


@interpreted
def test_an_interpreter_that_runs_no_kernel_is_said_where_kernels_need_it(monkeypatch):
    """As that of Triton 3.6 with numpy 2.5."""

    def run(*_: Any, **__: Any) -> None:
        raise TypeError("only 0-dimensional arrays can be converted")

    assert probe.broken() == ""
    monkeypatch.setattr(InterpretedFunction, "run", run)
    sentence = probe.broken()
    assert f"does not run with numpy {np.__version__}: TypeError: only 0-dimensional" in sentence
    monkeypatch.setattr(probe, "_of_users", list)
    assert probe.broken() == ""


@needs_its_triton
def test_every_patch_is_active(runs):
    assert set(runs["quick"]["active"]) == {patch.name for patch in fast_interpreter.PATCHES}
    assert all(runs["quick"]["active"].values())


def test_results_and_errors_are_the_same(runs):
    unpatched, quick = runs["plain"]["results"], runs["quick"]["results"]
    assert unpatched.keys() == quick.keys()
    assert {name: (unpatched[name], quick[name]) for name in unpatched if unpatched[name] != quick[name]} == {}
    assert runs["quick"]["stable"]


def test_most_kernels_run_and_bad_ones_raise(runs):
    results = runs["quick"]["results"]
    assert sum(len(x) == 64 for x in results.values()) > 500
    for name, error in {
        "bad_types_kernel": "IncompatibleTypeErrorImpl",
        "bad_pointers_kernel": "TypeError",
        "bad_sign_kernel": "ValueError",
        "bad_shapes_kernel": "ValueError",
        "bad_assert_kernel debug": "AssertionError",
        "bad_overflow_kernel debug": "AssertionError",
        "bad_assumption_kernel": "AssertionError",
    }.items():
        assert results[name].startswith("InterpreterError") and error in results[name], name
    assert "reads 4 addresses outside of every tensor" in results["outside"]
    assert results["outside of a kernel"].startswith("ValueError")


@needs_its_triton
def test_another_source_of_triton_runs_without_its_patches(runs):
    active, result, sentence = _python("-c", ANOTHER_TRITON).splitlines()
    assert active == "builder launches" and [*runs["quick"]["active"]] == ["types", "builder", "semantics", "launches"]
    assert result == runs["quick"]["results"]["arithmetic torch.float32 torch.int32"]
    assert sentence.endswith("types, semantics") and runs["quick"]["sentence"].endswith("faster parts")


def test_a_missing_function_has_no_digest():
    assert fast_interpreter.digest(["triton.language.core:tensor.missing"]) == ""
    assert fast_interpreter.digest(["triton.language.missing:tensor"]) == ""
    assert fast_interpreter.digest(["triton.language.core:dtype.is_block"]) != ""
