"""Random cases reach what they promise, and depend on nothing but their seed."""

import os
import subprocess
import sys
from typing import Any

import pytest
from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, run_seed, scope_of, strategy
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from tests.engine.drawn_cases import BATCH, FUNCTIONS, OF_EACH_FAMILY, covered, draws, most_draws
from tests.engine.promises_of_functions import PROMISES

# one after another: they share draws
of_every_function = pytest.mark.parametrize("function", FUNCTIONS, scope="module")


def unreached(promises: dict[str, Any], cases) -> dict[str, Any]:
    """The promises that no case keeps."""
    return {name: promise for name, promise in promises.items() if not any(promise(case) for case in cases)}


@of_every_function
def test_the_draws_reach_all_that_is_promised(function):
    missing = unreached(PROMISES[function], scope_of(function, Space()).far())
    for batch in range(-(-most_draws(function) // BATCH)):
        if missing:
            missing = unreached(missing, draws(function, batch))
    assert [*missing] == []


def values(function: str, cases) -> set[tuple[str, Any]]:
    """The words and flags among the values of the axes, and the laws, that the cases have."""
    axes = {axis.name for axis in scope_of(function, Space()).axes} | {"law"}
    pairs = {(name, getattr(case, name)) for case in cases for name in axes}
    flags = {(name, value) for name, value in pairs if isinstance(value, bool)}
    return flags | {(name, word) for name, value in pairs if isinstance(value, str) for word in value.split("+")}


LEFT_TO_THE_ARRAY = {  # values that no draw has
    "moe_layer": {("grads", name) for name in ("router_bias", "fc1_bias", "fc2_bias")},
    "load_balancing_loss": {("map_dtype", "bool"), ("values", "ties")},
    "update_expert_bias": {("map_dtype", "bool")},
}


@of_every_function
def test_the_draws_reach_each_word_and_flag_of_the_covering_array(function):
    missing = values(function, covered(function).cases) - LEFT_TO_THE_ARRAY.get(function, set())
    for batch in range(-(-most_draws(function) // BATCH)):
        if missing:
            missing -= values(function, draws(function, batch))
    assert missing == set()


@of_every_function
def test_draws_that_are_held_back_are_missed(function):
    default = draws(function)[0].changed(law="", poison="nan")
    wanted = values(function, covered(function).cases)
    held_back = {pair for pair in wanted if pair[0] in ("law", "poison")} - {("law", ""), ("poison", "nan")}
    assert held_back and held_back <= wanted - values(function, [default])


# ---- what they depend on


@pytest.mark.parametrize("function", OF_EACH_FAMILY)
def test_the_same_seed_draws_the_same_cases_and_another_seed_others(function):
    first, repeated, of_other_seed = (drawn(strategy(function, Space()), seed, 8) for seed in (7, 7, 8))
    assert first == repeated
    assert len({case.id for case in first}) == 8
    assert len({case.id for case in first} & {case.id for case in of_other_seed}) < 4


DRAW_ELSEWHERE = """
import sys
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.core.space import Space
for function in sys.argv[1:]:
    for kind in ("fixed", "drawn"):
        print(*(case.id for case in cases_of(Section(kind, function), PROFILES["smoke"], Space(), 0)))
"""


def test_the_cases_depend_on_neither_folder_nor_process(tmp_path):
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DRAW_ELSEWHERE, *OF_EACH_FAMILY]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    sections = [Section(kind, function) for function in OF_EACH_FAMILY for kind in ("fixed", "drawn")]
    here = [cases_of(section, PROFILES["smoke"], Space(), 0) for section in sections]
    assert printed.splitlines() == [" ".join(case.id for case in cases) for cases in here]


def test_seeds_of_sections_differ():
    seeds = [run_seed(function, shard, seed) for function in FUNCTIONS for shard in range(3) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


# ---- what smoke has

AFTER = {"score_function": "softmax", "pre_softmax": False}  # the defaults: softmax of the chosen
GPT_OSS = {  # settings of a call, with True for a tensor that is given
    "gate": {"bias": True},
    "topk_routing": {"topk": 2} | AFTER,
    "glu": {"kind": "quick_geglu", "clamp": 7.0, "offset": 1.0, "interleave": 1, "probs": True},
    "grouped_mlp": {"clamp": 7.0, "offset": 1.0, "fc1_bias": True, "fc2_bias": True, "probs": True},
}


def smoke_has(function: str, device: str, settings: dict) -> bool:
    """Whether a call of the profile smoke has all these settings."""
    sections = (Section("fixed", function), Section("drawn", function))
    cases = [case for section in sections for case in cases_of(section, PROFILES["smoke"], Space(device), 0)]
    calls = [CONTRACTS[function].problem(case).settings for case in cases if not case.illegal]
    calls_settings = [{name: True if isinstance(x, Tensor) else x for name, x in call.items()} for call in calls]
    return any(settings.items() <= (AFTER | call).items() for call in calls_settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("function", GPT_OSS)
def test_smoke_has_the_settings_of_gpt_oss(function, device):
    assert smoke_has(function, device, GPT_OSS[function])
    assert not smoke_has(function, device, GPT_OSS[function] | {"no such setting": True})
