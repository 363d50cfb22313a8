"""The process in which an implementation runs. It may crash or hang; the parent notices.

The parent sends ("evaluate", case text) and receives ("outcome", dict). The first message back is ("ready", what the
implementation offers) or ("unusable", one sentence).
"""

import contextlib
import faulthandler
import gc
import inspect
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import Collective, Place
from conformance.engine.child import interpreting, poison
from conformance.engine.child.evaluate import device_is_lost, evaluate
from conformance.engine.child.runner import Outcome
from conformance.interface import Implementation, UsageError, load


@dataclass(frozen=True)
class Settings:
    """What a child is started with."""

    implementation: str
    device: str = "auto"  # auto, cpu or cuda
    trace: str = ""  # a package's folder, or a file: record which of its functions a case runs
    search: tuple[
        str, ...
    ] = ()  # folders put in front of the import path, such as a mutant's copy; the working directory comes last


def serve(connection: Connection, settings: Settings, log_path: str) -> None:
    """Answer requests until the parent hangs up."""
    implementation = opened(connection, settings, log_path)
    if implementation is not None:
        answer_all(connection, settings, implementation)


def opened(connection: Connection, settings: Settings, log_path: str) -> Implementation | None:
    """Make this process fit for an implementation and import it; the parent is told that it is ready, or why it is unusable."""
    _redirect_output(log_path)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:0] = settings.search
    sys.path.append(os.getcwd())
    poison.install()
    torch.set_num_threads(1)
    try:
        implementation = load(settings.implementation)
        interpreting.install()
        connection.send(("ready", _description(implementation, settings)))
    except UsageError as error:
        connection.send(("unusable", str(error)))
    except Exception as error:
        connection.send(("unusable", f"--impl {settings.implementation}: {type(error).__name__}: {error}"))
    else:
        return implementation
    return None


def answer_all(
    connection: Connection,
    settings: Settings,
    implementation: Implementation,
    place_of: Callable[[Case], Place] | None = None,
) -> None:
    """Judge the cases that come, until the parent hangs up: alone, or at a place in a world of each."""
    device = chosen_device(settings.device)
    compiled = _watch_compiler()
    with contextlib.suppress(EOFError, BrokenPipeError), _stream(device):
        while True:
            case = connection.recv()
            place = place_of(case) if place_of else None
            with _traced(settings.trace) as calls:
                outcome = _answer(case, implementation, device, place)
            outcome.calls = sorted(calls)
            outcome.kernels, compiled[:] = compiled[:], []
            connection.send(("outcome", asdict(outcome), place.seen if place else []))


def _end_with_parent() -> None:
    """Leave when the parent is gone, even in the middle of a case that hangs: a run that was killed must not keep the device."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _traced(package: str) -> Iterator[set[str]]:
    """The package's functions that run inside the block, as "file:name" relative to what holds it; none if there is no package."""
    calls: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.add(f"{os.path.relpath(frame.f_code.co_filename, os.path.dirname(package))}:{frame.f_code.co_name}")

    if package:
        sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _watch_compiler() -> list[str]:
    """A list to which Triton, if the implementation uses it, adds the name of every kernel specialisation that it makes."""
    compiled: list[str] = []
    if "triton" in sys.modules:

        def made(*, key: str, fn: Any, **_: Any) -> None:
            compiled.append(f"{fn.name} {zlib.crc32(str(key).encode()):08x}")

        sys.modules["triton"].knobs.runtime.jit_post_compile_hook = made
    return compiled


MOST_RANKS = 4  # of a world on one machine; on a GPU each rank has one of its own
KEPT_BYTES = 2**30  # of device memory that a child may keep from case to case


def _answer(case: Case, implementation: Implementation, device: str, place: Place | None) -> Outcome:
    try:
        return evaluate(case, implementation, device, place)
    except Exception as error:
        if device_is_lost(error):
            return Outcome("CRASH", reason=f"the device was lost: {' '.join(str(error).split())[:160]}")
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(
            "ERROR", reason=f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"
        )
    finally:
        gc.collect(0)
        if device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()  # children share the device: what one far case took, another needs


def chosen_device(wanted: str) -> str:
    """cuda where there is one, unless the user says otherwise.

    Raises:
        UsageError: cuda is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _stream(device: str) -> Any:
    """A stream of our own: an implementation that launches on the default one races with its inputs."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def _redirect_output(log_path: str) -> None:
    """Send what the implementation prints, and Python's traceback of a crash, to a file that outlives this process."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()


def _signature(function: str, implementation: Implementation) -> str:
    """How it is called, in the same words in every process: without the addresses of defaults."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{function}{inspect.signature(getattr(implementation.namespace, function))}")


def _description(implementation: Implementation, settings: Settings) -> dict[str, Any]:
    """What the parent may know: what is offered, with which settings, what is declared, and on what it runs."""
    functions = {}
    for function, contract in CONTRACTS.items():
        offered = implementation.offers(function) and not (
            isinstance(contract, Collective) and implementation.lacks(function, {"group": None})
        )
        functions[function] = {
            "offered": offered,
            "without": implementation.lacks(function, dict.fromkeys(contract.optional))
            if offered
            else list(contract.optional),
            "declares": implementation.declares(function) if offered else {},
            "signature": _signature(function, implementation) if offered else "",
        }
    device = chosen_device(settings.device)
    triton = sys.modules.get("triton")
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", ""),
    }
    for package in ("transformer_engine", "megatron.core"):
        module = sys.modules.get(package)
        if module is not None:
            versions[package] = str(getattr(module, "__version__", "unknown"))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    ranks = MOST_RANKS if device == "cpu" else min(MOST_RANKS, torch.cuda.device_count())
    return {
        "functions": functions,
        "device": device,
        "device_name": name,
        "ranks": ranks,
        "versions": {k: v for k, v in versions.items() if v},
    }
