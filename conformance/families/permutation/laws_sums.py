"""Laws of functions that are linear in their rows."""

from dataclasses import replace

import torch
from torch import Tensor

from conformance.core.law import Law, Trial, same
from conformance.judge import Exact, Finding

LINEAR = {  # function: the input it is linear in, and the output that is
    "permute": ("tokens", "rows"),
    "unpermute": ("rows", "tokens"),
    "sort_chunks": ("rows", "rows"),
    "indices_to_multihot": ("probs", "probs"),
    "multihot_to_indices": ("probs", "probs"),
    "drop_tokens": ("probs", "probs"),  # twice the probs keep the same tokens
    "load_balancing_loss": ("scores", "loss"),
    "attach_loss": ("x", "x"),
}


def _scaling(trial: Trial) -> Finding | None:
    """Twice the input is exactly twice the output, where runs repeat: a power of two passes through every rounding."""
    into, out = LINEAR[trial.case.function]
    x = trial.problem.tensors[into]
    twice = replace(trial.problem.with_tensors({into: x * 2}), wanted=(), cotangents={})
    outputs = trial.run(twice)
    if not isinstance(trial.expected[out], Exact) and not trial.declared.get("deterministic"):
        return trial.judged(
            "scaling", {out: trial.reference(twice)[out]}, outputs
        )  # the order of a sum may change from run to run
    return same("scaling", {out: trial.first[out] * 2}, {out: outputs.get(out)})


def _adjointness(trial: Trial) -> Finding | None:
    """⟨dy, A x⟩ = ⟨Aᵀ dy, x⟩: forward and backward are the same matrix. Dyadic values make both sides exact."""
    into, out = LINEAR[trial.case.function]
    cotangent, x = trial.problem.cotangents.get(out), trial.problem.tensors[into]
    gradient = trial.first.get(f"d_{into}")
    if cotangent is None or gradient is None:
        return None
    left, right = _inner(cotangent, trial.first[out]), _inner(gradient, x)
    if left == right:
        return None
    return Finding(f"d_{into}", "adjointness", f"⟨d_{out}, {out}⟩ = {left:.9g}, but ⟨d_{into}, {into}⟩ = {right:.9g}")


def _inner(a: Tensor, b: Tensor) -> float:
    """Where b is garbage that nothing may read, a must be zero and the product counts as zero."""
    product = a.double() * b.double()
    return float(torch.where(a == 0, 0.0, product).sum())


def _garbage_independence(trial: Trial) -> Finding | None:
    """Other garbage in the padding rows: the tokens do not change."""
    rows = trial.problem.required["rows"].clone()
    row_map = trial.extras["reference_row_map"]
    rows[row_map.token_P < 0] = 3.0
    return trial.repeats("garbage_independence", trial.run(trial.problem.with_tensors({"rows": rows})))


def _exact_fp32(case) -> bool:
    plain = not case.golden and not case.illegal and case.values == "dyadic" and case.layout != "expanded"
    exact_products = (
        case.function != "unpermute" or not case.probs or case.experts <= 4
    )  # 12 + 10 bits, and 2 for their sum
    return plain and exact_products and case.dtype == "float32" and case.probs in ("", "float32")


def _doubles(case) -> bool:
    plain = not case.golden and not case.illegal and case.layout != "expanded"
    return plain and case.dtype in ("float32", "bfloat16", "float16") and getattr(case, "values", "dyadic") != "special"


SCALING = Law("scaling", _scaling, _doubles)
ADJOINTNESS = Law(
    "adjointness",
    _adjointness,
    lambda case: _exact_fp32(case) and LINEAR[case.function][0] in case.grads.split("+") and not case.unused,
)
GARBAGE_INDEPENDENCE = Law(
    "garbage_independence", _garbage_independence, lambda case: not case.golden and not case.illegal
)
