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
    """The reference on all ranks of the group, and this rank's share of its results."""
    settings: dict[str, Any] = {
        "training": training and torch.is_grad_enabled(),
        "batch_size": batch_size,
        "rerun": rerun,
        "recompute": recompute,
    }
    single_process_settings = {"wgrads": wgrads, "amaxes": amaxes}  # settings of a single process
    settings |= {
        name: [results_of_ranks]
        for name, results_of_ranks in single_process_settings.items()
        if results_of_ranks is not None
    }
    leaves, form = pytree.tree_flatten((x_TH, parameters, state, padding_mask, noise, linear_states))

    def play(all_leaves: Sequence[Sequence[Any]]) -> list[LayerOutput]:
        ranks = [pytree.tree_unflatten(list(rank_leaves), form) for rank_leaves in all_leaves]
        x, p, states, *optional_arguments = ([argument_of_ranks[i] for argument_of_ranks in ranks] for i in range(6))
        mask, noises, scales = (
            None if argument_of_ranks[0] is None else argument_of_ranks for argument_of_ranks in optional_arguments
        )
        options = settings | {"padding_mask": mask, "noise": noises, "linear_states": scales}
        return _by_rank(moe_ref.moe_layer(x, p, config, states=states, **options))

    if group is None:
        return play([leaves])[0]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def play_tensors(all_tensors: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[LayerOutput]]:
        outputs = play([_put(leaves, places, tensors) for tensors in all_tensors])
        return [[x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)] for out in outputs], outputs

    results_of_ranks: list[list[LayerOutput]] = []
    tensors = Played.apply(group, play_tensors, results_of_ranks, *(leaves[i] for i in places))
    fields, form_of_results = pytree.tree_flatten(results_of_ranks[0][dist.get_rank(group)])
    at = [i for i, field in enumerate(fields) if isinstance(field, Tensor)]
    out: LayerOutput = pytree.tree_unflatten(_put(fields, at, tensors), form_of_results)
    return out


del moe_layer.__wrapped__  # the signature is this function's, not of lists over ranks


def _by_rank(out: LayerOutput) -> list[LayerOutput]:
    ranks = range(len(out.output))
    return [LayerOutput(*(None if field is None else field[rank] for field in out)) for rank in ranks]


def _put(leaves: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    filled = list(leaves)
    for index, x in zip(places, tensors, strict=True):
        filled[index] = x
    return filled
