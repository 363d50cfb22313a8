"""For each law, a case and a namespace that is right on the case but breaks the law."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase
from conformance.families.router.cases_route import RouteCase
from tests.common.suite import wrapped

# six tokens, three experts; the last token and the last expert are empty
PERMUTE = RoutingCase(
    function="permute", tokens=6, experts=3, hidden=3, routing=(0b011, 0b001, 0b010, 0b011, 0b001, 0), grads="tokens"
)
FORWARD = replace(PERMUTE, grads="")
ALIGNED = replace(FORWARD, align=4)
UNPERMUTE = replace(PERMUTE, function="unpermute", grads="rows")
CHUNKS = ChunksCase(function="sort_chunks", sizes=(2, 0, 3), order=(1, 2, 0), tail=1, hidden=3)
PAD = RoutingCase(function="pad_routing_map", tokens=6, experts=3, align=4, routing=(0b001, 0b001, 0b001, 0b010, 0, 0))
TO_MULTIHOT = IndicesCase(function="indices_to_multihot", tokens=3, topk=2, experts=4, slots=(0, 3, 1, -1, -1, -1))
LAYOUT = replace(TO_MULTIHOT, function="deepep_layout", ranks=2)
TO_INDICES = RoutingCase(function="multihot_to_indices", tokens=6, experts=3, topk=2, routing=FORWARD.routing)
# row by row, in eighths; best expert: 2 for token 0, 1 for the last token, 0 for none
LOGITS = (0, 8, 16, 0, 16, 8, 0, 8, 24, 0, 24, 8, 0, 8, 32, 0, 32, 8)
TOPK = LogitsCase(function="topk_routing", tokens=6, experts=3, topk=1, score="sigmoid", logits=LOGITS)
SPREAD_TOPK = replace(TOPK, logits=(), topk=2, seed=3, experts=5, score="softmax")
AUX = LogitsCase(function="aux_loss_scores", tokens=6, experts=5, topk=2, padding=4, seed=1)
Z = LogitsCase(function="z_loss", tokens=6, experts=5, padding=4, seed=1)
LOSS = LoadCase(function="load_balancing_loss", tokens=7, experts=3, topk=2)
GATE = GateCase(function="gate", tokens=5, hidden=4, experts=3)
JITTER = GateCase(function="jitter", tokens=12, hidden=12, eps=4)
ROUTE = RouteCase(
    function="route", tokens=6, experts=4, topk=2, losses="aux+z", steps="train+finish+train", bias=True, grads="logits"
)
GLU = ActivationCase(function="glu", tokens=6, width=4, probs="float32", grads="h+probs", seed=1)
ACTIVATION = replace(GLU, function="activation")
SEGMENTS = {"tokens": 9, "experts": 3, "counts": (4, 0, 5), "seed": 1}
LINEAR = GroupedCase(function="grouped_linear", hidden=5, width=4, grads="rows+weight", **SEGMENTS)
FORWARD_LINEAR = replace(LINEAR, grads="")
DGRAD = replace(LINEAR, function="grouped_dgrad", grads="")
WGRAD = replace(LINEAR, function="grouped_wgrad", grads="")
MLP = MlpCase(function="grouped_mlp", hidden=5, width=4, probs="float32", weights="zeros", grads="rows", **SEGMENTS)
FORWARD_MLP = replace(MLP, grads="")
TRAINED_MLP = replace(MLP, grads="fc1_weight+fc2_weight")
SHARED = SharedCase(function="shared_experts", tokens=6, hidden=5, width=4, grads="x", seed=1)
QUANTIZE = QuantizeCase(function="quantize", hidden=5, **SEGMENTS)
BLOCKS = replace(QUANTIZE, scaling="block")
ACTIVATED = QuantizedActivationCase(function="glu_and_quantize", tail=1, width=4, probs="float32", **SEGMENTS)
ONE_STEP = PermutedQuantizationCase(
    function="permute_and_quantize", tokens=6, experts=3, hidden=5, routing=FORWARD.routing, align=4, seed=1
)


# Wrong results, made from right ones


def no_rows(out):
    return out._replace(rows=torch.zeros_like(out.rows))


def no_probs(out):
    return out._replace(probs=torch.zeros_like(out.probs))


def to_no_rank(out):
    return out._replace(is_token_in_rank=torch.zeros_like(out.is_token_in_rank))


def nothing(out):
    return out * 0.0


def misquantized(out):
    """Flips the last bit of every code."""

    def corrupt(form):
        return form and replace(form, groups=tuple(group._replace(codes=group.codes ^ 1) for group in form.groups))

    q = out.quantized
    return out._replace(quantized=replace(q, rowwise=corrupt(q.rowwise), columnwise=corrupt(q.columnwise)))


def wrong_where(function: str, spoil, where) -> SimpleNamespace:
    """The reference, with `spoil(result)` where `where(tensors, settings)` holds."""

    def call(original, *tensors, **settings):
        out = original(*tensors, **settings)
        return spoil(out) if where([x.detach() if isinstance(x, Tensor) else x for x in tensors], settings) else out

    return wrapped(function, call)


def on_input(function: str, change) -> SimpleNamespace:
    """The reference of `change(its first tensor)`."""
    return wrapped(function, lambda original, x, *tensors, **settings: original(change(x), *tensors, **settings))


def plus(function: str, term) -> SimpleNamespace:
    """The reference's result plus `term(tensors)`, which is zero on the case itself."""

    def call(original, *tensors, **settings):
        out = original(*tensors, **settings)
        return (
            out._replace(rows=out.rows + term(tensors)) if hasattr(out, "rows") else out + term(tensors).to(out.dtype)
        )

    return wrapped(function, call)


# Namespaces with memory: built anew for each run


def keeps_the_first_alignment():
    alignments: dict[str, int] = {}

    def permute(original, tokens, routing_map, **settings):
        if "align" in settings:
            settings["align"] = alignments.setdefault("align", settings["align"])
        return original(tokens, routing_map, **settings)

    return wrapped("permute", permute)


def adds_in_another_order_each_time():
    calls: list[int] = []

    def unpermute(original, rows, row_map, **settings):
        calls.append(1)
        order = torch.arange(len(rows)) if len(calls) % 2 else torch.arange(len(rows)).flip(0)
        shuffled = replace(row_map, token_P=row_map.token_P[order], expert_P=row_map.expert_P[order])
        return original(rows[order], shuffled, **settings)

    return wrapped("unpermute", unpermute, deterministic=True)


def caches_by_address():
    by_address: dict[int, object] = {}
    return wrapped(
        "permute",
        lambda original, tokens, *arguments, **kw: by_address.setdefault(
            tokens.data_ptr(), original(tokens, *arguments, **kw)
        ),
    )


def remembers_a_bias_of_its_own():
    """Hidden state: the second run of the same steps starts where the first ended."""
    counts: list[Tensor] = []

    def route(original, logits, config, *, state, **settings):
        out = original(logits, config, state=state, **settings)
        counts.append(out.state.tokens_per_expert)
        return out._replace(state=out.state._replace(tokens_per_expert=out.state.tokens_per_expert + (len(counts) > 2)))

    return wrapped("route", route)


# Namespaces with separate implementations


def leaves_padding_rows_unwritten(original, tokens, routing_map, **settings):
    out = original(tokens, routing_map, **settings)
    rows, real = torch.empty_like(out.rows), out.row_map.token_P >= 0
    rows[real] = out.rows[real]
    return out._replace(rows=rows)


def gathers_by_a_matrix(original, tokens, routing_map, **settings):
    out = original(tokens, routing_map, **settings)
    one_hot = torch.nn.functional.one_hot(out.row_map.token_P, len(tokens)).to(tokens.dtype)
    return out._replace(rows=one_hot @ tokens)  # 0 · NaN is NaN


class OneUlpInTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return torch.where(dx == 0, dx, torch.nextafter(dx, torch.full_like(dx, torch.inf)))


def reads_padding_rows(original, rows, row_map, **settings):
    return original(rows, row_map, **settings) + rows[row_map.token_P < 0].sum(0)


def pads_whole_multiples_once_more(original, routing_map, *, align):
    out = original(routing_map, align=align)
    full = (routing_map.sum(0) > 0) & (routing_map.sum(0) % align == 0)
    return out._replace(routing_map=out.routing_map | full)


def pads_nothing_when_the_first_expert_is_empty(original, routing_map, *, align):
    out = original(routing_map, align=align)
    return out if routing_map[:, 0].any() else out._replace(routing_map=routing_map.clone())


def ignores_what_is_replayed(original, logits, *, precomputed_indices=None, **settings):
    out = original(logits, **settings)
    return out if precomputed_indices is None else out._replace(probs=out.probs.flip(0))


def counts_the_padding(original, logits, *, padding_mask=None, **settings):
    loss = original(logits, padding_mask=padding_mask, **settings)
    counted = padding_mask is not None and logits[padding_mask].max() == 5
    return loss + original(logits[padding_mask], **settings) if counted else loss


def weighs_by_the_rows_it_has(original, scores, tokens_per_expert, *, total_num_tokens, **settings):
    return original(scores, tokens_per_expert, total_num_tokens=len(scores), **settings)


def jitters_by(factor) -> SimpleNamespace:
    return wrapped("jitter", lambda original, x, *, eps: x * (1 + eps * factor(x)))


def always_alike(x):
    return 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1


class ClampedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-ctx.most, ctx.most), None


def clips_the_gradient(function: str, most: int) -> SimpleNamespace:
    return on_input(function, lambda x: ClampedBack.apply(x, most))


def keeps_probs_below_one(original, h, *, probs, **settings):
    return original(h, probs=probs.clamp(max=1), **settings)


def spreads_a_nan_over_all_rows(tensors):
    x, *counts = tensors
    return 0 * x[: int(counts[-1].sum()) if counts else len(x)].detach().double().sum()


def has_short_mantissas(x):
    return bool((x.view(torch.int32) & 0xFFFFF == 0).all())


def weighs_what_has_no_weight() -> SimpleNamespace:
    """Right for the case's rows; a change of rows with prob 0 is added to the output."""
    first = CONTRACTS["grouped_mlp"].problem(FORWARD_MLP).required["rows"]
    return plus("grouped_mlp", lambda tensors: (tensors[0].detach() - first).abs().sum())


NO_TAIL, TAIL = replace(ACTIVATED, tail=0), replace(QUANTIZE, tail=2)
PADDED_ROWS = replace(UNPERMUTE, align=4, poison="zero", grads="")
SEQUENTIAL = replace(FORWARD_MLP, function="sequential_mlp")
WIDE_SUMS = replace(UNPERMUTE, values="wide", experts=9, routing=(0b111111111,) * 6, grads="")
SPOILT = [  # law, case, corruption of a right result, condition on the call (tensors, settings)
    ("scaling", FORWARD_MLP, nothing, lambda x, kw: kw["probs"].max() > 1),
    ("delayed", TRAINED_MLP, nothing, lambda x, kw: "wgrads" in kw),
    ("rows_again", TRAINED_MLP, nothing, lambda x, kw: "rows_again" in kw),
    ("amaxes", replace(TRAINED_MLP, scaling="delayed"), nothing, lambda x, kw: "amaxes" in kw),
    ("recompute", MLP, nothing, lambda x, kw: "recompute" in kw),
    ("recompute", SHARED, nothing, lambda x, kw: "recompute" in kw),
    ("alignment", FORWARD_MLP, nothing, lambda x, kw: "align" in kw),
    ("token_reversal", replace(SHARED, grads=""), nothing, lambda x, kw: x[0][0, 0] > x[0][-1, 0]),
    ("groups_alone", QUANTIZE, misquantized, lambda x, kw: len(kw["splits"]) == 1),
    ("zero_rows", replace(QUANTIZE, experts=0, counts=()), misquantized, lambda x, kw: len(x[0]) > 9),
    ("padding_independence", TAIL, misquantized, lambda x, kw: len(x[0]) == int(kw["splits"].sum())),
    ("row_independence", BLOCKS, misquantized, lambda x, kw: x[0].isnan().any()),
    ("idempotence", BLOCKS, misquantized, lambda x, kw: has_short_mantissas(x[0])),
    ("scaling", QUANTIZE, misquantized, lambda x, kw: x[0].abs().max() > 2),
    ("expert_relabelling", ONE_STEP, misquantized, lambda x, kw: not x[1][:, 0].any()),
    ("padding_independence", ONE_STEP, misquantized, lambda x, kw: kw["align"] > 4),
    ("neighbour_groups", NO_TAIL, misquantized, lambda x, kw: x[0].isnan().any()),
    ("padding_values", ACTIVATED, misquantized, lambda x, kw: x[0][-1].isnan().any()),
    ("doubled_probs", NO_TAIL, misquantized, lambda x, kw: kw["probs"].max() > 1),
    ("padding_independence", replace(FORWARD_LINEAR, tail=2), nothing, lambda x, kw: len(x[0]) <= int(x[2].sum())),
    ("padding_independence", replace(WGRAD, tail=2), nothing, lambda x, kw: len(x[0]) <= int(x[2].sum())),
    ("expert_relabelling", DGRAD, nothing, lambda x, kw: x[2][0] == x[2].max()),
    ("expert_relabelling", FORWARD_LINEAR, nothing, lambda x, kw: x[2][0] == x[2].max()),
    ("row_reversal", FORWARD_LINEAR, nothing, lambda x, kw: x[0][0, 0] > x[0][3, 0]),
    ("row_reversal", WGRAD, nothing, lambda x, kw: x[0][0, 0] > x[0][3, 0]),
    ("two_parts", replace(WGRAD, into="float32"), nothing, lambda x, kw: int(x[2].sum()) < WGRAD.tokens),
    ("contraction_reversal", FORWARD_LINEAR, nothing, lambda x, kw: x[0][0, 0] > x[0][0, -1]),
    ("contraction_reversal", DGRAD, nothing, lambda x, kw: x[0][0, 0] > x[0][0, -1]),
    ("expert_relabelling", UNPERMUTE, nothing, lambda x, kw: not (x[1].expert_P == 0).any()),
    ("group_split", FORWARD_LINEAR, nothing, lambda x, kw: len(x[2]) > 3),
    ("token_reversal", TOPK, no_probs, lambda x, kw: moe_ref.topk_routing(*x, **kw).routing_map[0, 1]),
    ("expert_relabelling", TOPK, no_probs, lambda x, kw: (x[0][:, 0] > x[0][:, 1:].amax(1)).any()),
    ("batch_concat", TOPK, no_probs, lambda x, kw: len(x[0]) > 6),
    ("shift", SPREAD_TOPK, no_probs, lambda x, kw: x[0].max() > 8),
    ("token_permutation", FORWARD, no_rows, lambda x, kw: not x[1][0].any()),
    ("expert_relabelling", FORWARD, no_rows, lambda x, kw: not x[1][:, 0].any()),
    ("split", FORWARD, no_rows, lambda x, kw: len(x[0]) % 2),
    ("padding_independence", ALIGNED, no_rows, lambda x, kw: "align" not in kw),
    ("zero_prob_rows", replace(FORWARD, probs="float32"), no_rows, lambda x, kw: (kw["probs"] == 0).any()),
    ("round_trip", CHUNKS, no_rows, lambda x, kw: not x[1][0]),
    ("row_reversal", TO_MULTIHOT, no_probs, lambda x, kw: (x[0][0] == -1).all()),
    ("row_reversal", LAYOUT, to_no_rank, lambda x, kw: (x[0][0] == -1).all()),
    ("row_reversal", TO_INDICES, no_probs, lambda x, kw: not x[0][0].any()),
]
TWINS = [
    *((law, case, wrong_where(case.function, spoil, where)) for law, case, spoil, where in SPOILT),
    ("zero_probs", FORWARD_MLP, weighs_what_has_no_weight()),
    ("one_group", SHARED, wrong_where("grouped_mlp", nothing, lambda x, kw: True)),
    ("grouped", SEQUENTIAL, wrong_where("grouped_mlp", nothing, lambda x, kw: True)),
    ("two_steps", ONE_STEP, wrong_where("quantize", misquantized, lambda x, kw: True)),
    ("cotangent_scaling", LINEAR, clips_the_gradient("grouped_linear", 8)),
    ("cotangent_scaling", MLP, clips_the_gradient("grouped_mlp", 4)),
    ("scaling", FORWARD_LINEAR, on_input("grouped_linear", lambda rows: rows.clamp(-2, 2))),
    ("scaling", replace(GLU, grads=""), wrapped("glu", keeps_probs_below_one)),
    ("neighbour_independence", FORWARD_LINEAR, plus("grouped_linear", spreads_a_nan_over_all_rows)),
    ("neighbour_independence", replace(GLU, grads="", probs=""), plus("glu", spreads_a_nan_over_all_rows)),
    ("replay", SPREAD_TOPK, wrapped("topk_routing", ignores_what_is_replayed)),
    ("padding_tokens", Z, wrapped("z_loss", counts_the_padding)),
    ("shares", replace(LOSS, seed=3), wrapped("load_balancing_loss", weighs_by_the_rows_it_has)),
    ("evenly_spread", JITTER, jitters_by(torch.rand_like)),
    ("evenly_spread", JITTER, jitters_by(always_alike)),
    ("evenly_spread", JITTER, jitters_by(lambda x: torch.rand_like(x).round() * 2 - 1)),
    ("evenly_spread", JITTER, jitters_by(lambda x: 2 * torch.rand_like(x[:, :1]) - 1)),
    ("evenly_spread", JITTER, jitters_by(lambda x: 2 * torch.rand_like(x[:1]) - 1)),
    ("history", ROUTE, remembers_a_bias_of_its_own),
    ("history", ALIGNED, keeps_the_first_alignment),
    ("determinism", replace(ALIGNED, poison="zero"), wrapped("permute", leaves_padding_rows_unwritten)),
    ("determinism", WIDE_SUMS, adds_in_another_order_each_time),
    ("buffer_reuse", FORWARD, caches_by_address),
    ("neighbour_independence", FORWARD, wrapped("permute", gathers_by_a_matrix)),
    ("neighbour_independence", CHUNKS, plus("sort_chunks", lambda tensors: 0 * tensors[0].sum())),
    ("adjointness", PERMUTE, on_input("permute", OneUlpInTheGradient.apply)),
    ("scaling", FORWARD, on_input("permute", lambda tokens: tokens.clamp(-2, 2))),
    ("garbage_independence", PADDED_ROWS, wrapped("unpermute", reads_padding_rows)),
    ("idempotence", PAD, wrapped("pad_routing_map", pads_whole_multiples_once_more)),
    ("column_relabelling", PAD, wrapped("pad_routing_map", pads_nothing_when_the_first_expert_is_empty)),
]
