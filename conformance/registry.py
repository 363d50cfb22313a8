"""Which functions there are: one contract each, in the order in which a verdict lists them, producers before consumers."""

from typing import Any

from conformance.contracts import (
    golden,
    golden_dispatch,
    golden_experts,
    golden_mlp,
    golden_permuted_quantization,
    golden_quantization,
    golden_quantized_activations,
    golden_recipes,
    golden_routing,
    illegal,
    illegal_dispatch,
    illegal_recipes,
)
from conformance.contracts.activation import Activation, Glu
from conformance.contracts.balancing import AuxLossScores, SinkhornRouting, ZLoss
from conformance.contracts.base import Contract
from conformance.contracts.chunks import SortChunks
from conformance.contracts.collective import Collective
from conformance.contracts.deepep_layout import DeepEPLayout
from conformance.contracts.dispatch_deepep import DeepEPCombine, DeepEPDispatch
from conformance.contracts.dispatch_deepep import dispatches as deepep_dispatches
from conformance.contracts.dispatch_maps import CachedDispatch, MapCombine, MapDispatch
from conformance.contracts.dispatch_maps import dispatches as map_dispatches
from conformance.contracts.dispatch_quantized import HybridEPDispatch
from conformance.contracts.dispatch_slabs import LowLatencyCombine, LowLatencyDispatch
from conformance.contracts.experts_mlp import GroupedMlp, SequentialMlp
from conformance.contracts.gating import AttachLoss, Gate, Jitter
from conformance.contracts.grouped import GroupedDgrad, GroupedLinear, GroupedWgrad
from conformance.contracts.latent import LatentProjection
from conformance.contracts.loads import DropTokens, LoadBalancingLoss, UpdateExpertBias
from conformance.contracts.permutation import Permute, Unpermute
from conformance.contracts.permuted_quantization import PermuteAndQuantize
from conformance.contracts.quantize import Quantize
from conformance.contracts.quantized_activation import (
    ActivationAndQuantize,
    ActivationBackwardAndQuantize,
    GluAndQuantize,
    GluBackwardAndQuantize,
)
from conformance.contracts.route_ranks import RouteOverRanks
from conformance.contracts.routing_map import IndicesToMultihot, MultihotToIndices, PadRoutingMap
from conformance.contracts.shared_mlp import SharedExperts
from conformance.contracts.shared_out import SharedOut
from conformance.contracts.topk import TopkIndices, TopkRouting
from conformance.laws import LAWS

WEIGHTS = ("weight", "bias", "fc1_weight", "fc2_weight", "gate_weight")  # that ranks which share a batch out have alike

CONTRACTS: dict[str, Contract[Any]] = {
    contract.function: contract
    for contract in (
        *(SharedOut(Gate(), WEIGHTS), Jitter(), TopkIndices(), TopkRouting(), SinkhornRouting(), DropTokens()),
        *(AuxLossScores(), LoadBalancingLoss(), ZLoss(), AttachLoss(), UpdateExpertBias(), RouteOverRanks()),
        *(Permute(), Unpermute(), SortChunks(), PadRoutingMap(), IndicesToMultihot(), MultihotToIndices()),
        *(Quantize(), PermuteAndQuantize()),
        *(GluAndQuantize(), ActivationAndQuantize(), GluBackwardAndQuantize(), ActivationBackwardAndQuantize()),
        *(Glu(), Activation(), GroupedLinear(), GroupedDgrad(), GroupedWgrad()),
        *(GroupedMlp(), SequentialMlp(), SharedOut(SharedExperts(), WEIGHTS), LatentProjection()),
        *(MapDispatch("allgather_dispatch", "expert_tensor_parallel"), MapCombine("allgather_combine")),
        *(MapDispatch("alltoall_dispatch", "expert_tensor_parallel", "capacity"), MapCombine("alltoall_combine")),
        *(
            DeepEPLayout(),
            DeepEPDispatch(),
            CachedDispatch("deepep_cached_dispatch", deepep_dispatches),
            DeepEPCombine(),
        ),
        *(LowLatencyDispatch(), LowLatencyCombine()),
        *(
            HybridEPDispatch(),
            CachedDispatch("hybridep_cached_dispatch", map_dispatches),
            MapCombine("hybridep_combine"),
        ),
    )
}
_GOLDEN = (
    golden,
    golden_dispatch,
    golden_routing,
    golden_experts,
    golden_mlp,
    golden_quantization,
    golden_permuted_quantization,
    golden_quantized_activations,
)
for _name, _contract in CONTRACTS.items():
    _table = next(getattr(module, _name.upper()) for module in _GOLDEN if hasattr(module, _name.upper()))
    _table = _table | getattr(golden_recipes, _name.upper(), {})
    if isinstance(_contract, Collective):
        _contract.worldwide = _table
        _table = {name: (calls[0], right[0]) for name, (calls, right) in _table.items()}
    _contract.golden = _table
    _contract.illegal = (illegal.RULES | illegal_dispatch.RULES)[_name] | illegal_recipes.RULES.get(_name, {})
    _contract.laws = LAWS[_name]
