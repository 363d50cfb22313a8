"""Faults in configurations of kernels: what the command prints of those that survive."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from conformance.core.case import Case
from conformance.engine.child.faults import KILLED, SURVIVED, WITHOUT_EFFECT
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import Options
from conformance.families.permutation.cases import RoutingCase
from conformance.mutants import configurations

CASES: list[Case] = [RoutingCase(function="permute", seed=seed) for seed in range(6)]
KERNEL = "permute_kernel 0e02ccf3"
Print = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Print:
    """The exit code and the output, where a fault in KERNEL has these results in CASES."""

    def run(results: list[str]) -> tuple[int, str]:
        outcomes = [
            (case, Outcome("PASS", configurations=[KERNEL], planted={KERNEL: result}))
            for case, result in zip(CASES, results, strict=False)
        ]
        pool = SimpleNamespace(start=lambda: {"device": "cuda"})
        monkeypatch.setattr(configurations, "Pool", lambda *_: nullcontext(pool))
        monkeypatch.setattr(configurations, "_outcomes", lambda *_: outcomes)
        return configurations.plant_in_configurations(Options("any"), 1), capsys.readouterr().out

    return run


def test_a_survivor_is_printed_with_the_first_three_cases_in_which_it_survived(printed):
    exit_code, output = printed([WITHOUT_EFFECT, SURVIVED, SURVIVED, SURVIVED, SURVIVED])
    assert exit_code == 1
    assert f"it survived in {', '.join(case.id for case in CASES[1:4])}\n" in output
    assert CASES[0].id not in output


def test_a_fault_without_effect_is_printed_without_cases(printed):
    exit_code, output = printed([WITHOUT_EFFECT])
    assert exit_code == 1
    assert "1 cases without effect\n" in output


def test_a_fault_that_one_case_kills_is_no_survivor(printed):
    assert printed([SURVIVED, KILLED]) == (0, "1 of 1 killed\n")
