"""What runs is recorded, also in other threads and inside kernels that Python does not run."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from conformance.engine.child.tracing import traced
from tests.engine import kernels_to_trace as kernels

FOLDER = os.path.dirname(__file__) + os.sep


def in_a_thread() -> None:
    pass


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, d):
        return 2 * d


def test_functions_in_other_threads_count_as_run():
    with traced(FOLDER) as calls, ThreadPoolExecutor(1) as pool:
        pool.submit(in_a_thread).result()
    assert calls == {"test_tracing.py:in_a_thread"}


def test_a_backward_counts_as_run_and_runs_in_the_thread_that_asks_for_it():
    x = torch.ones(2, requires_grad=True)
    with traced(FOLDER) as calls:
        assert not torch.autograd.is_multithreading_enabled()
        Twice.apply(x).sum().backward()
    assert torch.autograd.is_multithreading_enabled()
    assert calls == {"test_tracing.py:Twice.forward", "test_tracing.py:Twice.backward"}


def launched(kernel: kernels.Launched, *arguments: object) -> set[str]:
    """What a launch records; without a GPU it fails after it has begun."""
    with traced(FOLDER) as calls, contextlib.suppress(Exception):
        kernel[(1,)](*arguments)
    return {call.removeprefix("kernels_to_trace.py:") for call in calls if call.startswith("kernels_to_trace.py:")}


def test_a_launch_counts_for_the_kernel_and_all_that_it_calls():
    assert launched(kernels.outer) == {"outer_kernel", "middle", "inner", "Pair.first", "of_module"}


def test_a_function_that_a_kernel_is_given_counts_too():
    assert launched(kernels.given, kernels.inner_jit) == {"given_kernel", "inner"}


def test_functions_of_other_kernels_do_not_count():
    assert launched(kernels.alone) == {"alone_kernel"}
    with traced(FOLDER) as calls:
        pass
    assert calls == set()


def test_without_a_package_nothing_is_recorded():
    with traced("") as calls:
        in_a_thread()
    assert calls == set()
