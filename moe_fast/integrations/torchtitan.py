"""moe_fast as the routed experts of torchtitan: a converter of its model configurations.

    from moe_fast.integrations.torchtitan import MoEFastConverter
    model_registry("debugmodel", converters=[MoEFastConverter.Config()])

The converter replaces the experts of every MoE layer by `grouped_mlp`, and the reordering of their
tokens by `permute` and `unpermute`. The router, the shared experts and the exchange between ranks
remain torchtitan's. Checkpoints keep their names. Gate and value are one parameter, `w13`, as with
torchtitan's own override `fused_grouped_experts`: an optimizer sees that name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_fast.experts import grouped_mlp
from moe_fast.permutation import permute, unpermute
from moe_fast.permutation.row_map import RowMap

try:
    from spmd_types import is_type_checking
    from torchtitan.config import derive
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError as error:
    raise ImportError(f"moe_fast.integrations.torchtitan needs torchtitan 0.3: {error}") from error

ROWS = torch.bfloat16  # what torchtitan's experts compute in, whatever the tokens are


def _check_untyped() -> None:
    """Raise ValueError if torchtitan checks the types of tensors over ranks."""
    if is_type_checking():
        raise ValueError("debug.spmd_typechecking is True; it must be False: operators of moe_fast have no such types")


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a weight, in the dtype of the products."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(ROWS)


class FastGroupedExperts(FusedGroupedExperts):  # type: ignore[misc]
    """torchtitan's `GroupedExperts` by `grouped_mlp`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        _check_untyped()
        w13, w2 = _local(self.w13), _local(self.w2_EDF)
        rows = grouped_mlp(x_RD.to(ROWS), num_tokens_per_expert_E, w13.flatten(1, 2), w2, interleave=1)
        return rows.type_as(x_RD)


class StockGroupedExperts(GroupedExperts):  # type: ignore[misc]
    """The configuration in the place of torchtitan's. It has the names of its weights, because
    torchtitan sets initial values and shardings by them before it builds the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        def build(self) -> Any:
            fused = fused_grouped_experts(derive(self, GroupedExperts.Config))
            return derive(fused, FastGroupedExperts.Config).build()


class FastGptOssGroupedExperts(GptOssGroupedExperts):  # type: ignore[misc]
    """torchtitan's experts of gpt-oss by `grouped_mlp`.

    Raises:
        ValueError: the experts' width is split over ranks, each of which would add the second bias.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        _check_untyped()
        weight = self.mlp1_weight_EGD
        if isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
            size = weight.device_mesh["tp"].size()
            if size > 1:
                raise ValueError(f"tensor_parallel_degree is {size}; it must be 1 with gpt-oss, or experts be over ep")
        rows = grouped_mlp(
            x_RD.to(ROWS), num_tokens_per_expert_E, _local(weight), _local(self.mlp2_weight_EDF),
            fc1_bias=_local(self.mlp1_bias_EG), fc2_bias=_local(self.mlp2_bias_ED),
            kind="quick_geglu", offset=1.0, clamp=self.swiglu_limit, interleave=1,
        )  # fmt: skip
        return rows.type_as(x_RD)


@dataclass(frozen=True)
class Placement:
    """What `combine` needs of a dispatch within one rank."""

    row_map: RowMap
    probs_TE: Tensor


def _dispatch(x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Placement]:
    """(the tokens' rows in the order of their experts, their counts, the placement)."""
    sizes = (x_TD.shape[0], counts_E.shape[0])
    probs_TE = scores_TK.new_zeros(sizes).scatter(1, ids_TK, scores_TK)
    routing_map_TE = torch.zeros(sizes, dtype=torch.bool, device=ids_TK.device).scatter(1, ids_TK, True)
    permuted = permute(x_TD, routing_map_TE, num_rows=ids_TK.numel())
    return permuted.rows, counts_E, Placement(permuted.row_map, probs_TE)


def _combine(rows_RD: Tensor, placement: Placement) -> Tensor:
    """Each token's rows, weighted and summed in float32."""
    return unpermute(rows_RD, placement.row_map, probs=placement.probs_TE)


class FastLocalDispatcher(LocalTokenDispatcher):  # type: ignore[misc]
    """torchtitan's dispatcher of one rank by `permute` and `unpermute`."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts_E: Tensor) -> Any:
        return _dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, counts_E)

    def combine(self, routed_output_RD: Tensor, metadata: Placement, x_TD: Tensor) -> Tensor:
        return _combine(routed_output_RD, metadata)


class FastAllToAllDispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]
    """The same without expert parallelism; with it, torchtitan's own exchange."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts_E: Tensor) -> Any:
        run = _dispatch if self.ep_mesh is None else super().dispatch
        return run(x_TD, topk_scores_TK, topk_expert_ids_TK, counts_E)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        if self.ep_mesh is None:
            return _combine(routed_output_RD, metadata)
        combined: Tensor = super().combine(routed_output_RD, metadata, x_TD)
        return combined


EXPERTS = {
    GroupedExperts.Config: StockGroupedExperts.Config,
    GptOssGroupedExperts.Config: FastGptOssGroupedExperts.Config,
}
DISPATCHERS = {
    LocalTokenDispatcher.Config: FastLocalDispatcher.Config,
    AllToAllTokenDispatcher.Config: FastAllToAllDispatcher.Config,
}


class MoEFastConverter(ModelConfigConverter):  # type: ignore[misc]
    """Replaces the routed experts and the local dispatch of every MoE layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration itself, changed in place.

        Raises:
            ValueError: experts or a dispatcher that are not covered, such as those of another
                converter; or a model without routed experts.
        """
        layers = list(model_config.traverse(RoutedExperts.Config))
        if not layers:
            raise ValueError(f"{type(model_config).__qualname__} has no RoutedExperts that moe_fast could replace")
        for name, layer, *_ in layers:
            layer.inner_experts = _converted(f"{name}.inner_experts", layer.inner_experts, EXPERTS)
            layer.token_dispatcher = _converted(f"{name}.token_dispatcher", layer.token_dispatcher, DISPATCHERS)
        return model_config


def _converted(name: str, config: Any, known: dict[Any, Any]) -> Any:
    """The configuration as that of our class, with all its fields."""
    if type(config) not in known:
        expected = " or ".join(x.__qualname__.removesuffix(".Config") for x in known)
        raise ValueError(f"{name} is a {type(config).__qualname__.removesuffix('.Config')}; it must be {expected}")
    return derive(config, known[type(config)])
