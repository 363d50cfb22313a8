"""Fast paths, caches and shortcuts gone wrong in routers, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    1,
    (
        (
            "the last H mod 8 columns are left out past H = 1024",
            "gate",
            "router/gating.py",
            "product(round_to(x, dtype), round_to(weight, dtype).T)",
            "product(*((t if t.shape[1] <= 1024 else t[:, : t.shape[1] // 8 * 8]) for t in"
            " (round_to(x, dtype),)), (lambda t: t if t.shape[1] <= 1024 else t[:, : t.shape[1]"
            " // 8 * 8])(round_to(weight, dtype)).T)",
        ),
        (
            "noise of float64 is drawn in float32",
            "jitter",
            "router/gating.py",
            "torch.rand_like(x_TH)",
            "torch.rand_like(x_TH, dtype=torch.float32 if x_TH.dtype == torch.float64 else x_TH.dtype)",
        ),
        (
            "rows past 1024 repeat the noise of the first 1024",
            "jitter",
            "router/gating.py",
            "torch.rand_like(x_TH)",
            "torch.rand_like(x_TH[:1024])[torch.arange(len(x_TH), device=x_TH.device) % 1024]",
        ),
        (
            "an expert of key -inf counts 0 in its group's sum",
            "topk_indices topk_routing",
            "router/selection.py",
            "values[..., :counted].sum(2)",
            "values[..., :counted].nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0).sum(2)",
        ),
        (
            "given experts past 256 wrap: they are kept in a byte",
            "topk_indices topk_routing",
            "router/selection.py",
            "weights_TK = _weights(scores_TE.gather(1, index_TK)",
            "index_TK = index_TK if precomputed_indices is None or topk < 4 else index_TK & 255\n"
            "    weights_TK = _weights(scores_TE.gather(1, index_TK)",
        ),
        (
            "the least sum of float64 scores is 1e-40",
            "topk_indices aux_loss_scores",
            "router/scores.py",
            "(scores.sum(-1, keepdim=True) + EPSILON)",
            "(scores.sum(-1, keepdim=True) + (EPSILON if scores.dtype == torch.float32 else EPSILON**2))",
        ),
        (
            "the map is where probs are not 0: chosen experts of underflowed activation are missing",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "logits_TE.dtype), map_TE)",
            "logits_TE.dtype), map_TE & (round_to(activation_TE, logits_TE.dtype) != 0))",
        ),
        (
            "probs above 1 count as 1 (clamped keys; a scaling factor above 1)",
            "drop_tokens",
            "router/capacity.py",
            "value_T.double(), -torch.inf",
            "value_T.double().clamp(max=1), -torch.inf",
        ),
        (
            "the plan is shifted by the largest logit, 1e-8 is not",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "cost_TE = round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).exp()",
            "cost_TE = round_to(logits_TE, accumulator_dtype(logits_TE.dtype))\n"
            "    cost_TE = (cost_TE - cost_TE.amax()).exp()",
        ),
        (
            "an expert of key -inf in a kept group is not preferred to other groups",
            "topk_indices topk_routing",
            "router/selection.py",
            "keys_TE.clamp(min=lowest), -torch.inf)",
            "keys_TE, -torch.inf)",
        ),
        (
            "exp of 16-bit logits is in 16 bits",
            "sinkhorn_routing",
            "router/sinkhorn.py",
            "round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).exp()",
            "round_to(logits_TE.exp(), accumulator_dtype(logits_TE.dtype))",
        ),
        (
            "rows of an expanded x share their noise",
            "jitter",
            "router/gating.py",
            "torch.rand_like(x_TH)",
            "torch.rand_like(x_TH[:1] if x_TH.stride(0) == 0 else x_TH)",
        ),
    ),
    "RD",
    SHORTCUT,
)
