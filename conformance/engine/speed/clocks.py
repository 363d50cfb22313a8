"""Clocks of calls that alternate in one process: events on a GPU, the host's clock on a CPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

COLD_BYTES = 256 * 2**20  # several times the L2 of a GPU
HOST_BYTES = 32 * 2**20  # the same for caches of a CPU, where writing takes longer
BF16 = 2  # bytes per element
AHEAD = 2.0  # how many times the host's time for a call the GPU is busy with other work
MOST_WRITES = 64  # the most writes before a call: a few milliseconds

Call = Callable[[], object]
Times = dict[str, float]  # microseconds of each version


def medians(
    versions: Mapping[str, Call], blocks: int, reps: int, setup: Call = lambda: None, device: str = "cuda"
) -> Times:
    """Medians over `blocks` turns of medians of `reps` calls; `setup` runs untimed before each."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    turn = _by_events if device == "cuda" else _by_the_host
    for _ in range(blocks):
        for name, call in versions.items():
            call()
            times[name].append(statistics.median(turn(call, reps, setup)))
    return {name: statistics.median(turn_medians) for name, turn_medians in times.items()}


def _by_events(call: Call, reps: int, setup: Call) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for begin, end in pairs:
        setup()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _by_the_host(call: Call, reps: int, setup: Call) -> list[float]:
    spans = []
    for _ in range(reps):
        setup()
        started = time.perf_counter()
        call()
        spans.append((time.perf_counter() - started) * 1e6)
    return spans


def interleaved(versions: Mapping[str, Call], blocks: int, reps: int, device: str = "cuda", writes: int = 1) -> Times:
    """Single calls, launched from Python, with cold caches.

    They are flushed by `writes` writes, as in `triton.testing.do_bench`: a call also pays for
    evictions.
    """
    flushed = _flushed(device)

    def flush() -> None:
        for _ in range(writes):
            flushed.zero_()

    for call in versions.values():
        call()
    return medians(versions, blocks, reps, flush, device)


def queued(versions: Mapping[str, Call], blocks: int, reps: int, device: str = "cuda") -> Times:
    """As `interleaved`, but a GPU writes longer than the host needs to launch a call. A call that
    waits for nothing then takes the time of its kernels, not that of the host.
    """
    if device != "cuda":
        return interleaved(versions, blocks, reps, device)
    write = medians({"write": _flushed(device).zero_}, 1, reps)["write"]
    return interleaved(versions, blocks, reps, device, writes_for(max(map(_launch, versions.values())), write))


def writes_for(launch: float, write: float) -> int:
    """Writes that last AHEAD times as long as the launch of a call; both in microseconds."""
    return min(1 + int(AHEAD * launch / write), MOST_WRITES)


def _launch(call: Call) -> float:
    """The host's time for the second call, in microseconds."""
    call()
    torch.cuda.synchronize()
    (span,) = _by_the_host(call, 1, lambda: None)
    return span


def _flushed(device: str) -> torch.Tensor:
    return torch.empty((COLD_BYTES if device == "cuda" else HOST_BYTES) // 4, dtype=torch.int32, device=device)


def ceilings(
    blocks: int, reps: int, device: str = "cuda", kinds: Sequence[str] = ("copy", "write", "read")
) -> dict[str, float]:
    """The bandwidths in TB/s of a copy (bytes read plus bytes written), of writes only, and of
    reads only, for 1 GiB, or on a CPU for 64 MiB.
    """
    source = torch.empty(2**29 if device == "cuda" else 2**25, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    versions: dict[str, Call] = {
        "copy": lambda: target.copy_(source),
        "write": lambda: target.view(torch.int32).fill_(3),
        "read": lambda: source.view(torch.float32).sum(),
    }
    count = source.numel() * BF16
    times = interleaved({kind: versions[kind] for kind in kinds}, blocks, reps, device)
    return {name: count * (2 if name == "copy" else 1) / us / 1e6 for name, us in times.items()}
