"""Parameters and their checkpoints: names, results, rules."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config.dispatch import check_expert_split
from moe_ref.config.experts import GATED, PLAIN
from moe_ref.config.rules import check_choice, check_count, check_float, is_count, require, require_shape

EXTRA_STATE = "_extra_state"
LAYOUTS_OF_EXPERTS = ("sequential", "grouped")
LINEARS, NAMES = ("linear_fc1", "linear_fc2"), ("weight", "bias")
# the axis of one expert's parameter that tensor-parallel ranks share; None: each has all of it
TENSOR_AXIS = {"linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1, "linear_fc2.bias": None}
# tensors of an FP8 layer's extra state, and their columns per expert: of input, weight and output;
# of the gradients of output and input
COLUMNS = {"scale_fwd": 3, "amax_history_fwd": 3, "scale_bwd": 2, "amax_history_bwd": 2}

State = Mapping[str, Any]


class Shard(NamedTuple):
    """A part of a parameter of the checkpoint, which has one axis per dimension of `values`."""

    key: str
    values: Tensor
    shape: tuple[int, ...]  # of the whole parameter
    offset: tuple[int, ...]  # of the first value
    writes: bool  # whether this rank saves it: of ranks with the same values, only the first


class MemberShard(NamedTuple):
    """The part of a master shard that belongs to one member of a grouped parameter."""

    member: Tensor
    values: Tensor | None  # [n], a view of the shard; None: no part of the member
    start: int | None  # of the values in the flattened member


class Upcycled(NamedTuple):
    """The parameters of a Mixture-of-Experts layer made of a dense one; F is an expert's width."""

    router_weight: Tensor  # [E,H]
    fc1_weight: Tensor  # [E,2F,H] for a gated kind, [E,F,H] for others
    fc2_weight: Tensor  # [E,H,F]
    fc1_bias: Tensor | None  # [E,2F] or [E,F]
    fc2_bias: Tensor | None  # [E,H]


def matches(key: str, name: str) -> bool:
    """Whether the key is the name, or ends in it after a dot."""
    return key == name or key.endswith(f".{name}")


def check_num_experts(num_experts: int) -> None:
    check_count("num_experts", num_experts)


def check_whole(key: str, packed: Any, num_experts: int) -> None:
    """A packed parameter has a member per expert, or rows that the experts share equally."""
    if isinstance(packed, Sequence):
        require(len(packed) == num_experts, key, f"of {len(packed)} members", f"of {num_experts}, one per expert")
        return
    expected = f"a tensor whose first dimension is a multiple of {num_experts}, or a list of tensors"
    require(isinstance(packed, Tensor) and packed.dim() > 0, key, f"a {type(packed).__name__} without rows", expected)
    require_shape(packed.shape[0] % num_experts == 0, key, packed, expected)


def check_members(key: str, members: Sequence[Tensor]) -> None:
    """All experts' parameters have one shape."""
    shapes = {tuple(x.shape) for x in members}
    require(len(shapes) == 1, f"{key}0", f"one of shapes {sorted(shapes)}", "of the shape of every other expert's")


def check_layout_of_experts(layout: str) -> None:
    requirement = f"one of {', '.join(LAYOUTS_OF_EXPERTS)}"
    require(layout in LAYOUTS_OF_EXPERTS, "layout", repr(layout), requirement)


def check_conversion(state: State, source: Sequence[str], target: Sequence[str]) -> None:
    """Each expert has the parameter, and none has it under both names."""
    missing = [key for key in source if key not in state]
    require(not missing, "state", f"without {', '.join(missing)}", "of all experts: a part would be left at random")
    both = [key for key in target if key in state]
    require(not both, "state", f"with {', '.join(both)} too", "in one layout")


def check_extra_state(key: str, extra: State, num_experts: int) -> None:
    """The last dimension of each tensor has its columns of all experts."""
    for name, columns in COLUMNS.items():
        x = extra.get(name)
        requirement = f"a tensor whose last dimension is {columns * num_experts}"
        fits = isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] == columns * num_experts
        require(fits, f"{key}[{name!r}]", _described(x), requirement)


def check_shard_parameters(
    parameters: State, num_experts: int, rank: int, ranks: int, tensor_rank: int, tensor_ranks: int
) -> None:
    """Ranks are among their number, and no parameter is unknown."""
    check_num_experts(num_experts)
    for name, number, count in (("rank", rank, ranks), ("tensor_rank", tensor_rank, tensor_ranks)):
        check_count(f"{name}s", count)
        require(is_count(number) and 0 <= number < count, name, number, f"from 0 to {count - 1}")
    check_expert_split(num_experts, ranks)
    local = range(num_experts // ranks)
    known_keys = {key for name in TENSOR_AXIS for key in (name, *(f"{name}{e}" for e in local))}
    unknown = [key for key in parameters if key not in known_keys]
    require(not unknown, "parameters", f"with {', '.join(unknown)}", f"of {', '.join(TENSOR_AXIS)}")


def check_halves(key: str, x: Tensor) -> None:
    require_shape(x.shape[0] % 2 == 0, key, x, "of an even number of rows: two halves")


def check_expand_shard(members: Sequence[Tensor], shard: Tensor | None, offset: int | None) -> None:
    """The shard is flat and lies within the members."""
    first, total = offset or 0, sum(x.numel() for x in members)
    require(is_count(first) and first >= 0, "offset", offset, "None or a whole number ≥ 0")
    if shard is not None:
        require_shape(shard.dim() == 1, "shard", shard, "flat")
        last = first + shard.shape[0]
        require(last <= total, "shard", f"of elements {first} to {last}", f"within the {total} of all members")


def check_upcycle(
    router_weight_EH: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, topk: int, granularity: int, kind: str,
    fc1_bias: Tensor | None, fc2_bias: Tensor | None, halves: int,
) -> None:  # fmt: skip
    """Experts and the dense width are multiples of the granularity."""
    check_choice("kind", kind, GATED + PLAIN)
    require(router_weight_EH.dim() == 2, "router_weight", _described(router_weight_EH), "[E,H]")
    require(fc2_weight.dim() == 2, "fc2_weight", _described(fc2_weight), "[H,F]")
    (experts, hidden), width = router_weight_EH.shape, fc2_weight.shape[1]
    require(is_count(topk) and 1 <= topk <= experts, "topk", topk, f"from 1 to {experts}")
    divides = is_count(granularity) and granularity >= 1 and experts % granularity == 0 and width % granularity == 0
    require(divides, "granularity", granularity, f"a divisor of {experts} experts and of the dense width {width}")
    check_float("fc1_weight", fc1_weight, (halves * width, hidden), router_weight_EH)
    check_float("fc2_weight", fc2_weight, (hidden, width), router_weight_EH)
    for name, bias, length in (("fc1_bias", fc1_bias, halves * width), ("fc2_bias", fc2_bias, hidden)):
        if bias is not None:
            check_float(name, bias, (length,), router_weight_EH)


def _described(x: Any) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
