"""The experts through Transformer Engine's operation fuser, in high precision.

`Sequential(GroupedLinear, scaled activation, GroupedLinear)` of transformer_engine.pytorch.ops,
which it may run as one operation. Without probs the scales are ones: a product with 1 is exact.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.peers.te import padding
from conformance.peers.te.activations import Gate, Operation, made, scaled
from conformance.peers.te.counts import Counts
from conformance.peers.te.part import Part, named
from conformance.peers.te.probes import with_parameters
from conformance.peers.te.trace import Unavailable
from moe_ref.config import check_count_values, check_grouped_mlp, check_kind


class Mlp(Part):
    """`grouped_mlp` of moe_ref.experts."""

    needs: ClassVar = {"grouped_mlp": ("ops_grouped_linear", "ops_sequential", "scaled_swiglu")}

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """One dtype for all, the activations that exist with a scale per row, and its rounding."""
        reason = super().supports(function, payload, settings)
        if reason:
            return reason
        for name in ("probs", "fc1_bias", "fc2_bias"):
            if settings.get(name) is not None and settings[name].dtype != payload.dtype:
                return f"grouped_mlp of {named(payload)} with {name} of {named(settings[name])}"
        weighted = settings.get("probs") is not None
        if weighted and payload.dtype != torch.float32:
            if settings.get("fc2_bias") is not None:
                return f"grouped_mlp of {named(payload)} with probs and fc2_bias: it rounds their product"
            if settings.get("round_before_probs", False) == self.probes.rounds_once:
                return f"grouped_mlp with round_before_probs {not self.probes.rounds_once}, otherwise"
        if weighted and settings.get("fc2_bias") is not None and not self.features["ops_scale_bias"]:
            return "grouped_mlp with probs and fc2_bias: Transformer Engine lacks ops_scale_bias"
        gate = Gate.of(settings, "swiglu")
        operation = scaled(gate)
        there = operation is not None and self.features[operation.feature]
        return None if there else f"grouped_mlp of {gate}"

    def declares(self, function: str) -> dict[str, Any]:
        """Alone, counts that do not sum to the rows are not checked here."""
        return {} if self.complete else {"unchecked": ("tokens_per_expert",)}

    def grouped_mlp(
        self, rows: Tensor, tokens_per_expert: Tensor | tuple[Tensor | None, Tensor], fc1_weight: Tensor,
        fc2_weight: Tensor, *,
        probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
        kind: str = "swiglu", offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
        interleave: int | None = None, round_before_probs: bool = False, align: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.grouped_mlp` without a recipe. Modules are made for the call."""
        check_kind(kind, offset, clamp, alpha, interleave)
        biases, counts, used = (fc1_bias, fc2_bias), Counts.of(tokens_per_expert), len(rows)
        check_grouped_mlp(
            rows, counts.device, fc1_weight, fc2_weight, probs, *biases, interleave, kind, False, align, None
        )
        if self.complete:
            host_counts = counts.tolist()
            check_count_values(host_counts, used)
            used = sum(host_counts)
            if 0 in (used, *fc1_weight.shape, *fc2_weight.shape):
                raise Unavailable("no row or no column")
        scales = rows.new_ones(used) if probs is None else probs[:used]
        activation = scaled(Gate(kind, offset, clamp, alpha, interleave))
        layers = (fc1_weight, fc2_weight, *biases)
        out = self._padded(rows[:used], scales, counts, align or 1, layers, probs is not None, activation)
        return out if used == len(rows) else torch.cat([out, out.new_zeros((len(rows) - used, out.shape[1]))])

    def _padded(
        self, rows: Tensor, scales: Tensor, counts: Counts, align: int, layers: tuple[Any, ...], weighted: bool,
        activation: Operation | None,
    ) -> Tensor:  # fmt: skip
        """The layers over rows that are padded per expert."""
        if align == 1:
            return self._layers(rows, scales, counts.device, layers, weighted, activation)
        cut = padding.segments_of(counts, align)
        if cut.num_padded == cut.num_rows:
            return self._layers(rows, scales, counts.device, layers, weighted, activation)
        padded, scales = self.pad_rows(rows, cut), padding.pad(scales, cut)
        return self.unpad_rows(self._layers(padded, scales, cut.padded, layers, weighted, activation), cut)

    def _layers(
        self, rows: Tensor, scales: Tensor, counts: Tensor, layers: tuple[Any, ...], weighted: bool,
        activation: Operation | None,
    ) -> Tensor:  # fmt: skip
        """Both layers and the activation, with these weights."""
        fc1_weight, fc2_weight, fc1_bias, fc2_bias = layers
        with_bias = weighted and fc2_bias is not None
        first = self._layer(fc1_weight, fc1_bias, False)
        act = made(self, activation)
        modules = self.features.get("ops_sequential")(first, act, self._layer(fc2_weight, fc2_bias, with_bias))
        self.trace.step("Sequential")
        tensors = {"0.weight": fc1_weight, "0.bias": fc1_bias, "2.weight": fc2_weight, "2.bias": fc2_bias}
        tensor_of_name = {
            f"{key}{e}": x for key, all_ in tensors.items() if all_ is not None for e, x in enumerate(all_)
        }
        extra = (counts, scales, counts, *([scales] if with_bias else []))
        out: Tensor = with_parameters(modules, tensor_of_name)(rows, *extra)
        return out

    def _layer(self, weight: Tensor, bias: Tensor | None, scale_bias: bool) -> torch.nn.Module:
        """A grouped linear operation whose parameters hold no memory."""
        self.trace.step("GroupedLinear of ops")
        num_groups, width, hidden = weight.shape
        words: dict[str, Any] = {"scale_bias": True} if scale_bias else {}
        module: torch.nn.Module = self.features.get("ops_grouped_linear")(
            num_groups=num_groups,
            in_features=hidden,
            out_features=width,
            bias=bias is not None,
            device="meta",
            dtype=weight.dtype,
            **words,
        )
        return module
