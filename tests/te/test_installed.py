"""The adapters of the installed package, here with a stand-in in its place."""

import importlib
import sys
from pathlib import Path

import pytest

import moe_fast
from conformance.core.space import Space
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.interface import Implementation
from conformance.peers.te.package import installed
from tests.te.judging import NOTHING_WRONG
from tests.te.standin import standin

PEER = "conformance.peers.transformer_engine"
MODULES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.router")


@pytest.fixture
def without_package(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine" or name == PEER]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)


@pytest.fixture
def with_package(without_package, monkeypatch):
    te = standin("2.20")
    for name, module in zip(MODULES, (te, te.pytorch, te.pytorch.router), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    yield te
    sys.modules.pop(PEER, None)


def test_a_missing_package_is_one_sentence_that_says_what_to_install(without_package):
    with pytest.raises(
        ImportError, match=r"^transformer_engine cannot be imported .*pip install 'moe-conformance\[te\]'"
    ):
        importlib.import_module(PEER)


def test_a_package_whose_libraries_fail_is_named(without_package, monkeypatch):
    def broken(name):
        raise OSError("libcudnn.so.9 cannot be opened")

    monkeypatch.setattr("conformance.peers.te.package.importlib.import_module", broken)
    with pytest.raises(ImportError, match=r"OSError: libcudnn\.so\.9 cannot be opened"):
        installed()


def test_the_peer_offers_what_the_package_has_and_nothing_else(with_package):
    peer = importlib.import_module(PEER)
    implementation = Implementation(peer, PEER)
    offered = [name for name in moe_fast.__all__ if implementation.offers(name)]
    assert sorted(offered) == sorted(["declares", "supports", *peer.alone.offered])
    assert implementation.declares("permute")["zero_prob_rows"] == "zero"
    assert implementation.lacks("permute", {"align": 1, "capacity": 1, "num_rows": 1}) == ["capacity", "num_rows"]
    assert "tie_rule" not in implementation.declares("topk_routing")


def test_completed_by_ours_every_function_of_the_adapter_has_every_setting(with_package):
    adapter = importlib.import_module(PEER).completed
    implementation = Implementation(adapter, f"{PEER}:completed")
    assert implementation.lacks("permute", {"align": 1, "capacity": 1, "num_rows": 1}) == []
    assert implementation.lacks("topk_routing", {"precomputed_indices": None}) == []
    assert adapter.ours is moe_fast


def test_a_child_process_judges_an_adapter_like_any_implementation():
    with Pool(
        ChildOptions("tests.te.adapted:completed", device="cpu", search=(str(Path(__file__).parents[2]),))
    ) as pool:
        description = pool.start()
        space = Space.of(description)
        section = next(x for x in sections() if (x.kind, x.function) == ("fixed", "permute"))
        outcomes = [outcome for _, outcome in pool.run(cases_of(section, PROFILES["smoke"], space, 0))]
    assert description["functions"]["permute"]["declares"]["zero_prob_rows"] == "zero"
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count("PASS") > 8 and {*statuses} <= {*NOTHING_WRONG}


def test_a_release_without_a_submodule_is_loaded_all_the_same(with_package):
    assert installed() is with_package
