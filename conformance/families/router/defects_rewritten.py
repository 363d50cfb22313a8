"""Mistakes in routers that two conditions together invite, as changes of the reference's source."""

from conformance.core.rewritten import series

BOTH = "topk_indices topk_routing"

DEFECTS = series(
    1,
    (
        (
            "a weight's gradient passes through the dtype of x: master weights in float32",
            "gate",
            "router/gating.py",
            "round_to(product(g.T, round_to(x, g.dtype)), weight.dtype)",
            "round_to(round_to(product(g.T, round_to(x, g.dtype)), x.dtype), weight.dtype)",
        ),
        (
            "the bias is loaded in the dtype of x before it is widened",
            "gate",
            "router/gating.py",
            "logits + round_to(bias, dtype)",
            "logits + round_to(round_to(bias, x.dtype), dtype)",
        ),
        (
            "the bias gradient of a float64 router is summed in float32",
            "gate",
            "router/gating.py",
            "round_to(g.sum(0), bias.dtype)",
            "round_to(g.float().sum(0), bias.dtype)",
        ),
        (
            "the noise is drawn once per column, for all tokens of a tile",
            "jitter",
            "router/gating.py",
            "torch.rand_like(x_TH)",
            "torch.rand_like(x_TH[:1]).expand_as(x_TH)",
        ),
        (
            "the noise of 16-bit inputs is drawn in 256 steps",
            "jitter",
            "router/gating.py",
            "torch.rand_like(x_TH)",
            "(torch.rand_like(x_TH) * 8).floor() / 8",
        ),
        (
            "where one expert of a group counts, its score is taken before the bias",
            BOTH,
            "router/selection.py",
            "keys_TE = _only_best_groups(keys_TE, num_groups, group_topk, topk // group_topk)",
            "alone = topk == group_topk and expert_bias is not None\n"
            "            plain_TE = _only_best_groups(scores_TE.detach() if alone else keys_TE,"
            " num_groups, group_topk,"
            " topk // group_topk)\n"
            "            keys_TE = torch.where(plain_TE == -torch.inf, -torch.inf, keys_TE) if alone else plain_TE",
        ),
        (
            "given experts are not scaled: the factor is in the kernel of the choice",
            BOTH,
            "router/selection.py",
            "if scaling_factor is not None:",
            "if scaling_factor is not None and precomputed_indices is None:",
        ),
        (
            "one given expert is normalised: the kernel of replays knows no single slot",
            BOTH,
            "router/selection.py",
            "    if scaling_factor is not None:",
            '    if precomputed_indices is not None and score_function != "softmax":\n'
            "        weights_TK = normalised(scores_TE.gather(1, index_TK))\n"
            "    if scaling_factor is not None:",
        ),
        (
            "where all experts are chosen, the sum that divides has no gradient",
            BOTH,
            "router/selection.py",
            "    if scaling_factor is not None:",
            '    if score_function != "softmax" and 1 < topk == logits_TE.shape[1]:\n'
            "        picked_TK = scores_TE.gather(1, index_TK)\n"
            "        weights_TK = picked_TK / (picked_TK.detach().sum(-1, keepdim=True) + 1e-20)\n"
            "    if scaling_factor is not None:",
        ),
        (
            "a group of one expert: the sum over its best reads the next group's first",
            BOTH,
            "router/selection.py",
            "    score_TG = by_group",
            "    if by_group.shape[2] == counted:\n"
            "        by_group = by_group.clone()\n"
            "        by_group[:, :-1, -1] = by_group[:, 1:, 0]\n"
            "    score_TG = by_group",
        ),
        (
            "the factor of a softmax before the choice is applied after the rounding",
            BOTH,
            "router/selection.py",
            "        weights_TK = weights_TK * scaling_factor",
            "        if pre_softmax and num_groups is not None:\n"
            "            weights_TK = round_to(weights_TK, logits_TE.dtype).to(weights_TK.dtype)\n"
            "        weights_TK = weights_TK * scaling_factor",
        ),
        (
            "float64 keys are compared in float32",
            BOTH,
            "router/selection.py",
            "    return keys.sort(dim=1",
            "    keys = keys.float()\n    return keys.sort(dim=1",
        ),
        (
            "one slot of sqrtsoftplus is not normalised for the losses",
            "aux_loss_scores",
            "router/balancing.py",
            'if score_function != "softmax":',
            'if score_function != "softmax" and not (topk == 1 and score_function == "sqrtsoftplus"):',
        ),
        (
            "the mask is applied to the scores alone: padding with NaN has a gradient",
            "aux_loss_scores",
            "router/balancing.py",
            "        torch.where(valid_T1, logits_TE, 0)\n",
            "        logits_TE\n",
        ),
        (
            "the last token before padding loses its choice: the mask is shifted in the map",
            "aux_loss_scores",
            "router/balancing.py",
            "map_TE & valid_T1)",
            "map_TE & valid_T1 & (valid_T1.roll(-1, 0) | (torch.arange(len(map_TE), device=map_TE.device) % 64 != 63)"
            "[:, None]))",
        ),
        (
            "N² is taken in 32 bits",
            "load_balancing_loss",
            "router/balancing.py",
            "coeff * num_experts / topk / tokens / tokens",
            "coeff * num_experts / topk / torch.where(tokens == tokens.floor(),"
            " ((tokens.long() ** 2 + 2**31) % 2**32 - 2**31).to(tokens.dtype), tokens * tokens)",
        ),
        (
            "counts are integers: a mean over micro-batches is cut",
            "load_balancing_loss route",
            "router/balancing.py",
            "tokens_per_expert.detach().to(accumulator)",
            "tokens_per_expert.detach().long().to(accumulator)",
        ),
        (
            "scores of 16 bits are summed in blocks of 64 rows, each rounded",
            "load_balancing_loss",
            "router/balancing.py",
            "round_to(scores, accumulator).sum(0)",
            "sum((round_to(part, accumulator).sum(0).to(scores.dtype).to(accumulator) for part in scores.split(64)),"
            " torch.zeros((), dtype=accumulator))",
        ),
        (
            "with a mask the mean is over the valid tokens up to the last one, rounded up to even",
            "z_loss",
            "router/balancing.py",
            "max(len(square_T), 1)",
            "max(len(square_T) + (len(square_T) % 2 if padding_mask is not None else 0), 1)",
        ),
        (
            "the exponentials are not shifted by the largest logit",
            "z_loss",
            "router/balancing.py",
            "round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).logsumexp(1)",
            "round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).exp().sum(1).log()",
        ),
        (
            "the sum of squares is taken in the dtype of the logits past 128 tokens",
            "z_loss",
            "router/balancing.py",
            "coeff * square_T.sum()",
            "coeff * (square_T if len(square_T) <= 128 else square_T.to(logits_TE.dtype).to(square_T.dtype)).sum()",
        ),
        (
            "the scale is held in the dtype of x",
            "attach_loss",
            "router/balancing.py",
            "torch.full_like(ctx.like, ctx.scale)",
            "torch.full_like(ctx.like, float(torch.tensor(ctx.scale, dtype=dx.dtype)))",
        ),
        (
            "the loss gets its gradient in float32",
            "attach_loss",
            "router/balancing.py",
            "ctx.scale, ctx.like = scale, loss.detach()",
            "ctx.scale, ctx.like = float(torch.tensor(scale)), loss.detach()",
        ),
        (
            "the mean is an integer division",
            "update_expert_bias",
            "router/balancing.py",
            "(count.sum() - len(count) * count).sign()",
            "((count.sum() / len(count)).floor() - count).sign()",
        ),
        (
            "E times the count is taken in 32 bits",
            "update_expert_bias",
            "router/balancing.py",
            "(count.sum() - len(count) * count).sign()",
            "(count.sum() - ((len(count) * count + 2**31) % 2**32 - 2**31)).sign()",
        ),
        (
            "the step is rounded to bfloat16",
            "update_expert_bias",
            "router/balancing.py",
            "update_rate * direction.to(expert_bias.dtype)",
            "(update_rate * direction).to(torch.bfloat16).to(expert_bias.dtype)",
        ),
        (
            "evaluation of several slots renormalises",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "    return Routed(",
            "    if not training and topk > 1:\n"
            "        activation_TE = activation_TE / torch.where(map_TE, activation_TE, 0).sum(1, keepdim=True)\n"
            "    return Routed(",
        ),
        (
            "the plan is of a tile of 64 tokens",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "_plan(logits_TE.detach()) if training",
            "torch.cat([_plan(part) for part in logits_TE.detach().split(64)]) if training",
        ),
        (
            "probs are compared by their bits as integers without a sign",
            "drop_tokens",
            "router/capacity.py",
            "value_T.double()",
            "torch.where(value_T < 0, 1 - 1 / value_T.double().clamp(max=-1e-30), value_T.double())",
        ),
        (
            "probs are compared in float32",
            "drop_tokens",
            "router/capacity.py",
            "value_T.double()",
            "value_T.float()",
        ),
        (
            "an expert with exactly its capacity loses the last when it is filled up",
            "drop_tokens",
            "router/capacity.py",
            "room = capacity if pad_to_capacity else",
            "room = capacity - int(capacity == len(routed_T)) if pad_to_capacity and drop_policy == 'position' else",
        ),
        (
            "x in float64 without a router dtype is multiplied in float32",
            "gate",
            "router/gating.py",
            "        logits = product(round_to(x, dtype), round_to(weight, dtype).T)\n",
            "        narrow = torch.float32 if dtype == torch.float64 == x.dtype else dtype\n"
            "        logits = product(round_to(x, narrow), round_to(weight, narrow).T).to(dtype)\n",
        ),
        (
            "a bias is read in the dtype of the weight",
            "gate",
            "router/gating.py",
            "logits + round_to(bias, dtype)",
            "logits + round_to(round_to(bias, weight.dtype), dtype)",
        ),
        (
            "the weight's gradient is contracted in bfloat16 where x has that dtype and no bias is given",
            "gate",
            "router/gating.py",
            "dweight = round_to(product(g.T, round_to(x, g.dtype)), weight.dtype)",
            "narrow = g.to(x.dtype).to(g.dtype) if bias is None else g\n"
            "        dweight = round_to(product(narrow.T, round_to(x, g.dtype)), weight.dtype)",
        ),
        (
            "a plan of float64 logits is made in float32",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "activation_TE = sigmoid(logits_TE) if topk == 1 else softmax(logits_TE)",
            "activation_TE = sigmoid(logits_TE.float()) if topk == 1 else softmax(logits_TE.float())",
        ),
        (
            "an expert bias in float64 is read in float32",
            BOTH,
            "router/selection.py",
            "expert_bias.detach().to(scores_TE.dtype)",
            "expert_bias.detach().float().to(scores_TE.dtype)",
        ),
        (
            "a bias in float64 steps in float32",
            "update_expert_bias",
            "router/balancing.py",
            "return expert_bias + update_rate * direction.to(expert_bias.dtype)",
            "return expert_bias + torch.tensor(update_rate).item() * direction.to(expert_bias.dtype)",
        ),
        (
            "bf16 scores of the losses are rounded to the logits' dtype before they are divided",
            "aux_loss_scores",
            "router/balancing.py",
            "        scores_TE = normalised(scores_TE)\n",
            "        scores_TE = normalised(scores_TE if padding_mask is None else"
            " round_to(scores_TE, logits_TE.dtype)"
            ".to(scores_TE.dtype))\n",
        ),
    ),
)
