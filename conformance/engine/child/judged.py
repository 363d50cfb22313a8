"""Compares the outputs of one call with what is expected of them."""

from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Contract, Problem
from conformance.judge import Expectation, Finding, Resolved, controls, judge


def resolved(expected: dict[str, Expectation], outputs: dict[str, Any]) -> tuple[dict[str, Resolved], Exception | None]:
    """The expectations resolved with the outputs, and the first error in resolving one."""
    resolved_expectations: dict[str, Resolved] = {}
    first = None
    for name, expectation in expected.items():
        try:
            resolved_expectations[name] = expectation.resolve(outputs)
        except Exception as error:
            first = first or error
    return resolved_expectations, first


def scores(expectations: dict[str, Resolved], outputs: dict[str, Any]) -> dict[str, float]:
    """The largest score of each kind over the right outputs."""
    largest_scores: dict[str, float] = {}
    for name, expectation in expectations.items():
        observed = outputs.get(name)
        for kind, score in expectation.scores(observed).items() if isinstance(observed, torch.Tensor) else ():
            largest_scores[kind] = max(largest_scores.get(kind, 0.0), score)
    return largest_scores


def excess(finding: Finding, expectations: dict[str, Resolved], outputs: dict[str, Any]) -> dict[str, float]:
    """The scores of the wrong output for the check that it failed; none without degrees."""
    stages = expectations[finding.output].stages if finding.output in expectations else ()
    check = next((stage for stage in stages if stage.check == finding.check), None)
    return check.scores(outputs[finding.output]) if check else {}


def first_wrong(
    contract: Contract[Any], problem: Problem, expectations: dict[str, Any], outputs: dict[str, Any]
) -> Finding | None:
    """The first wrong output, explained by the contract where it can."""
    for name, expectation in expectations.items():
        finding = judge(name, expectation, outputs.get(name))
        if finding:
            text = contract.explain(problem, name, finding.index, outputs[name]) if finding.index else None
            return replace(finding, message=text) if text else finding
    return None


def is_informative(contract: Contract[Any], problem: Problem, expectations: dict[str, Resolved]) -> bool:
    """Whether the controls reject a corrupted output: a main one, or else any other one."""
    main = {contract.primary, *(f"d_{name}" for name in problem.wanted)}
    shown = sum(controls.check(name, x) for name, x in expectations.items() if name in main)
    return bool(shown) or any(controls.check(name, x) for name, x in expectations.items() if name not in main)
