"""Every honest variant passes a case per function; `benchmarks/honest.py` runs many."""

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.experts import FAMILY
from tests.honest import EXPERTS, HONEST, ROUTERS, SUMS

EACH = 1
BY_RECIPE = {contract.function for contract in FAMILY.contracts}


@pytest.mark.parametrize("implementation", HONEST + ROUTERS + SUMS + EXPERTS)
def test_it_is_accepted(implementation):
    with Pool(ChildOptions(implementation, "cpu")) as pool:
        description = pool.start()
        space = Space.of(description)
        offered = [name for name, about in description["functions"].items() if about["offered"]]
        cases = []
        for function in offered:
            own = cases_of(Section("drawn", function), PROFILES["smoke"], space, 7)
            cases += [case for case in own if not ranks_of(CONTRACTS[function], case)][:EACH]
            cases += scope_of(function, space).more([])[:1] if function in BY_RECIPE else []
        statuses = {case.text: outcome for case, outcome in pool.run(cases)}
    assert offered
    assert {
        text: (o.finding, o.reason)
        for text, o in statuses.items()
        if o.status not in ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
    } == {}
    assert any(outcome.status == "PASS" for outcome in statuses.values())
