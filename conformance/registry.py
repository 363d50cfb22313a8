"""Which functions there are: one contract each, in the order in which a verdict lists them, producers before consumers."""

from typing import Any

from conformance.contracts import golden, golden_experts, golden_quantization, golden_routing, illegal
from conformance.contracts.activation import Activation, Glu
from conformance.contracts.balancing import AuxLossScores, SinkhornRouting, ZLoss
from conformance.contracts.base import Contract
from conformance.contracts.chunks import SortChunks
from conformance.contracts.gating import AttachLoss, Gate, Jitter
from conformance.contracts.grouped import GroupedDgrad, GroupedLinear, GroupedWgrad
from conformance.contracts.loads import DropTokens, LoadBalancingLoss, UpdateExpertBias
from conformance.contracts.permutation import Permute, Unpermute
from conformance.contracts.quantize import Quantize
from conformance.contracts.route import Route
from conformance.contracts.routing_map import IndicesToMultihot, MultihotToIndices, PadRoutingMap
from conformance.contracts.topk import TopkIndices, TopkRouting
from conformance.laws import LAWS

CONTRACTS: dict[str, Contract[Any]] = {
    contract.function: contract
    for contract in (
        *(Gate(), Jitter(), TopkIndices(), TopkRouting(), SinkhornRouting(), DropTokens()),
        *(AuxLossScores(), LoadBalancingLoss(), ZLoss(), AttachLoss(), UpdateExpertBias(), Route()),
        *(Permute(), Unpermute(), SortChunks(), PadRoutingMap(), IndicesToMultihot(), MultihotToIndices()),
        Quantize(),
        *(Glu(), Activation(), GroupedLinear(), GroupedDgrad(), GroupedWgrad()),
    )
}
_GOLDEN = (golden, golden_routing, golden_experts, golden_quantization)
for _name, _contract in CONTRACTS.items():
    _contract.golden = next(getattr(module, _name.upper()) for module in _GOLDEN if hasattr(module, _name.upper()))
    _contract.illegal = illegal.RULES[_name]
    _contract.laws = LAWS[_name]
