"""Records of the configurations of tuned kernels that cases judged."""

from collections.abc import Iterable
from typing import Any

# By kernel or function: the `total` of its configurations, how they are chosen (`by`), and labels
# of those that were `judged` and of those that are `unfit` for the device.
Tuned = dict[str, dict[str, Any]]
EACH, FIRST, UNKNOWN = "each", "first", "tuner"  # each in turn, the first alone, or what the tuner chooses


def joined(records: Iterable[Tuned]) -> Tuned:
    """The configurations of several cases or shards together.

    A configuration that was judged once does fit.
    """
    out: Tuned = {}
    for record_of_case in records:
        for name, record in record_of_case.items():
            joined_record = out.setdefault(name, record | {"judged": [], "unfit": []})
            judged = {*joined_record["judged"], *record["judged"]}
            unfit = {*joined_record["unfit"], *record["unfit"]} - judged
            out[name] = joined_record | {"judged": sorted(judged), "unfit": sorted(unfit)}
            out[name]["total"] = max(joined_record["total"], record["total"])
    return dict(sorted(out.items()))
