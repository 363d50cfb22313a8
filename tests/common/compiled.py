"""Functions compiled into one graph, beside the same functions eager."""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

Outcome = list[Tensor]


class Recorded(torch.fx.Interpreter):
    """A graph that runs node by node, and keeps the calls of our operators in `calls`."""

    def __init__(self, graph: torch.fx.GraphModule, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") == "moe_fast":
            self.calls.append((target, args))
        return super().call_function(target, args, kwargs)


class Graph:
    """A function compiled with fullgraph=True."""

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = None) -> None:
        torch._dynamo.reset()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []  # of our operators, when the graphs ran
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(Recorded(graph, self.calls).run))
        self._counter = CompileCounterWithBackend(backend)
        self.function = torch.compile(function, fullgraph=True, backend=self._counter, dynamic=dynamic)

    @property
    def compilations(self) -> int:
        return self._counter.frame_count

    def check_operators(self) -> None:
        """Each operator that ran: its schema, and shapes and strides without memory."""
        checked = set()
        for operator, args in self.calls:
            if operator not in checked:
                checked.add(operator)
                torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
        assert checked


def outcome(function: Callable[..., Any], *inputs: Any) -> Outcome:
    """The tensors of the result, and the gradients of the inputs that require one."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs)
    outputs = [x for x in pytree.tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    ends = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in ends]
    gradients = torch.autograd.grad(ends, leaves, cotangents) if leaves else ()
    return [*outputs, *gradients]


def same(a: Outcome, b: Outcome) -> bool:
    """Whether all tensors have the same bits, dtypes and shapes."""
    pairs = zip(a, b, strict=True)
    return all(x.dtype == y.dtype and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs)


def assert_compiles(function: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None) -> None:
    """One graph serves all calls, bit by bit as eager, and its operators know their shapes."""
    graph = Graph(function, dynamic)
    for inputs in calls:
        expected = outcome(function, *inputs)
        assert same(outcome(graph.function, *inputs), expected)
    assert graph.compilations == 1
    graph.check_operators()
