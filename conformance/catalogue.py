"""The functions: one contract each, in the order in which a verdict lists them, producers before consumers."""

import os
from importlib import import_module
from typing import Any

from conformance.catalogue_laws import LAWS
from conformance.core.contract import Contract
from conformance.core.family import Family
from conformance.core.ranks import Collective
from conformance.core.shared_out import SharedOut
from conformance.families.dispatch import golden as golden_dispatch
from conformance.families.dispatch import illegal as illegal_dispatch
from conformance.families.dispatch.deepep import DeepEPCombine, DeepEPDispatch
from conformance.families.dispatch.deepep import dispatches as deepep_dispatches
from conformance.families.dispatch.hybridep import HybridEPDispatch
from conformance.families.dispatch.low_latency import LowLatencyCombine, LowLatencyDispatch
from conformance.families.dispatch.maps import CachedDispatch, MapCombine, MapDispatch
from conformance.families.dispatch.maps import dispatches as map_dispatches
from conformance.families.experts import golden as golden_experts
from conformance.families.experts import golden_mlp, golden_recipes, illegal_recipes
from conformance.families.experts import illegal as illegal_experts
from conformance.families.experts.activations import Activation, Glu
from conformance.families.experts.latent import LatentProjection
from conformance.families.experts.linear import GroupedDgrad, GroupedLinear, GroupedWgrad
from conformance.families.experts.mlp import GroupedMlp, SequentialMlp
from conformance.families.experts.shared import SharedExperts
from conformance.families.fused import golden as golden_permuted_quantization
from conformance.families.fused import golden_activate as golden_quantized_activations
from conformance.families.fused import illegal as illegal_fused
from conformance.families.fused.activate_and_quantize import (
    ActivationAndQuantize,
    ActivationBackwardAndQuantize,
    GluAndQuantize,
    GluBackwardAndQuantize,
)
from conformance.families.fused.permute_and_quantize import PermuteAndQuantize

WEIGHTS = ("weight", "bias", "fc1_weight", "fc2_weight", "gate_weight")  # that ranks which share a batch out have alike

# module of each family, in the order of a verdict; the environment may name more, separated by commas
MODULES = (
    *(f"conformance.families.{name}" for name in ("router", "permutation", "quantization", "dispatch")),
    *filter(None, os.environ.get("MOE_CONFORMANCE_FAMILIES", "").split(",")),
)
FAMILIES: tuple[Family, ...] = tuple(import_module(module).FAMILY for module in MODULES)
_UNCONVERTED: tuple[Contract[Any], ...] = (
    PermuteAndQuantize(),
    *(GluAndQuantize(), ActivationAndQuantize(), GluBackwardAndQuantize(), ActivationBackwardAndQuantize()),
    *(Glu(), Activation(), GroupedLinear(), GroupedDgrad(), GroupedWgrad()),
    *(GroupedMlp(), SequentialMlp(), SharedOut(SharedExperts(), WEIGHTS), LatentProjection()),
    *(MapDispatch("allgather_dispatch", "expert_tensor_parallel"), MapCombine("allgather_combine")),
    *(MapDispatch("alltoall_dispatch", "expert_tensor_parallel", "capacity"), MapCombine("alltoall_combine")),
    *(DeepEPDispatch(), CachedDispatch("deepep_cached_dispatch", deepep_dispatches), DeepEPCombine()),
    *(LowLatencyDispatch(), LowLatencyCombine()),
    *(HybridEPDispatch(), CachedDispatch("hybridep_cached_dispatch", map_dispatches), MapCombine("hybridep_combine")),
)
CONTRACTS: dict[str, Contract[Any]] = {}


def _add(contract: Contract[Any], golden: Any, illegal: Any, laws: Any) -> None:
    """List the contract with its golden cases, illegal calls and laws. Rank 0's part stands for a collective's."""
    if isinstance(contract, Collective):
        contract.worldwide = golden
        golden = {name: (calls[0], right[0]) for name, (calls, right) in golden.items()}
    contract.golden, contract.illegal, contract.laws = golden, illegal, laws
    CONTRACTS[contract.function] = contract


for _family in FAMILIES:
    for _contract in _family.contracts:
        _name = _contract.function
        _laws = {law.name: law for law in _family.laws[_name]}
        _add(_contract, _family.golden[_name], _family.illegal[_name], _laws)
        _contract.shapes = _family.space[_name]
        _contract.case_type.serves(_name)

_GOLDEN = (
    golden_dispatch,
    golden_experts,
    golden_mlp,
    golden_permuted_quantization,
    golden_quantized_activations,
)
_ILLEGAL = {
    name: rules
    for module in (
        illegal_fused,
        illegal_experts,
        illegal_dispatch,
    )
    for name, rules in module.RULES.items()
}
for _contract in _UNCONVERTED:
    _name = _contract.function
    _table = next(getattr(module, _name.upper()) for module in _GOLDEN if hasattr(module, _name.upper()))
    _table = _table | getattr(golden_recipes, _name.upper(), {})
    _add(_contract, _table, _ILLEGAL[_name] | illegal_recipes.RULES.get(_name, {}), LAWS[_name])
