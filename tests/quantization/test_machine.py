"""The machine of delayed scaling: right implementations pass, a wrong history is found."""

import pytest

from tests.common.fast import interpreted
from tests.common.machines import cases_of, judge_of, smallest


@pytest.mark.parametrize("implementation", ["moe_ref", pytest.param("moe_fast", marks=interpreted)])
def test_a_right_quantiser_passes_every_sequence(implementation):
    judged = cases_of("quantize", judge_of(implementation), 6, 6)
    assert {outcome.status for _, outcome in judged} <= {"PASS", "UNINFORMATIVE"}
    assert {case.scaling for case, _ in judged} == {"delayed"}
    assert any("reload" in case.steps for case, _ in judged)


@pytest.mark.parametrize(
    ("defect", "most"),
    [
        ("Z15", 3),  # the last amax of a step, not the largest
        ("Z17", 5),  # the largest amax for the most recent one, which must be smaller
        ("Z19", 4),  # a history forgets all but its ends
    ],
)
def test_a_wrong_history_is_found_and_shrinks_to_a_short_sequence(defect, most):
    case = smallest("quantize", judge_of(f"conformance.mutants.planted:{defect}.moe_ref"), 300, 8)
    assert len(case.steps.split("+")) <= most, case.steps
