"""Configurations compiled and judged, in an order that reaches every kernel early."""

import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evidence.machine_code.compiling import compiled
from evidence.machine_code.findings import report
from evidence.machine_code.launches import Configuration

# the most loads and stores of local memory that a kernel may have, and why
KNOWN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "known.json").read_text())


@dataclass(frozen=True)
class Result:
    """A configuration and what is wrong with it."""

    kernel: str
    constants: dict[str, str]
    signature: dict[str, str]
    options: dict[str, Any]
    call: str  # that launches it
    instructions: int
    spills: int
    findings: list[str]

    def record(self) -> dict[str, Any]:
        return asdict(self)


def in_turn(configurations: Iterable[Configuration]) -> list[Configuration]:
    """The configurations in turn: one of each kernel, then a second of each, and so on. New tiles
    come before new integers.
    """
    of_kernels: dict[str, tuple[list[Configuration], list[Configuration]]] = defaultdict(lambda: ([], []))
    tiles = set()
    for configuration in configurations:
        of_kernels[configuration.name][configuration.tile in tiles].append(configuration)
        tiles.add(configuration.tile)
    rows = (row for turn in (0, 1) for row in zip_longest(*(queues[turn] for queues in of_kernels.values())))
    return [configuration for row in rows for configuration in row if configuration is not None]


def judged(configuration: Configuration) -> Result:
    """The result of a configuration; code that does not compile and unknown spills are findings."""
    instructions = spills = 0
    try:
        instructions, spills, findings = report(compiled(configuration))
    except Exception as error:
        findings = [f"{type(error).__name__}: {error}"]
    if spills > KNOWN.get(configuration.name, {}).get("spills", 0):
        findings = [*findings, f"{spills} loads and stores of local memory"]
    signature = {name: str(kind) for name, kind in configuration.signature.items()}
    return Result(
        configuration.name, configuration.named_constants, signature, configuration.options, configuration.call,
        instructions, spills, findings,
    )  # fmt: skip


def all_judged(configurations: list[Configuration], seconds: float, jobs: int) -> Iterator[Result]:
    """The results of as many configurations as the time allows, from this many processes.

    Each process is a fork of this one, because a configuration holds a kernel, which cannot be
    sent.
    """
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        _shared[:] = configurations
        for result in pool.map(partial(_judged_until, end), range(len(configurations))):
            if result is not None:
                yield result


_shared: list[Configuration] = []  # with the forks


def _judged_until(end: float, index: int) -> Result | None:
    return judged(_shared[index]) if time.monotonic() < end else None
