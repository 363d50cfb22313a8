"""Laws of an expert's two layers: rows that do not count, and settings that must not change a result."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.judge import Expectation, Finding
from conformance.judge.bound import Bounded
from conformance.laws.base import Law, Trial, upside_down
from conformance.laws.experts import doubled, plain

ALIGNED = 16  # rows: more than most experts of a small case have


def _zero_probs(trial: Trial) -> Finding | None:
    """Other numbers in the rows whose prob is 0: they reach nothing but the gradient of that prob."""
    probs = trial.problem.settings["probs"]
    nothing = probs == 0
    rows = trial.problem.required["rows"]
    other = torch.where(nothing[:, None], upside_down(torch.where(rows.isfinite(), rows, 0), 1) + 1, rows)
    expected: dict[str, Expectation] = dict(trial.expected)
    right = expected.get("d_probs")
    if isinstance(right, Bounded):
        expected["d_probs"] = replace(right, bound=torch.where(nothing, torch.inf, right.bound))
    return trial.judged("zero_probs", expected, trial.run(replace(trial.problem.with_tensors({"rows": other}), layouts={})))


def _scaling(trial: Trial) -> Finding | None:
    """Twice the probs."""
    probs = trial.problem.settings["probs"]
    twice = replace(trial.problem.with_tensors({"probs": probs * 2}), wanted=(), cotangents={}, layouts={})
    return doubled(trial, "scaling", twice, ("out",))


def _cotangent_scaling(trial: Trial) -> Finding | None:
    """Twice the cotangent."""
    twice = replace(trial.problem, cotangents={name: x * 2 for name, x in trial.problem.cotangents.items()}, layouts={})
    return doubled(trial, "cotangent_scaling", twice, tuple(f"d_{name}" for name in trial.problem.wanted))


def _other_setting(trial: Trial, name: str, value: Any) -> dict[str, Any]:
    """Without a setting, or with it where it was not given."""
    settings = {key: x for key, x in trial.problem.settings.items() if key != name}
    given = name in trial.problem.settings
    return trial.run(replace(trial.problem, settings=settings if given else settings | {name: value}))


def _recompute(trial: Trial) -> Finding | None:
    """What is computed again in the backward, or no longer is: the same bits where runs repeat."""
    shared = trial.case.function == "shared_experts"
    return trial.repeats("recompute", _other_setting(trial, "recompute", True if shared else ("moe_act", "moe")[trial.case.seed % 2]))


def _alignment(trial: Trial) -> Finding | None:
    """Rows of zeros behind each expert's, or none."""
    return trial.judged("alignment", trial.expected, _other_setting(trial, "align", ALIGNED))


def _one_after_another(trial: Trial) -> Finding | None:
    """grouped_mlp, where it is offered too."""
    return trial.judged("grouped", trial.expected, trial.run(replace(trial.problem, function="grouped_mlp")))


def _token_reversal(trial: Trial) -> Finding | None:
    """Tokens in the opposite order: each has what it had."""
    problem = trial.problem
    turned = replace(
        problem.with_tensors({"x": problem.required["x"].flip(0)}), cotangents={name: x.flip(0) for name, x in problem.cotangents.items()}, layouts={}
    )
    outputs = {name: x.flip(0) if name in ("out", "d_x") and isinstance(x, Tensor) else x for name, x in trial.run(turned).items()}
    return trial.judged("token_reversal", trial.expected, outputs)


def _weighted(case: Any) -> bool:
    return plain(case) and bool(case.probs)


ZERO_PROBS = Law("zero_probs", _zero_probs, lambda case: _weighted(case) and case.weights != "plain")
SCALING = Law("scaling", _scaling, lambda case: _weighted(case) and not case.on_input and case.dtype != "float16")  # whose subnormals are within reach
COTANGENT_SCALING = Law("cotangent_scaling", _cotangent_scaling, lambda case: plain(case) and bool(case.grads) and case.dtype != "float16")
RECOMPUTE = Law("recompute", _recompute, lambda case: not case.golden and not case.illegal and bool(case.grads))
ALIGNMENT = Law("alignment", _alignment, plain)
GROUPED = Law("grouped", _one_after_another, plain)
TOKEN_REVERSAL = Law("token_reversal", _token_reversal, plain)
