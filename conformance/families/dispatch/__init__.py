"""Dispatch: moving rows between ranks and back."""

from conformance.core.family import Family, by_function
from conformance.families.dispatch import (
    golden,
    illegal,
    laws_worlds,
    machine,
    space,
)
from conformance.families.dispatch.deepep import DeepEPCombine, DeepEPDispatch
from conformance.families.dispatch.deepep import dispatches as deepep_dispatches
from conformance.families.dispatch.deepep_layout import DeepEPLayout
from conformance.families.dispatch.flat_experts import FlattenExperts
from conformance.families.dispatch.hybridep import HybridEPDispatch
from conformance.families.dispatch.low_latency import LowLatencyCombine, LowLatencyDispatch
from conformance.families.dispatch.maps import SIGNATURES, CachedDispatch, MapCombine, MapDispatch
from conformance.families.dispatch.maps import dispatches as map_dispatches

FAMILY = Family(
    contracts=(
        *(DeepEPLayout(), FlattenExperts()),
        *(MapDispatch("allgather_dispatch"), MapCombine("allgather_combine")),
        *(MapDispatch("alltoall_dispatch"), MapCombine("alltoall_combine")),
        *(
            DeepEPDispatch(),
            CachedDispatch("deepep_cached_dispatch", DeepEPDispatch.signature, deepep_dispatches),
            DeepEPCombine(),
        ),
        *(LowLatencyDispatch(), LowLatencyCombine()),
        *(
            HybridEPDispatch(),
            CachedDispatch("hybridep_cached_dispatch", SIGNATURES["hybridep_dispatch"], map_dispatches),
        ),
        MapCombine("hybridep_combine"),
    ),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws_worlds),
    space=by_function(space),
    machines=by_function(machine),
)
