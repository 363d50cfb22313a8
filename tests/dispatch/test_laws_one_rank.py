"""Laws of dispatchers, and their rules of indices, on one rank in this process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.law import Trial
from conformance.core.ranks import AtRank, RankContext
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.runner import Runner
from conformance.families.dispatch.cases import DispatchCase
from conformance.interface import Implementation
from conformance.peers import reference_world
from moe_ref.config import IndexPolicy
from tests.dispatch.test_laws import turned, two_ranks

poison.install()


# ---- adjointness: small integers sum exactly: a gradient that breaks the law has a wrong value too


class Doubled(torch.autograd.Function):
    """x, with twice the gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, d_x: torch.Tensor) -> torch.Tensor:
        return 2 * d_x


def doubling(function: str) -> SimpleNamespace:
    def dispatch(tokens: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        return getattr(reference_world, function)(Doubled.apply(tokens), *arguments, **settings)

    return SimpleNamespace(**{function: dispatch})


def asked_alone(law: str, case: DispatchCase, namespace: Any, context: RankContext) -> Any:
    """What the law says, whatever the values are."""
    contract: AtRank[DispatchCase] = AtRank(CONTRACTS[case.function], context)
    implementation, problem, outcome = Implementation(namespace), contract.problem(case), Outcome("PASS")
    runner = Runner(implementation, "cpu", case.poison, outcome)
    refusal = lambda call: "" if implementation.offers(call.function) else "not offered"  # noqa: E731
    extras = {"refusal": refusal, "offers": implementation.offers}
    return (
        CONTRACTS[case.function]
        .laws[law]
        .check(
            Trial(case, contract, problem, {}, runner.run(problem), runner.run, runner.run_both, {}, outcome, extras)
        )
    )


@pytest.mark.parametrize(
    "function", ["allgather_dispatch", "alltoall_dispatch", "hybridep_dispatch", "deepep_dispatch"]
)
def test_a_gradient_of_another_matrix_breaks_adjointness(function, one_rank):
    case = two_ranks(function, counts=(4,), grads="tokens", probs="")
    assert CONTRACTS[function].laws["adjointness"].applies(case)
    assert asked_alone("adjointness", case, reference_world, one_rank) is None
    finding = asked_alone("adjointness", case, doubling(function), one_rank)
    assert (finding.output, finding.check) == ("d_tokens", "adjointness")
    judged = evaluate(case, Implementation(doubling(function)), rank=one_rank)
    assert (judged.status, judged.finding["output"], judged.finding["check"]) == ("FAIL", "d_tokens", "bound")


@pytest.mark.parametrize("function", ["deepep_dispatch", "deepep_low_latency_dispatch"])
@pytest.mark.parametrize("rule", ["expert_twice", "slot_empty"])
def test_an_index_that_the_policy_rejects_must_raise(function, rule, one_rank):
    collective = reference_world.collective(function)

    def lenient(*arguments: Any, policy: Any = None, **settings: Any) -> Any:
        room = {"max_tokens_per_rank": 9} if function == "deepep_low_latency_dispatch" else {}
        return collective(*arguments, policy=IndexPolicy("count each"), **settings | room)

    case = DispatchCase(function=function, illegal=rule, counts=(2,), local_experts=2)
    outcomes = {
        name: evaluate(case, Implementation(SimpleNamespace(**{function: call})), rank=one_rank)
        for name, call in (("right", collective), ("wrong", lenient))
    }
    assert outcomes["right"].status == "PASS", outcomes["right"]
    assert (outcomes["wrong"].status, outcomes["wrong"].finding["message"]) == (
        "FAIL",
        "accepted an illegal indices; it must raise ValueError, or be declared unchecked",
    )


@pytest.mark.parametrize("output", ["rows", "probs", "tokens_per_expert", "overflow"])
def test_fused_dispatch_without_a_permute_beside_it_is_held_to_the_references(output, one_rank):
    """So is its value: the law finds nothing more there, but it does find what it asks for."""
    collective = reference_world.collective("hybridep_dispatch")

    def dispatch(*arguments: Any, **settings: Any) -> Any:
        out = collective(*arguments, **settings)
        return out._replace(**{output: ~out.overflow if output == "overflow" else turned(getattr(out, output))})

    case = two_ranks("hybridep_dispatch", counts=(5,), align=2, local_experts=3, spread="ragged")
    assert asked_alone("fused", case, SimpleNamespace(hybridep_dispatch=collective), one_rank) is None
    finding = asked_alone("fused", case, SimpleNamespace(hybridep_dispatch=dispatch), one_rank)
    assert (finding.output, finding.check) == (output, "fused")
