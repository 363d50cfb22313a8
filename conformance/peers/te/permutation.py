"""Permutation through Transformer Engine: permute, unpermute and sort_chunks under our names.

`moe_permute`, `moe_permute_with_probs`, `moe_permute_and_pad_with_probs`, `moe_unpermute`,
`moe_sort_chunks_by_index` and `moe_sort_chunks_by_index_with_probs` of transformer_engine.pytorch,
by routing maps, or by lists of experts before 2.1. Transformer Engine checks neither maps nor
counts, and writes out of bounds where they disagree; so the rules of `moe_ref.config` are checked
here, and the host counts.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from conformance.peers.te import padding
from conformance.peers.te.indices import MOST_SLOTS, VECTOR, in_slots, in_vectors, slots_of
from conformance.peers.te.part import Part, named
from conformance.peers.te.trace import Unavailable
from moe_ref.config import Permuted, SortedChunks, check_permute, check_sort_chunks, check_unpermute


class RowMap(NamedTuple):
    """What `unpermute` needs of the call to `permute`."""

    row_id_map: Tensor  # as Transformer Engine returned it
    num_tokens: int
    num_experts: int
    num_rows: int  # P
    cut: padding.Segments | None  # None without `align`
    pad_offsets: Tensor | None = None  # as `moe_permute_and_pad_with_probs` returned them
    indices: Tensor | None = None  # [N,K] each token's experts, where the release takes no routing maps


def _row_map(row_id_map: Tensor, routing_map: Tensor, num_rows: int, cut: padding.Segments | None) -> RowMap:
    num_tokens, num_experts = routing_map.shape
    return RowMap(row_id_map, num_tokens, num_experts, num_rows, cut)


class Permutation(Part):
    """Functions of moe_ref.permutation."""

    needs: ClassVar = {
        "permute": ("permute", "unpermute"),
        "unpermute": ("permute", "unpermute"),
        "sort_chunks": ("sort_chunks",),
    }

    @property
    def by_indices(self) -> bool:
        """Whether the release permutes by lists of experts, and not by routing maps."""
        return self.features["permute_indices"] and self.features["unpermute_indices"]

    def missing(self, function: str) -> str | None:
        """Why the function has no path through this Transformer Engine, or None."""
        return None if function in ("permute", "unpermute") and self.by_indices else super().missing(function)

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """The documented dtypes; by lists of experts, whole vectors, and no probs of float64."""
        probs = settings.get("probs")
        if function == "unpermute" and self.by_indices and isinstance(probs, Tensor) and probs.dtype == torch.float64:
            return "unpermute with probs of float64"
        needs_vectors = function != "sort_chunks" and self.by_indices and not self.complete
        if needs_vectors and isinstance(payload, Tensor) and payload.shape[1] * payload.element_size() % VECTOR:
            return f"{function} of {payload.shape[1]} columns of {named(payload)}: no whole {VECTOR} bytes"
        return super().supports(function, payload, settings)

    def declares(self, function: str) -> dict[str, Any]:
        """In terms of the conformance suite's vocabulary."""
        if function == "sort_chunks":
            return {"unchecked": ("chunk_sizes", "order")}
        policy = {"zero_prob_rows": self.probes.zero_prob_rows} if function == "permute" else {}
        sums = {"accumulator": "storage", "noncontiguous": self.complete} if self.by_indices else {}
        return policy | sums

    def permute(
        self, tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None, align: int | None = None
    ) -> Permuted:
        """`moe_ref.permute` without `capacity` and `num_rows`: mask maps have neither.

        Returns:
            `overflow` is None: nothing is dropped. `pad_offsets` of None from Transformer Engine,
            where no expert needs padding, are zeros.
        """
        check_permute(tokens, routing_map, probs, align, None, None)
        cut = padding.segments(routing_map, align or 1)
        if self.complete and cut.num_rows * tokens.shape[1] == 0:
            raise Unavailable("no row or no column")  # it asserts, or unpermute loses the tokens
        if self.by_indices:
            return self._permute_by_indices(tokens, routing_map, probs, align, cut)
        tokens = self._wanting_gradient(tokens, probs)
        if align is not None and probs is not None and self.features["permute_and_pad"]:
            return self._permute_and_pad(tokens, routing_map, probs, cut)
        rows, row_probs, row_id_map = self._plain(tokens, routing_map, probs, cut.num_rows)
        row_map = _row_map(row_id_map, routing_map, cut.num_padded, None if align is None else cut)
        return self._finished(rows, row_probs, row_map, cut)

    def _finished(self, rows: Tensor, probs: Tensor | None, row_map: RowMap, cut: padding.Segments) -> Permuted:
        """The result, padded if the row map has segments."""
        if row_map.cut is None:
            return Permuted(rows, probs, row_map, cut.counts, None, None)  # type: ignore[arg-type]
        rows, probs = self.pad_rows(rows, cut), None if probs is None else padding.pad(probs, cut)
        return Permuted(rows, probs, row_map, cut.padded, cut.pad_offsets, None)  # type: ignore[arg-type]

    def _permute_by_indices(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, align: int | None, cut: padding.Segments
    ) -> Permuted:
        """The kernels read contiguous rows of whole vectors, whatever strides and columns are."""
        indices = slots_of(routing_map)
        if self.complete and indices.shape[1] > MOST_SLOTS:
            raise Unavailable(f"a token has {indices.shape[1]} experts")
        inp = in_vectors(tokens) if self.complete else tokens
        self.trace.step("moe_permute of indices")
        permute = self.features.get("permute_indices")
        rows, row_id_map = permute(inp=inp, indices=indices, num_out_tokens=cut.num_rows)
        row_map = _row_map(row_id_map, routing_map, cut.num_padded, None if align is None else cut)
        row_probs = self._probs_by_index(routing_map, probs)
        return self._finished(rows[:, : tokens.shape[1]], row_probs, row_map._replace(indices=indices), cut)

    def _probs_by_index(self, routing_map: Tensor, probs: Tensor | None) -> Tensor | None:
        if probs is None:
            return None
        self.trace.step("probs by an index")
        expert_R, token_R = (routing_map != 0).T.nonzero(as_tuple=True)
        return probs[token_R, expert_R]

    def _wanting_gradient(self, payload: Tensor, probs: Tensor | None) -> Tensor:
        """A payload that requires a gradient, where a release gives probs none without."""
        only_probs = probs is not None and probs.requires_grad and torch.is_grad_enabled() and not payload.requires_grad
        if self.complete and only_probs and not self.probes.probs_gradient_alone:
            self.trace.step("a payload made to require a gradient")
            return payload.detach().requires_grad_()
        return payload

    def _permute_and_pad(self, tokens: Tensor, routing_map: Tensor, probs: Tensor, cut: padding.Segments) -> Permuted:
        self.trace.step("moe_permute_and_pad_with_probs")
        rows, row_probs, row_id_map, offsets, padded = self.features.get("permute_and_pad")(
            inp=tokens, probs=probs, routing_map=routing_map, tokens_per_expert=cut.counts, align_size=cut.align
        )
        row_map = _row_map(row_id_map, routing_map, len(rows), cut)._replace(pad_offsets=offsets)
        offsets = torch.zeros_like(cut.counts) if offsets is None else offsets
        return Permuted(rows, row_probs, row_map, padded, offsets, None)  # type: ignore[arg-type]

    def _plain(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_rows: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Rows, their probs and the row_id_map, without padding."""
        settings = {"routing_map": routing_map, "num_out_tokens": num_rows}
        if probs is not None and self.features["permute_with_probs"]:
            self.trace.step("moe_permute_with_probs")
            return self.features.get("permute_with_probs")(inp=tokens, probs=probs, **settings)
        self.trace.step("moe_permute")
        rows, row_id_map = self.features.get("permute")(inp=tokens, map_type="mask", **settings)
        return rows, self._probs_by_index(routing_map, probs), row_id_map

    def unpermute(
        self,
        rows: Tensor,
        row_map: RowMap,
        *,
        restore_shape: tuple[int, int] | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """`moe_ref.unpermute`."""
        if not isinstance(row_map, RowMap):
            raise Unavailable("the row map is ours")
        tokens, experts = row_map.num_tokens, row_map.num_experts
        check_unpermute(rows, row_map.num_rows, tokens, experts, restore_shape, probs)
        if self.complete and rows.shape[1] == 0:
            return self._no_columns(rows, tokens, probs)
        rows = self._wanting_gradient(rows, probs)
        if row_map.indices is not None:
            return self._unpermute_by_indices(rows, row_map, row_map.indices, probs)
        merging: dict[str, Any] = {} if probs is None else {"merging_probs": probs}
        cut, offsets = row_map.cut, row_map.pad_offsets
        if cut is not None and row_map.num_rows > cut.num_rows:
            if self.features["unpermute_pad_offsets"]:
                merging["pad_offsets"] = cut.pad_offsets if offsets is None else offsets
            else:
                rows = self.unpad_rows(rows, cut)
        self.trace.step("moe_unpermute with pad_offsets" if "pad_offsets" in merging else "moe_unpermute")
        return self.features.get("unpermute")(
            inp=rows,
            row_id_map=row_map.row_id_map,
            restore_shape=torch.Size((tokens, rows.shape[1])),
            map_type="mask",
            **merging,
        )

    def _no_columns(self, rows: Tensor, num_tokens: int, probs: Tensor | None) -> Tensor:
        """[N,0], with gradients of zeros; Transformer Engine returns the rows."""
        self.trace.step("no column")
        out = rows.index_select(0, torch.zeros(num_tokens, dtype=torch.int64, device=rows.device))
        return out if probs is None else out + 0 * probs.sum().to(rows.dtype)

    def _unpermute_by_indices(self, rows: Tensor, row_map: RowMap, indices: Tensor, probs: Tensor | None) -> Tensor:
        if row_map.cut is not None and row_map.num_rows > row_map.cut.num_rows:
            rows = self.unpad_rows(rows, row_map.cut)
        inp = in_vectors(rows) if self.complete else rows
        self.trace.step("moe_unpermute of indices")
        merging = in_slots(indices, probs, row_map.num_experts)
        out: Tensor = self.features.get("unpermute_indices")(inp=inp, row_id_map=row_map.row_id_map, probs=merging)
        return out[:, : rows.shape[1]]

    def sort_chunks(
        self, rows: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None
    ) -> SortedChunks:
        """`moe_ref.sort_chunks`; neither sizes nor order are checked."""
        check_sort_chunks(rows, chunk_sizes, order, probs)
        if self.complete and 0 in (*rows.shape, len(order)):
            raise Unavailable("no row, no column or no chunk")
        if self.complete and not self.probes.rows_past_the_chunks:
            self.trace.step("the rows past the chunks as one chunk")
            tail_size = len(rows) - chunk_sizes.sum()
            chunk_sizes = torch.cat([chunk_sizes, tail_size[None].to(chunk_sizes.dtype)])
            order = torch.cat([order, order.new_tensor([len(order)])])
        if self.complete:  # the kernels do not ask for their strides
            chunk_sizes, order = chunk_sizes.contiguous(), order.contiguous()
        settings = {"split_sizes": chunk_sizes, "sorted_index": order}
        if probs is not None and self.features["sort_chunks_with_probs"]:
            self.trace.step("moe_sort_chunks_by_index_with_probs")
            return SortedChunks(*self.features.get("sort_chunks_with_probs")(inp=rows, probs=probs, **settings))
        self.trace.step("moe_sort_chunks_by_index")
        sort = self.features.get("sort_chunks")
        out = sort(inp=rows, **settings)
        if probs is None:
            return SortedChunks(out, None)
        self.trace.step("moe_sort_chunks_by_index of the probs as rows of one column")
        return SortedChunks(out, sort(inp=probs[:, None], **settings)[:, 0])
