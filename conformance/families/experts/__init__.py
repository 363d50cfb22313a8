"""Experts: activations, grouped products and MLPs."""

from conformance.core.family import Family, by_function
from conformance.core.shared_out import SharedOut
from conformance.families.experts import (
    golden,
    golden_mlp,
    golden_recipes,
    illegal,
    illegal_recipes,
    laws_mlp,
    space,
    space_mlp,
)
from conformance.families.experts.activations import Activation, Glu
from conformance.families.experts.latent import LatentProjection
from conformance.families.experts.linear import GroupedDgrad, GroupedLinear, GroupedWgrad
from conformance.families.experts.mlp import GroupedMlp, SequentialMlp
from conformance.families.experts.shared import SharedExperts

FAMILY = Family(
    contracts=(
        *(Glu(), Activation(), GroupedLinear(), GroupedDgrad(), GroupedWgrad(), GroupedMlp(), SequentialMlp()),
        SharedOut(SharedExperts(), ("weight", "bias", "fc1_weight", "fc2_weight", "gate_weight")),
        LatentProjection(),
    ),
    golden=by_function(golden, golden_mlp, golden_recipes),
    illegal=by_function(illegal, illegal_recipes),
    laws=by_function(laws_mlp),
    space=by_function(space, space_mlp),
)
