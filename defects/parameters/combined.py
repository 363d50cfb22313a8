"""Defects of parameters that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only

SEVERAL = "a mistake that one option alone does not show"
MANY = "a mistake that few experts do not show"


def _later_members_start_at_zero_of_shard(
    expand: Wrapper, right: Any, members: Any, shard: Any, **settings: Any
) -> Any:
    """The third member's values begin where the second's do."""
    if isinstance(members, Tensor):
        return right
    with_values = [i for i, m in enumerate(right) if m.values is not None]
    if len(with_values) < 3:
        return right
    third, second = right[with_values[2]], right[with_values[1]]
    same = len(third.values) == len(second.values)
    found = list(right)
    found[with_values[2]] = third._replace(values=second.values if same else third.values)
    return found


def _packed_biases_stay(normalize: Wrapper, right: Any, state: Any, **settings: Any) -> Any:
    """A flat bias [L·M] is not split."""
    key = f"{settings.get('prefix', '')}bias"
    flat = state.get(key)
    if not isinstance(flat, Tensor) or flat.dim() != 1 or settings.get("packed") or key in right:
        return right
    kept = {name: x for name, x in right.items() if not (name.startswith(key) and name not in state)}
    return kept | {key: flat}


def _listed_is_stacked(normalize: Wrapper, right: Any, state: Any, **settings: Any) -> Any:
    """A list of members is stacked for a packed module, which should have it as it is."""
    key = f"{settings.get('prefix', '')}weight"
    value = state.get(key)
    return right | {key: torch.stack(list(value))} if isinstance(value, list) and right.get(key) is value else right


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE107",
        "a third member has the second's values",
        MANY,
        {"expand_shard": only(lambda *x, **s: True, _later_members_start_at_zero_of_shard)},
    ),
    (
        "AE111",
        "a flat bias is not split",
        SEVERAL,
        {"normalize_parameters": only(lambda *x, **s: True, _packed_biases_stay)},
    ),
    (
        "AE112",
        "a list of members is stacked",
        SEVERAL,
        {"normalize_parameters": only(lambda *x, **s: True, _listed_is_stacked)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
