"""Makes one call of an implementation: places its inputs, poisons fresh memory, asks for the gradients, looks after guards."""

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
from conformance.interface import Implementation, named_outputs
from conformance.judge import Finding, judge
from conformance.judge.exact import Exact, bits


@dataclass
class Outcome:
    """What became of one case."""

    status: (
        str  # PASS FAIL CRASH HANG OOM NOT_OFFERED DECLARED_UNSUPPORTED BLOCKED UNINFORMATIVE, or ERROR of the harness
    )
    finding: dict[str, Any] | None = None
    reason: str = ""
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    evaluations: int = 0
    kernels: list[str] = field(
        default_factory=list
    )  # names of the kernel specialisations that were compiled or loaded for it
    calls: list[str] = field(
        default_factory=list
    )  # "file:function" of the implementation's Python functions that it ran, if traced


class Blocked(Exception):
    """The producer of an opaque input is wrong, so nothing can be said of its consumer."""


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
        """Place the inputs, call, ask for the gradients, and look after the inputs and the guards.

        Args:
            poison: what fresh memory holds, if not the case's own.
            storage: placed inputs of an earlier run, to be overwritten by this one's.
            late: let the device write the inputs only after the call has been made.
            forbid_sync: make waiting for the device an error.
            replay: capture the call in a graph, put these values in, and replay it.

        Raises:
            Misbehaved: the implementation raised, or returned something else than the interface says.
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
        self.changed = next(
            (name for name, x in masters.items() if (bits(x) != bits(placed[name].detach().cpu())).any()), ""
        )
        return {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in outputs.items()}

    def _moved(self, x: Any) -> Any:
        """An argument that is not looked after: a tensor or a tuple of them on the device, anything else as it is."""
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
        """Overwrite the inputs by garbage now, and by their values after a pause on the current stream."""
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
        moved = {name: self._moved(x) for name, x in (producer.required | producer.settings).items()}
        arguments = [moved[name] for name in producer.required]
        try:
            result = self.implementation.call(
                producer.function, *arguments, **{name: moved[name] for name in producer.settings}
            )
            outputs = named_outputs(result, CONTRACTS[producer.function].outputs)
        except Exception as error:
            raise Blocked(f"{producer.function} raised {type(error).__name__}: {error}") from error
        got = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in outputs.items()}
        right = problem.produced.rows
        wrong = judge("rows", Exact(right) if isinstance(right, Tensor) else right.resolve(got), got["rows"])
        if wrong:
            raise Blocked(f"{producer.function} is wrong here: rows {wrong.message}")
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
        left_out = [
            name for name in self.implementation.lacks(problem.function, problem.settings) if name in contract.redundant
        ]
        settings = {
            name: placed[name] if name in placed else self._moved(x)
            for name, x in problem.settings.items()
            if name not in left_out
        }
        try:
            outputs = named_outputs(
                self.implementation.call(problem.function, *arguments, **settings), contract.outputs
            )
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
                raise Misbehaved(
                    name,
                    "shape",
                    f"has shape {tuple(outputs[name].shape)}; the reference's is {tuple(placed[f'd_{name}'].shape)}",
                )
        gradients: tuple[Tensor | None, ...]
        attached = [name for name in used if outputs[name].requires_grad]
        inputs = [placed[name] for name in problem.wanted]
        if attached:
            cotangents = [placed[f"d_{name}"].to(outputs[name].dtype) for name in attached]
            gradients = torch.autograd.grad([outputs[name] for name in attached], inputs, cotangents, allow_unused=True)
        else:
            gradients = ()
        asked = zip(problem.wanted, inputs, gradients or (None,) * len(inputs), strict=True)
        return {f"d_{name}": torch.zeros_like(x) if g is None else g for name, x, g in asked}

    def _captured(
        self, problem: Problem, replay: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._call(problem, placed, opaque)  # compiles what must be compiled
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = self._call(problem, placed, opaque)
        for name, master in replay.tensors.items():
            placed[name].copy_(master)
        graph.replay()
        torch.cuda.synchronize()
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in outputs.items()}
