"""Calls of the layer that must raise an error, even after legal calls with the same settings.

A layer runs thousands of times in the same way, so an implementation may check settings only once;
but it must check what depends on the inputs each time.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.illegal import Rule, bare, in_dtype, setting
from conformance.families.layer.layer import script

OTHERS = 64  # settings, one of which has the place of settings that were dropped


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


def _once_known(rule: Rule) -> Rule:
    """The illegal call after two legal ones with the same settings, and after a similar one."""

    def break_it(problem: Problem) -> Problem:
        def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
            legal = {
                name: _on_device_of(x, arguments["x"]) for name, x in (problem.required | problem.settings).items()
            }
            for _ in range(2):
                script(implementation, legal | {"config": arguments["config"]})
            try:
                return script(implementation, arguments)
            except (ValueError, TypeError):
                return script(implementation, arguments)

        return replace(rule(problem), script=run)

    return break_it


def _on_device_of(value: Any, x: Tensor) -> Any:
    return value.to(x.device) if isinstance(value, Tensor) else value


def _settings_of_others(problem: Problem) -> Problem:
    """Noise without jitter.

    The settings are at the address of earlier settings with jitter, which no one holds any more.
    """

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        first_config = replace(arguments["config"], jitter_eps=0.5)
        address = id(first_config)
        script(implementation, arguments | {"config": first_config})
        del first_config
        new_configs = [replace(arguments["config"]) for _ in range(OTHERS)]
        here = next((candidate for candidate in new_configs if id(candidate) == address), new_configs[0])
        return script(implementation, arguments | {"config": here})

    noise = torch.zeros_like(problem.required["x"])
    return replace(bare(problem), settings=problem.settings | {"noise": noise}, script=run, blame="noise")


def _stage_once_known(problem: Problem) -> Problem:
    """The router's weight is transposed in a call of `gate`, after two legal calls of the layer."""

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            script(implementation, arguments)
        return {"logits": implementation.call("gate", arguments["x"], arguments["router_weight"].mT)}

    return replace(bare(problem), script=run, others=("gate",), blame="weight")


_PARAMETERS: dict[str, Rule] = {
    "an_expert_without_weights": _experts_missing,
    "an_expert_without_a_bias": _bias_missing,
    "into_a_latent_space_alone": _without("latent_up"),
    "half_of_the_shared_experts": _without("shared_fc2_weight"),
}
_CALLS: dict[str, Rule] = {
    "noise_without_jitter": setting("noise", torch.zeros(2, 1)),
    "mask_too_long": setting("padding_mask", torch.zeros(3, dtype=torch.bool)),
    "sequences_cut_in_two": setting("batch_size", 3),
    "weights_in_another_dtype": in_dtype("fc1_weight", torch.float64),
}
MOE_LAYER: dict[str, Rule] = {
    **_PARAMETERS,
    **_CALLS,
    **{f"{name}_once_known": _once_known(rule) for name, rule in _CALLS.items()},
    "noise_where_another_had_jitter": _settings_of_others,
    "gate_once_known": _stage_once_known,
}
