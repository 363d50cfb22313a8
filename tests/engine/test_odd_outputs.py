"""What a call returns is judged whatever it is: an odd tensor is a finding, never an error."""

from types import SimpleNamespace

import pytest
import torch

from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.results import Unreadable, is_changed, read
from conformance.families.permutation.cases import RoutingCase
from conformance.families.router.cases import LogitsCase
from conformance.interface import Implementation, load
from conformance.judge.expectation import Given
from moe_ref import permute
from moe_ref.router.selection import topk_indices as select
from tests.engine.odd_outputs import ODDITIES, WHOLE

CASE = RoutingCase(function="permute", tokens=3, experts=2, hidden=2, routing=(1, 2, 3))


@pytest.mark.parametrize("grads", ["", "tokens"])
@pytest.mark.parametrize("name", [*ODDITIES, *WHOLE])
def test_an_odd_result_fails_with_a_sentence(name, grads):
    case = RoutingCase(**{**vars(CASE), "grads": grads})
    outcome = evaluate(case, load(f"tests.engine.odd_outputs:{name}"))
    finding = outcome.finding or {"output": "", "message": ""}
    message = (ODDITIES | WHOLE)[name][1]
    assert outcome.status == ("FAIL" if grads or message else "PASS")
    assert grads or f"{finding['output']} {finding['message']}".startswith(message)
    assert "\n" not in finding["message"]


def test_a_backward_that_raises_is_a_finding_of_the_call():
    case = RoutingCase(**{**vars(CASE), "grads": "tokens"})
    finding = evaluate(case, load("tests.engine.odd_outputs:raises")).finding
    assert finding["message"] == "raised RuntimeError on a legal call: no backward"


CHOICE = LogitsCase(function="topk_indices", tokens=3, experts=4, topk=2)


def chosen(change):
    """The reference's choice of experts, changed."""

    def topk_indices(*args, **settings):
        probs, indices = select(*args, **settings)
        return probs, change(indices)

    return evaluate(CHOICE, Implementation(SimpleNamespace(topk_indices=topk_indices)))


@pytest.mark.parametrize("change", [lambda x: x.numpy(), lambda x: x.T, lambda x: x[None], lambda x: None])
def test_an_output_on_which_another_depends_is_the_one_that_is_wrong(change):
    outcome = chosen(change)
    assert (outcome.status, outcome.finding["output"]) == ("FAIL", "indices")
    assert chosen(lambda x: x).status == "PASS"


def test_indices_are_integers():
    assert chosen(lambda x: x != 0).finding["message"] == "has dtype torch.bool; it must be integer"


def test_an_expectation_that_raises_while_its_output_is_right_is_an_error_of_the_suite(monkeypatch):
    monkeypatch.setattr(Given, "resolve", lambda self, outputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chosen(lambda x: x)


def test_plain_tensors_are_read_as_they_are():
    x = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(read(x.requires_grad_(), "cpu"), x)
    assert type(read(torch.nn.Parameter(x), "cpu")) is torch.Tensor
    assert torch.equal(read(x.expand(2, 3, 2), "cpu"), x.expand(2, 3, 2))
    assert read(torch.empty(0, 5), "cpu").shape == (0, 5)


def test_only_integers_may_be_on_the_host_when_the_inputs_are_not():
    assert read(torch.ones(2, dtype=torch.int64), "cuda").tolist() == [1, 1]
    with pytest.raises(Unreadable, match="is on cpu, the inputs are on cuda"):
        read(torch.ones(2), "cuda")


IN_VALUES = (lambda x: x.add_(1), lambda x: x.set_(torch.ones(3, 2)))
IN_PLACE = (lambda x: x.resize_(1), lambda x: x.untyped_storage().resize_(0))


@pytest.mark.parametrize("change", [*IN_VALUES, *IN_PLACE])
def test_an_input_is_changed_in_its_values_or_in_place(change):
    master = torch.arange(6.0).reshape(3, 2)
    x = master.clone()
    change(x)
    assert is_changed(x, master)
    assert not is_changed(master.clone(), master)


@pytest.mark.parametrize("poison", ["nan", "max", "zero"])
def test_a_result_that_is_nan_is_another_failure_than_a_wrong_number(poison):
    """Memory that nobody wrote is NaN under one poison alone: that is no result."""
    case = RoutingCase(**{**vars(CASE), "poison": poison, "probs": "float32"})

    def finding(change):
        def call(tokens, routing_map, *, probs=None):
            out = permute(tokens, routing_map, probs=probs)
            return out._replace(rows=out.rows + 1, probs=change(out.probs))

        return evaluate(case, Implementation(SimpleNamespace(permute=call))).finding

    of_nan = finding(lambda probs: probs * torch.nan)
    assert (of_nan["output"], of_nan["nan"]) == ("rows", "probs")
    assert of_nan["message"].endswith("; probs is NaN where the reference has numbers")
    assert finding(lambda probs: probs * 2)["nan"] == finding(torch.empty_like)["nan"] == ""
