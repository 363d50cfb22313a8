"""Records which configurations of kernels a call launches.

A configuration is a kernel with its constants, its warps, stages and registers, and whether one
program or several run. The compiler translates each configuration by itself, and can be wrong for
one alone, so each one that real sizes choose must be launched by some case that is judged.

Triton calls a kernel's `launch_metadata` and `knobs.runtime.launch_enter_hook` at every launch.
Both are public. Where a version of Triton lacks one of them, nothing is recorded.
"""

import sys
import zlib
from collections.abc import Callable
from typing import Any

KEY = "conformance_launch"  # of the launch's metadata
OPTIONS = {"num_warps": "warps", "num_stages": "stages", "maxnreg": "registers", "num_ctas": "ctas"}

Arguments = dict[str, Any]
Identity = tuple[Any, ...]

_ids: dict[Identity, str] = {}  # names of the configurations that this process has met
_launched: set[str] = set()
_descriptions: dict[str, dict[str, str]] = {}  # descriptions of configurations that the parent does not have yet


def install() -> None:
    """Record every launch from now on; idempotent. A Triton without the hook records nothing."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    chain: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if hasattr(chain, "add"):
        chain.add(_entered)


def watch(kernel: Any) -> None:
    """Report the constants and options of each launch of a kernel that is about to be compiled."""
    if not hasattr(kernel, "launch_metadata") or hasattr(kernel.launch_metadata, "watches"):
        return
    kernel.launch_metadata = _metadata_of(kernel, kernel.launch_metadata)


def take() -> list[str]:
    """The configurations that were launched since the last call."""
    names = sorted(_launched)
    _launched.clear()
    return names


def take_descriptions() -> dict[str, dict[str, str]]:
    """The configurations that this process has met since the last call, as `described`."""
    descriptions = dict(_descriptions)
    _descriptions.clear()
    return descriptions


def described(name: str, identity: Identity) -> dict[str, str]:
    """A configuration as text: the kernel's name, its constants, and its options."""
    _, constants, options, several = identity
    texts = (f"{key}={_text(value)}" for key, value in constants)
    settings = [f"{value} {key}" for key, value in options if value is not None]
    programs = "several programs" if several else "one program"
    return {"kernel": name, "constants": " ".join(texts), "options": ", ".join([*settings, programs])}


def _metadata_of(kernel: Any, original: Callable[..., dict[str, Any]] | None) -> Callable[..., dict[str, Any]]:
    constant = [p.name for p in kernel.params if p.is_constexpr]
    runtime_arguments = [p.name for p in kernel.params if not p.is_constexpr]
    full_name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"

    def metadata(grid: tuple[int, ...], compiled: Any, arguments: Arguments) -> dict[str, Any]:
        constants = [(name, _value(arguments.get(name))) for name in constant]
        missing = [(name, absent) for name in runtime_arguments if (absent := _absent(arguments.get(name)))]
        options = tuple((text, getattr(compiled, option, None)) for option, text in OPTIONS.items())
        several = grid[0] * (grid[1] if len(grid) > 1 else 1) * (grid[2] if len(grid) > 2 else 1) > 1
        identity = (full_name, (*constants, *missing), options, several)
        result = original(grid, compiled, arguments) if original else {}
        return result | {KEY: (kernel.fn.__name__, identity, arguments)}

    metadata.watches = kernel  # type: ignore[attr-defined]
    return metadata


def _entered(lazy: Any) -> None:
    launch = lazy.get().get(KEY)
    if launch is not None:
        _launched.add(name_of(*launch[:2]))


def name_of(kernel: str, identity: Identity) -> str:
    """The configuration's name: its kernel's, and a checksum that is equal in every process."""
    name = _ids.get(identity)
    if name is None:
        name = _ids[identity] = f"{kernel} {zlib.crc32(repr(identity).encode()):08x}"
        _descriptions[name] = described(identity[0], identity)
    return name


def _value(x: Any) -> Any:
    """A constant as a value that can be hashed, and is written alike in every process."""
    value = getattr(x, "value", x)
    return value if isinstance(value, int | float | str | type(None)) else _text(value)


def _text(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def _absent(x: Any) -> str:
    """Which elements of an argument are None, a constant to the compiler; empty if none is."""
    if isinstance(x, tuple) and any(element is None for element in x):
        return f"({','.join('None' if element is None else 'given' for element in x)})"
    return "None" if x is None else ""
