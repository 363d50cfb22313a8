"""What megatron-core's adapter offers of a release is what the release's signatures have words for.

`megatron_signatures.json` holds the signatures of six releases, as `megatron_features.read` read
them; 0.16.0's are 0.16.1's.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.interface import Implementation
from conformance.peers import megatron_features as features
from tests.peers import needs_megatron

RECORDED = {
    release: {symbol: None if text is None else tuple(text.split()) for symbol, text in signatures.items()}
    for release, signatures in json.loads(Path(__file__).with_name("megatron_signatures.json").read_text()).items()
}
NEWEST = RECORDED["0.16.1"]
UNTIL_0_15 = {
    "topk_indices": None,
    "topk_routing": {"precomputed_indices"},
    "aux_loss_scores": {"padding_mask"},
    "z_loss": {"padding_mask"},
    "route": {"padding_mask", "replay", "replay_target"},
}
LACKING = {"0.14.0": UNTIL_0_15 | {"gate": {"bias"}}, "0.15.3": UNTIL_0_15}
LACKING |= {release: {} for release in ("0.16.1", "0.17.1", "0.18.2", "0.19.2")}
Z_LOSS = f"{features.UTILS}z_loss_func"


def lacking(parameters):
    """By function, what it lacks: a set of settings, or None for the function itself."""
    missing = {name: features.lacking(name, parameters) for name in features.CALLS}
    return {name: without and {*without} for name, without in missing.items() if without is None or without}


def offered(parameters):
    """A function such as the adapter's `topk_routing`, as it is offered."""

    def topk_routing(logits, *, topk, precomputed_indices=None, **settings): ...

    return Implementation(SimpleNamespace(topk_routing=features.offered(topk_routing, parameters)))


@pytest.mark.parametrize("release", RECORDED)
def test_a_release_offers_what_its_signatures_have_words_for(release):
    assert lacking(RECORDED[release]) == LACKING[release]
    releases = [name for name in RECORDED if LACKING[name] != LACKING[release]]
    assert releases and all(lacking(RECORDED[name]) != LACKING[release] for name in releases)


@needs_megatron
def test_the_installed_release_has_the_recorded_signatures():
    installed, words = importlib.import_module("megatron.core").__version__, NEWEST[features.CONFIGURATION]
    read = features.read()
    read[features.CONFIGURATION] = tuple(name for name in read[features.CONFIGURATION] if name in words)
    assert read == RECORDED[installed]


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda logits, z_loss_coeff, padding_mask=None, new=None: None, {}),
        (lambda logits, z_loss_coeff, new=None, **_: None, {"z_loss": {"padding_mask"}}),
        (lambda logits, z_loss_coeff, new, padding_mask=None: None, {"z_loss": None}),
        (lambda logits, coeff, padding_mask=None: None, {"z_loss": None}),
        (None, {"z_loss": None}),
        (SimpleNamespace(), {"z_loss": None}),
    ],
)
def test_an_unknown_release_loses_what_has_no_word_or_needs_an_unknown_one(function, expected):
    read = features.read(lambda symbol: function if symbol == Z_LOSS else None)
    assert lacking(NEWEST | {Z_LOSS: read[Z_LOSS]}) == expected


def test_a_setting_without_a_word_is_not_in_the_signature_that_the_suite_reads():
    arguments = dict.fromkeys(("topk", "precomputed_indices", "expert_bias"))
    assert offered(RECORDED["0.15.3"]).lacks("topk_routing", arguments) == ["precomputed_indices"]
    assert offered(NEWEST).lacks("topk_routing", arguments) == []
    assert offered(NEWEST).offers("topk_routing")
    assert not offered(NEWEST | {features.CALLS["topk_routing"][0].symbol: None}).offers("topk_routing")
