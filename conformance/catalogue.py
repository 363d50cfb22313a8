"""One contract per function, in the order of a verdict: producers before consumers."""

import os
from importlib import import_module
from typing import Any

from conformance.core.case import Case
from conformance.core.contract import Contract
from conformance.core.family import Family
from conformance.core.machine import Machine
from conformance.core.ranks import Collective, ranks_of

NAMES = ("router", "permutation", "quantization", "fused", "experts", "dispatch", "layer", "parameters")
# one module per family, in the order of a verdict; the environment may name more, separated by
# commas
MODULES = (
    *(f"conformance.families.{name}" for name in NAMES),
    *filter(None, os.environ.get("MOE_CONFORMANCE_FAMILIES", "").split(",")),
)
FAMILIES: tuple[Family, ...] = tuple(import_module(module).FAMILY for module in MODULES)
CONTRACTS: dict[str, Contract[Any]] = {}
MACHINES: dict[str, type[Machine]] = {name: m for family in FAMILIES for name, m in family.machines.items()}

for _family in FAMILIES:
    for _contract in _family.contracts:
        _name = _contract.function
        _golden: Any = _family.golden[_name]
        if isinstance(_contract, Collective):
            _contract.worldwide = _golden  # the expectation of rank 0 stands for the collective
            _golden = {name: (calls[0], expectations[0]) for name, (calls, expectations) in _golden.items()}
        _contract.golden, _contract.illegal = _golden, dict(_family.illegal[_name])
        _has_gradients = bool(_contract.signature.gradients)
        _contract.laws = {law.name: law for law in _family.laws[_name] if _has_gradients or not law.gradients}
        _contract.shapes = _family.space[_name]
        _contract.case_type.serves(_name)
        CONTRACTS[_name] = _contract


def ranks_with_calls_before(case: Case) -> int:
    """The largest number of ranks of the case and of the calls before it; 0 if all of them run in a
    single process.
    """
    return max(ranks_of(CONTRACTS[call.function], call) for call in (case, *case.before))


def runs_in_one_place(case: Case) -> bool:
    """Whether the calls before the case run where the case itself runs: all in one process, or all
    in a world of ranks.
    """
    return len({ranks_of(CONTRACTS[call.function], call) > 0 for call in (case, *case.before)}) == 1
