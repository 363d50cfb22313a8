"""Defects of grouped products and MLPs: steps, tiles, empty experts, epilogues; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.gradients import with_gradient, with_gradients_of

EDGE = "a mistake that sizes at the edge of a tile invite"
BACK = "a mistake that a backward of one's own invites"
END = "a mistake that a product's epilogue invites"


def _slices(counts: Tensor) -> list[slice]:
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


# ---- layers

MLP = ("grouped_mlp", "sequential_mlp")


def _second_bias_unweighted(
    mlp: Wrapper, rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any
) -> Any:
    out, bias, probs = mlp(rows, counts, fc1, fc2, **settings), settings.get("fc2_bias"), settings.get("probs")
    if bias is None or probs is None or settings.get("probs_on_input"):
        return out
    every = torch.zeros_like(out, dtype=torch.float64)
    for expert, part in enumerate(_slices(counts)):
        every[part] = bias[expert].detach().double() * (1 - probs[part].detach().double())[:, None]
    return with_gradients_of((out.double() + every).to(out.dtype), out)


def _recomputed_without(*names: str) -> Wrapper:
    """The activation that is computed again lacks some options."""

    def layer(base: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
        out, rest = base(*tensors, **settings), {name: x for name, x in settings.items() if name not in names}
        again = settings.get("recompute") and out.requires_grad and len(rest) < len(settings)
        return with_gradients_of(out, base(*tensors, **rest)) if again else out

    return layer


def _no_gradient_of_probs_on_the_input(
    mlp: Wrapper, rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any
) -> Any:
    probs = settings.get("probs")
    if probs is not None and settings.get("probs_on_input"):
        settings["probs"] = with_gradient(probs, torch.zeros_like)
    return mlp(rows, counts, fc1, fc2, **settings)


def _one_row_is_none(mlp: Wrapper, rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
    """An expert with one row is squeezed to a vector, and skipped."""
    out = mlp(rows, counts, fc1, fc2, **settings)
    alone = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device)
    for part in _slices(counts):
        alone[part] = part.stop - part.start == 1
    return torch.where(alone, 0.0, out)


def _gate_without_a_gradient(shared: Wrapper, x: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
    gate = settings.get("gate_weight")
    return shared(
        x, fc1, fc2, **settings | ({} if gate is None else {"gate_weight": with_gradient(gate, torch.zeros_like)})
    )


def _gate_is_constant(shared: Wrapper, x: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
    """x has no gradient through the gate; other gradients are right."""
    out, gate = shared(x, fc1, fc2, **settings), settings.get("gate_weight")
    if gate is None or not out.requires_grad or settings.get("noise") is not None or settings.get("state") is not None:
        return out
    bare = shared(x, fc1, fc2, **{name: value for name, value in settings.items() if name != "gate_weight"})
    score = torch.sigmoid(x.detach().double() @ gate.detach().double().T).to(bare.dtype)
    of_gate = shared(x.detach(), fc1.detach(), fc2.detach(), **settings)
    return with_gradients_of(out, bare * score, of_gate)


DEFECTS: tuple[Defect, ...] = (
    Defect("Y35", "the second bias is not weighted", END, dict.fromkeys(MLP, _second_bias_unweighted)),
    Defect(
        "Y36",
        "what is computed again has no clamp",
        BACK,
        dict.fromkeys((*MLP, "shared_experts"), _recomputed_without("clamp")),
    ),
    Defect(
        "Y37",
        "what is computed again has no offset and no alpha",
        BACK,
        dict.fromkeys((*MLP, "shared_experts"), _recomputed_without("offset", "alpha")),
    ),
    Defect("Y38", "probs on the input have no gradient", BACK, dict.fromkeys(MLP, _no_gradient_of_probs_on_the_input)),
    Defect("Y39", "an expert with one row is skipped", EDGE, {"sequential_mlp": _one_row_is_none}),
    Defect("Y40", "the gate of shared experts has no gradient", BACK, {"shared_experts": _gate_without_a_gradient}),
    Defect("Y41", "x has no gradient through the gate", BACK, {"shared_experts": _gate_is_constant}),
)
