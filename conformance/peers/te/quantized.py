"""Quantised rows, and their permutation, through Transformer Engine.

`moe_permute` and `moe_permute_and_pad_with_probs` move codes and scales of tensors that
`Float8BlockQuantizer` or `MXFP8Quantizer` made by rows. Blocks lie within a token's row, so rows
that are quantised and then permuted are rows that are permuted and then quantised. It wants tokens
in fours (MXFP8: in 128s): tokens of zeros that go nowhere are added.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.peers.te import padding, recipes
from conformance.peers.te.part import Part
from conformance.peers.te.permutation import RowMap
from moe_ref.config import (
    PermutedQuantization,
    Quantization,
    QuantizerState,
    Recipe,
    check_permute_and_quantize,
    check_quantize,
    check_splits,
)
from moe_ref.config.quantization import BLOCK

TOKENS = {"block": 4, "mxfp8": 128}  # tokens come in multiples of it
QUANTIZER = {"block": "block_quantizer", "mxfp8": "mxfp8_quantizer"}
_SHARED = {  # why there is no path for scales of many rows
    "quantize": "only blocks within a row are offered",
    "permute_and_quantize": "an expert's rows share a scale, which is not known before they are permuted",
}
_READS = ("permute", "unpermute", "block_quantizer", "fp8_dtype")


class QuantisedRows(NamedTuple):
    """Rows as they were given, or in the order of the experts."""

    tensor: Any  # a quantised tensor of Transformer Engine; it may have further rows, of zeros
    scaling: str
    shape: tuple[int, int]
    amax: Tensor  # [groups' rows, blocks]: the adapter's own, because Transformer Engine keeps none


class Quantized(Part):
    """`quantize` of moe_ref.quantization, `permute_and_quantize` of moe_ref.fused, readers."""

    needs: ClassVar = dict.fromkeys(
        ("quantize", "permute_and_quantize", "codes", "scales", "amax", "dequantize"), _READS
    )

    def missing(self, function: str) -> str | None:
        """Completed, all is ours: its tensors have no columns, gradients and GEMM layouts."""
        return "its quantised rows have one form" if self.complete else super().missing(function)

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """Scalings whose blocks lie within a row, by rows."""
        reason = super().supports(function, payload, settings)
        recipe = settings.get("recipe")
        if reason or function not in _SHARED or not isinstance(recipe, Recipe):
            return reason
        description = f"{function} under {recipe.scaling}"
        if recipe.scaling not in TOKENS:
            return f"{description}: {_SHARED[function]}"
        if settings.get("role") == "weight" or not settings.get("rowwise", True):
            return f"{description}: it moves rows of blocks alone"
        if function == "permute_and_quantize" and recipe.scaling == "block" and settings.get("align") not in (None, 1):
            return f"{description} with align: scales of its padding are 0, which no quantiser gives"
        wanted = ("permute_and_pad", QUANTIZER[recipe.scaling]) if recipe.scaling == "mxfp8" else ()
        lacking = recipes.lacking(self.features, recipe) or next((x for x in wanted if not self.features[x]), None)
        return (
            f"{description}: Transformer Engine lacks {lacking}" if lacking else self.probes.refused.get(recipe.scaling)
        )

    def declares(self, function: str) -> dict[str, Any]:
        """Transformer Engine asserts that gradients are not quantised."""
        return {"differentiable": False} if function in _SHARED else {}

    def quantize(
        self, x: Tensor, recipe: Recipe, *, role: str = "input", splits: Tensor | None = None, rowwise: bool = True,
        state: QuantizerState | None = None,
    ) -> Quantization:  # fmt: skip
        """`moe_ref.quantize` by rows, without `columnwise` and `noise`. Groups share no block; rows
        past the last one are zeros.
        """
        check_quantize(x, recipe, role, splits, rowwise, False, state, None)
        sizes = [len(x)] if splits is None else splits.tolist()
        check_splits(sizes, len(x), recipe)
        owned = x.detach()[: sum(sizes)]
        padding_rows = len(x) - len(owned) + -len(x) % TOKENS[recipe.scaling]
        te_quantized = self._quantizer(recipe, role)(pad(owned, (0, 0, 0, padding_rows)))
        amax = _amax(owned, BLOCK[recipe.scaling])
        quantized = QuantisedRows(te_quantized, recipe.scaling, (len(x), x.shape[1]), amax)
        return Quantization(quantized, None)  # type: ignore[arg-type]

    def permute_and_quantize(
        self, tokens: Tensor, routing_map: Tensor, recipe: Recipe, *, probs: Tensor | None = None,
        align: int | None = None, role: str = "input", rowwise: bool = True,
        state: QuantizerState | None = None,
    ) -> PermutedQuantization:  # fmt: skip
        """`moe_ref.permute_and_quantize` by rows, without `capacity` and `num_rows`."""
        check_permute_and_quantize(
            tokens, routing_map, recipe, probs, align, None, None, role, rowwise, False, state
        )  # fmt: skip
        cut = padding.segments(routing_map, align or 1)
        padding_rows = -len(tokens) % TOKENS[recipe.scaling]
        quantised = self._quantizer(recipe, role)(pad(tokens.detach(), (0, 0, 0, padding_rows)))
        chosen = pad(routing_map, (0, 0, 0, padding_rows))
        rows, row_id_map, offsets = self._permuted(quantised, chosen, cut)
        narrow = row_id_map.shape == chosen.T.shape  # before 2.6; since, two columns per expert and one more
        row_id_map = row_id_map[:, : len(tokens)].contiguous() if narrow else row_id_map[: len(tokens)]
        row_map = RowMap(
            row_id_map, len(tokens), routing_map.shape[1], cut.num_padded, None if align is None else cut, offsets
        )
        token_R = (routing_map != 0).T.nonzero()[:, 1]
        amax = padding.pad(_amax(tokens.detach(), BLOCK[recipe.scaling])[token_R], cut)
        quantized = QuantisedRows(rows, recipe.scaling, (cut.num_padded, tokens.shape[1]), amax)
        offsets = None if align is None else cut.pad_offsets
        moved = self._probs(probs, routing_map, cut)
        return PermutedQuantization(quantized, None, moved, row_map, cut.padded, offsets, None)  # type: ignore[arg-type]

    def _quantizer(self, recipe: Recipe, role: str) -> Any:
        """A quantiser by rows."""
        te_recipe = recipes.theirs(self.features, self.trace, recipe)
        dtype = self.features.get("fp8_dtype")(fp8_recipe=te_recipe, fprop_tensor=role != "grad_output")
        words: dict[str, Any] = {"fp8_dtype": dtype, "rowwise": True, "columnwise": False}
        if recipe.scaling == "block":
            words |= {"amax_epsilon": recipe.amax_epsilon, "force_pow_2_scales": recipe.power_of_two_scales}
            words["block_scaling_dim"] = 1
        self.trace.step("get_fp8_te_dtype")
        self.trace.step("Float8BlockQuantizer" if recipe.scaling == "block" else "MXFP8Quantizer")
        return self.features.get(QUANTIZER[recipe.scaling])(**words)

    def _permuted(self, quantised: Any, chosen: Tensor, cut: padding.Segments) -> tuple[Any, Tensor, Tensor | None]:
        """Rows, row_id_map and pad_offsets; of probs that are ones, which make no row of zeros."""
        if cut.num_padded > cut.num_rows:
            self.trace.step("moe_permute_and_pad_with_probs")
            ones = torch.ones(chosen.shape, device=chosen.device)
            rows, _, row_id_map, offsets, _ = self.features.get("permute_and_pad")(
                inp=quantised, probs=ones, routing_map=chosen, tokens_per_expert=cut.counts, align_size=cut.align
            )
            return rows, row_id_map, offsets
        self.trace.step("moe_permute")
        permute = self.features.get("permute")
        rows, row_id_map = permute(inp=quantised, routing_map=chosen, num_out_tokens=cut.num_rows, map_type="mask")
        return rows, row_id_map, None

    def _probs(self, probs: Tensor | None, chosen: Tensor, cut: padding.Segments) -> Tensor | None:
        if probs is None:
            return None
        self.trace.step("probs by an index")
        expert_R, token_R = (chosen != 0).T.nonzero(as_tuple=True)
        return padding.pad(probs[token_R, expert_R], cut)

    def _own(self, quantized: QuantisedRows) -> Any:
        """The quantised tensor."""
        self.trace.step("a quantised tensor is read")
        return quantized.tensor

    def codes(self, quantized: QuantisedRows) -> Tensor:
        """`moe_ref.codes`, by rows."""
        data: Tensor = self._own(quantized)._rowwise_data
        return data.view(torch.uint8)[: quantized.shape[0]]

    def scales(self, quantized: QuantisedRows) -> Tensor:
        """`moe_ref.scales`, by rows and compact: blocks' are stored transposed, with padding."""
        stored: Tensor = self._own(quantized)._rowwise_scale_inv
        stored = stored.T if quantized.scaling == "block" else stored.view(torch.uint8)
        columns = quantized.shape[1]
        return stored[: len(quantized.amax), : -(-columns // BLOCK[quantized.scaling])].contiguous()

    def amax(self, quantized: QuantisedRows) -> Tensor:
        """`moe_ref.amax`, by rows."""
        self._own(quantized)
        return quantized.amax

    def dequantize(self, quantized: QuantisedRows) -> Tensor:
        """`moe_ref.dequantize`, by rows."""
        out: Tensor = self._own(quantized).dequantize()
        return out[: quantized.shape[0]]


def _amax(x: Tensor, block: int) -> Tensor:
    """[N, blocks] float32: max |x|; NaN is ignored."""
    magnitude = torch.where(x.isnan(), 0, x.abs()).float()
    return pad(magnitude, (0, -x.shape[1] % block)).unflatten(1, (-1, block)).amax(2)
