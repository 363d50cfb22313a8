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
from tests.common.suite import in_turn
from tests.honest import EXPERTS, HONEST, ROUTERS, SUMS

EACH = 1
PRODUCTS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
OF_PRODUCTS = [name for name in EXPERTS if ".experts:" in name or ".low_precision:" in name]
ACCEPTED = ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
BY_RECIPE = {contract.function for contract in FAMILY.contracts}


@pytest.mark.parametrize("implementation", HONEST + ROUTERS + SUMS + EXPERTS)
def test_an_honest_variant_is_accepted(implementation):
    with Pool(ChildOptions(implementation, "cpu")) as pool:
        description = pool.start()
        space = Space.of(description)
        offered = [name for name, about in description["functions"].items() if about["offered"]]
        cases = []
        for function in offered:
            drawn_cases = cases_of(Section("drawn", function), PROFILES["smoke"], space, 7)
            cases += [case for case in drawn_cases if not ranks_of(CONTRACTS[function], case)][:EACH]
            cases += scope_of(function, space).more([])[:1] if function in BY_RECIPE else []
        statuses = {case.text: outcome for case, outcome in pool.run(cases)}
    assert offered
    assert {text: (o.finding, o.reason) for text, o in statuses.items() if o.status not in ACCEPTED} == {}
    assert any(outcome.status == "PASS" for outcome in statuses.values())


@pytest.mark.parametrize("implementation", OF_PRODUCTS)
def test_no_chosen_case_rejects_an_honest_product(implementation):
    """A case that was made for a defect may find it in honest kernels, too."""
    with Pool(ChildOptions(implementation, "cpu"), 1) as pool:
        space = Space.of(pool.start())
        chosen = [Section(kind, function) for function in PRODUCTS for kind in ("fixed", "covering")]
        all_cases = [case for section in chosen for case in cases_of(section, PROFILES["gate"], space, 0)]
        cases = in_turn(all_cases, implementation, OF_PRODUCTS)
        outcomes = [(case.text, outcome) for case, outcome in pool.run(cases)]
    assert [(text, o.finding, o.reason) for text, o in outcomes if o.status not in ACCEPTED] == []
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) > len(outcomes) // 2
