"""Compares the ratios of two reports of times. Times change from day to day; ratios change less."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.usage import UsageError

FALL = 0.05  # the least fall of a ratio: repeated runs differ by less, but raw times by more
REGRESSION = 5  # exit code
Report = dict[str, Any]


def read(path: str, same: Sequence[str], command: str) -> Report:
    """The report of `command` in a file: its ratios, and what must be the same in another one.

    Raises:
        UsageError: no such file, or no report of the command.
    """
    try:
        report = json.loads(Path(path).read_text())
        for name in report["benchmarks"]:
            list(ratios(report, name))
        return {name: report[name] for name in (*same, "benchmarks")}
    except OSError as error:
        raise UsageError(f"--baseline {path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        raise UsageError(f"--baseline {path}: not a JSON report of {command}") from None


def check_same(old: Report, new: Report, same: Sequence[str]) -> None:
    """Check that two reports can be compared.

    Raises:
        UsageError: they are of different devices, or whatever else `same` names.
    """
    for name in same:
        if old[name] != new[name]:
            raise UsageError(f"the baseline's {name} is {old[name]!r}, this run's {new[name]!r}: ratios differ by it")


def compared(old: Report, new: Report, chosen: Sequence[str], same: Sequence[str]) -> int:
    """Print each ratio that fell, or is gone; the exit code.

    Raises:
        UsageError: see `check_same`.
    """
    check_same(old, new, same)
    count, fallen = 0, []
    for name in chosen:
        now = dict(ratios(new, name))
        for measurement, old_ratio in ratios(old, name):
            count += 1
            if measurement not in now:
                fallen.append(f"{', '.join(measurement)}: {old_ratio:.3f}, and is no longer measured")
            elif now[measurement] < old_ratio * (1 - FALL):
                change = f"{old_ratio:.3f} → {now[measurement]:.3f} ({now[measurement] / old_ratio - 1:+.1%})"
                fallen.append(f"{', '.join(measurement)}: {change}")
    print("\n".join([f"{len(fallen)} of {count} ratios of the baseline fell by more than {FALL:.0%}", *fallen]))
    return REGRESSION if fallen else 0


def ratios(report: Report, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """The speed of each of our versions relative to each peer and to that run's floor; 1: equal."""
    for shape, operations in report["benchmarks"].get(name, {}).get("operations", {}).items():
        for title, result in operations.items():
            for version in result["ours"]:
                measurement, us = (name, shape, title, version), result["us"][version]
                if result.get("floor_us"):
                    yield (*measurement, "÷ floor"), result["floor_us"] / us
                for peer in result["us"].keys() - {*result["ours"]}:
                    yield (*measurement, f"÷ {peer}"), result["us"][peer] / us
