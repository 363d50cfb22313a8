"""Memory that all ranks of a group address.

When more is needed, the memory in use stays where it is, because a CUDA graph may have captured its
address. A barrier waits for ten minutes, and multicast memory is refused.
"""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import moe_ref
from conformance.judge.exact import bits
from moe_fast.dispatch import slabs
from moe_fast.dispatch.slabs import BARRIER_MS, MULTICAST, Room, Slab, slab_for
from moe_fast.dispatch.steps import Transfer, run, send
from moe_fast.dispatch.symmetric import Early, hybridep_dispatch, start_early
from moe_ref.config import Recipe

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[list[Any]]:
    """One rank's; whoever takes it out of the list has the last of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [dist.new_group([0])]
    dist.destroy_process_group()


# ---- more room


def dispatched(slab: Slab, seed: int) -> bool:
    """Whether a dispatch over this memory, replayed by a graph captured with it, is right."""
    noise = torch.Generator().manual_seed(seed)
    tokens, routing_map = torch.randn((3, 2), generator=noise), torch.rand((3, 2), generator=noise) < 0.7
    rows, _, counts, _ = run(send(tokens, routing_map, None, Transfer(4), slab, 0), slab)
    expected = moe_ref.hybridep_dispatch([tokens], [routing_map], num_rows=4)[0]
    num_used = int(counts.sum())
    return (
        torch.equal(counts, expected.tokens_per_expert)
        and not (bits(rows[:num_used]) != bits(expected.rows[:num_used])).any()
    )


def test_memory_that_a_graph_has_captured_stays_when_more_is_needed(group):
    slab = slab_for(group[0], CPU, Room(1, 2, 4, 8))
    assert dispatched(slab, 1)
    larger = slab_for(group[0], CPU, Room(1, 2, 9, 8))
    assert larger is not slab and not {int(x) for x in larger.tables.values()} & {int(x) for x in slab.tables.values()}
    assert dispatched(larger, 2) and dispatched(slab, 3)
    captured = [ref(x) for x in (slab, slab.memory, *slab.tables.values(), *slab.memories)]
    del slab
    gc.collect()
    assert None not in [weak() for weak in captured]
    assert slab_for(group[0], CPU, Room(1, 1, 5, 4)) is larger


def test_the_memory_of_a_group_is_freed_with_the_group(group):
    first, second = (slab_for(group[0], CPU, Room(1, 1, rows, 8)) for rows in (2, 5))
    weak_slabs = [ref(first), ref(second)]
    del first, second
    dist.destroy_process_group(group.pop())
    gc.collect()
    assert [weak() for weak in weak_slabs] == [None, None]


def test_outgrown_memory_is_no_larger_than_the_memory_in_use():
    rooms = [Room(2, 4, 1, 16)]
    for rows in range(2, 700):
        wanted = Room(2, 4, rows, 16)
        if not rooms[-1].holds(wanted):
            rooms.append(rooms[-1].grown(wanted))
            assert rooms[-1].holds(wanted)
    assert sum(room.rows for room in rooms[:-1]) <= rooms[-1].rows < 2 * 700
    assert Room(2, 8, 10, 4).grown(Room(2, 4, 3, 32)) == Room(2, 8, 10, 32)
    assert Room(2, 8, 10, 4).grown(Room(2, 4, 50, 2)) == Room(2, 8, 50, 4)


def test_tokens_travel_early_between_two_ranks_alone(group):
    tokens, routing_map = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="group is of 1 ranks; it must be of two"):
        start_early(tokens, num_experts=2, num_rows=6, group=group[0])
    transfer = Early(tokens, slab_for(group[0], CPU, Room(1, 2, 6, 8)), lambda: None)
    settings: dict[str, Any] = {"num_rows": 6, "group": group[0], "early": transfer}
    hybridep_dispatch(tokens, routing_map, **settings)
    for other_tokens, options in (
        (tokens.clone(), {}),
        (tokens, {"deduplicate": False}),
        (tokens, {"recipe": Recipe("block")}),
    ):
        with pytest.raises(ValueError, match="early is of other tokens or rows, or with a recipe or duplicates"):
            hybridep_dispatch(other_tokens, routing_map, **settings, **options)


# ---- over NVLink, with torch's part of it played


def meet(
    monkeypatch: pytest.MonkeyPatch, group: Any, multicast_ptr: int = 0, set_to: str | None = "1"
) -> tuple[Slab, list[dict[str, int]]]:
    """The slab of a host whose handle says so; and how its barrier is called."""
    import torch.distributed._symmetric_memory as symmetric

    waited: list[dict[str, int]] = []
    handle = SimpleNamespace(
        multicast_ptr=multicast_ptr,
        get_remote_tensor=lambda rank, shape, dtype: torch.empty(shape, dtype=dtype),
        barrier=lambda **arguments: waited.append(arguments),
    )
    monkeypatch.setattr(symmetric, "empty", torch.empty)
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: handle)
    if set_to is None:
        monkeypatch.delenv(MULTICAST, raising=False)
    else:
        monkeypatch.setenv(MULTICAST, set_to)
    return slabs._nvlink(group, CPU, Room(1, 2, 4, 8)), waited


def test_the_barrier_waits_for_ten_minutes(group, monkeypatch):
    slab, waited = meet(monkeypatch, group[0])
    slab.barrier()
    assert waited == [{"channel": 0, "timeout_ms": BARRIER_MS}]
    assert BARRIER_MS == 10 * 60 * 1000  # what `hybridep_dispatch` tells its callers


def test_a_handle_with_a_multicast_pointer_is_refused(group, monkeypatch):
    with pytest.raises(
        ValueError, match=f"group is with a multicast pointer; it must be without: {MULTICAST} was set too late"
    ):
        meet(monkeypatch, group[0], multicast_ptr=0x7F00)


@pytest.mark.parametrize("set_to", [None, "0", ""])
def test_multicast_that_is_not_switched_off_is_refused_before_any_memory_is_taken(set_to, group, monkeypatch):
    with pytest.raises(ValueError, match=f"{MULTICAST} is {set_to!r}; it must be 1, set before torch is imported"):
        meet(monkeypatch, group[0], set_to=set_to)
