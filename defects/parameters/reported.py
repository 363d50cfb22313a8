"""Defects that were reported of public converters, planted by their mechanism; see `planted`."""

from typing import Any

from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only


def _turned_second(upcycle: Wrapper, right: Any, *weights: Any, **settings: Any) -> Any:
    """Of a square weight the shape does not tell in which order its axes are."""
    return right._replace(fc2_weight=right.fc2_weight.mT.contiguous())


def _square_second(router: Tensor, fc1: Tensor, fc2: Tensor, **settings: Any) -> bool:
    return fc2.shape[0] * settings.get("granularity", 1) == fc2.shape[1] and fc2.shape[0] > 1


def _cut_by_rows(shard: Wrapper, right: Any, parameters: Any, **settings: Any) -> Any:
    turned = {
        key: x.mT.contiguous() if "fc2.weight" in key and x.shape[-1] == x.shape[-2] else x
        for key, x in parameters.items()
    }
    return shard(turned, **settings)


def _first_of_all_writes(shard: Wrapper, right: Any, parameters: Any, **settings: Any) -> Any:
    """The writer is elected among all ranks, not among those of the expert."""
    return [part._replace(writes=part.writes and settings["rank"] == 0) for part in right]


def _both_parallel(parameters: Any, **settings: Any) -> bool:
    return settings.get("tensor_ranks", 1) > 1 and settings["ranks"] > 1


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB78",
        "a square second weight is turned",
        "transformers #47031",
        {"upcycle": only(_square_second, _turned_second)},
    ),
    (
        "RB79",
        "a square second weight is cut as if it were turned",
        "unsloth-zoo #849",
        {"shard_parameters": only(lambda *x, **s: True, _cut_by_rows)},
    ),
    (
        "RB80",
        "the first of all ranks writes",
        "Megatron-LM #6775",
        {"shard_parameters": only(_both_parallel, _first_of_all_writes)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
