"""The machine of delayed scaling: tensors quantised and scales updated in any order."""

from hypothesis.stateful import precondition, rule

from conformance.core.machine import Machine


class QuantizeMachine(Machine):
    """Steps of one quantiser with an amax history."""

    fixed = {"scaling": "delayed", "repeats": 0}  # noqa: RUF012

    @rule()
    def quantize(self) -> None:
        self.step("quantize")

    @precondition(lambda self: self.words)
    @rule()
    def train(self) -> None:
        """Quantise and update, as training does.

        Without this rule few histories would hold more than one amax.
        """
        self.step("update")
        self.step("quantize")

    @precondition(lambda self: self.words)
    @rule()
    def update(self) -> None:
        self.step("update")

    @precondition(lambda self: self.words)
    @rule()
    def update_with_the_amax_of_all_ranks(self) -> None:
        self.step("reduced")

    @precondition(lambda self: self.words)
    @rule()
    def reload(self) -> None:
        self.step("reload")


QUANTIZE = QuantizeMachine
