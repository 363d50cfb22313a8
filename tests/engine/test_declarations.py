"""What a namespace says of its functions is checked, and is never an error of the suite."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import RankContext
from conformance.engine.child import child
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions
from conformance.interface import DEFAULTS, NAMES, VOCABULARY, WORDS, Implementation, Undeclared, UsageError
from conformance.texts import LONGEST


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


def raises(*_):
    raise RuntimeError("I do not know")


def declaring(answer, function="permute"):
    namespace = SimpleNamespace(**{function: raises}, declares=lambda name: answer)
    return child._declarations(function, Implementation(namespace, "kernels"), CONTRACTS[function])


WRONG = {
    "accumulator": "float8",
    "emulated": "mxfp8",
    "reduction_order": 3,
    "tie_rule": "any_order",
    "zero_prob_rows": "dropped",
    "scale_arithmetic": None,
    "deterministic": "yes",
    "differentiable": 1,
    "noncontiguous": torch.ones(2),
    "host_sync_free": [],
    "graph_capturable": Unprintable(),
    "unchecked": (3,),
    "omits": {"rows": True},
}


def test_every_word_of_the_vocabulary_has_a_wrong_value_here():
    assert list(WRONG) == list(VOCABULARY)


@pytest.mark.parametrize("key", VOCABULARY)
def test_a_wrong_value_is_a_usage_error_with_the_legal_values(key):
    with pytest.raises(UsageError) as raised:
        declaring({key: WRONG[key]})
    text = str(raised.value)
    assert text.startswith(f"kernels declares {key} = ")
    assert text.endswith(f" for permute; it must be {VOCABULARY[key].legal}")
    assert text.isprintable()


@pytest.mark.parametrize("key", VOCABULARY)
def test_every_legal_value_is_accepted(key):
    values = VOCABULARY[key].values
    for value in {NAMES: [(), []], WORDS: ["ascending"]}.get(values, values):
        assert declaring({key: value}) == DEFAULTS | {key: tuple(value) if isinstance(value, list) else value}


@pytest.mark.parametrize("answer", [None, [], 0, True, "fast", torch.ones(2), Unprintable()])
def test_an_answer_that_is_no_dict_is_a_usage_error(answer):
    with pytest.raises(UsageError, match=r"kernels declares .* for permute; it must be a dict"):
        declaring(answer)


@pytest.mark.parametrize("key", ["fast", 3, Unprintable()])
def test_an_unknown_key_is_a_usage_error(key):
    with pytest.raises(UsageError, match=f"the vocabulary is {', '.join(VOCABULARY)}"):
        declaring({key: True})


@pytest.mark.parametrize(
    ("key", "names", "known"),
    [
        ("omits", ("rows", "colour"), "overflow, pad_offsets, probs, row_map, tokens_per_e"),
        *(("omits", (name,), "overflow, ") for name in ("rows", "colour")),
        *(("unchecked", (name,), ".*align, ") for name in ("tokenz", "rows")),
    ],
)
def test_a_name_that_the_function_does_not_have_is_a_usage_error(key, names, known):
    sentence = f"kernels declares {key} = {', '.join(sorted(names))} for permute; it may name {known}"
    with pytest.raises(UsageError, match=sentence):
        declaring({key: names})


def test_names_that_the_function_has_are_accepted():
    assert declaring({"omits": ("overflow",), "unchecked": ("align", "probs")})["omits"] == ("overflow",)
    # an argument of the implementation, and one that an illegal call is about
    namespace = SimpleNamespace(
        route=lambda logits, config, *, mine=None: None, declares=lambda name: {"unchecked": ("mine",)}
    )
    assert child._declarations("route", Implementation(namespace), CONTRACTS["route"])["unchecked"] == ("mine",)
    assert declaring({"unchecked": ("weight",)}, "grouped_wgrad")["unchecked"] == ("weight",)


def test_a_long_text_is_cut():
    assert len(declaring({"reduction_order": "x\n\0" * 10**6})["reduction_order"]) == LONGEST - 2


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_declares_that_raises_about_one_function_says_nothing_of_the_others(error):
    def declares(function):
        if function == "permute":
            raise error("I do not know")
        return {"deterministic": True}

    implementation = Implementation(SimpleNamespace(permute=raises, declares=declares))
    with pytest.raises(Undeclared, match=f"declares raised {error.__name__}: I do not know"):
        implementation.declares("permute")
    assert child._declarations("permute", implementation, CONTRACTS["permute"]) == DEFAULTS
    assert implementation.declares("unpermute")["deterministic"]


def test_declares_is_asked_once_and_not_for_long(monkeypatch):
    questions = []

    def declares(function):
        questions.append(function)
        time.sleep(3600)

    monkeypatch.setattr(child, "DECLARE_SECONDS", 0.1)
    implementation = Implementation(SimpleNamespace(permute=raises, declares=declares))
    assert child._declarations("permute", implementation, CONTRACTS["permute"]) == DEFAULTS
    with pytest.raises(Undeclared, match=r"TimeoutError: no answer within 0\.1 s"):
        implementation.declares("permute")
    assert questions == ["permute"]


# ---- supports, transport


def supporting(answer):
    return Implementation(SimpleNamespace(supports=lambda function: answer)).supports("permute", {})


def test_a_reason_is_text_on_one_line():
    texts = {None: None, "no fp16\nkernel": "no fp16 kernel", "\0\ud800": "\\x00\\ud800"}
    assert {answer: supporting(answer) for answer in texts} == texts
    assert len(supporting("x" * 10**7)) < LONGEST


@pytest.mark.parametrize("answer", [[], 0, False, True, 1.5, torch.ones(2), Unprintable(), b"no"])
def test_any_other_reason_is_a_type_error(answer):
    with pytest.raises(TypeError, match="it must return None or a reason"):
        supporting(answer)


def asked(transport, status="PASS"):
    """The outcome of a case with `status`, after the question how its two ranks are connected."""
    outcome = Outcome(status, {"output": "rows", "message": "is wrong"} if status == "FAIL" else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "evaluate", lambda *_, **__: outcome)
        case = CONTRACTS["permute"].case_type(function="permute")
        implementation = Implementation(SimpleNamespace(transport=transport))
        return child._answer(case, implementation, "cpu", RankContext(0, 2), ChildOptions("kernels"))


def test_a_transport_is_text():
    assert asked(lambda function, group: "mail").transport == "mail between CPUs"
    assert asked(lambda function, group: "mail").status == "PASS"


@pytest.mark.parametrize("answer", [None, [], 0, True, torch.ones(2), Unprintable()])
def test_any_other_transport_is_a_failure_of_the_function(answer):
    finding = asked(lambda function, group: answer).finding
    assert finding["output"] == "transport"
    assert "it must return text" in finding["message"]


def test_a_transport_that_raises_is_a_failure_and_hides_none():
    outcome = asked(raises)
    assert (outcome.status, outcome.finding["message"]) == ("FAIL", "transport raised RuntimeError: I do not know")
    assert asked(raises, "FAIL").finding["output"] == "rows"
    assert asked(lambda *_: sys.exit(), "PASS").status == "CRASH"
