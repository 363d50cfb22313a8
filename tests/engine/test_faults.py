"""A planted fault loses half of what one configuration writes, and nothing else."""

import pytest
import torch

from conformance.core.case import case_from
from conformance.engine.child.faults import KILLED, SURVIVED, TRIES, WITHOUT_EFFECT, Fault, Planting
from conformance.engine.child.outcome import Outcome


def launched(fault: Fault, name: str, x: torch.Tensor, value: float, **constants) -> None:
    """A launch of the configuration that writes `value` everywhere."""
    fault.enter(name, {"x_ptr": x} | constants)
    x.fill_(value)
    fault.exit()


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((torch.ones(2, 4).to(dtype), [[5] * 4, [1] * 4]) for dtype in DTYPES),
        (torch.tensor([5.0, 1, 5, 1, 5, 5]), [5, 5, 5, 1, 5, 5]),  # only written elements count
        (torch.ones(1), [1]),  # the only one
        (torch.full((4,), 2**40), [5, 5, 0, 0]),  # a lost index is zero
    ],
)
def test_the_second_half_of_what_is_written_keeps_its_contents(before, after):
    x, fault = before.clone(), Fault("a")
    launched(fault, "a", x, 5)
    assert x.tolist() == after
    assert fault.effect


def test_tensors_that_are_parts_of_an_argument_lose_too():
    x, y, fault = torch.ones(2), torch.ones(2), Fault("a")
    fault.enter("a", {"forms": (None, (x, y))})
    y.fill_(5)
    fault.exit()
    assert (x.tolist(), y.tolist()) == ([1, 1], [5, 1])


@pytest.mark.parametrize(("launch", "value"), [("b", 5), ("a", 1)], ids=["another configuration", "what was there"])
def test_nothing_is_lost_of(launch, value):
    x, fault = torch.ones(4), Fault("a")
    launched(fault, launch, x, value)
    assert x.tolist() == [value] * 4
    assert not fault.effect


# ---- in which configurations a process plants it

CASE = case_from({"function": "jitter", "tokens": 3})


@pytest.fixture
def effects(monkeypatch) -> dict[str, bool]:
    """Whether the fault in a configuration, by name, has an effect."""
    differs: dict[str, bool] = {}

    class Planted:
        def __init__(self, name: str) -> None:
            self.effect = differs.get(name, True)

        def __enter__(self) -> "Planted":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("conformance.engine.child.faults.planted", Planted)
    return differs


def test_a_fault_is_killed_once(effects):
    planting = Planting()
    judged = lambda _: Outcome("FAIL")  # noqa: E731
    assert planting.tried(CASE, ["a", "b"], judged) == {"a": KILLED, "b": KILLED}
    assert planting.tried(CASE, ["a", "c"], judged) == {"c": KILLED}


def test_a_fault_that_survives_is_planted_again_in_other_cases_a_limited_number_of_times(effects):
    planting = Planting()
    results = [planting.tried(CASE, ["a"], lambda _: Outcome("PASS")) for _ in range(TRIES + 1)]
    assert results == [{"a": SURVIVED}] * TRIES + [{}]


def test_a_fault_without_an_effect_is_not_called_a_survivor(effects):
    effects["a"] = False
    assert Planting().tried(CASE, ["a"], lambda _: Outcome("PASS")) == {"a": WITHOUT_EFFECT}


def test_a_case_is_judged_again_without_its_law(effects):
    laws = []
    lawful = CASE.changed(law="history")
    Planting().tried(lawful, ["a"], lambda case: laws.append(case.law) or Outcome("FAIL"))
    assert laws == [""]
