"""Makes one call: places inputs, poisons memory, takes gradients and checks guards."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Opaque, Problem
from conformance.core.double_backward import second_derivatives
from conformance.core.tensors import laid_out
from conformance.engine.child.addresses import Addresses
from conformance.engine.child.aliases import alias, shared_elements
from conformance.engine.child.copies import copied, delay, overwrite
from conformance.engine.child.manners import Outputs, around_forward, made, overwritten, with_graph
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.poison import Poison
from conformance.engine.child.results import Unreadable, first_changed, read
from conformance.engine.child.saved_memory import alive_bytes, allocated_bytes
from conformance.interface import Implementation, ModeChanged, named_outputs
from conformance.judge import Finding, judge
from conformance.judge.exact import Exact
from conformance.modes import Modes
from conformance.texts import described


class Blocked(Exception):
    """The producer of an opaque input is wrong, so its consumer cannot be judged."""


class Misbehaved(Exception):
    """The call itself was wrong, before any value could be judged."""

    def __init__(self, output: str, check: str, message: str) -> None:
        super().__init__(message)
        self.finding = Finding(output, check, message)


def _may_draw(problem: Problem) -> bool:
    """Whether the call may draw random numbers, by its function or by stochastic rounding."""
    arguments = (problem.required | problem.settings).values()
    rounds = any(getattr(x, "stochastic_rounding", False) for x in arguments)
    return CONTRACTS[problem.function].signature.random or rounds or problem.draws


@dataclass
class Runner:
    """Makes calls of one implementation on one device, and measures them."""

    implementation: Implementation
    device: str
    poison: str
    outcome: Outcome
    recording: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # entered around calls
    changed: str = ""  # an input or cotangent that the last run's (first) call changed
    alias: tuple[str, str] | None = None  # an output of the last run without memory of its own, and why

    def run(
        self,
        problem: Problem,
        *,
        poison: str = "",
        late: bool = False,
        forbid_sync: bool = False,
        replay: Problem | None = None,
        manner: str = "",
        before: Problem | None = None,
        earlier: Problem | None = None,
    ) -> Outputs:
        """Place the inputs, call, take the gradients, and check the inputs and the guards.

        Args:
            poison: kind of poison, if not the case's own.
            late: the device writes the inputs only after the call has been made.
            forbid_sync: make waiting for the device an error.
            replay: values with which the call is replayed, after its capture in a graph.
            manner: how the call is made, if not in the plain way: see `made`.
            before: a call that takes the same opaque inputs before, whose results are dropped.
            earlier: a call before, of other values, which these ones overwrite in the same tensors.

        Raises:
            Misbehaved: the implementation wrote outside its memory, changed torch's global state,
                or returned values that the interface forbids.
            Blocked: the producer of an opaque input is wrong.
        """
        placed = self.place(earlier or problem)
        placed_before = self.place(before) if before else {}
        with self._watched(problem, poison):
            opaque = self.produce(problem) if problem.producer else None
            if before:
                self._call(before, placed_before, opaque)
            if earlier:
                self._call(earlier, placed, opaque)
                overwrite(placed, problem)
            started = time.perf_counter()
            try:
                if late:
                    delay(placed)
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("error")
                if replay is None:
                    outputs = made(manner, lambda: self._call(problem, placed, opaque, manner))
                else:
                    outputs = self._captured(problem, replay, placed, opaque)
            finally:
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("default")
            returned, outputs = outputs, self._finished(problem, outputs)
            self.outcome.seconds_implementation += time.perf_counter() - started
        self.changed = first_changed((replay or problem).masters, placed)
        self.alias = alias(outputs, placed) or shared_elements(returned)
        return self._read(outputs, problem)

    def kept(self, problem: Problem) -> int:
        """The bytes that the call keeps for its backward pass, without its inputs and results."""
        placed = self.place(problem)

        def call() -> Outputs:
            return self._forward(problem, placed, None)

        if self.device == "cuda":
            return allocated_bytes(call, placed.values())
        return alive_bytes(call, placed.values(), torch.no_grad()(call))

    def run_both(self, first: Problem, second: Problem, *, reuse: bool = False) -> tuple[Outputs, Outputs]:
        """Both calls before the backward of either; read when all is done.

        Args:
            reuse: the second call's inputs overwrite the first's in their memory.

        Raises:
            Misbehaved, Blocked: see `run`.
        """
        places = [self.place(first), {} if reuse else self.place(second)]
        calls: list[tuple[Problem, dict[str, Tensor], Outputs]] = []
        with self._watched(first):
            for problem, placed in zip((first, second), places, strict=True):
                placed = placed or self.place(problem, places[0])
                opaque = self.produce(problem) if problem.producer else None
                calls.append((problem, placed, self._forward(problem, placed, opaque)))
            results = [
                self._finished(problem, outputs | self.gradients(problem, inputs, outputs))
                for problem, inputs, outputs in calls
            ]
        self.changed = "" if reuse else first_changed(first.masters, places[0])
        return self._read(results[0], first), self._read(results[1], second)

    @contextlib.contextmanager
    def _watched(self, problem: Problem, poison: str = "") -> Iterator[None]:
        """Poison and guard the memory around calls.

        At the end, check their effects on other memory and on global state.

        Raises:
            Misbehaved: memory or global state has changed.
        """
        modes, changed = Modes(generators=not _may_draw(problem)), ""
        try:
            with Poison(poison or self.poison) as memory, Addresses(memory) as addresses, self.recording():
                yield
        except ModeChanged as error:
            raise Misbehaved("call", "state", str(error)) from error
        finally:
            changed = modes.restore()
        self.outcome.evaluations += 1
        if addresses.outside:
            raise Misbehaved("memory", "memory", addresses.outside)
        if memory.overrun():
            raise Misbehaved("memory", "memory", "wrote outside the memory it had allocated")
        if changed:
            raise Misbehaved("call", "state", f"left another {changed} than before the call")

    def _finished(self, problem: Problem, outputs: Outputs) -> Outputs:
        """The outputs, once the device has computed them, with what further calls read of them."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return problem.read(self.implementation, outputs) if problem.read else outputs

    def _read(self, outputs: Outputs, problem: Problem) -> Outputs:
        """The outputs, with tensors on the host.

        An output that is a lazily negated input may be negated as well.

        Raises:
            Misbehaved: a tensor cannot be read.
        """
        out = dict(outputs)
        negated = "negated" in problem.layouts.values()
        for name, x in outputs.items():
            if isinstance(x, Tensor):
                try:
                    out[name] = read(x, self.device, negated)
                except Unreadable as error:
                    raise Misbehaved(name, "tensor", str(error)) from error
        return out

    def _on_device(self, x: Any) -> Any:
        """An argument without guards: tensors, or a tuple of them, go to the device."""
        if isinstance(x, tuple) and any(isinstance(element, Tensor) for element in x):
            return tuple(element.to(self.device, copy=True) for element in x)
        return x.to(self.device) if isinstance(x, Tensor) else x

    def _laid_out(self, problem: Problem, name: str, x: Any) -> Any:
        """A producer's argument, in the layout that the problem has for it."""
        layout = "contiguous" if name in problem.tensors else problem.layouts.get(name, "contiguous")
        return laid_out(x, layout) if isinstance(x, Tensor) else x

    def place(self, problem: Problem, storage: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The inputs and cotangents on the device in their layouts, or in given memory."""
        if storage is None:
            placed = {
                name: laid_out(copied(x, self.device), problem.layouts.get(name, "contiguous"))
                for name, x in problem.masters.items()
            }
        else:
            placed = {
                name: storage[name].detach().copy_(x) if name in storage else x.to(self.device)
                for name, x in problem.masters.items()
            }
        for name in problem.wanted:
            placed[name] = placed[name].detach().requires_grad_()
        return placed

    def produce(self, problem: Problem) -> dict[str, Any]:
        """The opaque inputs, from the implementation's own producer, whose rows must be right."""
        assert problem.producer is not None
        producer = problem.producer
        passed = producer.required | producer.settings
        inputs = {name: self._laid_out(problem, name, self._on_device(x)) for name, x in passed.items()}
        arguments = [inputs[name] for name in producer.required]
        settings = {name: inputs[name] for name in producer.settings}
        try:
            result = self.implementation.call(producer.function, *arguments, **settings)
            outputs = named_outputs(result, CONTRACTS[producer.function].outputs)
            observed = self._read(outputs, producer)
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

    def _call(self, problem: Problem, placed: dict[str, Tensor], opaque: Outputs | None, manner: str = "") -> Outputs:
        """The outputs with the gradients of the wanted inputs, or with their second derivatives."""
        if manner != "accumulated":
            with around_forward(manner, problem, self.device):
                outputs = self._forward(problem, placed, opaque)
            if manner == "no_grad":
                if name := with_graph(outputs):
                    raise Misbehaved(name, "graph", "has a graph, although the call is made under torch.no_grad")
                return outputs
            if manner == "twice":
                inputs = {name: placed[name] for name in problem.wanted}
                cotangents = {name: placed[f"d_{name}"] for name in problem.cotangents}
                return second_derivatives(outputs, inputs, cotangents)
            if manner == "overwritten":
                return overwritten(outputs, lambda: self.gradients(problem, placed, outputs))
            return outputs | self.gradients(problem, placed, outputs)
        views = {name: placed[name].view_as(placed[name]) for name in problem.wanted}
        outputs = self._forward(problem, placed | views, opaque)
        try:
            gradients = self._accumulated_gradients(problem, placed, outputs, keep=True)
        except Exception:  # it refused to keep what it had saved, as compiled backwards do
            outputs = self._forward(problem, placed | views, opaque)
            return outputs | self._accumulated_gradients(problem, placed, outputs)
        try:
            return outputs | self._accumulated_gradients(problem, placed, outputs)
        except Exception:  # it refused a second backward pass
            return outputs | gradients

    def arguments(
        self, problem: Problem, placed: dict[str, Tensor], opaque: Outputs | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments, as the implementation takes them."""
        arguments = [
            opaque[x.field_name] if isinstance(x, Opaque) and opaque else placed.get(name, x)
            for name, x in problem.required.items()
        ]
        left_out = {*self.implementation.lacks(problem.function, problem.settings)}
        left_out &= {*CONTRACTS[problem.function].redundant}
        left_out |= self.implementation.with_default(problem.function, problem.omitted)
        names = [name for name in problem.settings if name not in left_out or name == problem.blame]
        settings = {name: placed[name] if name in placed else self._on_device(problem.settings[name]) for name in names}
        return arguments, settings

    def _forward(self, problem: Problem, placed: dict[str, Tensor], opaque: Outputs | None) -> Outputs:
        if problem.script:
            inputs = problem.required | problem.settings | placed | {"produced": opaque}
            return problem.script(self.implementation, inputs)
        arguments, settings = self.arguments(problem, placed, opaque)
        try:
            result = self.implementation.call(problem.function, *arguments, **settings)
            return named_outputs(result, CONTRACTS[problem.function].outputs)
        except ValueError as error:
            if str(error).startswith("returned"):
                raise Misbehaved("call", "signature", str(error)) from error
            raise

    def _backward(
        self, problem: Problem, placed: dict[str, Tensor], outputs: Outputs
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that depend on the wanted inputs, and their cotangents.

        Raises:
            Misbehaved: an output has another shape than its cotangent.
        """
        used = [name for name in problem.cotangents if isinstance(outputs.get(name), Tensor)]
        for name in used:
            shape, expected_shape = tuple(outputs[name].shape), tuple(placed[f"d_{name}"].shape)
            if shape != expected_shape:
                raise Misbehaved(name, "shape", f"has shape {shape}; the reference's is {expected_shape}")
        attached = [name for name in used if outputs[name].requires_grad]
        cotangents = [placed[f"d_{name}"].to(outputs[name].dtype) for name in attached]
        return [outputs[name] for name in attached], cotangents

    def gradients(self, problem: Problem, placed: dict[str, Tensor], outputs: Outputs) -> dict[str, Tensor]:
        """The gradients of the wanted inputs; zeros for an input without an effect."""
        if not problem.wanted:
            return {}
        inputs = [placed[name] for name in problem.wanted]
        attached, cotangents = self._backward(problem, placed, outputs)
        gradients: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if attached:
            gradients = torch.autograd.grad(attached, inputs, cotangents, allow_unused=True)
        triples = zip(problem.wanted, inputs, gradients, strict=True)
        return {f"d_{name}": torch.zeros_like(x) if g is None else g for name, x, g in triples}

    def _accumulated_gradients(
        self, problem: Problem, placed: dict[str, Tensor], outputs: Outputs, keep: bool = False
    ) -> dict[str, Tensor]:
        """Gradients that are added to a `.grad` of zeros.

        With `keep`, the graph stays for another backward pass.
        """
        attached, cotangents = self._backward(problem, placed, outputs)
        for name in problem.wanted:
            placed[name].grad = torch.zeros_like(placed[name])
        if attached:
            torch.autograd.backward(attached, cotangents, retain_graph=keep)
        return {f"d_{name}": x for name in problem.wanted if (x := placed[name].grad) is not None}

    def _captured(
        self, problem: Problem, replay: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._call(problem, placed, opaque)  # the first call compiles the kernels
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = self._call(problem, placed, opaque)
        for name, master in replay.tensors.items():
            placed[name].copy_(master)
        graph.replay()
        torch.cuda.synchronize()
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in outputs.items()}
