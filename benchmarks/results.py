"""The page of results, docs/results/index.md, from the records beside it.

    python -m benchmarks.results > docs/results/index.md
    python -m benchmarks.results router python -m benchmarks.router  # measure, and keep the figures

A record is a JSON file, docs/results/NAME.json. It says what one command measured: `title`,
`commands`, `date`, `machine`, `versions` (name to version), `meaning` (a sentence or two in plain
words) and `tables`. A table has a `title`, `columns` and `rows`; of one with more than LONGEST rows
the page has the columns only. `details` holds further tables, which stay in the file; `picture`
names an image beside it.

With a name and a command, the command is run, and the Markdown tables that it prints replace the
figures of that record. Its title and its meaning stay, and have to be read again beside them.
"""

import datetime
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "docs" / "results"
LONGEST = 14  # rows of a table on the page
SECTIONS = {
    "Verdicts": [
        "gate-h200",
        "gate-cpu",
        "gate-ranks",
        "honest",
        "transformers",
        "transformers-layers",
        "compiled",
        "other-packages-tests",
        "sanitizers",
        "machine-code",
    ],
    "The layer": [
        "layer-h200",
        "layer-growth",
        "layer-h100",
        "layer-two-gpus",
        "training",
        "transformers-step",
        "megatron-step",
    ],
    "Stages": ["router", "permutation", "quantization", "fused", "experts", "dispatch"],
    "The suite": ["detection", "mutants", "configurations", "margins", "reach", "oracles"],
    "The tools": ["commands", "interpreter", "fuzzing"],
}
INTRODUCTION = """# Results

Each section is one measurement, written from the file that is named in it. Times and speeds hold
for the machine and the versions of their section; tables of different sections are of different
machines. A ratio in brackets compares with the version that the column or the section names, in the
same run. *Floor* is the time that a copy of as many bytes takes at the GPU's highest measured
copying speed.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    for heading, names in SECTIONS.items():
        yield f"## {heading}\n"
        for name in names:
            yield section(name, json.loads((FOLDER / f"{name}.json").read_text()))


def section(name: str, record: dict[str, Any]) -> str:
    """One measurement, as Markdown."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    origin = " · ".join(
        text for text in (record["date"], record["machine"], versions, f"[{name}.json]({name}.json)") if text
    )
    lines = [f'<a id="{name}"></a>\n', f"### {record['title']}\n", _wrapped(origin) + "\n"]
    lines += [f"    {command}" for command in record["commands"]]
    lines += ["", _wrapped(record["meaning"]) + "\n"]
    if "picture" in record:
        lines += [f"![{record['title']}]({record['picture']})\n"]
    for table in record["tables"]:
        lines += [f"{_wrapped(table['title'])}\n"] if table["title"] else []
        lines += _rows(table["columns"], table["rows"]) if len(table["rows"]) <= LONGEST else [_reference(name, table)]
        lines += [""]
    return "\n".join(lines)


def _reference(name: str, table: dict[str, Any]) -> str:
    """The sentence in place of a long table."""
    columns = ", ".join(table["columns"])
    return _wrapped(f"[{name}.json]({name}.json) has a table of {len(table['rows'])} rows. Its columns: {columns}.")


def measure(name: str, command: Sequence[str]) -> None:
    """Run a command, and keep the tables that it prints as the figures of a record."""
    record = json.loads((FOLDER / f"{name}.json").read_text())
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    record.pop("details", None)
    save(name, record | {"tables": list(tables_of(printed))}, [shlex.join(command)])


def save(name: str, figures: dict[str, Any], commands: list[str]) -> None:
    """Write a record: the figures, with the machine, the versions and the date of this run."""
    on_gpu = torch.cuda.is_available()
    origin = {
        "commands": commands,
        "date": str(datetime.date.today()),
        "machine": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores",
        "versions": {"torch": torch.__version__, "Python": platform.python_version()},
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(figures | origin, indent=1, ensure_ascii=False) + "\n")


def tables_of(text: str) -> Iterator[dict[str, Any]]:
    """The Markdown tables of a text, each with the line of text before it as its title."""
    title, lines = "", text.splitlines()
    for k, line in enumerate(lines):
        if line.startswith(("|-", "| -")):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[k + 1 :])
            yield {"title": title, "columns": _cells(lines[k - 1]), "rows": [_cells(row) for row in rows]}
            title = ""
        elif line and not line.startswith("|"):
            title = line.strip("# ")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def _rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' for _ in columns)}|"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(sys.argv[1], sys.argv[2:])
    else:
        print(page(), end="")
