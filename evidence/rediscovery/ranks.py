"""Ranks of a release on a CPU: forked processes, joined by gloo, with stubs for streams."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed


def on_ranks(count: int, function: Callable[[int], Any], **parallel: int) -> list[Any]:
    """The function's result on each rank of `parallel_state.initialize_model_parallel(**parallel)`.

    Raises:
        RuntimeError: a rank raises; the message is its error.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (function, count, os.path.join(folder, "store"), parallel, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(count)]
        for process in processes:
            process.start()
        answers = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    for _, error, _ in answers:
        if error:
            raise RuntimeError(error)
    return [result for _, _, result in sorted(answers, key=lambda answer: answer[0])]


def _rank(
    rank: int, function: Callable[[int], Any], count: int, path: str, parallel: dict[str, int], results: Any
) -> None:
    error, result = "", None
    try:
        from megatron.core import parallel_state

        store = distributed.FileStore(path, count)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
        parallel_state.initialize_model_parallel(**parallel)
        with without_a_gpu():
            result = function(rank)
        distributed.barrier()
    except Exception as raised:
        error = f"rank {rank}: {type(raised).__name__}: {raised}"
    results.put((rank, error, result))


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """The CPU for the current CUDA device, and streams on which everything is done at once."""
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _: None)
    stubs = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *_: stream,
        "Stream": lambda *_, **__: stream,
        "stream": lambda _: nullcontext(),
    }
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda x, *_, **__: x))
        yield
