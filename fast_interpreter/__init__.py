"""Makes Triton's interpreter faster, and its bfloat16 that of a GPU (`mended`).

Most of the interpreter's time is Python code around small numpy operations. Each patch here names
the functions of Triton that it replaces or relies on, and a digest of their source. With another
source the patch, and those that need it, stay off, and Triton's own code runs.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_interpreter import builder, launches, mended, semantics, types
from fast_interpreter.sources import digest


@dataclass(frozen=True)
class Patch:
    """A change of Triton's interpreter, for the source that it was written for."""

    name: str
    relies_on: tuple[str, ...]
    digest: str
    apply: Callable[[Any], None]  # to the module triton.runtime.interpreter
    needs: tuple[str, ...] = ()  # other patches


PATCHES = (
    Patch("types", types.RELIES_ON, types.DIGEST, lambda interpreter: types.apply(interpreter.tl.core)),
    Patch("builder", builder.RELIES_ON, builder.DIGEST, builder.apply),
    Patch("semantics", semantics.RELIES_ON, semantics.DIGEST, semantics.apply, ("types",)),
    Patch("launches", launches.RELIES_ON, launches.DIGEST, launches.apply),
)


def install() -> dict[str, bool]:
    """Patch the interpreter, which must be imported; idempotent. Which patches are active."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return {}
    if not hasattr(interpreter, "_quickened"):
        interpreter._quickened = fitting()
        for patch in PATCHES:
            if interpreter._quickened[patch.name]:
                patch.apply(interpreter)
        mended.apply(interpreter)
    return dict(interpreter._quickened)


def broken() -> str:
    """Why the imported kernels cannot run in the interpreter; empty without an interpreter."""
    if "triton.runtime.interpreter" not in sys.modules:
        return ""
    return str(importlib.import_module(f"{__name__}.probe").broken())


def fitting() -> dict[str, bool]:
    """Which patches fit the installed Triton, which no patch has changed yet."""
    fits: dict[str, bool] = {}
    for patch in PATCHES:
        fits[patch.name] = digest(patch.relies_on) == patch.digest and all(fits[name] for name in patch.needs)
    return fits


def switched_off() -> list[str]:
    """One sentence about the patches of the loaded interpreter that are off; none if all are on."""
    return [sentence()] if not all(install().values()) else []


def sentence() -> str:
    """What the user needs to know; empty without Triton."""
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return ""
    active = getattr(interpreter, "_quickened", None) or fitting()
    off = ", ".join(name for name, on in active.items() if not on)
    if not off:
        return "Triton's interpreter runs with all of the suite's faster parts"
    return f"Triton's interpreter runs slower: this version differs from the one that faster parts are for: {off}"
