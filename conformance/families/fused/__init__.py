"""Fused: permutation or activation, and quantisation, in one function."""

from conformance.core.family import Family, by_function
from conformance.families.fused import (
    golden,
    golden_activate,
    illegal,
    laws,
    laws_activate,
    space,
    space_activate,
)
from conformance.families.fused.activate_and_quantize import (
    ActivationAndQuantize,
    ActivationBackwardAndQuantize,
    GluAndQuantize,
    GluBackwardAndQuantize,
)
from conformance.families.fused.permute_and_quantize import PermuteAndQuantize

FAMILY = Family(
    contracts=(
        *(PermuteAndQuantize(), GluAndQuantize(), ActivationAndQuantize()),
        *(GluBackwardAndQuantize(), ActivationBackwardAndQuantize()),
    ),
    golden=by_function(golden, golden_activate),
    illegal=by_function(illegal),
    laws=by_function(laws, laws_activate),
    space=by_function(space, space_activate),
)
