"""Which functions there are: one contract each, in the order in which a verdict lists them, producers before consumers."""

from typing import Any

from conformance.contracts import golden, illegal
from conformance.contracts.base import Contract
from conformance.contracts.chunks import SortChunks
from conformance.contracts.permutation import Permute, Unpermute
from conformance.contracts.routing_map import IndicesToMultihot, MultihotToIndices, PadRoutingMap
from conformance.laws import LAWS

CONTRACTS: dict[str, Contract[Any]] = {
    contract.function: contract for contract in (Permute(), Unpermute(), SortChunks(), PadRoutingMap(), IndicesToMultihot(), MultihotToIndices())
}
for _name, _contract in CONTRACTS.items():
    _contract.golden = getattr(golden, _name.upper())
    _contract.illegal = illegal.RULES[_name]
    _contract.laws = LAWS[_name]
