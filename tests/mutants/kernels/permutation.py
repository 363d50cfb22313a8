"""Mistakes in the kernels of permutation."""

from tests.mutants.kernels import series

DEFECTS = series(
    "P",
    (
        (
            "the end of a list is not looked at: a slot never written is taken for a row",
            "permute unpermute",
            "permutation/_permute.py",
            "live = j < lists.num_slots  # the list's end was never written",
            "live = j <= lists.num_slots  # the list's end was never written",
        ),
        (
            "rows past the buffer are not dropped",
            "permute unpermute",
            "permutation/_permute.py",
            "live & (row < lists.num_rows)",
            "live & (row <= lists.num_rows)",
        ),
        (
            "a gap longer than a lane's step is zeroed in its first rows alone",
            "permute",
            "permutation/_permute.py",
            "BLOCK_H)\n    for i in range(tl.max(tl.cdiv(end - begin, step), axis=0)):",
            "BLOCK_H)\n    for i in range(tl.minimum(tl.max(tl.cdiv(end - begin, step), axis=0), 1)):",
        ),
        (
            "without columns the probs of rows without a token are not zeroed",
            "permute",
            "permutation/_permute.py",
            "if probs_ptr is not None and column == 0:  # once a row",
            "if probs_ptr is not None and column * BLOCK_H < num_columns and column == 0:  # once a row",
        ),
        (
            "the padding past the buffer's end is zeroed too",
            "permute unpermute",
            "permutation/_permute.py",
            "end = tl.minimum(tl.load(gap_ptr + num_experts + 1 + gap), num_rows)",
            "end = tl.load(gap_ptr + num_experts + 1 + gap)",
        ),
        (
            "the slot of a dropped row is never written",
            "permute unpermute",
            "permutation/_permute.py",
            ("tl.store(row_slots_ptr + t * num_experts + j, (row << RANK) | expert, mask=j < lists.num_slots)"),
            "tl.store(row_slots_ptr + t * num_experts + j, (row << RANK) | expert, mask=live)",
        ),
        (
            "the last of an odd number of a token's rows is not added",
            "permute unpermute",
            "permutation/_permute.py",
            "for first in range(UNROLL, tl.max(lists.num_slots, axis=0), UNROLL):",
            "for first in range(UNROLL, tl.max(lists.num_slots, axis=0) - 1, UNROLL):",
        ),
        (
            "merging probs are rounded to the rows' dtype before the product",
            "unpermute",
            "permutation/_permute.py",
            "value *= prob.to(PROBS_AS).to(acc.dtype)[:, None]",
            "value *= prob.to(rows_ptr.dtype.element_ty).to(acc.dtype)[:, None]",
        ),
        (
            "a row of probability 0 counts as 0, whatever it holds",
            "unpermute",
            "permutation/_permute.py",
            "value *= prob.to(PROBS_AS).to(acc.dtype)[:, None]",
            ("value = tl.where((prob != 0.0)[:, None], value * prob.to(PROBS_AS).to(acc.dtype)[:, None], 0.0)"),
        ),
        (
            "a slot never written takes part in the probs' gradient",
            "permute",
            "permutation/_permute.py",
            "dprobs = tl.where((expert[:, None] == e[None, :]) & live[:, None], dprob[:, None], dprobs)",
            "dprobs = tl.where(expert[:, None] == e[None, :], dprob[:, None], dprobs)",
        ),
        (
            "the last block of columns of the gradient's padding is not zeroed",
            "unpermute",
            "permutation/_permute.py",
            "for column in range(tl.cdiv(num_columns, BLOCK_H)):",
            "for column in range(tl.maximum(num_columns // BLOCK_H, 1)):",
        ),
        (
            "the gradient of merging probs is rounded after each block of columns",
            "unpermute",
            "permutation/_permute.py",
            "dprobs += tl.where((expert[:, None] == e[None, :]) & live[:, None], dot[:, None], 0.0)",
            (
                "dprobs += tl.where((expert[:, None] == e[None, :]) & live[:, None], dot[:, None], 0.0)\n"
                "                    dprobs = rounded(dprobs, dprobs_ptr.dtype.element_ty).to(PROBS_AS).to(ACCUMULATOR)"
            ),
        ),
        (
            "one expert past a block of them has no gradient of its probs",
            "permute",
            "permutation/_permute.py",
            "for first in range(0, num_experts, BLOCK_E):",
            "for first in range(0, tl.maximum(num_experts - 1, 1), BLOCK_E):",
        ),
        (
            "fp64 merging probs of fp32 rows are multiplied in fp32",
            "unpermute",
            "permutation/permute.py",
            '"ACCUMULATOR": accumulator(rows, probs)}',
            '"ACCUMULATOR": accumulator(rows)}',
        ),
        (
            "rows are kept for the backward if they learn, not if the probs do",
            "unpermute",
            "permutation/permute.py",
            "rows if ctx.needs_input_grad[1] else None, probs",
            "rows if ctx.needs_input_grad[0] else None, probs",
        ),
        (
            "the gradient of merging probs has the rows' dtype",
            "unpermute",
            "permutation/permute.py",
            "torch.empty(probs.shape, dtype=probs.dtype, device=dout.device)",
            "torch.empty(probs.shape, dtype=rows.dtype, device=dout.device)",
        ),
        (
            "the probs have no gradient if the rows are not used",
            "permute",
            "permutation/permute.py",
            "some = rows if rows is not None else drow_probs",
            "some = rows",
        ),
        (
            "the gradient of the rows' probs is taken as contiguous",
            "permute",
            "permutation/permute.py",
            "*strided(None if drow_probs is None else bits(drow_probs), 1),",
            "*(None if drow_probs is None else bits(drow_probs), 1),",
        ),
        (
            "align 1 has no pad_offsets",
            "permute",
            "permutation/permute.py",
            "pad_offsets = None if align is None else slots.pad_offsets",
            "pad_offsets = None if align in (None, 1) else slots.pad_offsets",
        ),
        (
            "of restore_shape the tokens are not checked",
            "unpermute",
            "permutation/permute.py",
            "row_map.num_experts, restore_shape, probs)\n",
            ("row_map.num_experts, restore_shape and (row_map.num_tokens, restore_shape[1]), probs)\n"),
        ),
        (
            "the gradient of the chunks' probs comes only with the rows'",
            "sort_chunks",
            "permutation/permute.py",
            "dout_probs = dout_probs if ctx.needs_input_grad[1] else None",
            "dout_probs = dout_probs if ctx.needs_input_grad[0] else None",
        ),
        (
            "with align the rows past the last segment are not zeroed",
            "permute",
            "permutation/row_map.py",
            '"tail_gap": num_rows is not None}',
            '"tail_gap": num_rows is not None and align is None}',
        ),
        (
            "with capacity the rows past all tokens are not zeroed",
            "permute",
            "permutation/row_map.py",
            'gaps = {"expert_gaps": bool(capacity > num_tokens), "tail_gap": False}',
            'gaps = {"expert_gaps": False, "tail_gap": False}',
        ),
        (
            "lists of rows are kept by their shape, and overwritten by the next call",
            "permute unpermute",
            "permutation/row_map.py",
            ("slots_TE = torch.empty(self.slots_TE.shape, dtype=torch.int64, device=self.slots_TE.device)"),
            (
                "kept = torch.empty(self.slots_TE.shape, dtype=torch.int64, device=self.slots_TE.device)\n"
                '        slots_TE = globals().setdefault(f"lists of {tuple(kept.shape)}", kept)'
            ),
        ),
        (
            "bytes of four experts overflow in a block of 256 tokens",
            "permute pad_routing_map",
            "permutation/row_map.py",
            "if tiles * block_tokens < 256 and _has_words(routing_map):",
            "if tiles * block_tokens <= 256 and _has_words(routing_map):",
        ),
        (
            "a map of experts that are no multiple of 4 is read in words if its rows are",
            "permute pad_routing_map",
            "permutation/row_map.py",
            "return routing_map.stride(0) % 4 == 0 and routing_map.shape[1] % 4 == 0",
            "return routing_map.stride(0) % 4 == 0",
        ),
        (
            "a map that begins between words is not copied",
            "permute pad_routing_map",
            "permutation/row_map.py",
            "aligned = routing_map.data_ptr() % 4 == 0 and routing_map.storage_offset() % 4 == 0",
            "aligned = routing_map.is_contiguous()",
        ),
        (
            "num_rows 0 counts as not given",
            "permute",
            "permutation/row_map.py",
            "bound = UNBOUNDED if num_rows is None else num_rows",
            "bound = num_rows or UNBOUNDED",
        ),
        (
            "tokens_per_expert falls below 0 past the buffer's end",
            "permute",
            "permutation/_row_map.py",
            "return tl.minimum(tl.maximum(num_rows - start, 0), segment)",
            "return tl.minimum(num_rows - start, segment)",
        ),
        (
            "pad_offsets forget all experts before but the last step's",
            "permute",
            "permutation/_row_map.py",
            "tokens += tl.sum(count, axis=0)",
            "tokens = tl.sum(count, axis=0) + tl.zeros([1], tl.int64)",
        ),
        (
            "a buffer that is exactly full counts as overflowing",
            "permute",
            "permutation/_row_map.py",
            "(total > num_rows).to(tl.uint8)",
            "(total >= num_rows).to(tl.uint8)",
        ),
        (
            "capacity: ranks of a block's later tiles forget the blocks before",
            "permute",
            "permutation/_row_map.py",
            ("mask=t < num_tokens)  # the last tile sticks out\n        before += tl.sum(one, axis=0)"),
            ("mask=t < num_tokens)  # the last tile sticks out\n        before = tl.sum(one, axis=0)"),
        ),
        (
            "an expert that is padded up to the last token counts as unreached",
            "pad_routing_map",
            "permutation/_row_map.py",
            "(reached % align != 0).to(tl.uint8)",
            "((reached == num_tokens) & (missing > 0)).to(tl.uint8)",
        ),
        (
            "a later slot of the same expert is only looked for in its own block of slots",
            "indices_to_multihot",
            "permutation/_routing_map.py",
            "for slot in range(num_slots):\n        later",
            (
                "here = tl.program_id(1) * BLOCK_K\n"
                "    for slot in range(here, tl.minimum(num_slots, here + BLOCK_K)):\n"
                "        later"
            ),
        ),
        (
            "a slot past the last expert takes the next token's gradient",
            "indices_to_multihot",
            "permutation/_routing_map.py",
            "counts = (index >= 0) & (index < num_experts)",
            "counts = index >= 0",
        ),
        (
            "overflow is only seen in the first tile of tokens",
            "multihot_to_indices",
            "permutation/_routing_map.py",
            "if tl.max(count, axis=0) > num_slots:",
            "if (tl.max(count, axis=0) > num_slots) & (tl.program_id(0) == 0):",
        ),
        (
            "empty slots are only written as far as there are experts",
            "multihot_to_indices",
            "permutation/_routing_map.py",
            "for first in range(0, num_slots, BLOCK_K):",
            "for first in range(0, num_experts, BLOCK_K):",
        ),
        (
            "in the backward, rows past the last chunk meet the empty end of the order",
            "sort_chunks",
            "permutation/_chunks.py",
            "here = (chunk[None, :] == chunk_R[:, None]) & (chunk_R >= 0)[:, None]",
            "here = chunk[None, :] == chunk_R[:, None]",
        ),
        (
            "where a chunk came from forgets all steps of chunks but the last",
            "sort_chunks",
            "permutation/_chunks.py",
            ("source += tl.sum(tl.where(here, begin[None, :], 0), axis=1)\n        carry += tl.sum(size, axis=0)"),
            (
                "source += tl.sum(tl.where(here, begin[None, :], 0), axis=1)\n"
                "        carry = tl.sum(size, axis=0) + tl.zeros([1], tl.int64)"
            ),
        ),
    ),
)
