"""A dispatcher that is called with a number of rows reads no count; without, it does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_fast
from conformance.catalogue import CONTRACTS
from conformance.core.ranks import RankContext
from conformance.families.dispatch.low_latency import allowed_to_wait
from moe_ref.config import IndexPolicy
from tests.common.fast import interpreted, normal, record_reads

TRUSTED = IndexPolicy(values="trusted")
EXPERTS = 3
MAPS = {"allgather": {"num_rows": 5}, "alltoall": {"num_rows": 5}, "hybridep": {"num_rows": 5}}
SLOTS = {"deepep": {"num_worst_tokens": 4, "policy": TRUSTED}, "deepep_low_latency": {"policy": TRUSTED}}


def called(dispatcher: str, group: Any, **sizes: Any) -> list[torch.Tensor]:
    """Dispatch, combine and their backward on a rank; the tokens that come back, and dx."""
    x = normal(4, 2).requires_grad_()
    slots = torch.tensor([[0, 2], [1, -1], [2, 0], [-1, -1]])
    if dispatcher in MAPS:
        routing_map = (slots[:, :, None] == torch.arange(EXPERTS)).any(1)
        dispatched = getattr(moe_fast, f"{dispatcher}_dispatch")(x, routing_map, group=group, **sizes)
        combined = getattr(moe_fast, f"{dispatcher}_combine")(dispatched.rows * 2, dispatched.handle, group=group)
    elif dispatcher == "deepep":
        dispatched = moe_fast.deepep_dispatch(x, slots, num_experts=EXPERTS, group=group, **sizes)
        combined = moe_fast.deepep_combine(dispatched.rows * 2, dispatched.handle, group=group)
    else:
        settings = {"num_experts": EXPERTS, "max_tokens_per_rank": 4, "group": group}
        dispatched = moe_fast.deepep_low_latency_dispatch(x, slots, **settings, **sizes)
        rows, probs = dispatched.rows * 2, torch.ones(slots.shape)
        combined = moe_fast.deepep_low_latency_combine(rows, slots, probs, dispatched.handle, group=group)
    y = getattr(combined, "tokens", combined)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad]


@interpreted
@pytest.mark.parametrize("dispatcher", [*MAPS, *SLOTS])
def test_with_a_static_size_the_host_reads_nothing_and_without_one_it_does(
    dispatcher: str, one_rank: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = called(dispatcher, one_rank.group)
    reads = record_reads(monkeypatch)
    results = called(dispatcher, one_rank.group, **(MAPS | SLOTS)[dispatcher])
    static_reads = len(reads)
    called(dispatcher, one_rank.group)
    assert static_reads == 0 < len(reads)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("function", ["deepep_dispatch", "deepep_low_latency_dispatch"])
def test_a_case_of_trusted_values_is_called_with_the_policy_that_trusts_them(function: str) -> None:
    contract: Any = CONTRACTS[function]
    case = contract.case_type(function=function, counts=(2,), slack=1, trusted=True)
    (call,) = contract.calls(case)
    assert call.settings["policy"].values == "trusted"
    (checked,) = contract.calls(replace(case, trusted=False))
    assert "policy" not in checked.settings


def test_the_suite_may_wait_while_it_arranges_rows_and_the_call_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = ["error"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(AssertionError), allowed_to_wait():
        raise AssertionError("dispatch is wrong")
    assert modes == ["error", "default", "error"]
