"""Defects of dispatchers in the process group, and in a handle that several calls take."""

from typing import Any

import torch.distributed as dist

from conformance.core.call_defects import right_once_per_handle
from conformance.core.defect import Defect, Wrapper

GROUPS = "a mistake that a program with one group does not show"


def _default_group(collective: Wrapper, *inputs: Any, group: Any, **settings: Any) -> Any:
    return collective(*inputs, group=dist.group.WORLD, **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect("C24", "collectives over the default group", GROUPS, {"alltoall_dispatch": _default_group}),
    Defect("C25", "collectives over the default group", GROUPS, {"deepep_combine": _default_group}),
    Defect(
        "C26",
        "a handle is right for one combine",
        "a mistake that one call per handle does not show",
        dict.fromkeys(("alltoall_combine", "deepep_combine", "unpermute"), right_once_per_handle()),
    ),
)
