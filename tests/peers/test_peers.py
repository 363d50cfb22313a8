"""The peer adapters represent their packages faithfully; the template works unchanged."""

import datetime
import importlib
import json
import sys
from pathlib import Path

import pytest

from conformance.core.space import Space
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run import corpus
from conformance.engine.run.pool import Pool
from conformance.engine.run.waivers import read_waivers
from conformance.interface import load
from tests.installed.steps import kernels
from tests.peers import needs_megatron
from tests.te.judging import NOTHING_WRONG

PEERS, ROOT = corpus.COMMITTED.parent / "peers", Path(__file__).parents[2]
PERMUTATION = ["permute", "unpermute", "sort_chunks", "pad_routing_map"]
SELECTION = ["gate", "jitter", "topk_indices", "topk_routing", "sinkhorn_routing", "drop_tokens"]
BALANCING = ["aux_loss_scores", "load_balancing_loss", "z_loss", "attach_loss", "update_expert_bias"]


def judged(implementation, wanted=lambda section: True, corpus_cases=(), only=lambda case: True, folder=ROOT):
    """The functions' descriptions, and (case, outcome) of the corpus and of the gate's sections."""
    profile = PROFILES["gate"]
    with Pool(ChildOptions(implementation, search=(str(folder),))) as pool:
        description = pool.start()
        offered = [
            s for s in sections() if s.function and description["functions"][s.function]["offered"] and wanted(s)
        ]
        cases = [case for section in offered for case in cases_of(section, profile, Space.of(description), 0)]
        return description["functions"], list(pool.run([*corpus_cases, *filter(only, cases)]))


@pytest.fixture(scope="module")
def megatron():
    """The gate's cases of permutation, the fixed cases of the router, and the kept cases."""
    return judged(
        "conformance.peers.megatron",
        lambda section: section.function in PERMUTATION or section.kind != "drawn",
        corpus.read_folder(PEERS / "megatron.corpus"),
    )


@needs_megatron
def test_megatron_offers_the_settings_that_the_package_has_words_for(megatron):
    functions = megatron[0]
    assert [name for name, about in functions.items() if about["offered"]] == [
        *SELECTION,
        *BALANCING,
        "route",
        *PERMUTATION,
    ]
    assert {name: about["without"] for name, about in functions.items() if about["offered"] and about["without"]} == {
        "permute": ["align", "num_rows"],
        "route": ["ranks"],
    }


@needs_megatron
def test_every_disagreement_with_megatron_is_a_known_one(megatron):
    waivers = read_waivers(PEERS / "megatron.waivers.toml", datetime.date.today())
    failing = [(case, outcome) for case, outcome in megatron[1] if outcome.status not in NOTHING_WRONG]
    new = [f"{case.text} {x}" for case, x in failing if not any(waiver.covers(case, x) for waiver in waivers)]
    assert not new
    assert all(any(waiver.covers(case, outcome) for case, outcome in failing) for waiver in waivers)


@needs_megatron
def test_every_kept_case_of_megatron_fails_as_it_was_kept(megatron):
    outcomes = {case.id: outcome for case, outcome in megatron[1]}
    files = sorted((PEERS / "megatron.corpus").glob("*.json"))
    recorded = {path.stem: json.loads(path.read_text())["found"]["finding"] for path in files}
    now = {name: outcomes[name].finding for name in recorded}
    keys = ("output", "check", "message")
    assert {name: [finding and finding[key] for key in keys] for name, finding in now.items()} == {
        name: [finding[key] for key in keys] for name, finding in recorded.items()
    }


@needs_megatron
@pytest.mark.parametrize("function", ["jitter", "attach_loss", "update_expert_bias"])
def test_megatron_agrees_everywhere_in_the_plain_functions_of_the_router(megatron, function):
    beyond = {"past_16_bits": 256, "past_24_bits": 1, "past_31_bits": 1}  # experts whose counts sum past 24 bits
    statuses = [
        outcome.status
        for case, outcome in megatron[1]
        if case.function == function and case.experts < beyond.get(getattr(case, "counted", ""), 1 << 31)
    ]
    assert statuses.count("PASS") > 10 and set(statuses) <= set(NOTHING_WRONG)


@needs_megatron
@pytest.mark.parametrize("function", ["topk_indices", "topk_routing"])
def test_megatron_selects_right_in_float32(megatron, function):
    cases = [
        (case, outcome)
        for case, outcome in megatron[1]
        if case.function == function and case.dtype == "float32" and case.tokens and not case.golden
    ]
    failing = {case.spread for case, outcome in cases if outcome.status not in NOTHING_WRONG}
    assert failing <= {"minus_inf"}
    assert sum(outcome.status == "PASS" for _, outcome in cases) > 20


@needs_megatron
def test_megatron_selects_among_float64_logits_as_float32_can():
    waivers = read_waivers(PEERS / "megatron.waivers.toml", datetime.date.today())
    narrower = [waiver for waiver in waivers if waiver.where.get("dtype") != "float64"]
    outcomes = judged(
        "tests.peers.test_megatron_route:FLOAT32_SUMS",
        lambda section: section.function in ("topk_indices", "topk_routing"),
        only=lambda case: case.dtype == "float64",
    )[1]
    failing = [
        f"{case.text} {outcome}"
        for case, outcome in outcomes
        if outcome.status not in NOTHING_WRONG and not any(w.covers(case, outcome) for w in narrower)
    ]
    assert not failing
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) > 20


@needs_megatron
def test_megatron_pads_a_copied_map_right_and_only_keeps_quiet_when_it_falls_short():
    outcomes = judged("tests.peers.test_megatron_route:COPIED", lambda section: section.function == "pad_routing_map")[
        1
    ]
    failing = [outcome for _, outcome in outcomes if outcome.status not in NOTHING_WRONG]
    assert {outcome.finding["output"] for outcome in failing} == {"unreached"}
    assert 3 * sum(outcome.status == "PASS" for _, outcome in outcomes) > len(outcomes)


def test_a_missing_package_is_one_sentence_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.delitem(sys.modules, "conformance.peers.megatron", raising=False)
    with pytest.raises(ImportError, match=r"pip install --no-deps megatron-core==0\.16\.1"):
        importlib.import_module("conformance.peers.megatron")


@needs_megatron
def test_the_head_of_a_report_names_an_unknown_release(monkeypatch):
    monkeypatch.delitem(sys.modules, "conformance.peers.megatron", raising=False)
    known = load("conformance.peers.megatron")
    assert known.notes == []
    monkeypatch.setattr("megatron.core.__version__", "0.99.0")
    monkeypatch.delitem(sys.modules, "conformance.peers.megatron")
    unknown = load("conformance.peers.megatron")
    monkeypatch.delitem(sys.modules, "conformance.peers.megatron")
    (note,) = unknown.notes
    assert note.startswith("megatron-core 0.99.0 is judged by an adapter of 0.14.x, 0.15.x, 0.16.x")
    assert unknown.offers("permute") and unknown.offers("route")


def test_the_template_is_conformant_as_it_stands():
    functions, outcomes = judged("conformance.peers.template")
    assert [name for name, about in functions.items() if about["offered"]] == ["permute"]
    assert not [f"{case.text} {outcome}" for case, outcome in outcomes if outcome.status not in NOTHING_WRONG]
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) >= PROFILES["gate"].minimum("permute")


def test_the_kernel_of_the_tutorial_is_conformant_in_the_end(tmp_path):
    (tmp_path / "tutorial_kernel.py").write_text(kernels()[-1])
    outcomes = judged("tutorial_kernel", lambda section: section.function == "permute", folder=tmp_path)[1]
    assert len(outcomes) > 200
    assert {outcome.status for _, outcome in outcomes} <= set(NOTHING_WRONG)
