"""The results of a dispatcher do not depend on the block sizes of its kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_fast
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.dispatch.cases import FUNCTIONS, DispatchCase
from conformance.interface import Implementation
from moe_fast.dispatch import symmetric
from moe_fast.launch import tuning
from tests.dispatch.test_laws import two_ranks
from tests.honest.retuned import retuned

poison.install()


def ill_conditioned(function: str) -> DispatchCase:
    """Sums that depend on their order, on three ranks of which one has no tokens; more than one
    block of the small sizes in every direction.
    """
    main, cached = "tokens" if function.endswith("dispatch") else "rows", "cached" in function
    room = {"align": 2, "slack": -1} if function.startswith("hybridep") else {}
    fields: dict[str, Any] = {
        "values": "wide",
        "grads": "" if cached else main,
        "hidden": 5,
        "topk": 4,
        "spread": "ragged",
    } | room
    return two_ranks(function, counts=(7, 0, 5), **fields)


@pytest.mark.parametrize(
    ("name", "namespace"),
    [("COLLECTIVES", moe_fast), ("SYMMETRIC", symmetric)],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_results_do_not_depend_on_block_sizes(name, namespace):
    with Pool(ChildOptions(f"tests.honest.retuned:{name}", "cpu")) as pool:
        pool.start()
        outcomes = {
            case.text: outcome
            for case, outcome in pool.run(
                ill_conditioned(function) for function in FUNCTIONS if hasattr(namespace, function)
            )
        }
    assert {text: (o.status, o.finding, o.reason) for text, o in outcomes.items() if o.status != "PASS"} == {}


def added_up_by_blocks(rows: torch.Tensor, handle: Any, **settings: Any) -> Any:
    out = symmetric.hybridep_combine(rows, handle, **settings)
    return out._replace(tokens=out.tokens * (1 + 2.0**-23 * (tuning.INTERPRETER.symmetric.tokens == 4)))


def showing() -> SimpleNamespace:
    """moe_fast's symmetric dispatcher, with sums that depend on the tokens of a block."""
    names = ("hybridep_dispatch", "supports", "declares")
    return retuned(
        SimpleNamespace(**{name: getattr(symmetric, name) for name in names}, hybridep_combine=added_up_by_blocks)
    )


def test_results_that_depend_on_block_sizes_are_found(one_rank):
    case = two_ranks("hybridep_combine", counts=(4,), values="dyadic")
    honest, dependent = (
        evaluate(case, Implementation(namespace), rank=one_rank) for namespace in (retuned(symmetric), showing())
    )
    assert honest.status == "PASS", honest
    assert (dependent.status, dependent.finding["check"]) == ("FAIL", "raises AssertionError")
    assert "tokens of hybridep_combine depends on the block sizes" in dependent.finding["message"]
