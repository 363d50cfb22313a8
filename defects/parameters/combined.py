"""Defects of parameters that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only
from moe_ref.config.experts import GATED

SEVERAL = "a mistake that one option alone does not show"
OWNER = "a mistake about whose memory it is"
MANY = "a mistake that few experts do not show"


def _bias_cut_as_one(upcycle: Wrapper, right: Any, *weights: Any, **settings: Any) -> Any:
    """The bias of a gated fc1 is cut into neighbours, not into a slice of each half."""
    bias, granularity = settings["fc1_bias"], settings["granularity"]
    experts, width = right.fc1_bias.shape
    parts = bias.reshape(granularity, width)
    scale = granularity if not settings.get("pre_softmax") else experts * granularity / settings["topk"]
    made = torch.stack([(parts[e % granularity].double() * scale ** (1 / 3)).to(bias.dtype) for e in range(experts)])
    return right._replace(fc1_bias=made)


def _gated_slices(*weights: Any, **settings: Any) -> bool:
    gated = settings.get("kind", "swiglu") in GATED
    return gated and settings.get("granularity", 1) > 1 and settings.get("fc1_bias") is not None


def _granularity_once(upcycle: Wrapper, right: Any, *weights: Any, **settings: Any) -> Any:
    power = 1 / 3 if settings.get("kind", "swiglu") in (*GATED, "squared_relu") else 1 / 2
    factor = settings["granularity"] ** -power
    changed = {name: None if x is None else (x.double() * factor).to(x.dtype) for name, x in right._asdict().items()}
    return right._replace(**{name: changed[name] for name in ("fc1_weight", "fc2_weight", "fc1_bias")})


def _slices_before_softmax(*weights: Any, **settings: Any) -> bool:
    return settings.get("granularity", 1) > 1 and bool(settings.get("pre_softmax"))


def _scale_in_the_weights_dtype(
    upcycle: Wrapper, right: Any, router: Tensor, fc1: Tensor, *rest: Any, **settings: Any
) -> Any:
    granularity = settings.get("granularity", 1)
    copies = len(router) // granularity
    alpha = copies * granularity**2 / settings["topk"] if settings.get("pre_softmax") else granularity
    scale = alpha ** (1 / 3 if settings.get("kind", "swiglu") in (*GATED, "squared_relu") else 1 / 2)
    narrow = float(torch.tensor(scale).to(fc1.dtype))
    return right._replace(fc1_weight=(right.fc1_weight.double() / scale).to(fc1.dtype) * narrow)


def _half_weights(router: Tensor, fc1: Tensor, *rest: Any, **settings: Any) -> bool:
    return fc1.dtype in (torch.bfloat16, torch.float16) and fc1.numel() > 0


def _biases_share_memory(upcycle: Wrapper, right: Any, *weights: Any, **settings: Any) -> Any:
    bias = settings["fc2_bias"]
    return right._replace(fc2_bias=bias[None].expand(len(right.router_weight), -1))


def _with_second_bias(*weights: Any, **settings: Any) -> bool:
    return settings.get("fc2_bias") is not None


def _router_is_the_callers(upcycle: Wrapper, right: Any, router: Tensor, *rest: Any, **settings: Any) -> Any:
    return right._replace(router_weight=router if settings.get("granularity", 1) == 1 else right.router_weight)


def _all_save_single_biases(shard: Wrapper, right: Any, parameters: Any, **settings: Any) -> Any:
    return [s._replace(writes=True) for s in right]


def _singleton(*inputs: Any, **settings: Any) -> bool:
    return bool(settings.get("singleton")) and settings.get("tensor_rank", 0) > 0


def _second_half_after_the_first(shard: Wrapper, right: Any, parameters: Any, **settings: Any) -> Any:
    """Biases of a gated layer: the second half is placed after this rank's first."""
    found = []
    for s in right:
        bias = "linear_fc1.bias" in s.key and s.offset[-1] >= s.shape[-1] // 2
        length = s.values.shape[-1]
        offset = (*s.offset[:-1], (2 * settings.get("tensor_rank", 0) + 1) * length) if bias else s.offset
        found.append(s._replace(offset=offset))
    return found


def _gated_ranks(*inputs: Any, **settings: Any) -> bool:
    return bool(settings.get("gated")) and settings.get("tensor_ranks", 1) > 1


def _empty_parts(expand: Wrapper, right: Any, members: Any, shard: Any, **settings: Any) -> Any:
    """A member that ends where the shard begins has an empty part of it."""
    if shard is None or isinstance(members, Tensor):
        return right
    first, begin, found = settings.get("offset") or 0, 0, []
    for m, member in zip(right, members, strict=True):
        end = begin + member.numel()
        found.append(m._replace(values=shard[:0], start=member.numel()) if m.values is None and end == first else m)
        begin = end
    return found


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


def _own_variables(split: Wrapper, right: Any, state: Any, **settings: Any) -> Any:
    """Only num_gemms of the extra variables is kept."""

    def cut(x: Any) -> Any:
        return x | {"extra_fp8_variables": {"num_gemms": 1}} if isinstance(x, dict) and "scale_fwd" in x else x

    return {key: cut(x) for key, x in right.items()}


def _variables_of_the_last(merge: Wrapper, right: Any, state: Any, *, num_experts: int, prefix: str = "") -> Any:
    last = state.get(f"{prefix}_extra_state{num_experts - 1 or ''}")
    key = f"{prefix}_extra_state"
    merged = right.get(key)
    if (
        not isinstance(last, dict)
        or not isinstance(merged, dict)
        or "scale_fwd" not in last
        or merged is state.get(key)
    ):
        return right
    others = {n: x for n, x in last.items() if n not in merged or not n.startswith(("scale", "amax", "extra"))}
    return right | {key: merged | others}


def _by_letters(convert: Wrapper, right: Any, state: Any, **settings: Any) -> Any:
    """Experts in the order of the letters of their numbers: 10 before 2."""
    order = sorted(range(settings["num_experts"]), key=str)
    prefix, found = settings.get("prefix", ""), dict(right)
    for linear in ("linear_fc1", "linear_fc2"):
        for name in ("weight", "bias"):
            keys = [
                f"{prefix}local_experts.{e}.{linear}.{name}"
                if settings["layout"] == "sequential"
                else f"{prefix}{linear}.{name}{e}"
                for e in range(settings["num_experts"])
            ]
            if all(key in right for key in keys):
                found |= {keys[e]: right[keys[old]] for e, old in enumerate(order)}
    return found


def _ten(*inputs: Any, **settings: Any) -> bool:
    return settings.get("num_experts", 0) > 10


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
    ("AE099", "the bias of two halves is cut as one", SEVERAL, {"upcycle": only(_gated_slices, _bias_cut_as_one)}),
    (
        "AE100",
        "slices before a softmax count once",
        SEVERAL,
        {"upcycle": only(_slices_before_softmax, _granularity_once)},
    ),
    (
        "AE101",
        "the scale is rounded to the dtype of the weights",
        SEVERAL,
        {"upcycle": only(_half_weights, _scale_in_the_weights_dtype)},
    ),
    ("AE102", "experts share one second bias", OWNER, {"upcycle": only(_with_second_bias, _biases_share_memory)}),
    (
        "AE103",
        "the router is the caller's tensor",
        OWNER,
        {"upcycle": only(lambda *w, **s: True, _router_is_the_callers)},
    ),
    (
        "AE104",
        "each tensor rank saves the keys of single experts",
        SEVERAL,
        {"shard_parameters": only(_singleton, _all_save_single_biases)},
    ),
    (
        "AE105",
        "a bias' second half follows the rank's first",
        SEVERAL,
        {"shard_parameters": only(_gated_ranks, _second_half_after_the_first)},
    ),
    (
        "AE106",
        "a member before the shard has an empty part",
        SEVERAL,
        {"expand_shard": only(lambda *x, **s: True, _empty_parts)},
    ),
    (
        "AE107",
        "a third member has the second's values",
        MANY,
        {"expand_shard": only(lambda *x, **s: True, _later_members_start_at_zero_of_shard)},
    ),
    (
        "AE108",
        "other variables of an extra state are lost",
        SEVERAL,
        {"split_extra_state": only(lambda *x, **s: True, _own_variables)},
    ),
    (
        "AE109",
        "what one expert can give is the last's",
        SEVERAL,
        {"merge_extra_state": only(lambda *x, **s: True, _variables_of_the_last)},
    ),
    ("AE110", "more than ten experts are converted by letters", MANY, {"convert_experts": only(_ten, _by_letters)}),
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
