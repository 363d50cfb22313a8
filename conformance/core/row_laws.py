"""Laws of functions whose tokens are independent: the order of tokens does not matter, and no token
matters to another.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, plain, upside_down
from conformance.core.signature import Signature
from conformance.judge import Chosen, Expectation, Finding

TOKENS = "T"  # the letter of tokens in a signature
PARAMETERS = ("weight", "bias")  # inputs whose gradients sum over all tokens
Change = Callable[[Tensor, int], Tensor]  # of a dimension of a tensor


def _with_changed_dimension(
    tensors: Mapping[str, Any], dims: Mapping[str, str], change: Change, letter: str = TOKENS
) -> dict[str, Any]:
    """The tensors, with the change along the dimension with this letter, where they have it."""
    return {
        name: change(x, dims[name].index(letter)) if isinstance(x, Tensor) and letter in dims.get(name, "") else x
        for name, x in tensors.items()
    }


def _results(signature: Signature) -> dict[str, str]:
    """Dimensions of outputs and gradients."""
    return {out.name: out.dims for out in signature.outputs} | {f"d_{x.name}": x.dims for x in signature.inputs}


def _judged(trial: Trial, law: str, there: Change, inverse: Change, letter: str = TOKENS) -> Finding | None:
    """Run with one dimension changed, undo the change in the outputs, and judge them by the
    expectations of the first run.
    """
    signature = trial.contract.signature
    inputs = {x.name: x.dims for x in signature.inputs}
    cotangents = _with_changed_dimension(trial.problem.cotangents, _results(signature), there, letter)
    second: Problem = trial.problem.with_tensors(_with_changed_dimension(trial.problem.tensors, inputs, there, letter))
    outputs = trial.run(replace(second, cotangents=cotangents))
    return trial.judged(
        law, any_of_equals(trial.expected), _with_changed_dimension(outputs, _results(signature), inverse, letter)
    )


def any_of_equals(expected: dict[str, Expectation]) -> dict[str, Expectation]:
    """Without the tie rule: a transformation may have reversed the order."""
    return {name: replace(x, lowest=False) if isinstance(x, Chosen) else x for name, x in expected.items()}


def _batch_concat(trial: Trial) -> Finding | None:
    """The same tokens with others after them: each token keeps its results."""
    first_tokens: Change = lambda x, dim: x.narrow(dim, 0, trial.case.tokens)  # noqa: E731
    return _judged(trial, "batch_concat", lambda x, dim: torch.cat([x, x.flip(dim)], dim), first_tokens)


def reversal(name: str, letter: str, applies: Callable[[Any], bool]) -> Law:
    """The law that the order along a dimension does not matter: all inputs reversed along it give
    the same results, reversed where they have it. A sum over it runs in another order.
    """

    def check(trial: Trial) -> Finding | None:
        return _judged(trial, name, upside_down, upside_down, letter)

    return Law(name, check, applies)


TOKEN_REVERSAL = reversal("token_reversal", TOKENS, plain)  # each token keeps its results
BATCH_CONCAT = Law(
    "batch_concat",
    _batch_concat,
    lambda case: plain(case) and case.tokens > 0 and not any(name in case.grads for name in PARAMETERS),
)
