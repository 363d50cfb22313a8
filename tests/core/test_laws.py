"""Each law finds an implementation that gives right values on the very same case; the reference keeps every law."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.shared_out_laws import ONE_PROCESS
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.runner import Outcome
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.families.experts.laws import ordinary
from conformance.families.experts.mlp import MlpCase
from conformance.families.experts.shared import SharedCase
from conformance.families.fused.cases import QuantizedActivationCase
from conformance.families.fused.permute_and_quantize import PermutedQuantizationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase
from conformance.families.router.cases_route import RouteCase
from conformance.interface import Implementation

poison.install()

# six tokens, three experts: the first token and the first expert have somebody, the last token and the last expert nobody
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
# token by token in eighths: the first expert is never the best one, the first token's best is the last, the last token's the second
LOGITS = (0, 8, 16, 0, 16, 8, 0, 8, 24, 0, 24, 8, 0, 8, 32, 0, 32, 8)
TOPK = LogitsCase(function="topk_routing", tokens=6, experts=3, topk=1, score="sigmoid", logits=LOGITS)
SPREAD_TOPK = replace(TOPK, logits=(), topk=2, seed=3, experts=5, score="softmax")
AUX = LogitsCase(function="aux_loss_scores", tokens=6, experts=5, topk=2, padding=4, seed=1)
Z = LogitsCase(function="z_loss", tokens=6, experts=5, padding=4, seed=1)
SINKHORN = LogitsCase(function="sinkhorn_routing", tokens=6, experts=3, topk=2, seed=1)
DROP = LoadCase(function="drop_tokens", tokens=6, experts=3, topk=2, capacity=2)
LOSS = LoadCase(function="load_balancing_loss", tokens=7, experts=3, topk=2)
BIAS = LoadCase(function="update_expert_bias", tokens=9, experts=3, bias=1, seed=2)
GATE = GateCase(function="gate", tokens=5, hidden=4, experts=3)
JITTER = GateCase(function="jitter", tokens=12, hidden=12, eps=4)
ATTACH = GateCase(function="attach_loss", tokens=5, hidden=4)
ROUTE = RouteCase(
    function="route", tokens=6, experts=4, topk=2, losses="aux+z", steps="train+finish+train", bias=True, grads="logits"
)
GLU = ActivationCase(function="glu", tokens=6, width=4, probs="float32", grads="h+probs", seed=1)
ACTIVATION = replace(GLU, function="activation")
LINEAR = GroupedCase(
    function="grouped_linear", tokens=9, experts=3, counts=(4, 0, 5), hidden=5, width=4, grads="rows+weight", seed=1
)
FORWARD_LINEAR = replace(LINEAR, grads="")
DGRAD = replace(LINEAR, function="grouped_dgrad", grads="")
WGRAD = replace(LINEAR, function="grouped_wgrad", grads="")
MLP = MlpCase(
    function="grouped_mlp",
    tokens=9,
    experts=3,
    counts=(4, 0, 5),
    hidden=5,
    width=4,
    probs="float32",
    weights="zeros",
    grads="rows",
    seed=1,
)
FORWARD_MLP = replace(MLP, grads="")
SHARED = SharedCase(function="shared_experts", tokens=6, hidden=5, width=4, grads="x", seed=1)
PROJECTION = GroupedCase(function="latent_projection", tokens=6, hidden=5, width=4, grads="x", seed=1)
QUANTIZE = QuantizeCase(function="quantize", tokens=9, experts=3, counts=(4, 0, 5), hidden=5, seed=1)
BLOCKS = replace(QUANTIZE, scaling="block")
ACTIVATED = QuantizedActivationCase(
    function="glu_and_quantize", tokens=9, experts=3, counts=(4, 0, 5), tail=1, width=4, probs="float32", seed=1
)
ONE_STEP = PermutedQuantizationCase(
    function="permute_and_quantize", tokens=6, experts=3, hidden=5, routing=FORWARD.routing, align=4, seed=1
)


def wrapped(function: str, wrapper, **declared) -> SimpleNamespace:
    """The reference, with `wrapper(original, *args, **settings)` in the place of one function."""
    namespace = SimpleNamespace(
        **{name: getattr(moe_ref, name) for name in moe_ref.__all__}, declares=lambda name: declared
    )
    original = getattr(namespace, function)
    setattr(namespace, function, lambda *args, **settings: wrapper(original, *args, **settings))
    return namespace


def outcome_of(case: Case, namespace) -> Outcome:
    return evaluate(case, Implementation(namespace, "here"))


def wrong_rows(out):
    return out._replace(rows=torch.zeros_like(out.rows))


# ---- namespaces that are right in the first call of the case below


def keeps_the_first_alignment():
    kept: dict[str, int] = {}

    def permute(original, tokens, routing_map, **settings):
        if "align" in settings:
            settings["align"] = kept.setdefault("align", settings["align"])
        return original(tokens, routing_map, **settings)

    return wrapped("permute", permute)


def leaves_padding_rows_unwritten():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        rows = torch.empty_like(out.rows)
        real = out.row_map.token_P >= 0
        rows[real] = out.rows[real]
        return out._replace(rows=rows)

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
    seen: dict[int, object] = {}

    def permute(original, tokens, routing_map, **settings):
        return seen.setdefault(tokens.data_ptr(), original(tokens, routing_map, **settings))

    return wrapped("permute", permute)


def wrong_when_the_first_token_has_no_expert():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        return out if routing_map[0].any() else wrong_rows(out)

    return wrapped("permute", permute)


def wrong_when_the_first_expert_is_empty():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        return out if routing_map[:, 0].any() else wrong_rows(out)

    return wrapped("permute", permute)


def wrong_for_an_odd_number_of_tokens():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        return out if len(tokens) % 2 == 0 else wrong_rows(out)

    return wrapped("permute", permute)


def wrong_without_alignment():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        return out if "align" in settings else wrong_rows(out)

    return wrapped("permute", permute)


def gathers_by_a_matrix():
    def permute(original, tokens, routing_map, **settings):
        out = original(tokens, routing_map, **settings)
        one_hot = torch.nn.functional.one_hot(out.row_map.token_P, len(tokens)).to(tokens.dtype)
        return out._replace(rows=one_hot @ tokens)  # 0 · NaN is NaN

    return wrapped("permute", permute)


def sorts_by_multiplying():
    def sort_chunks(original, rows, chunk_sizes, order, **settings):
        out = original(rows, chunk_sizes, order, **settings)
        return out._replace(rows=out.rows + 0 * rows.sum())

    return wrapped("sort_chunks", sort_chunks)


class OneUlpInTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return torch.where(dx == 0, dx, torch.nextafter(dx, torch.full_like(dx, torch.inf)))


def rounds_the_gradient_up():
    return wrapped(
        "permute",
        lambda original, tokens, routing_map, **settings: original(
            OneUlpInTheGradient.apply(tokens), routing_map, **settings
        ),
    )


def saturates():
    return wrapped(
        "permute",
        lambda original, tokens, routing_map, **settings: original(tokens.clamp(-2, 2), routing_map, **settings),
    )


def reads_padding_rows():
    def unpermute(original, rows, row_map, **settings):
        padding = rows[row_map.token_P < 0].sum(0)
        return original(rows, row_map, **settings) + padding

    return wrapped("unpermute", unpermute)


def wrong_when_the_first_chunk_is_empty():
    def sort_chunks(original, rows, chunk_sizes, order, **settings):
        out = original(rows, chunk_sizes, order, **settings)
        return out if chunk_sizes[0] else wrong_rows(out)

    return wrapped("sort_chunks", sort_chunks)


def pads_whole_multiples_once_more():
    def pad_routing_map(original, routing_map, *, align):
        out = original(routing_map, align=align)
        full = (routing_map.sum(0) > 0) & (routing_map.sum(0) % align == 0)
        return out._replace(routing_map=out.routing_map | full)

    return wrapped("pad_routing_map", pad_routing_map)


def pads_nothing_when_the_first_expert_is_empty():
    def pad_routing_map(original, routing_map, *, align):
        out = original(routing_map, align=align)
        return out if routing_map[:, 0].any() else out._replace(routing_map=routing_map.clone())

    return wrapped("pad_routing_map", pad_routing_map)


def stops_at_an_empty_first_token(function: str):
    def convert(original, given, probs, **settings):
        out = original(given, probs, **settings)
        stops = (given[0] == -1).all() if function == "indices_to_multihot" else not given[0].any()
        return out._replace(probs=torch.zeros_like(out.probs)) if stops else out

    return wrapped(function, convert)


def goes_nowhere_after_an_empty_first_token():
    def layout(original, given, **settings):
        out = original(given, **settings)
        return out._replace(is_token_in_rank=torch.zeros_like(out.is_token_in_rank)) if (given[0] == -1).all() else out

    return wrapped("deepep_layout", layout)


def lost(out):
    return out._replace(probs=torch.zeros_like(out.probs))


def wrong_when_the_first_token_goes_to_the_second_expert():
    def topk_routing(original, logits, **settings):
        out = original(logits, **settings)
        return lost(out) if out.routing_map[0, 1] else out

    return wrapped("topk_routing", topk_routing)


def wrong_when_the_first_expert_is_the_best():
    def topk_routing(original, logits, **settings):
        out = original(logits, **settings)
        return lost(out) if (logits[:, 0] > logits[:, 1:].amax(1)).any() else out

    return wrapped("topk_routing", topk_routing)


def wrong_for_more_tokens_than(most: int):
    def topk_routing(original, logits, **settings):
        out = original(logits, **settings)
        return lost(out) if len(logits) > most else out

    return wrapped("topk_routing", topk_routing)


def softmax_without_the_sum():
    def topk_routing(original, logits, **settings):
        out = original(logits, **settings)
        return lost(out) if logits.max() > 8 else out

    return wrapped("topk_routing", topk_routing)


def ignores_what_is_replayed():
    def topk_routing(original, logits, *, precomputed_indices=None, **settings):
        out = original(logits, **settings)
        return out if precomputed_indices is None else out._replace(probs=out.probs.flip(0))

    return wrapped("topk_routing", topk_routing)


def counts_the_padding():
    def z_loss(original, logits, *, padding_mask=None, **settings):
        loss = original(logits, padding_mask=padding_mask, **settings)
        return (
            loss
            if padding_mask is None or logits[padding_mask].max() != 5
            else loss + original(logits[padding_mask], **settings)
        )

    return wrapped("z_loss", z_loss)


def weighs_by_the_rows_it_has():
    def load_balancing_loss(original, scores, tokens_per_expert, *, total_num_tokens, **settings):
        return original(scores, tokens_per_expert, total_num_tokens=len(scores), **settings)

    return wrapped("load_balancing_loss", load_balancing_loss)


def jitters_by(factor):
    return wrapped("jitter", lambda original, x, *, eps: x * (1 + eps * factor(x)))


def only_up(x):
    return torch.rand_like(x)


def always_alike(x):
    return 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1


def at_the_ends(x):
    return torch.rand_like(x).round() * 2 - 1


def remembers_a_bias_of_its_own():
    """State kept beside the state: the second run of the same steps starts where the first ended."""
    kept: list[torch.Tensor] = []

    def route(original, logits, config, *, state, **settings):
        out = original(logits, config, state=state, **settings)
        kept.append(out.state.tokens_per_expert)
        return out._replace(state=out.state._replace(tokens_per_expert=out.state.tokens_per_expert + (len(kept) > 2)))

    return wrapped("route", route)


class ClampedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-ctx.most, ctx.most), None


def clips_the_gradient(function: str, most: int):
    return wrapped(
        function,
        lambda original, rows, *others, **settings: original(ClampedBack.apply(rows, most), *others, **settings),
    )


def saturates_rows():
    return wrapped(
        "grouped_linear", lambda original, rows, *others, **settings: original(rows.clamp(-2, 2), *others, **settings)
    )


def probs_above_one_are_one(most):
    return wrapped(
        "glu", lambda original, h, *, probs, **settings: original(h, probs=probs.clamp(max=most), **settings)
    )


def spreads_a_nan_over_all_rows(function: str):
    def spread(original, x, *others, **settings):
        out = original(x, *others, **settings)
        total = int(others[-1].sum()) if others else len(x)
        return out + 0 * x[:total].detach().double().sum().to(out.dtype)

    return wrapped(function, spread)


def looks_behind_the_last_segment(function: str):
    """Right while nothing or NaN stands there."""

    def grouped(original, x, other, counts, **settings):
        out = original(x, other, counts, **settings)
        return out if len(x) > int(counts.sum()) else wrong(out)

    return wrapped(function, grouped)


def wrong(out):
    return out * 0.0


def wrong_when_the_first_expert_has_most_rows(function: str):
    def grouped(original, x, other, counts, **settings):
        out = original(x, other, counts, **settings)
        return wrong(out) if counts[0] == counts.max() else out

    return wrapped(function, grouped)


def wrong_for_more_experts_than(most: int):
    def grouped(original, x, other, counts, **settings):
        out = original(x, other, counts, **settings)
        return wrong(out) if len(counts) > most else out

    return wrapped("grouped_linear", grouped)


def misquantised_where(odd):
    """The last bit of every code is wrong where odd(x, settings)."""

    def corrupt(form):
        return form and replace(form, groups=tuple(group._replace(codes=group.codes ^ 1) for group in form.groups))

    def quantize(original, x, recipe, **settings):
        out = original(x, recipe, **settings)
        if not odd(x.detach(), settings):
            return out
        return out._replace(
            quantized=replace(
                out.quantized, rowwise=corrupt(out.quantized.rowwise), columnwise=corrupt(out.quantized.columnwise)
            )
        )

    return wrapped("quantize", quantize)


def misquantised_in_one_step_where(odd):
    """The last bit of every code is wrong where odd(routing map, settings)."""

    def one_step(original, tokens, routing_map, recipe, **settings):
        out = original(tokens, routing_map, recipe, **settings)
        form = out.quantized.rowwise
        groups = tuple(group._replace(codes=group.codes ^ 1) for group in form.groups)
        return (
            out._replace(quantized=replace(out.quantized, rowwise=replace(form, groups=groups)))
            if odd(routing_map, settings)
            else out
        )

    return wrapped("permute_and_quantize", one_step)


def misquantised_when_activated_where(odd):
    """The last bit of every code is wrong where odd(h, settings)."""

    def activated(original, h, recipe, **settings):
        out = original(h, recipe, **settings)
        form = out.quantized.rowwise
        groups = tuple(group._replace(codes=group.codes ^ 1) for group in form.groups)
        return (
            out._replace(quantized=replace(out.quantized, rowwise=replace(form, groups=groups)))
            if odd(h.detach(), settings)
            else out
        )

    return wrapped("glu_and_quantize", activated)


def has_short_mantissas(x):
    return bool((x.view(torch.int32) & 0xFFFFF == 0).all())


def wrong_mlp_where(odd, function="grouped_mlp"):
    """Nothing comes out where odd(tensors, settings)."""
    return wrapped(
        function,
        lambda original, *tensors, **settings: (
            original(*tensors, **settings) * (0.0 if odd(tensors, settings) else 1.0)
        ),
    )


def weighs_what_has_no_weight():
    """Right for the case's own rows: what is added is how far those with prob 0 are from them."""
    first = CONTRACTS["grouped_mlp"].problem(FORWARD_MLP).required["rows"]
    return wrapped(
        "grouped_mlp",
        lambda original, rows, *others, **settings: (
            original(rows, *others, **settings) + (rows.detach() - first).abs().sum()
        ),
    )


TWINS = [
    ("zero_probs", FORWARD_MLP, weighs_what_has_no_weight),
    ("scaling", FORWARD_MLP, lambda: wrong_mlp_where(lambda tensors, settings: settings["probs"].max() > 1)),
    ("recompute", MLP, lambda: wrong_mlp_where(lambda tensors, settings: "recompute" in settings)),
    ("recompute", SHARED, lambda: wrong_mlp_where(lambda tensors, settings: "recompute" in settings, "shared_experts")),
    ("alignment", FORWARD_MLP, lambda: wrong_mlp_where(lambda tensors, settings: "align" in settings)),
    (
        "grouped",
        replace(FORWARD_MLP, function="sequential_mlp"),
        lambda: SimpleNamespace(
            **vars(wrong_mlp_where(lambda *call: True)) | {"sequential_mlp": moe_ref.sequential_mlp}
        ),
    ),
    (
        "token_reversal",
        replace(SHARED, grads=""),
        lambda: wrong_mlp_where(lambda tensors, settings: tensors[0][0, 0] > tensors[0][-1, 0], "shared_experts"),
    ),
    ("groups_alone", QUANTIZE, lambda: misquantised_where(lambda x, settings: len(settings["splits"]) == 1)),
    ("zero_rows", replace(QUANTIZE, experts=0, counts=()), lambda: misquantised_where(lambda x, settings: len(x) > 9)),
    (
        "padding_independence",
        replace(QUANTIZE, tail=2),
        lambda: misquantised_where(lambda x, settings: len(x) == int(settings["splits"].sum())),
    ),
    ("row_independence", BLOCKS, lambda: misquantised_where(lambda x, settings: x.isnan().any())),
    ("idempotence", BLOCKS, lambda: misquantised_where(lambda x, settings: has_short_mantissas(x))),
    ("scaling", QUANTIZE, lambda: misquantised_where(lambda x, settings: x.abs().max() > 2)),
    ("two_steps", ONE_STEP, lambda: misquantised_where(lambda x, settings: True)),
    (
        "expert_relabelling",
        ONE_STEP,
        lambda: misquantised_in_one_step_where(lambda chosen, settings: not chosen[:, 0].any()),
    ),
    (
        "padding_independence",
        ONE_STEP,
        lambda: misquantised_in_one_step_where(lambda chosen, settings: settings["align"] > 4),
    ),
    (
        "neighbour_groups",
        replace(ACTIVATED, tail=0),
        lambda: misquantised_when_activated_where(lambda h, settings: h.isnan().any()),
    ),
    ("padding_values", ACTIVATED, lambda: misquantised_when_activated_where(lambda h, settings: h[-1].isnan().any())),
    (
        "doubled_probs",
        replace(ACTIVATED, tail=0),
        lambda: misquantised_when_activated_where(lambda h, settings: settings["probs"].max() > 1),
    ),
    ("cotangent_scaling", LINEAR, lambda: clips_the_gradient("grouped_linear", 8)),
    ("cotangent_scaling", MLP, lambda: clips_the_gradient("grouped_mlp", 4)),
    ("scaling", FORWARD_LINEAR, saturates_rows),
    ("scaling", replace(GLU, grads=""), lambda: probs_above_one_are_one(1)),
    ("neighbour_independence", FORWARD_LINEAR, lambda: spreads_a_nan_over_all_rows("grouped_linear")),
    ("neighbour_independence", replace(GLU, grads="", probs=""), lambda: spreads_a_nan_over_all_rows("glu")),
    ("padding_independence", replace(FORWARD_LINEAR, tail=2), lambda: looks_behind_the_last_segment("grouped_linear")),
    ("padding_independence", replace(WGRAD, tail=2), lambda: looks_behind_the_last_segment("grouped_wgrad")),
    ("expert_relabelling", DGRAD, lambda: wrong_when_the_first_expert_has_most_rows("grouped_dgrad")),
    ("expert_relabelling", FORWARD_LINEAR, lambda: wrong_when_the_first_expert_has_most_rows("grouped_linear")),
    ("group_split", FORWARD_LINEAR, lambda: wrong_for_more_experts_than(3)),
    ("token_reversal", TOPK, wrong_when_the_first_token_goes_to_the_second_expert),
    ("expert_relabelling", TOPK, wrong_when_the_first_expert_is_the_best),
    ("batch_concat", TOPK, lambda: wrong_for_more_tokens_than(6)),
    ("shift", SPREAD_TOPK, softmax_without_the_sum),
    ("replay", SPREAD_TOPK, ignores_what_is_replayed),
    ("padding_tokens", Z, counts_the_padding),
    ("shares", replace(LOSS, seed=3), weighs_by_the_rows_it_has),
    ("evenly_spread", JITTER, lambda: jitters_by(only_up)),
    ("evenly_spread", JITTER, lambda: jitters_by(always_alike)),
    ("evenly_spread", JITTER, lambda: jitters_by(at_the_ends)),
    ("history", ROUTE, remembers_a_bias_of_its_own),
    ("history", ALIGNED, keeps_the_first_alignment),
    ("determinism", replace(ALIGNED, poison="zero"), leaves_padding_rows_unwritten),
    (
        "determinism",
        replace(UNPERMUTE, values="wide", experts=9, routing=(0b111111111,) * 6, grads=""),
        adds_in_another_order_each_time,
    ),
    ("buffer_reuse", FORWARD, caches_by_address),
    ("token_permutation", FORWARD, wrong_when_the_first_token_has_no_expert),
    ("expert_relabelling", FORWARD, wrong_when_the_first_expert_is_empty),
    ("split", FORWARD, wrong_for_an_odd_number_of_tokens),
    ("padding_independence", ALIGNED, wrong_without_alignment),
    ("neighbour_independence", FORWARD, gathers_by_a_matrix),
    ("neighbour_independence", CHUNKS, sorts_by_multiplying),
    ("adjointness", PERMUTE, rounds_the_gradient_up),
    ("scaling", FORWARD, saturates),
    ("garbage_independence", replace(UNPERMUTE, align=4, poison="zero", grads=""), reads_padding_rows),
    ("round_trip", CHUNKS, wrong_when_the_first_chunk_is_empty),
    ("idempotence", PAD, pads_whole_multiples_once_more),
    ("column_relabelling", PAD, pads_nothing_when_the_first_expert_is_empty),
    ("row_reversal", TO_MULTIHOT, lambda: stops_at_an_empty_first_token("indices_to_multihot")),
    ("row_reversal", LAYOUT, goes_nowhere_after_an_empty_first_token),
    ("row_reversal", TO_INDICES, lambda: stops_at_an_empty_first_token("multihot_to_indices")),
]
ALONE = {
    function: [law for law in contract.laws.values() if law is not ONE_PROCESS]
    for function, contract in CONTRACTS.items()
    if function not in COLLECTIVES
}
ON_A_CPU = {function: [law for law in laws if law.device != "cuda"] for function, laws in ALONE.items()}


@pytest.mark.parametrize(
    ("law", "case", "broken"), TWINS, ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", "")
)
def test_what_breaks_a_law_passes_as_values_and_is_found_by_that_law(law, case, broken):
    assert outcome_of(case, broken()).status == "PASS"
    found = outcome_of(replace(case, law=law), broken())
    assert (found.status, found.finding["check"]) == ("FAIL", law)


def test_every_law_has_a_twin_that_must_fail():
    assert {law for law, _, _ in TWINS} == {law.name for laws in ON_A_CPU.values() for law in laws}


def adds_by_layout():
    """A sum whose order, and so its last bit, follows the strides of what is added."""

    def activated(original, h, d_out, recipe, **settings):
        out = original(h, d_out, recipe, **settings)
        return out if d_out.is_contiguous() else out._replace(d_probs=torch.nextafter(out.d_probs, torch.zeros(())))

    return wrapped("glu_backward_and_quantize", activated, deterministic=True)


def test_no_law_minds_a_sum_whose_order_follows_the_layout():
    case = replace(ACTIVATED, function="glu_backward_and_quantize", layout="transposed", layout_of="d_out")
    laws = [law for law in CONTRACTS[case.function].laws.values() if law.device != "cuda" and law.applies(case)]
    assert "padding_values" in {law.name for law in laws}
    assert {law.name: outcome_of(replace(case, law=law.name), adds_by_layout()).status for law in laws} == {
        law.name: "PASS" for law in laws
    }


CALLS = [
    PERMUTE,
    replace(ALIGNED, probs="float32", grads="tokens+probs", map_dtype="int64"),
    replace(FORWARD, dtype="float8_e4m3fn", values="special"),
    replace(FORWARD, dtype="bfloat16", capacity=2, probs="bfloat16", zero_probs=True, grads="probs"),
    replace(FORWARD, capacity=9, layout="strided", layout_of="tokens"),
    replace(ALIGNED, slack=2, values="special", poison="max"),
    replace(PERMUTE, slack=-2),
    replace(PERMUTE, tokens=0, routing=()),
    UNPERMUTE,
    replace(UNPERMUTE, align=4, probs="float32", grads="rows+probs", poison="max"),
    replace(UNPERMUTE, dtype="bfloat16", values="special", probs="bfloat16", capacity=2),
    replace(UNPERMUTE, grads="", align=2),
    CHUNKS,
    replace(CHUNKS, grads="rows"),
    replace(CHUNKS, dtype="float8_e5m2", tail=0, index_dtype="int32"),
    replace(CHUNKS, probs="float32", grads="rows+probs", values="special"),
    replace(CHUNKS, sizes=(), order=(), tail=0),
    PAD,
    replace(PAD, align=16, map_dtype="uint8", layout="transposed", layout_of="routing_map"),
    TO_MULTIHOT,
    replace(TO_MULTIHOT, slots=(), repeats=True, empty=1, grads="probs", dtype="float16"),
    LAYOUT,
    replace(LAYOUT, slots=(), repeats=True, empty=1, experts=6, ranks=3, index_dtype="int16"),
    TO_INDICES,
    replace(TO_INDICES, topk=5, grads="probs", dtype="bfloat16", zero_probs=True),
    replace(TO_INDICES, tokens=0, routing=()),
    TOPK,
    SPREAD_TOPK,
    replace(SPREAD_TOPK, function="topk_indices"),
    replace(SPREAD_TOPK, function="topk_indices", grads="logits", scaling=20),
    replace(
        SPREAD_TOPK,
        function="topk_indices",
        score="sqrtsoftplus",
        bias="large",
        grads="logits",
        layout="strided",
        layout_of="expert_bias",
    ),
    replace(SPREAD_TOPK, experts=8, topk=3, groups=4, group_topk=2, score="sigmoid", bias="small", grads="logits"),
    replace(SPREAD_TOPK, function="topk_indices", spread="ties", dtype="bfloat16", score="softmax_pre", grads="logits"),
    replace(SPREAD_TOPK, precomputed=True, layout="transposed", layout_of="logits"),
    replace(SPREAD_TOPK, spread="minus_inf", grads="logits"),
    replace(SPREAD_TOPK, tokens=0),
    AUX,
    replace(AUX, score="sqrtsoftplus", spread="ties", grads="logits", dtype="float64"),
    replace(AUX, padding=8),
    Z,
    replace(Z, padding=0, grads="logits", dtype="float16"),
    replace(Z, spread="nan"),
    SINKHORN,
    replace(SINKHORN, topk=1, evaluation=True, grads="logits", dtype="bfloat16"),
    DROP,
    replace(DROP, pad=True, policy="position", values="zeros", map_dtype="uint8", grads="probs"),
    replace(DROP, capacity=9, values="negative", layout="strided", layout_of="probs"),
    LOSS,
    replace(LOSS, sequences=3, total="device", grads="scores", dtype="bfloat16"),
    replace(LOSS, total="zero"),
    BIAS,
    replace(BIAS, even=True, rate=250, map_dtype="int32"),
    GATE,
    replace(GATE, bias=True, router_dtype="fp64", dtype="bfloat16", weight_dtype="float32", grads="x+weight+bias"),
    replace(GATE, tokens=0),
    JITTER,
    replace(JITTER, eps=0, dtype="bfloat16"),
    ATTACH,
    replace(ATTACH, grads="x+loss", scale=-3, dtype="float16"),
    GLU,
    replace(GLU, clamp=6, offset=8, alpha=1702, interleave=2, values="bounds", weights="signed", dtype="bfloat16"),
    replace(GLU, kind="geglu", values="special", early=True, grads="", dtype="float16"),
    replace(GLU, kind="geglu_erf", values="saturated", probs="float64", layout="expanded", layout_of="d_out"),
    ACTIVATION,
    replace(ACTIVATION, kind="gelu_tanh", values="rows", dtype="bfloat16", early=True, weights="zeros"),
    replace(ACTIVATION, kind="relu", values="special", grads="", probs="bfloat16"),
    ONE_STEP,
    replace(
        ONE_STEP, scaling="mxfp8", hidden=2, align=1, slack=1, direction="both", probs="float32", grads="tokens+probs"
    ),
    replace(ONE_STEP, scaling="delayed", align=0, capacity=2, values="special"),
    ACTIVATED,
    replace(
        ACTIVATED,
        function="activation_and_quantize",
        scaling="mxfp8",
        counts=(1, 0, 2),
        tokens=3,
        width=2,
        direction="both",
        dtype="bfloat16",
    ),
    replace(ACTIVATED, function="glu_backward_and_quantize", values="special", rounded=True, interleave=2),
    replace(ACTIVATED, function="glu_backward_and_quantize", scaling="nvfp4", counts=(1, 0, 2), tokens=3, width=2),
    replace(
        ACTIVATED,
        function="activation_backward_and_quantize",
        scaling="block",
        counts=(1, 0, 2),
        tokens=3,
        width=2,
        kind="gelu_tanh",
    ),
    replace(ACTIVATED, scaling="delayed", grads="h+probs", values="rows"),
    LINEAR,
    FORWARD_LINEAR,
    replace(
        LINEAR, values="rows", tail=3, dtype="bfloat16", index_dtype="int32", layout="transposed", layout_of="weight"
    ),
    replace(LINEAR, values="special", bias="bfloat16", grads="rows+weight+bias", accumulator="float64"),
    replace(FORWARD_LINEAR, tokens=0, counts=(0, 0, 0), tail=2),
    replace(LINEAR, experts=1, counts=(), hidden=70, width=70, tokens=70),
    DGRAD,
    replace(DGRAD, values="special", tail=2, dtype="float16"),
    replace(DGRAD, layout="expanded", layout_of="d_out"),
    WGRAD,
    replace(WGRAD, values="special", tail=2, dtype="bfloat16", into="float32"),
    replace(WGRAD, into="float64", values="rows", counts=(9, 0, 0)),
    MLP,
    replace(
        MLP, values="special", bias1="float32", bias2="bfloat16", dtype="bfloat16", tail=2, align=4, recompute="moe"
    ),
    replace(FORWARD_MLP, function="sequential_mlp", on_input=True, index_dtype="int32"),
    FORWARD_MLP,
    replace(MLP, function="sequential_mlp", tail=1, recompute="moe_act"),
    replace(FORWARD_MLP, function="sequential_mlp", weights="signed"),
    SHARED,
    replace(SHARED, grads=""),
    PROJECTION,
    replace(PROJECTION, grads=""),
    replace(SHARED, gate=True, values="rows", dtype="bfloat16", again=True, grads="x+gate_weight"),
    QUANTIZE,
    replace(
        QUANTIZE,
        scaling="delayed",
        steps="quantize+update+quantize+reduced+reload+quantize",
        tail=2,
        grads="x",
        direction="both",
    ),
    replace(QUANTIZE, scaling="delayed", variant=2, role="grad_output", values="special", dtype="float16"),
    BLOCKS,
    replace(BLOCKS, variant=1, values="wide", direction="both", tail=1, dtype="bfloat16", gemm=True),
    replace(BLOCKS, role="weight", values="huge", experts=0, counts=(), layout="transposed", layout_of="x"),
    replace(QUANTIZE, variant=1, values="rows", role="weight"),
    replace(QUANTIZE, scaling="mxfp8", counts=(1, 0, 2), tokens=3, hidden=2, values="bounds", tail=3),
    replace(
        QUANTIZE,
        scaling="mxfp8",
        variant=2,
        counts=(1, 0, 2),
        tokens=3,
        hidden=2,
        values="tiny",
        role="weight",
        direction="both",
        gemm=True,
    ),
    replace(
        QUANTIZE,
        scaling="nvfp4",
        counts=(1, 0, 2),
        tokens=3,
        hidden=2,
        role="grad_output",
        direction="both",
        dtype="bfloat16",
        grads="x",
    ),
    replace(
        QUANTIZE, scaling="nvfp4", variant=1, counts=(1, 0, 2), tokens=3, hidden=2, values="zeros", dtype="float16"
    ),
    replace(
        QUANTIZE,
        scaling="nvfp4",
        variant=2,
        counts=(1, 0, 2),
        tokens=3,
        hidden=2,
        values="rows",
        direction="both",
        tail=1,
    ),
    replace(QUANTIZE, tokens=0, counts=(0, 0, 0), tail=2),
    ROUTE,
    replace(
        ROUTE,
        steps="record+forward+eval+nograd+backward+frozen+reload+train",
        sequences=2,
        losses="seq+global",
        capacity=3,
        padding=3,
    ),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.function}-{case.id}")
def test_the_reference_keeps_every_law(case):
    for law in ON_A_CPU[case.function]:
        if law.applies(case):
            outcome = outcome_of(replace(case, law=law.name), moe_ref)
            assert outcome.status in ("PASS", "UNINFORMATIVE"), (law.name, outcome)


def test_every_law_is_tried_on_the_reference():
    tried = {(case.function, law.name) for case in CALLS for law in ON_A_CPU[case.function] if law.applies(case)}
    assert tried == {(function, law.name) for function, laws in ON_A_CPU.items() for law in laws}


@pytest.mark.parametrize("law", ["token_reversal", "expert_relabelling", "batch_concat", "shift", "replay"])
def test_no_law_of_choices_is_asked_where_it_does_not_hold(law):
    assert CONTRACTS["topk_routing"].laws[law].applies(SPREAD_TOPK)
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, golden="softmax_of_all"))
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, illegal="no_slots"))
    assert (
        not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, layout="expanded", layout_of="d_probs"))
        or law == "replay"
    )


def test_what_is_added_to_all_logits_shows_where_scores_are_not_softmax():
    assert not CONTRACTS["topk_routing"].laws["shift"].applies(replace(SPREAD_TOPK, score="sigmoid"))
    assert not CONTRACTS["aux_loss_scores"].laws["shift"].applies(replace(AUX, score="sqrtsoftplus"))
    assert CONTRACTS["aux_loss_scores"].laws["shift"].applies(AUX)


@pytest.mark.parametrize(
    "law", ["token_permutation", "split", "padding_independence", "buffer_reuse", "scaling", "adjointness"]
)
def test_no_law_is_asked_where_it_does_not_hold(law):
    assert not CONTRACTS["permute"].laws[law].applies(replace(PERMUTE, golden="by_expert"))
    assert not CONTRACTS["permute"].laws[law].applies(replace(PERMUTE, illegal="align_zero"))
    assert not CONTRACTS["permute"].laws[law].applies(replace(ALIGNED, layout="expanded", layout_of="tokens"))


def test_what_raises_only_in_a_law_is_a_finding_of_that_law():
    def permute(original, tokens, routing_map, **settings):
        if len(tokens) % 2:
            raise RuntimeError("odd")
        return original(tokens, routing_map, **settings)

    finding = outcome_of(replace(FORWARD, law="split"), wrapped("permute", permute)).finding
    assert (finding["check"], "odd" in finding["message"]) == ("split", True)


class ShuffledSums:
    """Sums in another order on every run, as atomic additions do; declares nothing."""

    calls = itertools.count()

    @staticmethod
    def permute(tokens, routing_map, *, probs=None, align=None, capacity=None, num_rows=None):
        return moe_ref.permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)

    @classmethod
    def unpermute(cls, rows, row_map, *, restore_shape=None, probs=None):
        real = (row_map.token_P >= 0).nonzero().flatten()
        real = real.roll(next(cls.calls)) if next(cls.calls) % 3 else real.flip(0)
        weight = (
            torch.ones(len(real)) if probs is None else probs[row_map.token_P[real], row_map.expert_P[real]].float()
        )
        zeros = rows.new_zeros((row_map.num_tokens, rows.shape[1]), dtype=torch.float32)
        return zeros.index_add(0, row_map.token_P[real], rows[real].float() * weight[:, None]).to(rows.dtype)


SUMS = RoutingCase(
    function="unpermute", tokens=9, experts=24, hidden=5, topk=8, spread="uniform", probs="float32", values="wide"
)


def statuses(implementation, law):
    return {
        evaluate(replace(SUMS, law=law, seed=seed), Implementation(implementation, "sums")).status for seed in range(8)
    }


@pytest.mark.parametrize("law", ["scaling", "history", "determinism", "buffer_reuse", "garbage_independence"])
def test_sums_in_another_order_on_every_run_break_no_law(law):
    assert statuses(ShuffledSums, law) == {"PASS"}


def test_sums_in_another_order_on_every_run_are_found_where_determinism_is_declared():
    class Boastful(ShuffledSums):
        @staticmethod
        def declares(function):
            return {"deterministic": True}

    assert "FAIL" in statuses(Boastful, "determinism") & statuses(Boastful, "scaling")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_doubling_looks_away_from_numbers_that_are_made_of_subnormals_of_float32_alone(dtype):
    x = torch.tensor([0, 1e-39, 1e-37, 1e-20, 1.5, 1e20], dtype=dtype)
    assert ordinary(x).tolist() == [True, False, False, True, True, True]
    assert ordinary(torch.tensor([1e38], dtype=torch.float32)).tolist() == [False]
