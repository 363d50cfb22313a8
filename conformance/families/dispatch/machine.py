"""The machine of a dispatcher's handles: dispatches, cached ones and combines in any order."""

from dataclasses import replace

from hypothesis.stateful import precondition, rule

from conformance.core.machine import Machine
from conformance.families.dispatch.cases import CACHED, DispatchCase
from conformance.families.dispatch.laws_sequences import SEQUENCE


class HandleMachine(Machine):
    """Calls of one dispatcher on the same ranks."""

    field = "journey"
    fixed = {"law": "sequence", "fp8": ""}  # noqa: RUF012

    @classmethod
    def suits(cls, case: DispatchCase) -> bool:
        return SEQUENCE.applies(replace(case, journey="send")) and case.tokens > 0 and case.spread != "empty"

    @property
    def caches(self) -> bool:
        """Whether a handle exists through which tokens can be sent."""
        return bool(self.words) and f"{self.case.dispatcher}_cached_dispatch" in CACHED

    @rule()
    def dispatch(self) -> None:
        self.step("send")

    @precondition(lambda self: self.words)
    @rule()
    def combine(self) -> None:
        self.step("back")

    @precondition(lambda self: self.words)
    @rule()
    def combine_the_first_dispatch(self) -> None:
        self.step("first")

    @precondition(lambda self: self.caches)
    @rule()
    def dispatch_through_the_handle(self) -> None:
        self.step("again")

    @precondition(lambda self: self.caches)
    @rule()
    def dispatch_wider_through_the_handle(self) -> None:
        self.step("wider")


ALLGATHER_DISPATCH = ALLTOALL_DISPATCH = DEEPEP_DISPATCH = HYBRIDEP_DISPATCH = HandleMachine
