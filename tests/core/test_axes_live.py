"""Each axis of a case is live in some function, and the inputs that it names exist."""

from dataclasses import dataclass

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.axes import Choice, choice, size
from conformance.core.case import Case, axes_of
from conformance.core.signature import Signature

CLASSES = sorted(
    {cls for contract in CONTRACTS.values() for cls in contract.case_type.__mro__ if issubclass(cls, Case)},
    key=lambda cls: cls.__name__,
)
# what is never drawn on purpose
ON_PURPOSE = {
    "SharedCase": {"experts"},  # shared experts form one MLP
    "DispatchCase": {"journey"},  # calls of one law, which the family and its machine choose
}


def dead(declaring: type[Case], signatures: list[Signature]) -> set[str]:
    """Axes of this class that are live in no function, and unknown inputs that they name."""
    axes = [axis for name, axis in axes_of(declaring).items() if name in declaring.__annotations__]
    inputs = {name for signature in signatures for name in signature.names}
    strangers = {name for axis in axes if isinstance(axis, Choice) for name in axis.of if name not in inputs}
    return strangers | {axis.name for axis in axes if not any(map(axis.live, signatures))}


def signatures_of(declaring: type[Case]) -> list[Signature]:
    return [contract.signature for contract in CONTRACTS.values() if issubclass(contract.case_type, declaring)]


@pytest.mark.parametrize("declaring", CLASSES, ids=lambda cls: cls.__name__)
def test_each_axis_is_live_in_some_function(declaring):
    assert dead(declaring, signatures_of(declaring)) == ON_PURPOSE.get(declaring.__name__, set())


def test_an_axis_of_no_dimension_and_one_of_an_unknown_input_are_found():
    base = CONTRACTS["permute"].case_type

    @dataclass(frozen=True, kw_only=True)
    class Misspelt(base):
        depth: int = size("Q")
        shade: str = choice("", "dark", of=("colours",))
        tint: str = choice("", "dark", argument="tinted")

    assert dead(Misspelt, signatures_of(base)) == {"depth", "shade", "colours", "tint"}
