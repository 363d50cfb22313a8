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
    """The function is called without a setting."""
    return lambda f, *args, **settings: f(*args, **{n: x for n, x in settings.items() if n != name})


def doubled(name: str) -> Wrong:
    return lambda f, *args, **settings: f(*args, **settings | {name: 2 * settings[name]})


def turned(index: int, dim: int = 0) -> Wrong:
    """An argument is reversed along a dimension."""
    return lambda f, *args, **settings: f(*args[:index], args[index].flip(dim), *args[index + 1 :], **settings)


def other_rows(f: Wrong, ranks: Any, *args: Any, **settings: Any) -> Any:
    """The rows of each rank in another order; of one byte they are no numbers for torch."""
    bits = [x.view(torch.uint8).flip(0).view(x.dtype) if x.element_size() == 1 else x.flip(0) for x in ranks]
    return f(bits, *args, **settings)


def other_slots(f: Wrong, rows: Any, *args: Any, **settings: Any) -> Any:
    return f([x.flip(1) for x in rows], *args, **settings)


def next_expert(f: Wrong, indices: Any, *, num_experts: int, ranks: int) -> Any:
    return f(torch.where(indices < 0, indices, (indices + 1) % num_experts), num_experts=num_experts, ranks=ranks)


def other_experts(f: Wrong, x: Any, parameters: Any, *args: Any, **settings: Any) -> Any:
    """Each rank's second matrices belong to other experts than its first."""
    return f(x, [p._replace(fc2_weight=p.fc2_weight.flip(0)) for p in parameters], *args, **settings)


def other_setting(name: str, alternative: Callable[[Any], Any]) -> Wrong:
    return lambda f, state, **settings: f(state, **settings | {name: alternative(settings[name])})


FORGOTTEN = {  # a setting of each function
    "gate": "bias", "topk_indices": "expert_bias", "topk_routing": "scaling_factor", "sinkhorn_routing": "training",
    "drop_tokens": "drop_policy", "aux_loss_scores": "padding_mask", "z_loss": "padding_mask", "attach_loss": "scale",
    "route": "loss_scale", "unpermute": "probs", "quantize": "role", "permute_and_quantize": "role",
    "glu_and_quantize": "offset", "activation_and_quantize": "kind", "glu_backward_and_quantize": "clamp",
    "activation_backward_and_quantize": "kind", "glu": "interleave", "activation": "probs", "grouped_linear": "bias",
    "grouped_wgrad": "accumulate_into", "grouped_mlp": "probs_on_input", "sequential_mlp": "offset",
    "shared_experts": "gate_weight", "latent_projection": "bias", "shard_parameters": "gated",
    "expand_shard": "offset", "split_extra_state": "prefix", "upcycle": "pre_softmax",
}  # fmt: skip
DOUBLED = {
    "jitter": "eps", "load_balancing_loss": "coeff", "update_expert_bias": "update_rate", "pad_routing_map": "align",
}  # fmt: skip
REVERSED = {  # an argument of each function, and its dimension
    "permute": (1, 0), "sort_chunks": (2, 0), "indices_to_multihot": (1, 0), "multihot_to_indices": (0, 1),
    "grouped_dgrad": (2, 0), "flatten_experts": (0, 1),
}  # fmt: skip
MISTAKES: dict[str, Wrong] = {
    **{function: without(name) for function, name in FORGOTTEN.items()},
    **{function: doubled(name) for function, name in DOUBLED.items()},
    **{function: turned(*argument) for function, argument in REVERSED.items()},
    "deepep_layout": next_expert,
    "deepep_low_latency_combine": other_slots,
    "moe_layer": other_experts,
    "normalize_parameters": other_setting("packed", lambda packed: not packed),
    "normalize_master_parameters": other_setting("packed", lambda packed: not packed),
    "convert_experts": other_setting("layout", {"grouped": "sequential", "sequential": "grouped"}.get),
    "merge_extra_state": other_setting("num_experts", lambda count: count + 1),
}


class Mistaken:
    """The formulations, one of them with a mistake."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        formulation, mistake = getattr(everything, name), MISTAKES.get(name, other_rows)
        if name != self.function:
            return formulation
        return lambda *args, **settings: mistake(formulation, *args, **settings)


@pytest.fixture(params=CONTRACTS, scope="module")
def function(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expectations(function) -> list[tuple[Case, dict[str, Any]]]:
    """Cases of the function, and the reference's results."""
    drawn = cases(function, COUNTS.get(function, 16))
    assert len(drawn) == COUNTS.get(function, 16)
    return [(case, played(moe_ref, case)) for case in drawn]


def test_two_formulations_agree(expectations):
    differences = {case.text: difference(case, x, played(everything, case)) for case, x in expectations}
    assert {text: reason for text, reason in differences.items() if reason} == {}


def test_a_mistake_in_one_of_them_is_found(function, expectations):
    mistaken = Mistaken(function)
    assert any(difference(case, expected, played(mistaken, case)) for case, expected in expectations)


def test_a_change_of_one_value_is_a_difference(expectations):
    """Of each result, also of the gradients; of a float64 by a millionth."""
    tensors = [
        (case, {n: x for n, x in out.items() if isinstance(x, Tensor) and x.any()}) for case, out in expectations
    ]
    finite = [pair for pair in tensors if all(x.double().isfinite().all() for x in pair[1].values())]
    case, results = max(finite, key=lambda pair: len(pair[1]))
    for name, x in results.items():
        changed = x.detach().clone().flatten()
        at = int(changed.double().abs().argmax())
        changed[at] = changed[at] * (1 + 2.0**-20) if x.dtype == torch.float64 else changed[at] == 0
        message = difference(case, results, results | {name: changed.reshape(x.shape)})
        assert message.startswith(name) or ("codes" in name and case.function.startswith(UP_TO_SIGN))
