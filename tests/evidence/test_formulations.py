"""Every function of the reference agrees with a second formulation in float64, for drawn cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from evidence.formulations import everything
from evidence.formulations.agreement import UP_TO_SIGN, cases, difference, played

COUNTS = {"merge_extra_state": 96}  # cases: most states have no parts to merge; of others 16
Wrong = Callable[..., Any]


def without(name: str) -> Wrong:
    """A setting is forgotten."""
    return lambda right, *args, **settings: right(*args, **{n: x for n, x in settings.items() if n != name})


def doubled(name: str) -> Wrong:
    return lambda right, *args, **settings: right(*args, **settings | {name: 2 * settings[name]})


def turned(place: int, dim: int = 0) -> Wrong:
    """An argument is read from its end."""
    return lambda right, *args, **settings: right(*args[:place], args[place].flip(dim), *args[place + 1 :], **settings)


def other_rows(right: Wrong, ranks: Any, *args: Any, **settings: Any) -> Any:
    """The rows of each rank in another order; of one byte they are no numbers for torch."""
    bits = [x.view(torch.uint8).flip(0).view(x.dtype) if x.element_size() == 1 else x.flip(0) for x in ranks]
    return right(bits, *args, **settings)


def other_slots(right: Wrong, rows: Any, *args: Any, **settings: Any) -> Any:
    return right([x.flip(1) for x in rows], *args, **settings)


def next_expert(right: Wrong, indices: Any, *, num_experts: int, ranks: int) -> Any:
    return right(torch.where(indices < 0, indices, (indices + 1) % num_experts), num_experts=num_experts, ranks=ranks)


def other_experts(right: Wrong, x: Any, parameters: Any, *args: Any, **settings: Any) -> Any:
    """Each rank's second matrices belong to other experts than its first."""
    return right(x, [p._replace(fc2_weight=p.fc2_weight.flip(0)) for p in parameters], *args, **settings)


def other_setting(name: str, other: Callable[[Any], Any]) -> Wrong:
    return lambda right, state, **settings: right(state, **settings | {name: other(settings[name])})


MISTAKES: dict[str, Wrong] = {
    "gate": without("bias"),
    "jitter": doubled("eps"),
    "topk_indices": without("expert_bias"),
    "topk_routing": without("scaling_factor"),
    "sinkhorn_routing": without("training"),
    "drop_tokens": without("drop_policy"),
    "aux_loss_scores": without("padding_mask"),
    "load_balancing_loss": doubled("coeff"),
    "z_loss": without("padding_mask"),
    "attach_loss": without("scale"),
    "update_expert_bias": doubled("update_rate"),
    "route": without("loss_scale"),
    "permute": turned(1),
    "unpermute": without("probs"),
    "sort_chunks": turned(2),
    "pad_routing_map": doubled("align"),
    "indices_to_multihot": turned(1),
    "multihot_to_indices": turned(0, 1),
    "quantize": without("role"),
    "permute_and_quantize": without("role"),
    "glu_and_quantize": without("offset"),
    "activation_and_quantize": without("kind"),
    "glu_backward_and_quantize": without("clamp"),
    "activation_backward_and_quantize": without("kind"),
    "glu": without("interleave"),
    "activation": without("probs"),
    "grouped_linear": without("bias"),
    "grouped_dgrad": turned(2),
    "grouped_wgrad": without("accumulate_into"),
    "grouped_mlp": without("probs_on_input"),
    "sequential_mlp": without("offset"),
    "shared_experts": without("gate_weight"),
    "latent_projection": without("bias"),
    "deepep_layout": next_expert,
    "flatten_experts": turned(0, 1),
    "deepep_low_latency_combine": other_slots,
    "moe_layer": other_experts,
    "normalize_parameters": other_setting("packed", lambda packed: not packed),
    "normalize_master_parameters": other_setting("packed", lambda packed: not packed),
    "convert_experts": other_setting("layout", {"grouped": "sequential", "sequential": "grouped"}.get),
    "shard_parameters": without("gated"),
    "expand_shard": without("offset"),
    "split_extra_state": without("prefix"),
    "merge_extra_state": other_setting("num_experts", lambda count: count + 1),
    "upcycle": without("pre_softmax"),
}


class Mistaken:
    """The formulations, one of them with a mistake."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        right, wrong = getattr(everything, name), MISTAKES.get(name, other_rows)
        if name != self.function:
            return right
        return lambda *args, **settings: wrong(right, *args, **settings)


@pytest.fixture(params=CONTRACTS, scope="module")
def function(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def right(function) -> list[tuple[Case, dict[str, Any]]]:
    """Cases of the function, and the reference's results."""
    drawn = cases(function, COUNTS.get(function, 16))
    assert len(drawn) == COUNTS.get(function, 16)
    return [(case, played(moe_ref, case)) for case in drawn]


def test_two_formulations_agree(right):
    found = {case.text: difference(case, own, played(everything, case)) for case, own in right}
    assert {text: reason for text, reason in found.items() if reason} == {}


def test_a_mistake_in_one_of_them_is_found(function, right):
    wrong = Mistaken(function)
    assert any(difference(case, own, played(wrong, case)) for case, own in right)


def test_a_change_of_one_value_is_a_difference(right):
    """Of each result, also of the gradients; of a float64 by a millionth."""
    numbers = [(case, {n: x for n, x in own.items() if isinstance(x, Tensor) and x.any()}) for case, own in right]
    finite = [one for one in numbers if all(x.double().isfinite().all() for x in one[1].values())]
    case, results = max(finite, key=lambda one: len(one[1]))
    for name, x in results.items():
        wrong = x.detach().clone().flatten()
        place = int(wrong.double().abs().argmax())
        wrong[place] = wrong[place] * (1 + 2.0**-20) if x.dtype == torch.float64 else wrong[place] == 0
        found = difference(case, results, results | {name: wrong.reshape(x.shape)})
        assert found.startswith(name) or ("codes" in name and case.function.startswith(UP_TO_SIGN))
