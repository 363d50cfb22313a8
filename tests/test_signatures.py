"""A function of one rank takes what the reference's takes, by the same names and defaults."""

import inspect
from typing import Any

import pytest

import moe_fast
import moe_ref
from conformance.catalogue import FAMILIES, NAMES
from tests.common.fast import interpreted

pytestmark = interpreted
# the others take one rank's entry of the reference's lists
ONE_RANK = [name for name in NAMES if name not in ("dispatch", "layer")]


def differences(ours: Any, reference: Any) -> list[str]:
    """The parameters that differ; a reference that passes settings on names none of them."""
    parameters, wanted = (inspect.signature(function).parameters for function in (ours, reference))
    passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    if passed_on:
        wanted = {name: p for name, p in wanted.items() if p.kind is not p.VAR_KEYWORD}
        parameters = {name: p for name, p in parameters.items() if name in wanted}
    described = [[(name, p.kind, p.default) for name, p in listed.items()] for listed in (parameters, wanted)]
    return [str(entry[0]) for entry in set(described[0]) ^ set(described[1])]


def taking_totals(h, *, probs=None, kind="squared_relu", round_before_probs=False, totals=None):
    """As `activation`, but for one setting."""


@pytest.mark.parametrize("family", ONE_RANK)
def test_signatures_agree(family):
    names = [contract.function for contract in FAMILIES[NAMES.index(family)].contracts]
    offered = [name for name in names if hasattr(moe_fast, name) and hasattr(moe_ref, name)]
    mismatches = {name: differences(getattr(moe_fast, name), getattr(moe_ref, name)) for name in offered}
    assert mismatches and not any(mismatches.values()), mismatches


def test_a_setting_that_the_reference_has_not_is_found():
    assert "totals" in differences(taking_totals, moe_ref.activation)
