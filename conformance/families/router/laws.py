"""Laws of the router: transformations that keep choices, weights and losses.

Most transform the inputs, run again, transform the outputs back and judge them by the first run's
expectations, which hold again in exact arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core import universal_laws as universal
from conformance.core.autocast import AUTOCAST
from conformance.core.contract import Problem
from conformance.core.double_backward import DOUBLE_BACKWARD
from conformance.core.law import Law, Trial, plain
from conformance.core.row_laws import BATCH_CONCAT, TOKEN_REVERSAL, any_of_equals
from conformance.core.shared_out_laws import SHARED_OUT, of_one_process
from conformance.judge import Bounded, Finding, judge

PER_EXPERT = ("expert_bias", "tokens_per_expert")
SIGMAS = 6  # standard errors over √n, for u uniform in ±1: 1/√3 of the mean, 1/√15 of the deviation
FINE = ("float32", "float64")  # dtypes whose factors differ
STEPS = 2**16  # steps in which factors are compared; rounding moves equal factors by less
FACTOR_BINS = 1024  # bins of the factors of jitter


def _flipped(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim) if x.dim() > dim else x


def _turned(problem: Problem, turn: Callable[[str, Tensor], Tensor]) -> Problem:
    cotangents = {name: turn(name, x) for name, x in problem.cotangents.items()}
    return replace(
        problem.with_tensors({name: turn(name, x) for name, x in problem.tensors.items()}), cotangents=cotangents
    )


def _expert_relabelling(trial: Trial) -> Finding | None:
    """Experts in reverse order: the same experts under new indices."""
    last = trial.case.experts - 1
    slots = trial.case.function == "topk_indices"  # outputs [T,K]

    def turn(name: str, x: Tensor) -> Tensor:
        if name == "precomputed_indices":
            return last - x
        if name in PER_EXPERT:
            return x.flip(0)
        return x if slots and name == "probs" else _flipped(x, 1)

    def back(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if name == "indices":
            return last - x
        if name in PER_EXPERT:
            return x.flip(0)
        return x if slots and name == "probs" else _flipped(x, 1)

    outputs = {name: back(name, x) for name, x in trial.run(_turned(trial.problem, turn)).items()}
    return trial.judged("expert_relabelling", any_of_equals(trial.expected), outputs)


def _shift(trial: Trial) -> Finding | None:
    """A constant is added to all logits: a softmax does not change."""
    second = trial.problem.with_tensors({"logits": trial.problem.required["logits"] + 2})
    return trial.judged("shift", trial.expected, trial.run(second))


def _chosen(trial: Trial) -> Tensor:
    """The experts that the first run chose, as indices [T,K]."""
    if "indices" in trial.first:
        return trial.first["indices"].long()
    return trial.first["routing_map"].nonzero()[:, 1].reshape(trial.case.tokens, trial.case.topk)


def _replay(trial: Trial) -> Finding | None:
    """The chosen experts are given as precomputed indices: the weights are the same, without bias
    and groups.
    """
    index = _chosen(trial)
    settings = {
        name: x for name, x in trial.problem.settings.items() if name not in ("expert_bias", "num_groups", "group_topk")
    }
    cotangents = trial.problem.cotangents
    outputs = trial.run(
        replace(trial.problem, settings=settings | {"precomputed_indices": index}, cotangents=cotangents)
    )
    return trial.judged("replay", trial.expected, outputs)


def _padding_tokens(trial: Trial) -> Finding | None:
    """Other logits in rows of padding change no output."""
    padding = trial.problem.settings["padding_mask"]
    logits = torch.where(
        padding[:, None],
        torch.full((), 5.0, dtype=trial.problem.required["logits"].dtype),
        trial.problem.required["logits"],
    )
    return trial.judged("padding_tokens", trial.expected, trial.run(trial.problem.with_tensors({"logits": logits})))


def _shares(trial: Trial) -> Finding | None:
    """The losses of the two halves of the tokens add up to the whole loss."""
    half = trial.case.tokens // 2
    half_losses = []
    for rows in (slice(0, half), slice(half, None)):
        scores = trial.problem.required["scores"][rows].clone()
        half_losses.append(
            trial.run(replace(trial.problem.with_tensors({"scores": scores}), wanted=(), cotangents={}))["loss"]
        )
    full_loss = trial.expected["loss"].resolve(trial.first)
    assert isinstance(full_loss, Bounded)
    return judge_law(
        "shares",
        "loss",
        Bounded(full_loss.value, 3 * full_loss.bound, full_loss.dtype, full_loss.accumulator),
        sum(half_losses),
    )


def judge_law(law: str, output: str, expected: Bounded, observed: Any) -> Finding | None:
    finding = judge(output, expected, observed)
    return Finding(output, law, finding.message, finding.index) if finding else None


def _evenly_spread(trial: Trial) -> Finding | None:
    """The factors are uniform in [1 - eps, 1 + eps]; elements and calls have their own."""
    x, eps = trial.problem.required["x"].double(), trial.problem.settings["eps"]
    second_output = trial.run(trial.problem)["x"].double()
    u_TH = (trial.first["x"].double() / x - 1) / eps
    u = u_TH[x != 0]
    if len(u) < 64:
        return None
    mean, width = float(u.mean()), float(u.std())
    if abs(mean) > SIGMAS * 3**-0.5 / math.sqrt(len(u)) or abs(width - 3**-0.5) > SIGMAS * 15**-0.5 / math.sqrt(len(u)):
        return Finding(
            "x",
            "evenly_spread",
            f"its factors have mean 1 {mean:+.2f} eps and deviation {width:.2f} eps; uniform ones have 1 and 0.58 eps",
        )
    if len(u) >= FACTOR_BINS and _few_values(u):
        return Finding("x", "evenly_spread", "has few different factors")
    steps_TH = (u_TH * STEPS).round()[(x != 0).all(1)]
    if x.shape[1] >= 8 and len(steps_TH.unique(dim=0)) < len(steps_TH):
        return Finding("x", "evenly_spread", "has the same factors in two rows")
    if trial.case.dtype == "float64" and _of_float32(u):
        return Finding("x", "evenly_spread", "has the factors that float32 has; they are drawn in x's dtype")
    shared = _most_neighbours_alike(u_TH * eps, eps)
    if shared:
        return Finding("x", "evenly_spread", f"has one factor for most neighbours along {shared}")
    return (
        Finding("x", "evenly_spread", "is the same twice")
        if torch.equal(second_output, trial.first["x"].double())
        else None
    )


def _of_float32(u: torch.Tensor) -> bool:
    """Whether numbers from -1 to 1 are all multiples of 2⁻²³, like those that float32 draws."""
    steps = u * 2.0**23
    return bool(((steps - steps.round()).abs() < 2.0**-6).all())


def _few_values(u: torch.Tensor) -> bool:
    """Whether numbers from -1 to 1 fall into fewer than half of the bins into which uniform numbers
    fall.
    """
    met = ((u + 1) * (FACTOR_BINS // 2)).floor().unique()
    return len(met) < FACTOR_BINS * (1 - math.exp(-len(u) / FACTOR_BINS)) / 2


def _most_neighbours_alike(u: torch.Tensor, eps: float) -> str:
    """The dimension along which a quarter of the neighbours differ by less than eps / 256.

    Of independent factors one neighbour in 256 does.
    """
    for name, dim in (("columns", 1), ("rows", 0)):
        step = u.diff(dim=dim)[u.diff(dim=dim).isfinite()].abs()
        if len(step) >= 64 and bool((step < eps / 256).double().mean() >= 0.25):
            return name
    return ""


def _softmax(case: Any) -> bool:
    chosen = (
        case.score in ("softmax", "softmax_pre")
        if case.function != "aux_loss_scores"
        else case.score not in ("sigmoid", "sqrtsoftplus")
    )
    return plain(case) and chosen and case.spread in ("distinct", "ties", "equal", "zeros") and not case.logits


def _is_a_call(case: Any) -> bool:
    """Whether the case is a plain call, or one with a repeated row, whose copies have factors of
    their own.
    """
    return plain(case) or (case.layout == "expanded" and not case.golden and not case.illegal)


EXPERT_RELABELLING = Law("expert_relabelling", _expert_relabelling, plain)
SHIFT = Law("shift", _shift, _softmax)
REPLAY = Law(
    "replay", _replay, lambda case: plain(case) and not case.precomputed and case.spread != "nan", recompiles=True
)
PADDING_TOKENS = Law("padding_tokens", _padding_tokens, lambda case: plain(case) and case.padding > 0)
SHARES = Law("shares", _shares, lambda case: plain(case) and case.tokens > 1)
EVENLY_SPREAD = Law(
    "evenly_spread", _evenly_spread, lambda case: _is_a_call(case) and case.dtype in FINE and case.eps > 0
)

_EVERY = (*universal.EVERYWHERE, *universal.STATIC)
_CHOICE = (TOKEN_REVERSAL, EXPERT_RELABELLING, BATCH_CONCAT, SHIFT)
_OF_PRODUCTS = (law for law in universal.EVERYWHERE[2:] if law is not AUTOCAST)  # torch rounds their factors
GATE = (
    *SHARED_OUT,
    *of_one_process(*_OF_PRODUCTS, *universal.STATIC, DOUBLE_BACKWARD, TOKEN_REVERSAL, BATCH_CONCAT),
)
JITTER = (*_EVERY, EVENLY_SPREAD)
TOPK_ROUTING = (*_EVERY, DOUBLE_BACKWARD, *_CHOICE, REPLAY)
# the result of indices may be the given indices
_OWN_RESULTS = replace(
    universal.BUFFER_REUSE, applies=lambda case: universal.BUFFER_REUSE.applies(case) and not case.precomputed
)
TOPK_INDICES = tuple(_OWN_RESULTS if law is universal.BUFFER_REUSE else law for law in TOPK_ROUTING)
SINKHORN_ROUTING = (*universal.EVERYWHERE, DOUBLE_BACKWARD, EXPERT_RELABELLING)
DROP_TOKENS = (*_EVERY, DOUBLE_BACKWARD, EXPERT_RELABELLING, universal.SCALING)
AUX_LOSS_SCORES = (*_EVERY, DOUBLE_BACKWARD, *_CHOICE, PADDING_TOKENS)
LOAD_BALANCING_LOSS = (*_EVERY, DOUBLE_BACKWARD, SHARES, universal.SCALING)
Z_LOSS = (*_EVERY, DOUBLE_BACKWARD, TOKEN_REVERSAL, EXPERT_RELABELLING, PADDING_TOKENS)
# may return x itself
_NOT_OWNED = tuple(law for law in universal.CALLS if law is not universal.OWN_MEMORY)
ATTACH_LOSS = (*_NOT_OWNED, universal.LATE_PRODUCER, *universal.STATIC, universal.SCALING, DOUBLE_BACKWARD)
UPDATE_EXPERT_BIAS = (*_EVERY, EXPERT_RELABELLING)
# without gradients a router is not trained; the steps of a case say which of them compute gradients
_TRAINED = tuple(law for law in universal.CALLS[2:] if law not in (universal.INFERENCE_MODE, universal.NO_GRAD))
ROUTE = (*SHARED_OUT, *of_one_process(*_TRAINED, universal.LATE_PRODUCER, *universal.STATIC))
