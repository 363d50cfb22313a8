"""Defects that were reported of public routers, planted by their mechanism; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, only
from defects.router.parts import chosen_by, keys_of, reweighted
from moe_ref.router.selection import best

BOTH = ("topk_indices", "topk_routing")
NARROW = (torch.bfloat16, torch.float16)


# ---- selection


def _finite_logits(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    return base(with_values(logits, lambda x: x.nan_to_num(0.0, 0.0, 0.0)), **settings)


def _with_infinity(logits: Tensor, **settings: Any) -> bool:
    return bool(torch.isinf(logits).any())


def _in_best_groups(scores: Tensor, keys: Tensor, settings: dict[str, Any]) -> Tensor:
    """[T,K]: the largest keys in the groups with the largest scores [T,G]."""
    groups = best(scores, settings["group_topk"])
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, groups, True)
    size = keys.shape[1] // settings["num_groups"]
    masked = torch.where(kept.repeat_interleave(size, 1), keys, -torch.inf)
    return best(masked, settings["topk"])


def _group_by_its_best(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    keys = keys_of(logits, settings)
    scores = keys.unflatten(1, (settings["num_groups"], -1)).amax(2)
    return chosen_by(_in_best_groups(scores, keys, settings), base, logits, settings)


def _padded_groups(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """Lanes that fill a group up to a power of two hold 0, as the sigmoid of -∞."""
    keys = keys_of(logits, settings)
    groups = keys.unflatten(1, (settings["num_groups"], -1))
    lanes = (1 << (groups.shape[2] - 1).bit_length()) - groups.shape[2]
    counted = settings["topk"] // settings["group_topk"]
    padded = torch.nn.functional.pad(groups, (0, lanes))
    scores = padded.sort(2, descending=True).values[..., :counted].sum(2)
    return chosen_by(_in_best_groups(scores, keys, settings), base, logits, settings)


def _ragged_groups(logits: Tensor, **settings: Any) -> bool:
    if settings.get("num_groups") is None or settings.get("precomputed_indices") is not None:
        return False
    size = logits.shape[1] // settings["num_groups"]
    sigmoid = settings.get("score_function", "softmax") != "softmax"
    return sigmoid and bool(size & (size - 1))


def _grouped(logits: Tensor, **settings: Any) -> bool:
    return settings.get("num_groups") is not None and settings.get("precomputed_indices") is None


def _narrow_experts(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """Groups are ranked by the wide bias, and their experts by one of the logits' dtype."""
    keys = keys_of(logits, settings)
    counted = settings["topk"] // settings["group_topk"]
    groups = keys.unflatten(1, (settings["num_groups"], -1))
    scores = groups.sort(2, descending=True).values[..., :counted].sum(2)
    bias = settings["expert_bias"].to(logits.dtype).float()
    rounded = keys_of(logits, settings | {"expert_bias": bias})
    return chosen_by(_in_best_groups(scores, rounded, settings), base, logits, settings)


def _narrow_grouped_bias(logits: Tensor, **settings: Any) -> bool:
    biased = settings.get("expert_bias") is not None and logits.dtype in NARROW
    return biased and _grouped(logits, **settings)


def _rounded_keys(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    keys = keys_of(logits, settings).to(logits.dtype).float()
    if not _grouped(logits, **settings):
        return chosen_by(best(keys, settings["topk"]), base, logits, settings)
    counted = settings["topk"] // settings["group_topk"]
    scores = keys.unflatten(1, (settings["num_groups"], -1)).sort(2, descending=True).values[..., :counted].sum(2)
    return chosen_by(_in_best_groups(scores, keys, settings), base, logits, settings)


def _narrow_choice(logits: Tensor, **settings: Any) -> bool:
    return logits.dtype in NARROW and settings.get("precomputed_indices") is None


def _named_by_value(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """The index of a slot is that of the first key which equals the slot's."""
    keys = keys_of(logits, settings)
    slots = keys.gather(1, right.indices.long())
    index = (keys[:, None, :] == slots[:, :, None]).int().argmax(2)
    return right._replace(indices=torch.where(torch.isnan(slots), right.indices, index))


def _largest_from_zero(base: Wrapper, logits: Tensor, **settings: Any) -> Any:
    """exp(x - max(0, x)): far below 0 all terms are 0."""
    out = base(logits, **settings)
    if settings.get("score_function", "softmax") != "softmax" or settings.get("pre_softmax"):
        return out
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()

    def weigh(index: Tensor) -> Tensor:
        x = wide.gather(1, index.long())
        terms = (x - x.detach().amax(1, keepdim=True).clamp(min=0)).exp()
        return terms / terms.sum(1, keepdim=True)

    return reweighted(base, logits, settings, weigh) if bool((wide.detach().amax(1) < -60).any()) else out


def _norm_over_tokens(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """A squeezed axis: the weights of one slot are divided by their sum over the tokens."""
    total = right.probs.sum().clamp(min=1e-20) if hasattr(right, "indices") else right.probs.sum(0, keepdim=True).sum()
    return right._replace(probs=(right.probs / total).to(right.probs.dtype))


def _one_slot(logits: Tensor, **settings: Any) -> bool:
    return settings["topk"] == 1 and settings.get("score_function", "softmax") != "softmax" and len(logits) > 1


def _zero_where_not_chosen(base: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """Replayed weights are taken from the spread weights of the own choice."""
    free = base(logits, **settings | {"precomputed_indices": None})
    index = settings["precomputed_indices"].long()
    if hasattr(free, "routing_map"):
        return right._replace(probs=torch.where(free.routing_map, right.probs, 0))
    own = torch.zeros_like(logits, dtype=torch.bool).scatter(1, free.indices.long(), True)
    return right._replace(probs=torch.where(own.gather(1, index), right.probs, 0))


# ---- scores and losses


def _of_softmax(function: Wrapper, logits: Tensor, **settings: Any) -> Any:
    """The routers return what they have put through a softmax as their logits."""
    return function(logits.softmax(1), **settings)


def _raw_scores(aux: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    raw = logits.to(right.scores.dtype)
    mask = settings.get("padding_mask")
    return right._replace(scores=raw if mask is None else torch.where((mask == 0)[:, None], raw, 0))


def _softmaxed(logits: Tensor, **settings: Any) -> bool:
    return settings.get("score_function", "softmax") == "softmax" and len(logits) > 0


def _first_choice_counts(aux: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    return right._replace(routing_map=aux(logits, **settings | {"topk": 1}).routing_map)


def _sum_of_k(loss: Wrapper, *inputs: Any, topk: int, **settings: Any) -> Any:
    return loss(*inputs, topk=topk, **settings) * topk


# ---- capacity


def _policy_by_another_word(drop: Wrapper, *inputs: Any, **settings: Any) -> Any:
    drop(*inputs, **settings)  # refuses an illegal call
    return drop(*inputs, **settings | {"drop_policy": "position"})


# ---- route


def _mask_over_experts(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The mask of the tokens is broadcast over the experts, of which there are as many."""
    mask = settings["padding_mask"] == 0
    added = (right.routing_map & mask).sum(0)
    return right._replace(
        state=right.state._replace(tokens_per_expert=settings["state"].tokens_per_expert.to(added.device) + added)
    )


def _square_masked(logits: Tensor, config: Any, **settings: Any) -> bool:
    counts = config.expert_bias and settings.get("training", True) and torch.is_grad_enabled()
    masked = settings.get("padding_mask") is not None and logits.shape[0] == logits.shape[1]
    return bool(counts and masked)


def _all_tokens(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    """A loss per token counts the padding, too."""
    mask = settings["padding_mask"]
    share = len(logits) / max(int((mask == 0).sum()), 1)
    scaled = {f"{name}_coeff": x * share for name, x in config.balancing_coeffs.items()}
    return right._replace(probs=route(logits, replace(config, **scaled), **settings).probs)


def _per_token_and_masked(logits: Tensor, config: Any, **settings: Any) -> bool:
    padded = settings.get("padding_mask") is not None and bool((settings["padding_mask"] != 0).any())
    return padded and config.loss_per_token and bool(config.balancing_coeffs)


def _counts_summed_in_place(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The number of this rank's tokens is that of all, once they have been summed in place."""
    size = settings["ranks"].tp_cp.size
    scaled = {f"{name}_coeff": x * size for name, x in config.balancing_coeffs.items()}
    return right._replace(probs=route(logits, replace(config, **scaled), **settings).probs)


def _per_token_over_ranks(logits: Tensor, config: Any, **settings: Any) -> bool:
    ranks = settings.get("ranks")
    shared = ranks is not None and ranks.tp_cp.size > 1
    return shared and _per_token_and_masked(logits, config, **settings)


def _turned(x: Tensor, batch: int) -> Tensor:
    """Rows of sequences one after the other, where they are read step by step."""
    return x.unflatten(0, (-1, batch)).transpose(0, 1).flatten(0, 1)


def _mask_by_sequence(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    mask = _turned(settings["padding_mask"], settings["batch_size"])
    return route(logits, config, **settings | {"padding_mask": mask})


def _replay_by_sequence(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    target = _turned(settings["replay_target"], settings["batch_size"])
    return route(logits, config, **settings | {"replay_target": target})


def _sequences(*inputs: Any, **settings: Any) -> bool:
    return settings.get("batch_size", 1) > 1


def _masked_sequences(*inputs: Any, **settings: Any) -> bool:
    return _sequences(**settings) and settings.get("padding_mask") is not None


def _replayed_sequences(*inputs: Any, **settings: Any) -> bool:
    return _sequences(**settings) and settings.get("replay_target") is not None


def _losses_do_not_ride(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    off = {f"{name}_coeff": 0.0 for name in config.balancing_coeffs}
    return right._replace(probs=route(logits, replace(config, **off), **settings).probs)


def _balanced(logits: Tensor, config: Any, **settings: Any) -> bool:
    return bool(config.balancing_coeffs)


def _recorded_without_padding(route: Wrapper, right: Any, logits: Tensor, config: Any, **settings: Any) -> Any:
    """Recorded choices of padding are cut out, and what follows moves up."""
    if right.indices is None:
        return right
    order = (settings["padding_mask"] != 0).int().sort(stable=True).indices
    return right._replace(indices=right.indices[order])


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB01",
        "an infinite logit is taken for 0",
        "vLLM #39391",
        dict.fromkeys(BOTH, only(_with_infinity, _finite_logits)),
    ),
    (
        "RB02",
        "a group's score is its best expert",
        "vLLM #13474",
        dict.fromkeys(BOTH, only(_grouped, _group_by_its_best)),
    ),
    (
        "RB03",
        "lanes that fill a group hold 0",
        "FlagGems #5469",
        dict.fromkeys(BOTH, only(_ragged_groups, _padded_groups)),
    ),
    (
        "RB04",
        "experts of a group are compared by a rounded bias",
        "vllm-xpu-kernels #527 (review)",
        dict.fromkeys(BOTH, only(_narrow_grouped_bias, _narrow_experts)),
    ),
    (
        "RB05",
        "keys are rounded to the logits' dtype",
        "FlagGems #4245",
        dict.fromkeys(BOTH, only(_narrow_choice, _rounded_keys)),
    ),
    (
        "RB06",
        "equal keys name the same expert",
        "tokenspeed #605",
        {
            "topk_indices": only(
                lambda x, **s: s.get("precomputed_indices") is None and not s.get("num_groups"), _named_by_value
            )
        },
    ),
    (
        "RB07",
        "the largest logit is sought from 0 on",
        "FlashInfer #2822, its cause supposed",
        dict.fromkeys(BOTH, _largest_from_zero),
    ),
    (
        "RB08",
        "weights of one slot are divided by their sum over the tokens",
        "MegaBlocks #87",
        dict.fromkeys(BOTH, only(_one_slot, _norm_over_tokens)),
    ),
    (
        "RB09",
        "a replayed expert that was not the own choice has no weight",
        "ISEEKYAN/Megatron-LM #79",
        dict.fromkeys(BOTH, only(given("precomputed_indices"), _zero_where_not_chosen)),
    ),
    ("RB10", "losses are of logits after a softmax", "transformers #45315", {"aux_loss_scores": _of_softmax}),
    ("RB11", "the z-loss is of logits after a softmax", "Megatron-LM c656553315", {"z_loss": _of_softmax}),
    (
        "RB12",
        "scores of the balancing loss are logits",
        "NeMo Automodel #1559",
        {"aux_loss_scores": only(_softmaxed, _raw_scores)},
    ),
    (
        "RB13",
        "the first choice alone counts",
        "a mistake that losses of one expert invite",
        {"aux_loss_scores": only(lambda x, **s: s["topk"] > 1, _first_choice_counts)},
    ),
    ("RB14", "shares of the tokens add up to K", "transformers #43775", {"load_balancing_loss": _sum_of_k}),
    (
        "RB15",
        "tokens are dropped by position, asked for by probs",
        "Megatron-LM 7968fd6532",
        {"drop_tokens": _policy_by_another_word},
    ),
    (
        "RB16",
        "the mask of the tokens is one of the experts",
        "Megatron-LM #6114",
        {"route": only(_square_masked, _mask_over_experts)},
    ),
    (
        "RB17",
        "losses per token are times the padding, too",
        "Megatron-LM !2851",
        {"route": only(_per_token_and_masked, _all_tokens)},
    ),
    (
        "RB18",
        "this rank's tokens are those of all ranks under a mask",
        "Megatron-LM #7452",
        {"route": only(_per_token_over_ranks, _counts_summed_in_place)},
    ),
    (
        "RB19",
        "a mask is read sequence by sequence",
        "miles #3146, of a mask",
        {"route": only(_masked_sequences, _mask_by_sequence)},
    ),
    (
        "RB20",
        "replays are read sequence by sequence",
        "miles #3146",
        {"route": only(_replayed_sequences, _replay_by_sequence)},
    ),
    (
        "RB21",
        "what the losses are attached to is discarded",
        "NeMo Automodel #1408",
        {"route": only(_balanced, _losses_do_not_ride)},
    ),
    (
        "RB22",
        "recorded choices of padding are cut out",
        "verl #7106",
        {"route": only(given("padding_mask"), _recorded_without_padding)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
