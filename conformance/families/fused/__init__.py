"""Fused: permutation or activation, and quantisation, in one function."""

from conformance.core.family import Family, merged
from conformance.families.fused import golden, golden_activate
from conformance.families.fused.activate_and_quantize import (
    ActivationAndQuantize,
    ActivationBackwardAndQuantize,
    GluAndQuantize,
    GluBackwardAndQuantize,
)
from conformance.families.fused.illegal import RULES
from conformance.families.fused.laws_activate import LAWS
from conformance.families.fused.permute_and_quantize import PermuteAndQuantize

FAMILY = Family(
    contracts=(
        *(PermuteAndQuantize(), GluAndQuantize(), ActivationAndQuantize()),
        *(GluBackwardAndQuantize(), ActivationBackwardAndQuantize()),
    ),
    golden=merged(golden.GOLDEN, golden_activate.GOLDEN),
    illegal=RULES,
    laws=LAWS,
    space={},
)
