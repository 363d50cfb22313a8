"""The peer adapters represent their packages faithfully; the template works unchanged."""

import datetime
import importlib
import json
import sys
from importlib.util import find_spec
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
from moe_ref.config import PaddedMap
from tests.installed.steps import kernels

PEERS = corpus.COMMITTED.parent / "peers"
PERMUTATION = ["permute", "unpermute", "sort_chunks", "pad_routing_map"]
SELECTION = ["gate", "jitter", "topk_indices", "topk_routing", "sinkhorn_routing", "drop_tokens"]
BALANCING = ["aux_loss_scores", "load_balancing_loss", "z_loss", "attach_loss", "update_expert_bias"]
NOTHING_WRONG = ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1"
)


class CopiedMap:
    """megatron-core's pad_routing_map on a copy of the map, which it otherwise overwrites."""

    @staticmethod
    def declares(function):
        return importlib.import_module("conformance.peers.megatron").declares(function)

    @staticmethod
    def pad_routing_map(routing_map, *, align) -> PaddedMap:
        return importlib.import_module("conformance.peers.megatron").pad_routing_map(routing_map.clone(), align=align)


class Float32Sums:
    """megatron-core's selection, declared to accumulate in float32 for every dtype."""

    @staticmethod
    def supports(function, **arguments):
        return importlib.import_module("conformance.peers.megatron").supports(function, **arguments)

    @staticmethod
    def declares(function):
        return importlib.import_module("conformance.peers.megatron").declares(function) | {
            "accumulator": "float32_only"
        }

    @staticmethod
    def topk_indices(logits, *, topk, **settings):
        return importlib.import_module("conformance.peers.megatron").topk_indices(logits, topk=topk, **settings)

    @staticmethod
    def topk_routing(logits, *, topk, **settings):
        return importlib.import_module("conformance.peers.megatron").topk_routing(logits, topk=topk, **settings)


def judged(implementation: str, wanted=lambda section: True, kept=(), only=lambda case: True):
    """The functions' descriptions, and (case, outcome) of kept cases and the gate's sections."""
    profile = PROFILES["gate"]
    with Pool(ChildOptions(implementation, search=(str(Path(__file__).parents[2]),))) as pool:
        description = pool.start()
        offered = [
            s for s in sections() if s.function and description["functions"][s.function]["offered"] and wanted(s)
        ]
        cases = [case for section in offered for case in cases_of(section, profile, Space.of(description), 0)]
        return description["functions"], list(pool.run([*kept, *filter(only, cases)]))


@pytest.fixture(scope="module")
def megatron():
    """The gate's cases of permutation, the fixed cases of the router, and the kept cases."""
    kept = corpus.read_folder(PEERS / "megatron.corpus")
    return judged(
        "conformance.peers.megatron", lambda section: section.function in PERMUTATION or section.kind != "drawn", kept
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
    wrong = [(case, outcome) for case, outcome in megatron[1] if outcome.status not in NOTHING_WRONG]
    new = [
        f"{case.text} {outcome}"
        for case, outcome in wrong
        if not any(waiver.covers(case, outcome) for waiver in waivers)
    ]
    assert not new
    assert all(any(waiver.covers(case, outcome) for case, outcome in wrong) for waiver in waivers)


@needs_megatron
def test_every_kept_case_of_megatron_fails_as_it_was_kept(megatron):
    outcomes = {case.id: outcome for case, outcome in megatron[1]}
    files = sorted((PEERS / "megatron.corpus").glob("*.json"))
    kept = {path.stem: json.loads(path.read_text())["found"]["finding"] for path in files}
    now = {name: outcomes[name].finding for name in kept}
    keys = ("output", "check", "message")
    assert {name: [finding and finding[key] for key in keys] for name, finding in now.items()} == {
        name: [finding[key] for key in keys] for name, finding in kept.items()
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
    wrong = {case.spread for case, outcome in cases if outcome.status not in NOTHING_WRONG}
    assert wrong <= {"minus_inf"}
    assert sum(outcome.status == "PASS" for _, outcome in cases) > 20


@needs_megatron
def test_megatron_selects_among_float64_logits_as_float32_can():
    waivers = read_waivers(PEERS / "megatron.waivers.toml", datetime.date.today())
    others = [waiver for waiver in waivers if waiver.where.get("dtype") != "float64"]
    outcomes = judged(
        "tests.peers.test_peers:Float32Sums",
        only=lambda case: case.dtype == "float64",
    )[1]
    wrong = [
        f"{case.text} {outcome}"
        for case, outcome in outcomes
        if outcome.status not in NOTHING_WRONG and not any(w.covers(case, outcome) for w in others)
    ]
    assert not wrong
    assert sum(outcome.status == "PASS" for _, outcome in outcomes) > 20


@needs_megatron
def test_megatron_pads_a_copied_map_right_and_only_keeps_quiet_when_it_falls_short():
    outcomes = judged("tests.peers.test_peers:CopiedMap")[1]
    wrong = [outcome for _, outcome in outcomes if outcome.status not in NOTHING_WRONG]
    assert {outcome.finding["output"] for outcome in wrong} == {"unreached"}
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
    with Pool(ChildOptions("tutorial_kernel", search=(str(tmp_path),))) as pool:
        space = Space.of(pool.start())
        profile = PROFILES["gate"]
        cases = [
            case
            for section in sections()
            if section.function == "permute"
            for case in cases_of(section, profile, space, 0)
        ]
        statuses = {outcome.status for _, outcome in pool.run(cases)}
    assert len(cases) > 200
    assert statuses <= set(NOTHING_WRONG)
