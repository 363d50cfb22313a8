"""The configurations of kernels that a run launched, and how many cases judged each."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

Configurations = dict[str, dict[str, Any]]


def configurations(lines: Iterable[dict[str, Any]], informative: Collection[str]) -> Configurations:
    """By name: its kernel, constants and options as text, and the numbers of its cases.

    `launched` counts all cases and `judged` those whose judged call launched it, with a status in
    `informative`. Other calls launch too: those of laws, and those that reduce a failure.

    Args:
        lines: of a ledger.
        informative: statuses of a case whose results were compared.
    """
    judged, launched, descriptions = Counter[str](), Counter[str](), dict[str, dict[str, str]]()
    for line in lines:
        if line["kind"] in ("outcome", "request"):
            descriptions |= line["descriptions"]
            launched.update({*line["configurations"], *line["launched"]})
        if line["kind"] == "outcome" and line["status"] in informative:
            judged.update(line["configurations"])
    unknown = {"constants": "", "options": ""}  # its process died before it could tell
    return {
        name: {"kernel": name.split()[0], **descriptions.get(name, unknown)}
        | {"judged": judged[name], "launched": launched[name]}
        for name in sorted(launched)
    }


def merged(runs: Iterable[Configurations]) -> Configurations:
    """The configurations of several runs together."""
    out: Configurations = {}
    for configurations in runs:
        for name, record in configurations.items():
            earlier = out.get(name, {})
            out[name] = record | {key: earlier.get(key, 0) + record[key] for key in ("judged", "launched")}
    return dict(sorted(out.items()))


def unjudged(records: Configurations) -> list[str]:
    """The configurations that were launched in no judged case, as text."""
    never = [record for record in records.values() if not record["judged"]]
    return [f"{x['kernel']} ({', '.join(filter(None, (x['constants'], x['options'])))})" for x in never]


def by_kernel(records: Configurations) -> dict[str, tuple[int, int, int]]:
    """For each kernel the number of its configurations, of those that were judged, and of the cases
    that judged one of them.
    """
    out: dict[str, tuple[int, int, int]] = {}
    for record in records.values():
        num_configurations, judged, cases = out.get(record["kernel"], (0, 0, 0))
        out[record["kernel"]] = num_configurations + 1, judged + bool(record["judged"]), cases + record["judged"]
    return out
