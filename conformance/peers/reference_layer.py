"""The reference's layer as one rank calls it, with its state: `moe_ref.layer`, judged."""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import moe_ref
from conformance.peers.reference_world import Played
from moe_ref import new_state as new_state
from moe_ref import state_from as state_from
from moe_ref import state_tensors as state_tensors
from moe_ref.config import LayerConfig, LayerOutput, LayerParameters, RouterState


def declares(function: str) -> dict[str, Any]:
    """Bit-equal on every run."""
    return {"deterministic": True}


@wraps(moe_ref.moe_layer)
def moe_layer(
    x_TH: Tensor, parameters: LayerParameters, config: LayerConfig, *, state: RouterState,
    training: bool = True, batch_size: int = 1, group: Any = None,
    padding_mask: Tensor | None = None, noise: Tensor | None = None, wgrads: list[Any] | None = None,
    linear_states: Any = None, amaxes: Any = None, rerun: bool = False,
    recompute: str | Sequence[str] | None = None,
) -> LayerOutput:  # fmt: skip
    """The reference on all ranks of the group, and this rank's part of its results."""
    settings: dict[str, Any] = {
        "training": training and torch.is_grad_enabled(),
        "batch_size": batch_size,
        "rerun": rerun,
        "recompute": recompute,
    }
    alone = {"wgrads": wgrads, "amaxes": amaxes}  # of one process alone
    settings |= {name: [given] for name, given in alone.items() if given is not None}
    leaves, form = pytree.tree_flatten((x_TH, parameters, state, padding_mask, noise, linear_states))

    def play(every: Sequence[Sequence[Any]]) -> list[LayerOutput]:
        ranks = [pytree.tree_unflatten(list(own), form) for own in every]
        x, p, states, *others = ([given[i] for given in ranks] for i in range(6))
        mask, noises, scales = (None if given[0] is None else given for given in others)
        options = settings | {"padding_mask": mask, "noise": noises, "linear_states": scales}
        return _by_rank(moe_ref.moe_layer(x, p, config, states=states, **options))

    if group is None:
        return play([leaves])[0]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def play_tensors(every: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[LayerOutput]]:
        outputs = play([_put(leaves, places, tensors) for tensors in every])
        return [[x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)] for out in outputs], outputs

    given: list[list[LayerOutput]] = []
    tensors = Played.apply(group, play_tensors, given, *(leaves[i] for i in places))
    fields, form_of_results = pytree.tree_flatten(given[0][dist.get_rank(group)])
    at = [i for i, field in enumerate(fields) if isinstance(field, Tensor)]
    out: LayerOutput = pytree.tree_unflatten(_put(fields, at, tensors), form_of_results)
    return out


del moe_layer.__wrapped__  # the signature is this function's, not of lists over ranks


def _by_rank(out: LayerOutput) -> list[LayerOutput]:
    ranks = range(len(out.output))
    return [LayerOutput(*(None if field is None else field[rank] for field in out)) for rank in ranks]


def _put(leaves: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    found = list(leaves)
    for place, x in zip(places, tensors, strict=True):
        found[place] = x
    return found
