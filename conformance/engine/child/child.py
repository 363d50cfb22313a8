"""The process in which an implementation runs. It may crash or hang; the parent notices.

Its first message is ("ready", description) or ("unusable", one sentence). Then the parent sends
lists of cases, and receives ("outcome", an Outcome's fields, digests of the inputs) for each case.
"""

import contextlib
import gc
import importlib
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

import fast_interpreter
from conformance import private_parts
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Contract
from conformance.core.known_names import arguments_of, omissible_of
from conformance.core.ranks import Collective, RankContext
from conformance.engine.child import changes, configurations, poison
from conformance.engine.child.compiling import Compiler, kernels_of
from conformance.engine.child.evaluate import device_is_lost, evaluate
from conformance.engine.child.faults import Planting
from conformance.engine.child.isolation import at_most, isolate
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.sanitizer import Sanitizer
from conformance.engine.child.scopes import scopes_of
from conformance.engine.child.tracing import traced
from conformance.engine.child.warm import warm_up
from conformance.engine.choose.plan import Draw
from conformance.engine.options import ChildOptions
from conformance.interface import DEFAULTS, Implementation, Undeclared, UsageError, load, signature_of
from conformance.judge import Finding
from conformance.modes import Modes
from conformance.texts import described, message

MOST_RANKS = 4  # the most ranks of a world on one machine
KEPT_BYTES = 2**30  # device memory that a child may keep between cases
RECURSION_LIMIT = 2000  # of a child at least: torch's compiler raises a lower one to it, whenever it compiles
DECLARE_SECONDS = 20.0  # for `declares` to answer about one function


def serve(connection: Connection, options: ChildOptions, log_path: str) -> None:
    """Answer requests until the parent hangs up."""
    implementation = import_implementation(connection, options, log_path)
    if implementation is not None:
        answer_all(connection, options, implementation, log_path)


def import_implementation(connection: Connection, options: ChildOptions, log_path: str) -> Implementation | None:
    """Prepare this process and import the implementation; sends "ready" or "unusable"."""
    isolate(log_path)
    sys.path[:0] = options.search
    sys.path.append(os.getcwd())
    poison.install(guards=options.sanitize != "memcheck")  # the sanitizer would take a guard for a part of the tensor
    torch.set_num_threads(1)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    modes, sanitizer = Modes(), Sanitizer(options.sanitize, log_path)
    try:
        sanitizer.prepare()
        implementation = sanitizer.watched(load(options.implementation))
        modes.restore()  # the suite computes in the same process
        sanitizer.check(chosen_device(options.device))
        fast_interpreter.install()
        if reason := fast_interpreter.broken():
            raise UsageError(f"--impl {options.implementation}: {reason}")
        connection.send(("ready", _description(implementation, options)))
    except UsageError as error:
        connection.send(("unusable", str(error)))
    except Exception as error:
        connection.send(("unusable", f"--impl {options.implementation}: {described(error)}"))
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
    device, process = chosen_device(options.device), os.getpid()
    folder = os.path.dirname(log_path)
    compiler, sanitizer, planting = Compiler(folder), Sanitizer(options.sanitize, log_path), Planting()
    # a side stream: a launch on the default stream races with its inputs
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with contextlib.suppress(EOFError, BrokenPipeError), stream:
        if device == "cuda":
            warm_up(folder)
            compiler.take()
            configurations.take()
        while True:
            work = connection.recv()
            if isinstance(work, Draw):
                try:
                    connection.send(("structures", work.structures()))
                except Exception as error:
                    connection.send(("outcome", asdict(Outcome("ERROR", reason=_where(error)))))
                continue
            for case in work:
                rank = context_of(case) if context_of else None
                started = time.monotonic()
                with traced(options.trace) as calls:
                    outcome = sanitizer.judged(_answer(case, implementation, device, rank, options))
                if os.getpid() != process:
                    os._exit(0)  # a copy of this process that the implementation has forked
                if options.faults and not rank and outcome.status == "PASS":
                    judged = partial(_answer, implementation=implementation, device=device, rank=None, options=options)
                    outcome.planted = planting.tried(case, outcome.configurations, judged)
                outcome.calls = sorted(calls | changes.take())
                outcome.kernels = compiler.take()
                outcome.launched, outcome.descriptions = configurations.take(), configurations.take_descriptions()
                outcome.seconds = time.monotonic() - started
                connection.send(("outcome", asdict(outcome), rank.seen if rank else []))


def _where(error: Exception) -> str:
    """The error and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described(error)} ({os.path.basename(last.filename)}:{last.lineno})"


def _answer(
    case: Case, implementation: Implementation, device: str, rank: RankContext | None, options: ChildOptions
) -> Outcome:
    try:
        measured = {"scores": options.scores, "lines": options.lines}
        outcome = evaluate(case, implementation, device, rank, **measured, ring=options.sanitize == "fpsan")
        if rank and rank.ranks > 1:
            _add_transport(outcome, case.function, implementation, rank)
        return outcome
    except Undeclared as error:
        return Outcome("FAIL", asdict(Finding("declares", "error", str(error))))
    except Exception as error:
        if device_is_lost(error):
            return Outcome("CRASH", reason=f"the device was lost: {message(error)}{''.join(notes_of(error))}")
        return Outcome("ERROR", reason=_where(error))
    except BaseException as error:  # as sys.exit raises
        return Outcome("CRASH", reason=f"raised {described(error)}, which ends a process")
    finally:
        gc.collect(0)
        if device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()  # children share the device's memory


def notes_of(error: BaseException) -> list[str]:
    """Notes that were added to the error on its way, such as a tuned kernel's configuration."""
    return getattr(error, "__notes__", [])


def _add_transport(outcome: Outcome, function: str, implementation: Implementation, rank: RankContext) -> None:
    """Record how the ranks reached each other.

    A `transport` that raises is a failure of the function.
    """
    outcome.shares_gpu = rank.shares_gpu
    try:
        outcome.transport = rank.transport(implementation.transport(function, rank.group))
    except Exception as error:
        if not outcome.finding:
            outcome.status = "FAIL"
            outcome.finding = asdict(Finding("transport", "error", f"transport raised {described(error)}"))


def chosen_device(wanted: str) -> str:
    """The device to run on: by default cuda if available.

    Raises:
        UsageError: cuda is requested but not available.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _signature(function: str, implementation: Implementation) -> str:
    """The signature as text that is equal in every process: without the addresses in defaults."""
    try:
        text = str(signature_of(getattr(implementation.namespace, function)) or "(…)")
    except Exception:  # of the repr of a default
        text = "(…)"
    return re.sub(r" at 0x[0-9a-f]+", "", f"{function}{text}")


def _location(function: str, implementation: Implementation) -> str:
    """The definition's "file:line" below the working directory; else an empty text."""
    try:
        code = inspect.unwrap(getattr(implementation.namespace, function)).__code__
        file = os.path.relpath(code.co_filename)
    except Exception:  # a builtin, a callable object, another drive
        return ""
    return "" if file.startswith(os.pardir) else f"{file}:{code.co_firstlineno}"


def _declarations(function: str, implementation: Implementation, contract: Contract[Any]) -> dict[str, Any]:
    """The function's declarations, or the defaults where `declares` raises: its cases then fail.

    Raises:
        UsageError: a value or a name that is not possible.
    """
    try:
        with at_most(DECLARE_SECONDS):
            declared = implementation.declares(function)
    except Undeclared:
        return DEFAULTS
    for key, known_of in (("unchecked", arguments_of), ("omits", omissible_of)):
        if not declared.get(key):
            continue
        known_names = known_of(contract)
        if key == "unchecked" and (signature := signature_of(getattr(implementation.namespace, function))):
            known_names |= {*signature.parameters}
        if unknown := sorted(set(declared[key]) - known_names):
            problem = f"{implementation.name} declares {key} = {', '.join(unknown)} for {function}"
            raise UsageError(f"{problem}; it may name {', '.join(sorted(known_names)) or 'nothing'}")
    return declared


def _description(implementation: Implementation, options: ChildOptions) -> dict[str, Any]:
    """The functions offered, settings they lack, their declarations, the device and versions."""
    functions = {}
    for function, contract in CONTRACTS.items():
        offered = implementation.offers(function) and not (
            isinstance(contract, Collective) and implementation.lacks(function, {"group": None})
        )
        without = implementation.lacks(function, dict.fromkeys(contract.optional))
        functions[function] = {
            "offered": offered,
            "without": without if offered else list(contract.optional),
            "declares": _declarations(function, implementation, contract) if offered else {},
            "signature": _signature(function, implementation) if offered else "",
            "place": _location(function, implementation) if offered else "",
        }
    for function, scope in scopes_of(implementation, functions).items():
        functions[function]["scope"] = scope
    device = chosen_device(options.device)
    if device == "cuda":  # also right for a rank that joins: it was not forked from a process with Triton
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")
    triton = sys.modules.get("triton")
    triton_version = getattr(triton, "__version__", "")
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton_version}
    for package in ("transformer_engine", "megatron.core", "transformers", "torchao"):
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
        "kernels": kernels_of(options.implementation.partition(":")[0]) if device == "cuda" else [],
        "missing_parts": private_parts.missing() + fast_interpreter.switched_off() + implementation.notes,
    }
