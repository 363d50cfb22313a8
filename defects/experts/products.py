"""Defects of grouped products and MLPs: steps, tiles, empty experts, epilogues; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to, with_gradient, with_gradients_of

LOOP = "a mistake that a loop over a contraction invites"
EMPTY = "a mistake that empty experts invite"
EDGE = "a mistake that sizes at the edge of a tile invite"
BACK = "a mistake that a backward of one's own invites"
END = "a mistake that a product's epilogue invites"
LATE = "Megatron-LM #2977, 0.16"
STEP, TILE, PASSED_OVER = 128, 128, 2


def _plain(settings: dict[str, Any]) -> bool:
    return settings.get("recipe") is None


def _two_steps(columns: Tensor) -> Tensor:
    """Exactly two steps: the second reads the buffer of the first."""
    second = columns.shape[1] - STEP
    if not 0 < second <= STEP:
        return columns
    return torch.cat([columns[:, :STEP], columns[:, :second]], 1)


def _no_short_tail(columns: Tensor) -> Tensor:
    """A last step of one term is rounded away with the number of steps."""
    short = columns.shape[1] > STEP and columns.shape[1] % STEP == 1
    return torch.cat([columns[:, :-1], torch.zeros_like(columns[:, -1:])], 1) if short else columns


def _rounded_number_of_steps(columns: Tensor) -> Tensor:
    """A last step of less than half a step is rounded away."""
    tail = columns.shape[1] % STEP
    short = columns.shape[1] > STEP and 0 < tail < STEP // 2
    return torch.cat([columns[:, :-tail], torch.zeros_like(columns[:, -tail:])], 1) if short else columns


def _contracted(change: Callable[[Tensor], Tensor]) -> Wrapper:
    """A product of changed rows, whose columns are contracted."""

    def product(base: Wrapper, rows: Tensor, weight: Tensor, *rest: Any, **settings: Any) -> Any:
        out = base(rows, weight, *rest, **settings)
        changed = with_values(rows, change) if rows.dim() == 2 and _plain(settings) else rows
        return out if changed is rows else base(changed, weight, *rest, **settings)

    return product


def _slices(counts: Tensor) -> list[slice]:
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _legal(counts: Tensor, rows: Tensor, settings: dict[str, Any]) -> bool:
    integers = counts.dim() == 1 and not counts.is_floating_point()
    return integers and _plain(settings) and bool((counts >= 0).all()) and int(counts.sum()) <= len(rows)


def _without_rows(which: Callable[[Tensor], list[int]]) -> Wrapper:
    """The rows with these numbers are left out of the product."""

    def product(base: Wrapper, rows: Tensor, other: Tensor, counts: Tensor, /, **settings: Any) -> Any:
        if not _legal(counts, rows, settings):
            return base(rows, other, counts, **settings)
        lost = torch.tensor(which(counts), dtype=torch.int64, device=rows.device)
        changed = with_values(rows, lambda x: x.index_fill(0, lost, 0.0)) if len(lost) else rows
        return base(changed, other, counts, **settings)

    return product


def _last_of_a_tile(counts: Tensor) -> list[int]:
    return [rows.stop - 1 for rows in _slices(counts) if rows.stop - rows.start == TILE]


def _first_past_a_tile(counts: Tensor) -> list[int]:
    return [rows.stop - 1 for rows in _slices(counts) if rows.stop - rows.start == TILE + 1]


def _behind_an_empty_one(counts: Tensor) -> list[int]:
    empty = (counts == 0).nonzero().flatten().tolist()
    return [] if not empty else list(range(int(counts[: empty[0]].sum()), int(counts.sum())))


def _behind_a_long_run(counts: Tensor) -> list[int]:
    """The next expert is searched among three."""
    found, run = [], 0
    for rows, count in zip(_slices(counts), counts.tolist(), strict=True):
        found += list(range(rows.start, rows.stop)) if run > PASSED_OVER else []
        run = 0 if count else run + 1
    return found


def _empty_expert_cleared(wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    out = wgrad(d_out, rows, counts, **settings)
    if settings.get("accumulate_into") is None:
        return out
    return torch.where((counts == 0)[:, None, None], 0.0, out)


def _rounded_before_it_is_added(wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    out, into = wgrad(d_out, rows, counts, **settings), settings.get("accumulate_into")
    if into is None:
        return out
    product = wgrad(d_out, rows, counts, **settings | {"accumulate_into": None})
    return torch.where((counts == 0)[:, None, None], out, into + product.to(into.dtype))


def _bias_after_rounding(base: Wrapper, rows: Tensor, weight: Tensor, *counts: Tensor, **settings: Any) -> Any:
    out, bias = base(rows, weight, *counts, **settings), settings.get("bias")
    if bias is None:
        return out
    product = base(rows, weight, *counts, **settings | {"bias": None})
    if not counts:
        return with_gradients_of((product.double() + bias.double()).to(out.dtype), out)
    every = torch.zeros(len(rows), bias.shape[1], dtype=torch.float64, device=rows.device)
    for expert, part in enumerate(_slices(counts[0])):
        every[part] = bias[expert].detach().double()
    return with_gradients_of((product.double() + every).to(out.dtype), out)


def _bias_of_the_tail(base: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    """The gradient of the last expert's bias adds the rows past it."""
    out, bias = base(rows, weight, counts, **settings), settings.get("bias")
    if bias is None or not bias.requires_grad:
        return out
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["tail"] = g[int(counts.sum()) :].sum(0)
        return g

    def more(g: Tensor) -> Tensor:
        return torch.cat([g[:-1], (g[-1] + seen["tail"].to(g.dtype))[None]])

    return with_gradient(base(rows, weight, counts, **settings | {"bias": with_gradient(bias, more)}), noted)


def _with_bias(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Wrapper:
    """The product with change(bias, rows, weight)."""

    def product(base: Wrapper, rows: Tensor, weight: Tensor, *counts: Tensor, **settings: Any) -> Any:
        out, bias = base(rows, weight, *counts, **settings), settings.get("bias")
        return out if bias is None else base(rows, weight, *counts, **settings | {"bias": change(bias, rows, weight)})

    return product


def _bias_gradient_in_the_dtype_of_rows(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return with_gradient(bias, rounded_to(rows.dtype))


def _bias_with_the_weight(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return bias if weight.requires_grad else with_gradient(bias, torch.zeros_like)


def _tail_unwritten(dgrad: Wrapper, d_out: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    out = dgrad(d_out, weight, counts, **settings)
    total = int(counts.sum())
    return torch.cat([out[:total], torch.empty_like(out[total:])])


def _no_weight_gradient(latent: Wrapper, x: Tensor, weight: Tensor, /, **settings: Any) -> Any:
    return latent(x, with_gradient(weight, torch.zeros_like), **settings)


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


LINEAR = ("grouped_linear", "grouped_dgrad")
THREE = (*LINEAR, "grouped_wgrad")
DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Y20",
        "of two steps the second reads the first one's buffer",
        LOOP,
        dict.fromkeys((*LINEAR, "latent_projection"), _contracted(_two_steps)),
    ),
    Defect(
        "Y21",
        "a last step of one term is left out",
        LOOP,
        dict.fromkeys((*LINEAR, "latent_projection"), _contracted(_no_short_tail)),
    ),
    Defect(
        "Y22",
        "the number of steps is rounded to nearest",
        LOOP,
        dict.fromkeys((*LINEAR, "latent_projection"), _contracted(_rounded_number_of_steps)),
    ),
    Defect(
        "Y23",
        "the last row of exactly one tile is left out",
        EDGE,
        dict.fromkeys(THREE, _without_rows(_last_of_a_tile)),
    ),
    Defect("Y24", "the one row past a tile is left out", EDGE, dict.fromkeys(THREE, _without_rows(_first_past_a_tile))),
    Defect(
        "Y25",
        "the first empty expert ends the loop",
        "as TransformerEngine #3212 of its optimizer, to 2.17.1",
        dict.fromkeys(THREE, _without_rows(_behind_an_empty_one)),
    ),
    Defect(
        "Y26",
        "three empty experts end the search for the next",
        EMPTY,
        dict.fromkeys(THREE, _without_rows(_behind_a_long_run)),
    ),
    Defect("Y27", "an empty expert's accumulated gradient is cleared", EMPTY, {"grouped_wgrad": _empty_expert_cleared}),
    Defect("Y28", "a product is rounded before it is accumulated", END, {"grouped_wgrad": _rounded_before_it_is_added}),
    Defect(
        "Y29",
        "the bias is added after the product is rounded",
        END,
        dict.fromkeys(("grouped_linear", "latent_projection"), _bias_after_rounding),
    ),
    Defect("Y30", "the gradient of the last bias adds the rows past it", BACK, {"grouped_linear": _bias_of_the_tail}),
    Defect(
        "Y31",
        "the gradient of a bias is rounded to the rows' dtype",
        BACK,
        dict.fromkeys(("grouped_linear", "latent_projection"), _with_bias(_bias_gradient_in_the_dtype_of_rows)),
    ),
    Defect(
        "Y32",
        "a bias has a gradient only if the weight has one",
        BACK,
        dict.fromkeys(("grouped_linear", "latent_projection"), _with_bias(_bias_with_the_weight)),
    ),
    Defect("Y33", "rows past the last expert are not written", EDGE, {"grouped_dgrad": _tail_unwritten}),
    Defect(
        "Y34", "the weight of a latent projection has no gradient", LATE, {"latent_projection": _no_weight_gradient}
    ),
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
