"""The suite as pytest items, one per section of the plan."""

import pytest

from conformance.engine.choose.plan import Section
from conformance.engine.run.session import Session
from conformance.report.terminal import failure_lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a session, which gives the sections, the collection ends with one sentence."""
    plugins = metafunc.config.pluginmanager
    if not plugins.has_plugin("moe-conformance-run"):
        plugin = "" if plugins.has_plugin("conformance.plugin") else "-p conformance.plugin "
        raise pytest.Collector.CollectError(f"moe-conformance has nothing to judge: add {plugin}--moe-impl NAMESPACE")


@pytest.fixture
def conformance_session(request: pytest.FixtureRequest) -> Session:
    """The worker's session, which the plugin started."""
    return request.config.pluginmanager.get_plugin("moe-conformance-run").session  # type: ignore[union-attr]


def test_section(section: Section, conformance_session: Session) -> None:
    """Every case of the section has an outcome, and no new failure is among them."""
    replayed = conformance_session.options.replayed
    failures = conformance_session.sweep(section)
    if failures:
        text = [line for failure in failures for line in failure_lines(failure.record(), replayed)]
        pytest.fail("\n".join(text), pytrace=False)
