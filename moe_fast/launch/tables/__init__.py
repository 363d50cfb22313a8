"""Sizes that were measured on a GPU, one file per GPU; `python -m benchmarks.tune` writes it.

A file names the GPU and holds records of `Tuning` by path, as in "grouped.by_rows.0": they replace
the defaults of `moe_fast.launch.tuning`. A GPU without a file takes the nearest one's:

    of the same major compute capability; then least |log2 multiprocessors| + |log2 memory|, each of
    the ratio of the GPU's to the file's; of equals the first by the files' names.

If no file has the capability, the defaults are used.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_fast.launch.sizes import Tuning

FOLDER = Path(__file__).parent


class Gpu(NamedTuple):
    """The properties by which GPUs are told apart."""

    name: str
    major: int
    minor: int
    multiprocessors: int
    memory: int  # bytes

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU that a device is."""
        p = torch.cuda.get_device_properties(device)
        return cls(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory)


class Table(NamedTuple):
    """A GPU, and sizes by path."""

    gpu: Gpu
    sizes: Mapping[str, Mapping[str, int]]


def nearest(gpu: Gpu, tables: Iterable[Table]) -> Table | None:
    """The table for a GPU by the rule of this module; None if the defaults are to be used."""

    def distance(table: Table) -> float:
        if table.gpu.name == gpu.name:
            return -1.0
        pairs = ((gpu.multiprocessors, table.gpu.multiprocessors), (gpu.memory, table.gpu.memory))
        return sum(abs(math.log2(value / table_value)) for value, table_value in pairs)

    return min((table for table in tables if table.gpu.major == gpu.major), key=distance, default=None)


def changed(sizes: Any, path: str, values: Mapping[str, int]) -> Any:
    """The sizes, with the values of the record at `path` replaced.

    Raises:
        AttributeError, IndexError, TypeError: there is no such record, or no such value of it.
    """
    if not path:
        return replace(sizes, **values)
    head, _, remaining_path = path.partition(".")
    if isinstance(sizes, tuple):
        at = int(head)
        return (*sizes[:at], changed(sizes[at], remaining_path, values), *sizes[at + 1 :])
    return replace(sizes, **{head: changed(getattr(sizes, head), remaining_path, values)})


def with_table(sizes: Tuning, table: Table | None) -> Tuning:
    """The sizes, with every value that the table has."""
    for path, values in {} if table is None else table.sizes.items():
        sizes = changed(sizes, path, values)
    return sizes


def read(file: Path) -> Table:
    """The table of a file."""
    content = json.loads(file.read_text())
    return Table(Gpu(**content["gpu"]), content["sizes"])


@cache
def measured() -> tuple[Table, ...]:
    """The tables of this package, by the files' names."""
    return tuple(read(file) for file in sorted(FOLDER.glob("*.json")))
