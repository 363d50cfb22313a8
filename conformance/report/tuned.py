"""The configurations of tuned kernels that were judged, as lines of a report's head."""

from conformance.engine.child.tuned import EACH, FIRST, UNKNOWN
from conformance.engine.run.verdict import Verdict


def tuned_lines(verdict: Verdict) -> list[str]:
    """A line for each way in which configurations were chosen; empty without tuned kernels."""
    groups: dict[str, list[str]] = {EACH: [], FIRST: [], UNKNOWN: []}
    for name, record in verdict.tuned.items():
        kernel, total, judged = name.rpartition(".")[2], record["total"], len(record["judged"])
        num_unfit = len(record["unfit"])
        unfit = f" ({num_unfit} {'does' if num_unfit == 1 else 'do'} not fit the device)" if num_unfit else ""
        text = f"{kernel} {judged} of {total}{unfit}" if record["by"] == EACH else f"{kernel} ({total} configurations)"
        groups[record["by"]].append(text)
    heads = {
        EACH: "judged configurations",
        FIRST: "first configuration only, in the interpreter",
        UNKNOWN: "only the configuration that the tuner chose, because this version of Triton is not known",
    }
    return [f"tuned kernels: {heads[by]}: {', '.join(texts)}" for by, texts in groups.items() if texts]
