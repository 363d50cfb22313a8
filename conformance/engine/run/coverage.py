"""What the cases of a run covered: values of each field, pairs of values, time, kernels, and how
near right results came to wrong ones.
"""

from collections.abc import Iterable
from functools import cache
from itertools import combinations
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.axes import Size
from conformance.core.case import Case
from conformance.core.scope import Scope
from conformance.core.space import Space

NO_SETTINGS = ("seed", "golden", "illegal")
MOST_VALUES = 10  # the most values of a field whose pairs are shown
BINS = 20  # bins of a histogram of scores, from 0 to 1

Counts = list[int]  # numbers of judged and of wrong cases, or of the cases in each bin


@cache
def _fields(function: str) -> dict[str, bool]:
    """The fields that the function's calls depend on, and the law; whether each is a size."""
    axes = Scope(CONTRACTS[function], Space()).axes
    return {axis.name: isinstance(axis, Size) for axis in axes if axis.name not in NO_SETTINGS} | {"law": False}


def settings_of(case: Case) -> dict[str, str]:
    """Each field as a short text: numbers by powers of two, sequences by their lengths."""
    return {name: _text(getattr(case, name)) for name in _fields(case.function)}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return f"{_text(len(value))} entries"
    if isinstance(value, int) and value > 3:
        power = 1 << (value.bit_length() - 1)
        return f"{power:,}" if value == power else f"{power:,} …"
    return str(value) if value not in ("", None) else "none"


def coverage(
    outcomes: Iterable[dict[str, Any]], judged: tuple[str, ...], failing: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """By function the judged cases of each value, and of each pair but of sizes; seconds, kernels;
    the passing cases by their scores, in BINS from 0 (correctly rounded) to 1 (the limit).

    Args:
        outcomes: lines of a ledger that have the settings and scores of their cases.
        judged, failing: statuses of a case that was judged, and of one that is wrong.
    """
    functions: dict[str, list[dict[str, Any]]] = {}
    for line in outcomes:
        functions.setdefault(line["function"], []).append(line)
    return {name: _of_function(lines, judged, failing) for name, lines in functions.items()}


def _of_function(lines: list[dict[str, Any]], judged: tuple[str, ...], failing: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, dict[str, Counts]] = {}
    informative = [line for line in lines if line["status"] in judged and "settings" in line]
    for line in informative:
        for name, value in line["settings"].items():
            _count(fields.setdefault(name, {}), value, line["status"] in failing)
    sizes = _fields(lines[0]["function"])
    kinds = [name for name, values in fields.items() if 1 < len(values) <= MOST_VALUES and not sizes[name]]
    pairs: dict[str, dict[str, Counts]] = {f"{a} × {b}": {} for a, b in combinations(kinds, 2)}
    for line in informative:
        settings, is_wrong = line["settings"], line["status"] in failing
        for a, b in combinations(kinds, 2):
            _count(pairs[f"{a} × {b}"], f"{settings[a]} × {settings[b]}", is_wrong)
    return {
        "fields": {name: dict(sorted(values.items(), key=_order)) for name, values in fields.items()},
        "pairs": pairs,
        "seconds": round(sum(line["seconds"] for line in lines), 2),
        "kernels": len({kernel for line in lines for kernel in line["kernels"]}),
        "scores": _histograms(line["scores"] for line in informative),
    }


def _histograms(scores: Iterable[dict[str, float]]) -> dict[str, Counts]:
    """The cases of each bin, by kind of score."""
    histograms: dict[str, Counts] = {}
    for of_case in scores:
        for kind, score in of_case.items():
            bins = histograms.setdefault(kind, [0] * BINS)
            bins[min(int(max(score, 0.0) * BINS), BINS - 1)] += 1
    return histograms


def _count(counts: dict[str, Counts], value: str, is_wrong: bool) -> None:
    entry = counts.setdefault(value, [0, 0])
    entry[0] += 1
    entry[1] += is_wrong


def _order(item: tuple[str, Counts]) -> tuple[float, str]:
    """A sort key: numbers by size, before texts."""
    digits = item[0].split(" ")[0].replace(",", "")
    return (float(digits), item[0]) if digits.isdigit() else (float("inf"), item[0])
