"""Defects of sums over ranks, planted in functions that use ranks only for sums; see `planted`.

S01 … S10 are mistakes that such sums invite. None shows where all ranks have the same tokens; most
need several processes. The real defects A05 and A07 of `defects` show here too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from moe_ref.config import RankGroup, RouterRanks

Sum = Callable[[Tensor], Tensor]


def _with_groups(
    function: Wrapper, args: tuple[Any, ...], settings: dict[str, Any], other: Callable[[RouterRanks], RouterRanks]
) -> Any:
    """The function, called with other groups."""
    return function(*args, **settings | ({"ranks": other(settings["ranks"])} if "ranks" in settings else {}))


def _with_sequence_sum(
    route: Wrapper, args: tuple[Any, ...], settings: dict[str, Any], other: Callable[[RankGroup], Sum]
) -> Any:
    """The function, called with another sum over the ranks of a sequence."""
    return _with_groups(
        route, args, settings, lambda ranks: ranks._replace(tp_cp=ranks.tp_cp._replace(sum=other(ranks.tp_cp)))
    )


def _own_counts_times_ranks(route: Wrapper, *args: Any, **settings: Any) -> Any:
    """x times the ranks: the sum only if all ranks hold the same x."""
    return _with_sequence_sum(route, args, settings, lambda group: lambda x: x * group.size)


def _own_tokens_times_ranks(route: Wrapper, *args: Any, **settings: Any) -> Any:
    """Wrong only for scalars (token counts); counts per expert are summed."""
    return _with_sequence_sum(
        route, args, settings, lambda group: lambda x: group.sum(x) if x.dim() else x * group.size
    )


def _mean_of_counts(route: Wrapper, *args: Any, **settings: Any) -> Any:
    return _with_sequence_sum(
        route, args, settings, lambda group: lambda x: group.sum(x) // group.size if x.dim() else group.sum(x)
    )


def _batch_over_one_sequence(route: Wrapper, *args: Any, **settings: Any) -> Any:
    return _with_groups(route, args, settings, lambda ranks: ranks._replace(tp_dp_cp=ranks.tp_cp))


def _counts_summed_each_step(route: Wrapper, *args: Any, **settings: Any) -> Any:
    """Sums the running counts again in every micro-batch."""
    out = route(*args, **settings)
    if "ranks" not in settings:
        return out
    total = settings["ranks"].tp_dp_cp.sum(out.state.tokens_per_expert)
    return out._replace(state=out.state._replace(tokens_per_expert=total))


def _bias_by_own_counts(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    return finish_batch(state, config, **{name: x for name, x in settings.items() if name != "ranks"})


def _bias_of_an_idle_rank(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    """A rank without tokens joins the sum but keeps its bias."""
    after = finish_batch(state, config, **settings)
    idle = not bool(state.tokens_per_expert.any())
    return after._replace(expert_bias=state.expert_bias) if idle else after


def _bias_of_the_first_rank(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    """The sum reaches rank 0 only; the other ranks use their own counts."""
    elsewhere = dist.is_initialized() and dist.get_rank() > 0
    if "ranks" in settings and elsewhere:
        group = settings["ranks"].tp_dp_cp
        settings["ranks"] = settings["ranks"]._replace(tp_dp_cp=group._replace(sum=lambda x: group.sum(x) * 0 + x))
    return finish_batch(state, config, **settings)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / dist.get_world_size() if dist.is_initialized() else g


def _mean_of_gate_gradients(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    return gate(x, _Averaged.apply(weight), **settings)


def _mean_of_shared_gradients(
    shared_experts: Wrapper, x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, **settings: Any
) -> Any:
    return shared_experts(x, fc1_weight, _Averaged.apply(fc2_weight), **settings)


INVITED = "a mistake that sums over ranks invite"
DEFECTS: tuple[Defect, ...] = (
    Defect(
        "S01",
        "a balancing loss takes this rank's counts × ranks for the sum",
        INVITED,
        {"route": _own_counts_times_ranks},
    ),
    Defect(
        "S02",
        "a loss per token takes this rank's tokens × ranks for the sum",
        "Megatron-LM, correct for equal counts",
        {"route": _own_tokens_times_ranks},
    ),
    Defect("S03", "counts of a balancing loss are averaged over the ranks", INVITED, {"route": _mean_of_counts}),
    Defect(
        "S04",
        "the global loss counts the ranks of one sequence only",
        "the wrong group, as in Megatron-LM #5916",
        {"route": _batch_over_one_sequence},
    ),
    Defect(
        "S05",
        "counts for the expert bias are summed again with every micro-batch",
        INVITED,
        {"route": _counts_summed_each_step},
    ),
    Defect("S06", "the expert bias moves by this rank's counts", INVITED, {"finish_batch": _bias_by_own_counts}),
    Defect(
        "S07",
        "a rank without tokens does not update its expert bias",
        INVITED,
        {"finish_batch": _bias_of_an_idle_rank},
    ),
    Defect(
        "S08",
        "only the first rank's expert bias moves by the counts of all",
        INVITED,
        {"finish_batch": _bias_of_the_first_rank},
    ),
    Defect(
        "S09",
        "the gradient of the router's weight is divided by the ranks",
        "partial gradients, as in torchtitan #1878",
        {"gate": _mean_of_gate_gradients},
    ),
    Defect(
        "S10",
        "the gradient of a shared expert's weight is divided by the ranks",
        INVITED,
        {"shared_experts": _mean_of_shared_gradients},
    ),
)
