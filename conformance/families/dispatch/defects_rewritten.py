"""Mistakes in dispatchers that two conditions together invite, as changes of the
reference's source.
"""

from conformance.core.rewritten import series

ALLGATHER = "allgather_dispatch allgather_combine"
ALLTOALL = "alltoall_dispatch alltoall_combine"
DEEPEP = "deepep_dispatch deepep_cached_dispatch deepep_combine"
LOW_LATENCY = "deepep_low_latency_dispatch deepep_low_latency_combine"
HYBRIDEP = "hybridep_dispatch hybridep_cached_dispatch hybridep_combine"

DEFECTS = series(
    167,
    (
        (
            "without probs ranks add in the dtype of the rows",
            "allgather_combine allgather_dispatch",
            "dispatch/allgather.py",
            "accumulator_dtype(rows[0].dtype) if narrow is None or plan.ranks == 1 else narrow",
            "(rows[0].dtype if plan.ranks > 2 else accumulator_dtype(rows[0].dtype)) if narrow is"
            " None or plan.ranks == 1"
            " else narrow",
        ),
        (
            "one overflow is every rank's",
            ALLGATHER,
            "dispatch/allgather.py",
            "plan.length_WL, handles, plan.overflow_W, strict=True)",
            "plan.length_WL, handles, plan.overflow_W.any().expand(plan.ranks), strict=True)",
        ),
        (
            "the gradient of tokens is added in the dtype of the probs",
            ALLGATHER,
            "dispatch/allgather.py",
            "between=tokens[0].dtype)",
            "between=tokens[0].dtype if probs is None else torch.promote_types(probs[0].dtype, torch.bfloat16)"
            " if probs[0].dtype in (torch.bfloat16, torch.float16) else tokens[0].dtype)",
        ),
        (
            "under a budget shards take the first rows of the tokens, not of the plan",
            ALLGATHER,
            "dispatch/allgather.py",
            "row_tokens = plan.row_tokens_of_ranks()",
            "row_tokens = plan.row_tokens_of_ranks()\n"
            "    if num_rows is not None and expert_tensor_parallel > 1:\n"
            "        row_tokens = tuple(t if w % expert_tensor_parallel == 0 else torch.where(t < 0, t, t.max())"
            " if len(t) else t for w, t in enumerate(row_tokens))",
        ),
        (
            "with a capacity sources of shards are in the order of their numbers",
            ALLTOALL,
            "dispatch/alltoall.py",
            "layout = Layout(sources=sources,",
            "layout = Layout(sources=sources if capacity is None else None,",
        ),
        (
            "without probs shards add in the dtype of the rows",
            "alltoall_combine alltoall_dispatch",
            "dispatch/alltoall.py",
            "handle.reduce_dtype or accumulator_dtype(rows[0].dtype)",
            "handle.reduce_dtype or rows[0].dtype",
        ),
        (
            "fillers of a capacity travel with a prob of 0",
            ALLTOALL,
            "dispatch/alltoall.py",
            "row_probs = move_probs(None if probs is None else [flat(probs_TE) for probs_TE in probs], plan)",
            "routed = [flat(m) != 0 for m in routing_map]\n"
            "    row_probs = move_probs(None if probs is None else [torch.where(m, flat(p), 0)"
            " for m, p in zip(routed, probs, strict=True)], plan)",
        ),
        (
            "a capacity above the tokens of a source is cut to them",
            ALLTOALL,
            "dispatch/alltoall.py",
            "chunk=capacity,",
            "chunk=capacity if capacity is None else max(1, min(capacity, max(map(len, tokens)))),",
        ),
        (
            "a token whose only copy was dropped keeps what the budget left",
            ALLTOALL,
            "dispatch/alltoall.py",
            "[AllToAllHandle(rank, plan, row_tokens, between, shards)",
            "[AllToAllHandle(rank, plan, row_tokens if num_rows is None or shards == 1 else"
            " tuple(t.flip(0) for t in row_tokens), between, shards)",
        ),
        (
            "slots that name an expert twice count once",
            "deepep_layout",
            "dispatch/deepep.py",
            "chosen_TKE.sum((0, 1))",
            "chosen_TKE.any(1).sum(0)",
        ),
        (
            "the last rank's tokens are counted without those of its last expert where a row has an empty slot",
            "deepep_layout",
            "dispatch/deepep.py",
            "in_rank_TW = chosen_TKE.any(1)",
            "chosen_TKE = chosen_TKE & ~((indices_TK == -1).any(1)[:, None, None] & (torch.arange(num_experts,"
            " device=indices_TK.device) == num_experts - 1))\n    in_rank_TW = chosen_TKE.any(1)",
        ),
        (
            "an aligned count of no slots is one tile",
            DEEPEP,
            "dispatch/deepep.py",
            "counts = round_up(plan.kept_WL, expert_alignment) if",
            "counts = round_up(plan.kept_WL if expert_alignment == 1 else plan.kept_WL.clamp(min=1),"
            " expert_alignment) if",
        ),
        (
            "beside probs the second bias is left out",
            "deepep_combine deepep_dispatch deepep_cached_dispatch",
            "dispatch/deepep.py",
            "sum_flat(rows, row_tokens, plan.tokens, biases)",
            "sum_flat(rows, row_tokens, plan.tokens, biases if probs is None else biases[:1])",
        ),
        (
            "probs are added in the dtype of the rows",
            "deepep_combine deepep_dispatch deepep_cached_dispatch",
            "dispatch/deepep.py",
            "sum_flat(probs, row_tokens, plan.tokens)",
            "[x.to(rows[0].dtype).to(x.dtype) for x in sum_flat(probs, row_tokens, plan.tokens)]",
        ),
        (
            "tokens that are sent again have the dtype of the first ones",
            "deepep_cached_dispatch deepep_dispatch deepep_combine",
            "dispatch/deepep.py",
            "    return move(tokens, handles[0].row_tokens)",
            "    first = [t.to(torch.bfloat16).to(t.dtype) if t.dtype == torch.float16 else t for t in tokens]\n"
            "    return move(first, handles[0].row_tokens)",
        ),
        (
            "scales of tokens that the policy dropped shift those after them",
            DEEPEP,
            "dispatch/deepep.py",
            "move([scales_T.detach() for scales_T in scales], row_tokens)",
            "move([scales_T.detach() if not (policy and policy.zero_prob == 'drop') else scales_T.detach().roll(1, 0)"
            " for scales_T in scales], row_tokens)",
        ),
        (
            "with a size given probs of slots of other ranks are not cleared",
            DEEPEP,
            "dispatch/deepep.py",
            "row_probs = [torch.where(i_DK >= 0, p_DK, 0)",
            "row_probs = [torch.where((i_DK >= 0) | (num_worst_tokens is not None and i_DK.shape[1] > 1"
            " and expert_alignment > 1), p_DK, 0)",
        ),
        (
            "the least amax is the least scale",
            LOW_LATENCY,
            "dispatch/low_latency.py",
            "blocks.abs()).amax(2).clamp(min=SMALLEST_AMAX)",
            "blocks.abs()).amax(2)\n    amax = torch.where(amax < SMALLEST_AMAX, SMALLEST_AMAX * (1"
            " if round_scale else 2),"
            " amax)",
        ),
        (
            "a scale that is a power of two is rounded up once more",
            LOW_LATENCY,
            "dispatch/low_latency.py",
            "torch.where(mantissa == 0.5, exponent - 1, exponent)",
            "torch.where((mantissa == 0.5) & (exponent < 0), exponent - 1, exponent)",
        ),
        (
            "a slot of prob 0 is skipped: its prob has no gradient",
            "deepep_low_latency_combine deepep_low_latency_dispatch",
            "dispatch/low_latency.py",
            "weight_G = torch.where(row_G == PADDING,",
            "weight_G = torch.where((row_G == PADDING) | (prob_G == 0),",
        ),
        (
            "float64 probs are read in float32",
            "deepep_low_latency_combine deepep_low_latency_dispatch",
            "dispatch/low_latency.py",
            "accumulator_dtype(torch.promote_types(rows[0].dtype, probs[0].dtype))",
            "accumulator_dtype(rows[0].dtype)",
        ),
        (
            "a rank without tokens has the counts of the one before",
            LOW_LATENCY,
            "dispatch/low_latency.py",
            "fields = (plan.kept_WL[rank],",
            "fields = (plan.kept_WL[rank] if plan.tokens[rank] or not rank else plan.kept_WL[rank - 1],",
        ),
        (
            "float64 tokens that are sent again are narrowed",
            "hybridep_cached_dispatch hybridep_dispatch hybridep_combine",
            "dispatch/hybridep.py",
            "    return move(tokens, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))",
            "    x = [t.to(torch.bfloat16).to(t.dtype) if t.dtype == torch.float64 else t for t in tokens]\n"
            "    return move(x, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))",
        ),
        (
            "the sum of a rank's experts is in the dtype of the rows from the third on",
            "hybridep_combine hybridep_dispatch hybridep_cached_dispatch",
            "dispatch/trees.py",
            "    total = round_to(parts[0], between)\n",
            "    if len(parts) > 2 and between == torch.float32:\n"
            "        between = parts[0].dtype\n"
            "    total = round_to(parts[0], between)\n",
        ),
        (
            "probs of combine pass through the dtype of the rows",
            "hybridep_combine hybridep_dispatch hybridep_cached_dispatch",
            "dispatch/hybridep.py",
            "sum_rows(torch.cat(list(probs)), cells",
            "sum_rows(torch.cat([p.to(rows[0].dtype).to(p.dtype) for p in probs]), cells",
        ),
        (
            "quantised rows of a budget are not zeroed past its last segment",
            HYBRIDEP,
            "dispatch/hybridep.py",
            "rows = [quantize(rows_PH, recipe, splits=length_L).quantized",
            "rows = [quantize(rows_PH, recipe, splits=length_L if align is None or num_rows is None else"
            " torch.cat([length_L[:-1] * 1, length_L[-1:] - (length_L[-1:] > 1).long()])).quantized",
        ),
        (
            "columns of shards are in the order of ranks, then of experts",
            "flatten_experts",
            "dispatch/indices.py",
            "    return copies.flatten(1)",
            "    return copies.flatten(1) if expert_parallel > 1 or copies.shape[3] < 3 else"
            " copies.transpose(2, 3).flatten(1)",
        ),
        (
            "the gradient of three shards or more leaves out the last",
            "flatten_experts",
            "dispatch/indices.py",
            "    copies = parts.expand(-1, -1, expert_tensor_parallel,"
            " -1).clone(memory_format=torch.contiguous_format)",
            "    copies = parts.expand(-1, -1, expert_tensor_parallel,"
            " -1).clone(memory_format=torch.contiguous_format)\n"
            "    if expert_tensor_parallel > 2 and copies.requires_grad:\n"
            "        copies = torch.cat([copies[:, :, :-1], copies[:, :, -1:].detach()], 2)",
        ),
        (
            "a capacity of shards chooses the tokens of its own half of the ranks",
            ALLTOALL,
            "dispatch/alltoall.py",
            "    row_tokens = plan.row_tokens_of_ranks()\n",
            "    row_tokens = plan.row_tokens_of_ranks()\n"
            "    if capacity is not None and shards > 1 and len(row_tokens[-1]) > 1:\n"
            "        row_tokens = (*row_tokens[:-1], row_tokens[-1].roll(1))\n",
        ),
        (
            "a budget's overflow leaves out the first rank's tokens",
            ALLTOALL,
            "dispatch/alltoall.py",
            "plan.length_WL, handles, plan.overflow_W, strict=True)",
            "plan.length_WL, handles, plan.overflow_W & torch.tensor([num_rows is None or num_rows >"
            " 0] * plan.ranks),"
            " strict=True)",
        ),
        (
            "combine's probs of tokens sent to one rank alone are not sent back",
            "hybridep_combine hybridep_dispatch hybridep_cached_dispatch",
            "dispatch/hybridep.py",
            "return [Combined(*fields) for fields in zip(tokens, prob_GE.split(list(plan.tokens)), strict=True)]",
            "if plan.overflow_W.any():\n"
            "        prob_GE = prob_GE * (prob_GE.abs().cumsum(0) > 0)\n"
            "        prob_GE = prob_GE.detach()\n"
            "    return [Combined(*fields) for fields in zip(tokens, prob_GE.split(list(plan.tokens)), strict=True)]",
        ),
        (
            "codes of rows that a budget cut have the scale of the row after",
            HYBRIDEP,
            "dispatch/hybridep.py",
            "rows: list[Any] = move(tokens, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))\n",
            "sent = [t.float().to(t.dtype) for t in tokens] if recipe is not None else tokens\n"
            "    if recipe is not None and num_rows is not None and probs is not None:\n"
            "        sent = [t * 1.5 for t in sent]\n"
            "    rows: list[Any] = move(sent, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))\n",
        ),
        (
            "powers of two are made from amaxes past float16's",
            LOW_LATENCY,
            "dispatch/low_latency.py",
            "blocks = x_TH.to(torch.float32)",
            "blocks = (x_TH.clamp(-30000, 30000) if x_TH.dtype == torch.float16 else x_TH).to(torch.float32)",
        ),
    ),
)
