"""Makes one call of an implementation: inputs, poisoned memory, gradients, guards."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Opaque, Problem
from conformance.core.tensors import laid_out
from conformance.engine.child.addresses import Addresses
from conformance.engine.child.poison import Poison
from conformance.engine.child.results import Unreadable, is_changed, read
from conformance.interface import Implementation, named_outputs
from conformance.judge import Finding, judge
from conformance.judge.exact import Exact
from conformance.texts import described


@dataclass
class Outcome:
    """The outcome of one case.

    status: PASS FAIL CRASH HANG OOM NOT_OFFERED DECLARED_UNSUPPORTED BLOCKED UNINFORMATIVE,
        NOT_RUN for lack of ranks, or ERROR of the harness
    seconds: from the start of the case to its outcome
    kernels: names of the kernel specialisations that were compiled or loaded for it
    calls: the implementation's Python functions that it ran, as "file:function", if traced
    transport: how several ranks reached each other; shares_gpu: whether on fewer GPUs than ranks
    """

    status: str
    finding: dict[str, Any] | None = None
    reason: str = ""
    seconds: float = 0.0
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    evaluations: int = 0
    kernels: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    transport: str = ""
    shares_gpu: bool = False


class Blocked(Exception):
    """The producer of an opaque input is wrong, so its consumer cannot be judged."""


class Misbehaved(Exception):
    """The call itself was wrong, before any value could be judged."""

    def __init__(self, output: str, check: str, message: str) -> None:
        super().__init__(message)
        self.finding = Finding(output, check, message)


@dataclass
class Runner:
    """Makes calls of one implementation on one device, and measures them."""

    implementation: Implementation
    device: str
    poison: str
    outcome: Outcome
    placed: dict[str, Tensor] = field(default_factory=dict)
    changed: str = ""  # an input that the last run changed

    def run(
        self,
        problem: Problem,
        *,
        poison: str = "",
        storage: dict[str, Tensor] | None = None,
        late: bool = False,
        forbid_sync: bool = False,
        replay: Problem | None = None,
    ) -> dict[str, Any]:
        """Place the inputs, call, take the gradients, and check the inputs and the guards.

        Args:
            poison: kind of poison, if not the case's own.
            storage: placed inputs of an earlier run, which this run overwrites with its own.
            late: the device writes the inputs only after the call has been made.
            forbid_sync: make waiting for the device an error.
            replay: values with which the call is replayed, after its capture in a graph.

        Raises:
            Misbehaved: the implementation wrote outside its memory, or returned values that the
                interface forbids.
            Blocked: the producer of an opaque input is wrong.
        """
        placed = self._place(problem, storage)
        self.placed = placed
        with Poison(poison or self.poison) as memory, Addresses(memory) as addresses:
            opaque = self._produce(problem) if problem.producer else None
            started = time.perf_counter()
            try:
                if late:
                    self._delay(problem, placed)
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("error")
                outputs = (
                    self._call(problem, placed, opaque)
                    if replay is None
                    else self._captured(problem, replay, placed, opaque)
                )
            finally:
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("default")
            if self.device == "cuda":
                torch.cuda.synchronize()
            if problem.read:
                outputs = problem.read(self.implementation, outputs)
            self.outcome.seconds_implementation += time.perf_counter() - started
        self.outcome.evaluations += 1
        if addresses.outside:
            raise Misbehaved("memory", "memory", addresses.outside)
        if memory.overrun():
            raise Misbehaved("memory", "memory", "wrote outside the memory it had allocated")
        masters = (replay or problem).tensors
        self.changed = next((name for name, x in masters.items() if is_changed(placed[name], x)), "")
        return self._read(outputs)

    def _read(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """The outputs, tensors on the host.

        Raises:
            Misbehaved: a tensor cannot be read.
        """
        out = dict(outputs)
        for name, x in outputs.items():
            if isinstance(x, Tensor):
                try:
                    out[name] = read(x, self.device)
                except Unreadable as error:
                    raise Misbehaved(name, "tensor", str(error)) from error
        return out

    def _on_device(self, x: Any) -> Any:
        """An argument without guards: tensors, or a tuple of them, go to the device."""
        if isinstance(x, tuple) and any(isinstance(part, Tensor) for part in x):
            return tuple(part.to(self.device, copy=True) for part in x)
        return x.to(self.device) if isinstance(x, Tensor) else x

    def _place(self, problem: Problem, storage: dict[str, Tensor] | None) -> dict[str, Tensor]:
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        if storage is None:
            placed = {
                name: laid_out(x.to(self.device, copy=True), problem.layouts.get(name, "contiguous"))
                for name, x in masters.items()
            }
        else:
            placed = {
                name: storage[name].detach().copy_(x) if name in storage else x.to(self.device)
                for name, x in masters.items()
            }
        for name in problem.wanted:
            placed[name] = placed[name].detach().requires_grad_()
        return placed

    def _delay(self, problem: Problem, placed: dict[str, Tensor]) -> None:
        """Overwrite the inputs by garbage now, and by their values after a pause on the stream."""
        sources = {name: x.detach().clone() for name, x in placed.items()}
        for x in placed.values():
            x.detach().zero_()
        torch.cuda._sleep(2_000_000)  # about a millisecond
        for name, x in placed.items():
            x.detach().copy_(sources[name])

    def _produce(self, problem: Problem) -> dict[str, Any]:
        """The opaque inputs, from this implementation's own producer, whose rows must be right."""
        assert problem.producer is not None
        producer = problem.producer
        inputs = {name: self._on_device(x) for name, x in (producer.required | producer.settings).items()}
        arguments = [inputs[name] for name in producer.required]
        settings = {name: inputs[name] for name in producer.settings}
        try:
            result = self.implementation.call(producer.function, *arguments, **settings)
            outputs = named_outputs(result, CONTRACTS[producer.function].outputs)
            observed = self._read(outputs)
        except Misbehaved as error:
            raise Blocked(f"{producer.function} is wrong here: {error.finding.output} {error}") from error
        except Exception as error:
            raise Blocked(f"{producer.function} raised {described(error)}") from error
        rows = problem.produced.rows
        expected = Exact(rows) if isinstance(rows, Tensor) else rows.resolve(observed)
        finding = judge("rows", expected, observed["rows"])
        if finding:
            raise Blocked(f"{producer.function} is wrong here: rows {finding.message}")
        return outputs

    def _call(self, problem: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None) -> dict[str, Any]:
        contract = CONTRACTS[problem.function]
        if problem.script:
            outputs = problem.script(
                self.implementation, problem.required | problem.settings | placed | {"produced": opaque}
            )
            return outputs | self._gradients(problem, placed, outputs)
        arguments = [
            opaque[x.field_name] if isinstance(x, Opaque) and opaque else placed.get(name, x)
            for name, x in problem.required.items()
        ]
        lacking = self.implementation.lacks(problem.function, problem.settings)
        settings = {
            name: placed[name] if name in placed else self._on_device(x)
            for name, x in problem.settings.items()
            if not (name in lacking and name in contract.redundant)
        }
        try:
            result = self.implementation.call(problem.function, *arguments, **settings)
            outputs = named_outputs(result, contract.outputs)
        except ValueError as error:
            if str(error).startswith("returned"):
                raise Misbehaved("call", "signature", str(error)) from error
            raise
        return outputs | self._gradients(problem, placed, outputs)

    def _gradients(self, problem: Problem, placed: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, Tensor]:
        if not problem.wanted:
            return {}
        used = [name for name in problem.cotangents if isinstance(outputs.get(name), Tensor)]
        for name in used:
            if tuple(outputs[name].shape) != tuple(placed[f"d_{name}"].shape):
                shape, right = tuple(outputs[name].shape), tuple(placed[f"d_{name}"].shape)
                raise Misbehaved(name, "shape", f"has shape {shape}; the reference's is {right}")
        gradients: tuple[Tensor | None, ...]
        attached = [name for name in used if outputs[name].requires_grad]
        inputs = [placed[name] for name in problem.wanted]
        if attached:
            cotangents = [placed[f"d_{name}"].to(outputs[name].dtype) for name in attached]
            gradients = torch.autograd.grad([outputs[name] for name in attached], inputs, cotangents, allow_unused=True)
        else:
            gradients = ()
        triples = zip(problem.wanted, inputs, gradients or (None,) * len(inputs), strict=True)
        return {f"d_{name}": torch.zeros_like(x) if g is None else g for name, x, g in triples}

    def _captured(
        self, problem: Problem, replay: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._call(problem, placed, opaque)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = self._call(problem, placed, opaque)
        for name, master in replay.tensors.items():
            placed[name].copy_(master)
        graph.replay()
        torch.cuda.synchronize()
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in outputs.items()}
