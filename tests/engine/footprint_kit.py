"""A small implementation of three functions, written into a folder, and changed there."""

import importlib
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from conformance.engine.child import server
from conformance.engine.child.processes import plain_main
from conformance.engine.footprint.footprint import Footprints, footprints
from conformance.engine.run.since import changed
from conformance.interface import load

FILES = {
    "__init__.py": '''
"""Three functions of the reference, each by way of other modules."""
from kit import gate_checks, noise_checks, patch, plain
from kit.checks import combined
from kit.gating import gate
from kit.losses import z_loss
from kit.noise import jitter

supports = combined({"gate": gate_checks, "jitter": noise_checks, "z_loss": noise_checks})
''',
    "gating.py": """
from kit.registry import REGISTRY, SHIFT, exactly
import moe_ref


@exactly
def gate(x_TH, weight_EH, *, bias=None, router_dtype=None, _shift=SHIFT):
    return REGISTRY["plain"](moe_ref.gate, x_TH, weight_EH, bias, router_dtype)
""",
    "registry.py": """
import functools

SHIFT = 0
REGISTRY = {}


def exactly(function):
    @functools.wraps(function)
    def call(*args, **settings):
        return function(*args, **settings)
    return call


def register(name):
    def decorate(function):
        REGISTRY[name] = function
        return function
    return decorate
""",
    "plain.py": """
from kit.registry import register


@register("plain")
def plain(function, x, weight, bias, dtype):
    return function(x, weight, bias=bias, router_dtype=dtype)
""",
    "noise.py": '''
import moe_ref

try:
    from kit import quick
except ImportError:
    quick = None


def jitter(x_TH, *, eps):
    """Noise."""
    from kit.scales import noise
    if quick is not None:
        eps = quick.same(eps)
    return moe_ref.jitter(x_TH, eps=noise(eps))  # plain
''',
    "scales.py": """
def noise(eps):
    return eps
""",
    "quick.py": """
def same(eps):
    return eps
""",
    "losses.py": """
import importlib
import os
import moe_ref
from . import kernels

bases = importlib.import_module("kit.bases")


def z_loss(logits_TE, *, coeff, padding_mask=None):
    kernels.outer
    os.environ.get("KIT_NAME")
    return ZLoss().value(logits_TE, coeff, padding_mask)


class ZLoss(bases.Loss):
    function = staticmethod(lambda *args, **settings: moe_ref.z_loss(*args, **settings))
""",
    "bases.py": """
class Loss:
    def value(self, logits, coeff, mask):
        return self.function(logits, coeff=coeff, padding_mask=mask)
""",
    "kernels.py": """
import triton
import triton.language as tl


@triton.jit
def outer(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr))
""",
    "patch.py": """
import warnings

warnings.kit = 1
""",
    "checks.py": """
def combined(home):
    def supports(function, *args, **settings):
        return home[function].supports(*args, **settings)
    return supports
""",
    "gate_checks.py": "def supports(*args, **settings): return None\n",
    "noise_checks.py": "def supports(*args, **settings): return None\n",
    "unused.py": "VALUE = 1\n",
    "table.json": "[1]",
    "fast.so": "machine code",
}


def write(folder: Path, files: dict[str, str] | None = None) -> Path:
    """The package `kit` in the folder, with other contents of some files; "../x" is beside it."""
    package = folder / "kit"
    package.mkdir(parents=True)
    for name, content in (FILES | (files or {})).items():
        (package / name).write_text(content)
    return folder


def edited(file: str, old: str, new: str) -> dict[str, str]:
    """The file with one change."""
    assert FILES[file].count(old) == 1, (file, old)
    return {file: FILES[file].replace(old, new)}


def footprints_in(*folders: Path, implementation: str = "kit") -> list[Footprints]:
    """The footprints of the package in each folder, in a new process without others' objects."""
    context = server.start()
    pipe, child_pipe = context.Pipe()
    with plain_main():
        process = context.Process(target=_send, args=(child_pipe, dict(os.environ), folders, implementation))
        process.start()
    child_pipe.close()
    result = pipe.recv()
    process.join()
    return result


def _send(connection: Connection, environment: dict[str, str], folders: list[Path], implementation: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    connection.send([footprints_here(folder, implementation) for folder in folders])


def footprints_here(folder: Path, implementation: str = "kit") -> Footprints:
    """The footprints of the package in the folder, imported anew into this process."""
    _forget()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return footprints(load(implementation))
    finally:
        sys.path.remove(str(folder))
        _forget()


def changes(before: Footprints, now: Footprints) -> dict[str, str]:
    """By function, what changed."""
    reasons = {name: changed(now, before, name) for name in now.functions}
    return {name: reason for name, reason in reasons.items() if reason}


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kit"]:
        del sys.modules[name]
