"""The reference's layer as one rank calls it."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import moe_ref
from moe_ref.config import LayerConfig, LayerOutput, LayerParameters, RouterState


def one_rank_layer(played: Callable[..., tuple[Tensor, ...]]) -> Callable[..., LayerOutput]:
    """`moe_layer` of one rank; `played` gathers all ranks' tensors, plays the reference, and has
    its gradients.
    """
    whole = moe_ref.moe_layer

    @wraps(whole)
    def moe_layer(
        x_TH: Tensor, parameters: LayerParameters, config: LayerConfig, *, state: RouterState,
        training: bool = True, batch_size: int = 1, group: Any = None,
    ) -> LayerOutput:  # fmt: skip
        settings = {"training": training and torch.is_grad_enabled(), "batch_size": batch_size}
        leaves, form = pytree.tree_flatten((x_TH, parameters, state))

        def play(every: Sequence[Sequence[Any]]) -> list[LayerOutput]:
            own = [pytree.tree_unflatten(rank, form) for rank in every]
            x, p, states = ([given[i] for given in own] for i in range(3))
            return _by_rank(whole(x, p, config, states=states, **settings))

        if group is None:
            return play([leaves])[0]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: list[LayerOutput] = []

        def play_tensors(every: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[LayerOutput]]:
            filled = [_put(leaves, places, tensors) for tensors in every]
            outputs = play(filled)
            return [[x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)] for out in outputs], outputs

        tensors = played(group, play_tensors, results, *(leaves[i] for i in places))
        fields, form_of_results = pytree.tree_flatten(results[0][dist.get_rank(group)])
        at = [i for i, field in enumerate(fields) if isinstance(field, Tensor)]
        out: LayerOutput = pytree.tree_unflatten(_put(fields, at, tensors), form_of_results)
        return out

    # the reference's annotations are of lists; parameters are read off this signature
    del moe_layer.__wrapped__  # type: ignore[attr-defined]
    return moe_layer


def _by_rank(out: LayerOutput) -> list[LayerOutput]:
    ranks = range(len(out.output))
    return [LayerOutput(*(None if field is None else field[rank] for field in out)) for rank in ranks]


def _put(leaves: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    found = list(leaves)
    for place, x in zip(places, tensors, strict=True):
        found[place] = x
    return found
