"""Parameters in checkpoints: names, shards, extra states, and experts of a dense layer."""

from conformance.core.family import Family, by_function
from conformance.families.parameters import (
    golden,
    illegal,
    laws,
    space,
)
from conformance.families.parameters.extra_state import MergeExtraState, SplitExtraState
from conformance.families.parameters.names import ConvertExperts, NormalizeMasterParameters, NormalizeParameters
from conformance.families.parameters.shards import ExpandShard, ShardParameters
from conformance.families.parameters.upcycling import Upcycle

FAMILY = Family(
    contracts=(
        *(NormalizeParameters(), NormalizeMasterParameters(), ConvertExperts()),
        *(ShardParameters(), ExpandShard(), SplitExtraState(), MergeExtraState(), Upcycle()),
    ),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws),
    space=by_function(space),
)
