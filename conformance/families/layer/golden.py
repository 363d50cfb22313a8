"""Layers computed by hand."""

from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.literals import Golden, exactly, floats
from conformance.families.layer.layer import layer_call
from conformance.judge import Exact
from moe_ref.config import LayerConfig, RouterConfig

# two experts, both chosen: equal logits, so p = ½ each; f(h) = max(h, 0)
_BOTH = RouterConfig(num_experts=2, topk=2)
_WEIGHTS = {
    "router_weight": floats([1], [1]),
    "fc1_weight": floats([[1]], [[2]]),
    "fc2_weight": floats([[3]], [[1]]),
}
_SHARED = {"shared_fc1_weight": floats([1]), "shared_fc2_weight": floats([1])}
_BIASES = {"fc1_bias": floats([1], [1]), "fc2_bias": floats([4], [2])}
_LATENT = {"latent_down": floats([2]), "latent_up": floats([-1])}


def _layer(
    config: LayerConfig, wanted: tuple[str, ...] = (), padding_mask: Tensor | None = None, **parameters: Tensor
) -> Problem:
    required = {"x": floats([2], [-1]), **_WEIGHTS, **parameters}
    settings = {} if padding_mask is None else {"padding_mask": padding_mask}
    return layer_call(required, config, settings, wanted, {"output": floats([1], [1])} if wanted else {})


def _config(**settings: Any) -> LayerConfig:
    return LayerConfig(router=_BOTH, kind="relu", **settings)


_MAP = Exact(torch.ones(2, 2, dtype=torch.bool), "integers")
MOE_LAYER: Golden = {
    "two_experts_and_a_shared_one": (  # ½·3·2 + ½·1·4 + 2 = 7; nothing of a negative token passes a relu
        _layer(_config(), ("x", "fc1_weight", "fc2_weight", "shared_fc1_weight", "shared_fc2_weight"), **_SHARED),
        {
            "output": exactly(floats([7], [0])),
            "routing_map": _MAP,
            "d_x": exactly(floats([3.5], [0])),  # ½·3·1 + ½·1·2 + 1·1; the weights are constant: equal logits
            "d_fc1_weight": exactly(floats([[3]], [[1]])),  # ½·3·2, ½·1·2
            "d_fc2_weight": exactly(floats([[1]], [[2]])),  # ½·2, ½·4
            "d_shared_fc1_weight": exactly(floats([2])),
            "d_shared_fc2_weight": exactly(floats([2])),
        },
    ),
    "biases_of_experts": (  # h = 2 + 1 and 4 + 1, of the second token 0 and -1;  ½(3·3 + 4) + ½(1·5 + 2); ½(4 + 2)
        _layer(_config(), ("x", *_BIASES), **_BIASES),
        {
            "output": exactly(floats([10], [3])),
            "routing_map": _MAP,
            "d_x": exactly(floats([2.5], [0])),  # ½·3·1 + ½·1·2
            "d_fc1_bias": exactly(floats([1.5], [0.5])),
            "d_fc2_bias": exactly(floats([1], [1])),  # ½ of each of two tokens
        },
    ),
    "a_router_in_float64": (  # float32 has one logit for both experts: 2 and 2 + 2^-30; 2 · 2 of expert 1
        _layer(
            LayerConfig(router=RouterConfig(num_experts=2, topk=1), kind="relu", router_dtype="fp64"),
            router_bias=floats(0, 2.0**-30),
        ),
        {
            "output": exactly(floats([4], [0])),
            "routing_map": Exact(torch.tensor([[False, True], [False, True]]), "integers"),
        },
    ),
    "in_a_latent_space": (  # down: 4, -2;  ½·3·4 + ½·1·8 = 10;  up: -10; the shared expert sees 2
        _layer(_config(), (), **_SHARED, **_LATENT),
        {"output": exactly(floats([-8], [0])), "routing_map": _MAP},
    ),
    "padding_has_the_shared_expert_alone": (  # of a token of 2 the first case's 7 are 2
        _layer(_config(), ("x", "fc1_weight"), torch.tensor([True, False]), **_SHARED),
        {
            "output": exactly(floats([2], [0])),
            "routing_map": Exact(torch.tensor([[False, False], [True, True]]), "integers"),
            "d_x": exactly(floats([1], [0])),
            "d_fc1_weight": exactly(floats([[0]], [[0]])),
        },
    ),
}
