"""The reference has the results that were worked out by hand, and refuses each illegal call."""

import pytest

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.ranks import Collective, ranks_of
from conformance.core.space import Space
from conformance.engine.choose.plan import fixed_cases
from tests.common.suite import assert_accepted

COLLECTIVES = {name for name, contract in CONTRACTS.items() if isinstance(contract, Collective)}


@pytest.mark.parametrize("function", [name for name in CONTRACTS if name not in {*COLLECTIVES, "moe_layer"}])
def test_the_reference_passes_golden_cases_and_illegal_calls(function):
    """tests/dispatch and tests/layer call functions of several ranks, in a world of processes."""
    cases = [case for case in fixed_cases(function, Space()) if not ranks_of(CONTRACTS[function], case)]
    assert_accepted(cases, moe_ref, share=0)
