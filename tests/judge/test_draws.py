"""Codes that are draws of one stochastic rounding, judged without a quantiser."""

import torch

from conformance.judge.draws import Drawn
from conformance.judge.statistics import Stochastic

TABLE = torch.arange(256, dtype=torch.float64)


def drawn(elements: int, repeats: tuple[torch.Tensor, ...] = ()) -> Drawn:
    """Codes of values halfway between 0 and 1, of two rows."""
    low = torch.zeros(elements, dtype=torch.float64)
    codes = torch.zeros(2, elements, dtype=torch.uint8)
    return Drawn(codes, "integers", rounding=Stochastic(low + 0.5, low, low + 1), table=TABLE, others=repeats)


def test_no_elements_are_right():
    nothing = torch.zeros(2, 0, dtype=torch.uint8)
    assert drawn(0).wrong(nothing) is None
    assert drawn(0, (nothing,)).wrong(nothing) is None


def test_a_code_that_is_no_neighbour_and_a_repeated_call_are_wrong():
    mixed = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=torch.uint8)
    assert drawn(3, (1 - mixed,)).wrong(mixed) is None
    repeated = drawn(3, (mixed,)).wrong(mixed)
    assert repeated is not None and repeated.all()
    far = drawn(3).wrong(mixed + 1)
    assert far is not None and far.sum() == 4
