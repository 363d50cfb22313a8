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
"""Three functions of the reference, each by way of others."""
from kit.parts import gate, jitter, supports, z_loss
''',
    "parts.py": '''
import functools
import os
from dataclasses import dataclass, field
import moe_ref
from kit import kernels, names
from kit.bases import Loss
from kit.helpers import REGISTRY, SHIFT, exactly, noise

try:
    from kit import quick
except ImportError:
    quick = None
FACTOR = 1.0
UNUSED = 3
halves = functools.partial(names.twice, times=1)


@dataclass
class Settings:
    scales: list = field(default_factory=names.scales)


def jitter(x_TH, *, eps):
    """Noise."""
    if quick is not None:
        eps = quick.same(eps)
    return moe_ref.jitter(x_TH, eps=noise(eps))  # plain


@exactly
def gate(x_TH, weight_EH, *, bias=None, router_dtype=None, _shift=SHIFT):
    return REGISTRY["plain"](moe_ref.gate, x_TH, weight_EH, bias, router_dtype)


def z_loss(logits_TE, *, coeff, padding_mask=None):
    kernels.outer
    getattr(names, os.environ.get("KIT_NAME", "scales"))
    return ZLoss(Settings()).value(logits_TE, coeff, padding_mask) * FACTOR * halves(1)


class ZLoss(Loss):
    function = staticmethod(lambda *args, **settings: moe_ref.z_loss(*args, **settings))


def no_jitter(x, eps=None):
    return None


def no_gate(*args, **settings):
    return None


CHECKS = {"jitter": no_jitter, "gate": no_gate}


def supports(function, *args, **settings):
    return CHECKS[function](*args, **settings) if function in CHECKS else None
''',
    "helpers.py": """
import functools

SHIFT = 0
REGISTRY = {}


def noise(eps):
    return eps


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


@register("plain")
def plain(function, x, weight, bias, dtype):
    return function(x, weight, bias=bias, router_dtype=dtype)
""",
    "bases.py": """
class Loss:
    def __init__(self, settings):
        self.settings = settings

    def value(self, logits, coeff, mask):
        return self.function(logits, coeff=coeff, padding_mask=mask) * self.settings.scales[0]
""",
    "names.py": """
def scales():
    return [1]


def twice(x, times):
    return x * times
""",
    "kernels.py": """
import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(4)


@triton.jit
def inner(x):
    return x + STEP


@triton.jit
def outer(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, inner(tl.load(x_ptr)))
""",
    "quick.py": """
def same(eps):
    return eps
""",
    "table.json": "[1]",
    "fast.so": "machine code",
}


def write(folder: Path, **changes: str) -> Path:
    """The package `kit` in the folder, with other contents of some files; None: no file."""
    package = folder / "kit"
    package.mkdir(parents=True)
    for name, content in (FILES | {name.replace("_dot_", "."): text for name, text in changes.items()}).items():
        if content is not None:
            (package / name).write_text(content)
    return folder


def edited(file: str, old: str, new: str) -> dict[str, str]:
    """The file with one change."""
    assert FILES[file].count(old) == 1, (file, old)
    return {file: FILES[file].replace(old, new)}


def footprints_in(folder: Path, implementation: str = "kit") -> Footprints:
    """The footprints in a new process, as in a run: other tests leave objects in this one."""
    return footprints_in_each([folder], implementation)[0]


def footprints_in_each(folders: list[Path], implementation: str = "kit") -> list[Footprints]:
    """The footprints of the package in every folder, in one new process: most code is read once."""
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
    found = {name: changed(now, before, name) for name in now.functions}
    return {name: reason for name, reason in found.items() if reason}


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kit"]:
        del sys.modules[name]
