"""The process in which an implementation runs. It may crash or hang; the parent notices.

Its first message is ("ready", description) or ("unusable", one sentence). Then the parent sends
lists of cases, and receives ("outcome", an Outcome's fields, digests of the inputs) for each case.
"""

import contextlib
import faulthandler
import gc
import inspect
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import Collective, RankContext
from conformance.engine.child import interpreting, poison
from conformance.engine.child.compiling import Compiler
from conformance.engine.child.evaluate import device_is_lost, evaluate
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.plan import Draw
from conformance.engine.options import ChildOptions
from conformance.interface import Implementation, UsageError, load

MOST_RANKS = 4  # of a world on one machine
KEPT_BYTES = 2**30  # device memory that a child may keep between cases


def serve(connection: Connection, options: ChildOptions, log_path: str) -> None:
    """Answer requests until the parent hangs up."""
    implementation = import_implementation(connection, options, log_path)
    if implementation is not None:
        answer_all(connection, options, implementation, log_path)


def import_implementation(connection: Connection, options: ChildOptions, log_path: str) -> Implementation | None:
    """Prepare this process and import the implementation; sends "ready" or "unusable"."""
    _redirect_output(log_path)
    # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:0] = options.search
    sys.path.append(os.getcwd())
    poison.install()
    torch.set_num_threads(1)
    try:
        implementation = load(options.implementation)
        interpreting.install()
        connection.send(("ready", _description(implementation, options)))
    except UsageError as error:
        connection.send(("unusable", str(error)))
    except Exception as error:
        connection.send(("unusable", f"--impl {options.implementation}: {type(error).__name__}: {error}"))
    else:
        return implementation
    return None


def answer_all(
    connection: Connection,
    options: ChildOptions,
    implementation: Implementation,
    log_path: str,
    context_of: Callable[[Case], RankContext] | None = None,
) -> None:
    """Judge the cases that come, alone or as one rank of a world, until the parent hangs up."""
    device = chosen_device(options.device)
    compiler = Compiler(os.path.dirname(log_path))
    with contextlib.suppress(EOFError, BrokenPipeError), _stream(device):
        while True:
            work = connection.recv()
            if isinstance(work, Draw):
                connection.send(_drawn(work))
                continue
            for case in work:
                rank = context_of(case) if context_of else None
                started = time.monotonic()
                with _traced(options.trace) as calls:
                    outcome = _answer(case, implementation, device, rank)
                if rank and rank.ranks > 1:
                    outcome.transport = rank.transport(implementation.transport(case.function, rank.group))
                    outcome.shares_gpu = rank.shares_gpu
                outcome.calls = sorted(calls)
                outcome.kernels = compiler.take()
                outcome.seconds = time.monotonic() - started
                connection.send(("outcome", asdict(outcome), rank.seen if rank else []))


def _drawn(request: Draw) -> tuple[str, Any]:
    try:
        return "structures", request.structures()
    except Exception as error:
        return "outcome", asdict(Outcome("ERROR", reason=_where(error)))


def _where(error: Exception) -> str:
    """The error and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"


def _end_with_parent() -> None:
    """Exit when the parent dies, even during a case, so that a killed run frees the device."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _traced(package: str) -> Iterator[set[str]]:
    """The package's functions that run inside the block, as "file:qualified name"."""
    calls: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            file = os.path.relpath(frame.f_code.co_filename, os.path.dirname(package))
            calls.add(f"{file}:{frame.f_code.co_qualname}")

    if package:
        sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _answer(case: Case, implementation: Implementation, device: str, rank: RankContext | None) -> Outcome:
    try:
        return evaluate(case, implementation, device, rank)
    except Exception as error:
        if device_is_lost(error):
            return Outcome("CRASH", reason=f"the device was lost: {' '.join(str(error).split())[:160]}")
        return Outcome("ERROR", reason=_where(error))
    finally:
        gc.collect(0)
        if device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()  # children share the device's memory


def chosen_device(wanted: str) -> str:
    """The device to run on: by default cuda if available.

    Raises:
        UsageError: cuda is requested but not available.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _stream(device: str) -> Any:
    """A side stream, so that a launch on the default stream races with its inputs."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def _redirect_output(log_path: str) -> None:
    """Send the output and the traceback of a crash to a file that outlives this process."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()


def _signature(function: str, implementation: Implementation) -> str:
    """The signature as text equal in every process: without the addresses of defaults."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{function}{inspect.signature(getattr(implementation.namespace, function))}")


def _description(implementation: Implementation, options: ChildOptions) -> dict[str, Any]:
    """The functions offered, settings they lack, their declarations, the device and versions."""
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
    device = chosen_device(options.device)
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
        "shared_ranks": MOST_RANKS if ranks < MOST_RANKS else 0,
        "memory": torch.cuda.get_device_properties().total_memory if device == "cuda" else 0,
        "versions": {k: v for k, v in versions.items() if v},
    }
