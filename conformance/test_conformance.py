"""The suite: one test for each section of the plan. `pytest --pyargs conformance --impl NAMESPACE` runs it."""

import pytest

from conformance.engine.choose.plan import Section
from conformance.engine.run.session import Session
from conformance.report.terminal import failure_lines


@pytest.fixture
def section() -> Section:
    """Stands for the sections with which the plugin parametrizes the test when there is something to judge."""
    pytest.skip("no --impl was given: there is nothing to judge")


@pytest.fixture
def conformance_session(request: pytest.FixtureRequest) -> Session:
    """The worker's session, which the plugin started."""
    return request.config.pluginmanager.get_plugin("moe-conformance-run").session  # type: ignore[union-attr]


def test_section(section: Section, conformance_session: Session) -> None:
    """Every case of the section has an outcome, and no new failure is among them."""
    failures = conformance_session.sweep(section)
    told = [
        line
        for failure in failures
        for line in failure_lines(
            {
                "case": failure.case.record(),
                "finding": failure.outcome.finding,
                "status": failure.outcome.status,
                "reason": failure.outcome.reason,
                "function": failure.case.function,
                "smallest": failure.smallest,
                "id": failure.case.id,
            },
            conformance_session.options.implementation,
        )
    ]
    if told:
        pytest.fail("\n".join(told), pytrace=False)
