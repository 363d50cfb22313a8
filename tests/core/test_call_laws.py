"""Laws on sequences of calls: each rejects an operator that is right in a single call."""

from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.engine.run.blame import blamed
from conformance.mutants.kinds import calls
from tests.common.suite import outcome_of, wrapped
from tests.core.call_twins import CALL_TWINS, FORWARD_GLU, NARROW_GLU, STILL, itself
from tests.core.law_twins import FORWARD, FORWARD_LINEAR, GLU, LAYOUT, LINEAR

COUNTS = ("num_tokens_per_rank", "num_tokens_per_expert")
EVERY_CALL = [  # check, case, wrapper
    ("state", FORWARD, calls.draws_from_the_generator),
    ("state", replace(FORWARD_GLU, tokens=0), calls.leaves_another_dtype),
    ("input", LINEAR, calls.changes_the_cotangent),
    ("memory", STILL, itself),
    ("memory", replace(LAYOUT, experts=2, slots=(0, 1, 1, -1, -1, -1)), calls.results_of_one_buffer(*COUNTS)),
    ("memory", replace(FORWARD_LINEAR, tokens=0, tail=3, counts=(0, 0, 0)), calls.expands_equal_rows),
]


def spoilt(case, wrapper):
    return wrapped(case.function, wrapper)


@pytest.mark.parametrize(("law", "case", "make"), CALL_TWINS)
def test_a_law_rejects_what_is_right_in_a_plain_call(law, case, make):
    assert outcome_of(case, spoilt(case, make())).status == "PASS"
    outcome = outcome_of(replace(case, law=law), spoilt(case, make()))
    assert (outcome.status, outcome.finding["check"]) == ("FAIL", law), outcome
    assert outcome_of(replace(case, law=law), moe_ref).status == "PASS"


@pytest.mark.parametrize(("check", "case", "wrapper"), EVERY_CALL)
def test_every_call_is_checked_for_what_it_leaves_behind(check, case, wrapper):
    outcome = outcome_of(case, spoilt(case, wrapper))
    assert (outcome.status, outcome.finding["check"]) == ("FAIL", check), outcome
    assert torch.get_default_dtype() == torch.float32
    assert outcome_of(case, moe_ref).status in ("PASS", "UNINFORMATIVE")


def test_a_backward_that_refuses_to_run_twice_is_accepted():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.used = False
            return x.view_as(x)

        @staticmethod
        def backward(ctx, cotangent):
            if ctx.used:
                raise RuntimeError("a second backward is not supported")
            ctx.used = True
            return cotangent

    def once(original, h, **settings):
        return original(Once.apply(h), **settings)

    assert outcome_of(replace(GLU, law="accumulated"), wrapped("glu", once)).status == "PASS"


@pytest.mark.parametrize(("factor", "status"), [(1, "PASS"), (2, "FAIL")])
def test_a_backward_that_refuses_to_keep_its_graph_is_judged_by_one_that_need_not(factor, status):
    class Donated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = 1 if x.is_leaf else factor
            return x.view_as(x)

        @staticmethod
        def backward(ctx, cotangent):
            if torch._C._autograd._get_current_graph_task_keep_graph():
                raise RuntimeError("compiled with donated buffers, which requires retain_graph=False")
            return cotangent * ctx.factor

    implementation = wrapped("glu", lambda original, h, **settings: original(Donated.apply(h), **settings))
    assert outcome_of(GLU, implementation).status == "PASS"
    assert outcome_of(replace(GLU, law="accumulated"), implementation).status == status


def test_a_failure_of_two_calls_is_put_down_to_the_one_that_is_wrong_by_itself():
    first = CONTRACTS["glu"].problem(GLU).required["h"]

    def wrong_elsewhere(original, h, **settings):
        out = original(h, **settings)
        return out if torch.equal(h.detach(), first) else out * 2

    implementation, case = wrapped("glu", wrong_elsewhere), replace(GLU, law="interleaved")
    blame, outcome = blamed(case, outcome_of(case, implementation), lambda case: outcome_of(case, implementation))
    assert (blame.law, outcome.status, outcome.finding["check"]) == ("", "FAIL", "bound"), outcome
    assert outcome_of(replace(GLU, law=""), implementation).status == "PASS"


def test_a_call_that_refuses_autocast_is_accepted():
    def refuses(original, h, **settings):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("expected float32, found float16")
        return original(h, **settings)

    assert outcome_of(replace(NARROW_GLU, law="autocast"), wrapped("glu", refuses)).status == "PASS"


@pytest.mark.parametrize("law", ["autocast", "own_memory"])
def test_an_error_of_the_suite_itself_is_no_refusal(law, monkeypatch):
    laws = CONTRACTS["glu"].laws
    monkeypatch.setitem(laws, law, replace(laws[law], check=lambda trial: trial.nothing))
    with pytest.raises(AttributeError, match="nothing"):
        outcome_of(
            replace(NARROW_GLU, law=law, grads="h"),
            wrapped("glu", lambda original, h, **settings: original(h, **settings)),
        )
