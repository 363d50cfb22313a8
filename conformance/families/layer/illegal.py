"""Calls of the layer that must raise."""

from dataclasses import replace

import torch

from conformance.core.contract import Problem
from conformance.core.illegal import Rule, added, bare


def _without(name: str) -> Rule:
    """One parameter of a pair is missing."""

    def break_it(problem: Problem) -> Problem:
        required = {key: x for key, x in problem.required.items() if key != name}
        return replace(bare(problem), required=required, blame="parameters")

    return break_it


def _experts_missing(problem: Problem) -> Problem:
    fewer = {name: problem.required[name][:-1] for name in ("fc1_weight", "fc2_weight")}
    return replace(bare(problem).with_tensors(fewer), blame="parameters")


def _bias_missing(problem: Problem) -> Problem:
    """A bias for one expert fewer."""
    missing = {"fc2_bias": problem.required["fc2_weight"][1:, :, 0].clone()}
    return replace(bare(problem), required=bare(problem).required | missing, blame="parameters")


MOE_LAYER: dict[str, Rule] = {
    "an_expert_without_weights": _experts_missing,
    "an_expert_without_a_bias": _bias_missing,
    "into_a_latent_space_alone": _without("latent_up"),
    "half_of_the_shared_experts": _without("shared_fc2_weight"),
    "noise_without_jitter": added("noise", torch.zeros(2, 1)),
    "mask_too_long": added("padding_mask", torch.zeros(3, dtype=torch.bool)),
}
