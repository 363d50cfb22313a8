"""The defects to find again, from `rows.toml`: which release has each, and which one mended it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

MEGATRON = "megatron-core"
REPOSITORY = "NVIDIA/Megatron-LM"  # has releases that the index lacks
MAIN = "main"  # its newest revision


@dataclass(frozen=True)
class Row:
    """One defect of one package. `why` says why it is not run, or not shown."""

    bug: str
    title: str
    package: str
    broken: str  # a release with the defect
    mended: str | None = None  # the release that is said to have mended it; None: none has
    check: str | None = None
    why: str = ""
    mended_later: str | None = None  # where that release still fails: the one that passes
    on_a_gpu: bool = False  # judged by a run on a GPU, which is kept


_TABLES = tomllib.loads(Path(__file__).with_name("rows.toml").read_text())
ROWS = tuple(
    Row(bug, package=package, **fields) for package, defects in _TABLES.items() for bug, fields in defects.items()
)
