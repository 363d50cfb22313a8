"""Judges a tuned kernel in each of its configurations, not in the quickest alone.

A tuner times its configurations and keeps the quickest, so another machine, or another day, runs a
configuration that no case has judged. Here nothing is timed. The judged call of a case is made once
per configuration: the call of index i uses configuration i of each tuner, modulo the length of its
list. Of a long list a case uses MOST, and its seed says which. So the choice depends on the case
alone, a replay repeats it, and the tuner's cache of earlier choices is not read.

Tuners are `triton.autotune` (see `autotuning`), and those of namespaces that offer `configurations`
and `configured` (see `conformance.interface`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from conformance.core.case import Case
from conformance.engine.child import autotuning
from conformance.engine.child.autotuning import Choice
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.runner import Misbehaved
from conformance.engine.child.tuned import EACH, joined
from conformance.interface import Implementation
from conformance.judge import Finding
from conformance.texts import described, one_line

MOST = 8  # configurations of one case


class Tuning:
    """The configurations of one case, which tuners use inside the block.

    Args:
        single_process: whether one process makes the calls. Ranks must make equally many, so a case
            of several ranks uses one configuration, by its seed.
    """

    def __init__(
        self, implementation: Implementation, case: Case, outcome: Outcome, single_process: bool = True
    ) -> None:
        self.implementation, self.outcome = implementation, outcome
        self.most = MOST if single_process else 1
        self.choice = Choice(case.seed * self.most)
        self.block = contextlib.ExitStack()  # contexts of the whole case
        self.configured = contextlib.ExitStack()  # contexts of one configuration of the namespace's tuner

    def __enter__(self) -> Self:
        autotuning.install()
        self.block.enter_context(autotuning.chosen(self.choice))
        self.block.callback(self._leave)
        return self

    def __exit__(self, *_: object) -> None:
        self.block.close()

    def each(self, functions: Sequence[str], attempt: Callable[[], Any]) -> Any:
        """The result of the judged call in its last configuration, or in the first one that fails.

        That configuration stays in force until the end of the block, for the laws.

        Args:
            functions: those that the call calls.
            attempt: makes and judges the call: outputs, what is right, and a finding or None.
        """
        for step in range(self.most):
            self._configure(functions)
            try:
                outputs, resolved, finding = attempt()
            except Misbehaved as wrong:
                finding = self.named(wrong.finding)
                raise Misbehaved(finding.output, finding.check, finding.message) from wrong
            except RuntimeError as error:  # such as the loss of the device
                error.add_note(self.suffix)
                raise
            self.outcome.tuned = joined([self.outcome.tuned, self.choice.launched])
            if finding:
                return outputs, resolved, self.named(finding)
            if step + 1 >= min(self.choice.longest, self.most):
                break
            self.choice.index += 1
        return outputs, resolved, None

    def named(self, finding: Finding) -> Finding:
        """The finding with the configurations of the call."""
        return replace(finding, message=f"{finding.message}{self.suffix}")

    @property
    def suffix(self) -> str:
        """The configurations of the last call, as the end of a finding's message."""
        used = [(name, label) for name, record in self.choice.launched.items() for label in record["judged"]]
        if len(used) < 2:
            return "".join(f"; with the configuration {label}" for _, label in used)
        texts = (f"{name.rpartition('.')[2]} ({label})" for name, label in used)
        return f"; with the configurations {', '.join(texts)}"

    def _configure(self, functions: Sequence[str]) -> None:
        """Let the namespace's functions use the configuration of this index."""
        self._leave()
        self.choice.launched = {}
        for function in functions:
            with _misbehaving("configurations"):
                names = self.implementation.configurations(function)
            if len(names) > 1:
                name = names[self.choice.index % len(names)]
                self.choice.longest = max(self.choice.longest, len(names))
                self.choice.note(function, len(names), EACH, one_line(name))
                with _misbehaving("configured"):
                    self.configured.enter_context(self.implementation.configured(function, name))

    def _leave(self) -> None:
        with _misbehaving("configured"):
            self.configured.close()


@contextlib.contextmanager
def _misbehaving(hook: str) -> Iterator[None]:
    """An error of the namespace's hook, as a finding."""
    try:
        yield
    except Exception as error:
        raise Misbehaved(hook, f"raises {type(error).__name__}", f"{hook} raised {described(error)}") from error
