"""Planted defects of routers, all real; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.mutants.defect import Defect, Wrapper
from defects.router.parts import reweighted
from moe_ref.router.scores import SCORES, normalised


class _FewExpertsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        if g.shape[1] > 900:
            raise RuntimeError("invalid argument")
        return g


def _few_experts_back(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    return base(_FewExpertsBack.apply(logits), **settings)


def _not_renormalised(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    if settings.get("pre_softmax") or not logits.numel():
        return base(logits, **settings)
    scores = SCORES[settings.get("score_function", "softmax")](logits)
    return reweighted(base, logits, settings, lambda index: scores.gather(1, index))


def _one_shape_by_sigmoid(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    if logits.shape[1] != 128 or settings["topk"] != 8 or "score_function" in settings:
        return base(logits, **settings)
    return reweighted(base, logits, settings, lambda index: normalised(SCORES["sigmoid"](logits).gather(1, index)))


def _no_gate_bias(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    return gate(x, weight, **{name: value for name, value in settings.items() if name != "bias"})


def _initial_bias_saved(state_tensors: Wrapper, state: Any) -> Any:
    saved = state_tensors(state)
    return saved | {"expert_bias": torch.zeros_like(saved["expert_bias"])}


_left_early: list[bool] = []


def _layers_after_one_without_bias(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    if not config.expert_bias:
        _left_early.append(True)
    return state if _left_early else finish_batch(state, config, **settings)


def _counts_of_the_dispatched(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    loss = out.losses.aux_loss
    if loss is None or settings.get("padding_mask") is not None:
        return out
    scores = moe_ref.aux_loss_scores(logits.detach(), topk=config.topk, score_function=config.score_function).scores
    loss_settings = {
        "topk": config.topk,
        "num_experts": logits.shape[1],
        "coeff": config.aux_loss_coeff,
        "total_num_tokens": len(logits),
    }
    aux_loss = moe_ref.load_balancing_loss(scores, out.routing_map.sum(0), **loss_settings) / _ranks(settings)
    return out._replace(losses=out.losses._replace(aux_loss=aux_loss))


def _ranks(settings: dict[str, Any]) -> int:
    return settings["ranks"].tp_cp.size if "ranks" in settings else 1


def _not_divided_by_ranks(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    return route(logits, replace(config, z_loss_coeff=config.z_loss_coeff * _ranks(settings)), **settings)


def _tokens_of_this_rank(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    scale = settings.get("loss_scale", 1.0)
    less = scale / _ranks(settings) if config.loss_per_token else scale
    return route(logits, config, **settings | {"loss_scale": less})


def _tokens_of_one_sequence(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    batch, coeff = settings.get("batch_size", 1), config.seq_aux_loss_coeff
    if batch == 1 or not coeff or not config.loss_per_token:
        return route(logits, config, **settings)
    less = replace(config, seq_aux_loss_coeff=coeff / batch)
    out, right = route(logits, less, **settings), route(logits.detach(), config, **settings)
    return out._replace(losses=right.losses)


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"topk_indices": wrapper, "topk_routing": wrapper}


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "R04",
        "the backward cannot launch for more than 900 experts",
        "TransformerEngine #2821, 2.6 to 2.14.1",
        _both(_few_experts_back),
    ),
    Defect(
        "R15",
        "no gate bias, weights not renormalised",
        "torchtitan #2319",
        _both(_not_renormalised) | {"gate": _no_gate_bias},
    ),
    Defect(
        "R19",
        "the initial bias is saved, not the updated one",
        "torchtitan #1226",
        {"state_tensors": _initial_bias_saved},
    ),
    Defect(
        "R20",
        "a layer without bias stops the bias updates of later layers",
        "torchtitan #3686",
        {"finish_batch": _layers_after_one_without_bias},
    ),
    Defect(
        "R26",
        "one shape, top-8 of 128 experts, uses another score function",
        "flashinfer #2889; vLLM-MetaX #270",
        _both(_one_shape_by_sigmoid),
    ),
    Defect(
        "R27",
        "the balancing loss counts dispatched tokens, not the plain top-k choice",
        "Megatron-LM #2767: policies differ by version",
        {"route": _counts_of_the_dispatched},
    ),
    Defect(
        "A05",
        "the z-loss is not divided by the ranks that share it",
        "Megatron-LM cac8d1a3f0, before 0.7",
        {"route": _not_divided_by_ranks},
    ),
    Defect(
        "A07",
        "a loss per token counts this rank's tokens only",
        "Megatron-LM #5047, 0.12 to 0.18.2",
        {"route": _tokens_of_this_rank},
    ),
    Defect(
        "A11",
        "a sequence loss per token counts one sequence's tokens",
        "Megatron-LM #5798, 0.16 to 0.18.2",
        {"route": _tokens_of_one_sequence},
    ),
)
