"""Records of the configurations of tuned kernels that cases judged."""

from collections.abc import Iterable
from typing import Any

# By kernel or function: the `total` of its configurations, how they are chosen (`by`), and labels
# of those that were `judged` and of those that are `unfit` for the device.
Tuned = dict[str, dict[str, Any]]
EACH, FIRST, UNKNOWN = "each", "first", "tuner"  # each in turn, the first alone, or what the tuner chooses


def joined(parts: Iterable[Tuned]) -> Tuned:
    """The configurations of several cases or shards together; one that was judged once does fit."""
    out: Tuned = {}
    for part in parts:
        for name, record in part.items():
            known = out.setdefault(name, record | {"judged": [], "unfit": []})
            judged = {*known["judged"], *record["judged"]}
            unfit = {*known["unfit"], *record["unfit"]} - judged
            out[name] = known | {"judged": sorted(judged), "unfit": sorted(unfit)}
            out[name]["total"] = max(known["total"], record["total"])
    return dict(sorted(out.items()))
