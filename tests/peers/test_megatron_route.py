"""megatron-core's TopKRouter as `route`: the waivers cover all its differences, and no others.

The package runs in other processes, because its process groups are global to a process. `MENDED` is
the package with its known differences fixed: every case must pass on it, so no waiver hides another
difference.
"""

import contextlib
import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import drawn, strategy
from conformance.engine.options import ChildOptions
from conformance.engine.run import corpus
from conformance.engine.run.pool import Pool
from conformance.families.router.cases_route import RouteCase, config_of, logits_of_step
from conformance.families.router.route import STATE
from conformance.interface import Implementation
from tests.peers import needs_megatron
from tests.te.judging import NOTHING_WRONG

ADAPTER = "conformance.peers.megatron"
KEPT = corpus.COMMITTED.parent / "peers" / "megatron.corpus"
ONE_RANK = frozenset({"ranks"})  # unsupported by the adapter
pytestmark = needs_megatron


class Changed:
    """The adapter with functions replaced: called as change(function, *args, **settings)."""

    def __init__(self, **changes: Callable[..., Any]) -> None:
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(importlib.import_module(ADAPTER), name)
        if name not in self.changes:
            return function
        return functools.wraps(function)(functools.partial(self.changes[name], function))


# The package, fixed


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """TopKRouter by the reference's rules: one fix per known difference of 0.16.1."""
    router = importlib.import_module("megatron.core.transformer.moe.router")
    apply_seq_aux_loss, attach, loss = (
        router.TopKRouter._apply_seq_aux_loss,
        router.TopKRouter.attach_and_log_load_balancing_loss,
        router.switch_load_balancing_loss_func,
    )

    def count(self, routing_map, padding_mask=None):
        if self.enable_expert_bias and self.training and torch.is_grad_enabled():
            self.local_tokens_per_expert += (
                routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            ).sum(0)

    def of_sequences(self, probs, scores, routing_map, seq_length, bsz, **options):
        self.sequences = bsz
        return apply_seq_aux_loss(self, probs, scores, routing_map, seq_length, bsz, **options)

    def attached(self, activation, coeff, value, name, group, *, valid_token_count, **options):
        tokens = valid_token_count * self.sequences if name == "seq_load_balancing_loss" else valid_token_count
        return attach(self, activation, coeff, value, name, group, valid_token_count=tokens, **options)

    def of_any_count(*, probs, total_num_tokens, **options):
        if total_num_tokens == 0:
            return probs.sum() * 0
        return loss(probs=probs, total_num_tokens=total_num_tokens, **options)

    def earliest(x, k, dim=-1, sorted=True):
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)

    with (
        mock.patch.multiple(
            router.TopKRouter,
            _apply_expert_bias=count,
            _apply_seq_aux_loss=of_sequences,
            attach_and_log_load_balancing_loss=attached,
        ),
        mock.patch.object(router, "switch_load_balancing_loss_func", of_any_count),
        mock.patch.object(torch, "topk", earliest),
    ):
        yield


def _mended_route(route, *args, **settings):
    with mended():
        return route(*args, **settings)


def _freezing(finish_batch, state, config, *, frozen=False):
    new = finish_batch(state, config)
    return new._replace(buffers=new.buffers | {"expert_bias": state.buffers["expert_bias"]}) if frozen else new


MENDED = Changed(route=_mended_route, finish_batch=_freezing)
COPIED = Changed(pad_routing_map=lambda pad, routing_map, *, align: pad(routing_map.clone(), align=align))
FLOAT32_SUMS = Changed(declares=lambda declares, function: declares(function) | {"accumulator": "float32_only"})


# Defects planted in the adapter


def _leaking_bias(route, logits, config, *, state, **settings):
    out = route(logits, config, state=state, **settings)
    return out._replace(probs=out.probs + out.routing_map * state.buffers["expert_bias"])


def _twice_the_scale(route, *args, loss_scale=1.0, **settings):
    return route(*args, loss_scale=2 * loss_scale, **settings)


def _no_scale(route, *args, loss_scale=1.0, **settings):
    return route(*args, **settings)


def _as_tracked(route, logits, config, **settings):
    out = route(logits, config, **settings)
    return out._replace(losses=out.losses._replace(aux_loss=out.losses.aux_loss / config.aux_loss_coeff))


def _one_sequence(route, *args, batch_size=1, **settings):
    return route(*args, **settings)


def _no_mask(route, *args, padding_mask=None, **settings):
    return route(*args, **settings)


def _other_mask(route, *args, padding_mask=None, **settings):
    return route(*args, padding_mask=~padding_mask, **settings)


def _last_in_first_out(route, *args, state, replay="none", **settings):
    return route(*args, state=state._replace(queue=state.queue[::-1]), replay=replay, **settings)


def _always_training(route, *args, training=True, **settings):
    return route(*args, **settings)


def _forgotten(state_from, tensors):
    return state_from({name: x * 0 if "tokens" in name else x for name, x in tensors.items()})


def _counters_kept(finish_batch, state, config, **settings):
    counted = {name: x for name, x in state.buffers.items() if name != "expert_bias"}
    new = finish_batch(state, config, **settings)
    return new._replace(buffers=new.buffers | counted)


def _case(**fields: Any) -> RouteCase:
    return RouteCase(function="route", **{"experts": 6, "topk": 2, "tokens": 6, **fields})


ALL, TWICE = "aux+seq+global+z", "train+finish+train"
REPLAYS = "record+forward+record+forward+backward+backward"
# a function, its defect, a case that the package passes, the output that exposes the defect
PLANTS: dict[str, tuple[str, Callable[..., Any], RouteCase, str]] = {
    "the bias leaks into the weights": ("route", _leaking_bias, _case(bias=True, steps=TWICE), "2.probs"),
    "losses are attached twice": ("route", _twice_the_scale, _case(losses="aux", grads="logits"), "d_logits.0"),
    "the loss scale is lost": ("route", _no_scale, _case(losses="z", grads="logits", scale=24), "d_logits.0"),
    "a loss is reported without its coefficient": ("route", _as_tracked, _case(losses="aux"), "0.aux_loss"),
    "sequences are one sequence": ("route", _one_sequence, _case(losses="seq", sequences=3), "0.seq_aux_loss"),
    "padding counts": ("route", _no_mask, _case(losses="z", padding=4), "0.z_loss"),
    "the mask marks the valid": ("route", _other_mask, _case(losses="aux", padding=4), "0.aux_loss"),
    "replays come in the wrong order": ("route", _last_in_first_out, _case(steps=REPLAYS, seed=3), "4.routing_map"),
    "evaluation has losses": ("route", _always_training, _case(losses=ALL, steps="train+eval"), "1.losses"),
    "a saved state forgets its counts": (
        "state_from", _forgotten, _case(losses="global", steps="train+reload+train"), "2.global_aux_loss"
    ),
    "counters are never reset": (
        "finish_batch", _counters_kept, _case(losses="global", steps=TWICE), "2.global_aux_loss"
    ),
}  # fmt: skip


# Run in the package's process


def outcome_of(name: str) -> tuple[str, str]:
    """The adapter's status on the defect's case, and the output in which the defect differs."""
    function, change, case, _ = PLANTS[name]
    unchanged, planted = (evaluate(case, Implementation(x)) for x in (Changed(), Changed(**{function: change})))
    return unchanged.status, (planted.finding or {}).get("output", planted.status)


def left_behind() -> dict[str, Any]:
    """Comparisons of two calls with the same state, and the package's global state after them."""
    adapter = Changed()
    case = _case(bias=True, losses=ALL, steps="record")
    config = config_of(case)
    state = adapter.new_state(config)
    saved = {name: x.clone() for name, x in adapter.state_tensors(state).items()}
    first, second = (adapter.route(logits_of_step(case, 0), config, state=state, replay="record") for _ in range(2))
    replay = importlib.import_module("megatron.core.transformer.moe.router_replay").RouterReplay
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    return {
        "the same losses": all(torch.equal(a, b) for a, b in zip(first.losses, second.losses, strict=True)),
        "the same state": all(
            torch.equal(x, adapter.state_tensors(second.state)[name])
            for name, x in adapter.state_tensors(first.state).items()
        ),
        "the argument unchanged": all(torch.equal(x, adapter.state_tensors(state)[name]) for name, x in saved.items()),
        "something was counted": bool(adapter.state_tensors(first.state)["tokens_per_expert"].any()),
        "tracker": dict(utils.get_moe_layer_wise_logging_tracker()),
        "replay objects": list(replay.global_router_replay_instances),
    }


def counters(half: float) -> dict[str, torch.dtype]:
    """Dtypes of the state tensors when all counters are 1 + half."""
    adapter = Changed()
    state = adapter.new_state(config_of(_case(bias=True)))
    return {
        name: x.dtype
        for name, x in adapter.state_tensors(
            state._replace(buffers={n: x + 1 + half for n, x in state.buffers.items()})
        ).items()
    }


def refusals() -> list[str | None]:
    """The answers of `supports` to three configurations."""
    supports = Changed().supports
    softmax, unknown = config_of(_case()), config_of(_case(score="sqrtsoftplus"))
    return [
        supports("route", logits=None, config=softmax),
        supports("route", logits=None, config=unknown),
        supports("route", logits=None),
    ]


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function of this file in the package's process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=1200)


@pytest.fixture(scope="module")
def behind_the_waivers():
    """Kept and drawn cases of route on one rank, with their outcomes in the fixed package."""
    with Pool(ChildOptions("tests.peers.test_megatron_route:MENDED", search=(str(Path(__file__).parents[2]),))) as pool:
        description = pool.start()
        space = Space.of(description)
        one_rank = replace(space, without=space.without | {"route": space.without["route"] | ONE_RANK})
        corpus_cases = [case for case in corpus.read_folder(KEPT) if isinstance(case, RouteCase)]
        new = [case for case in drawn(strategy("route", one_rank), 1, 160) if isinstance(case, RouteCase)]
        new = [case for case in new if case.dtype != "float64"]  # its scores are float32: waived as a whole
        return description["functions"]["route"], corpus_cases, list(pool.run(corpus_cases + new))


# Claims


def test_the_adapter_offers_route_with_all_it_can_be_asked_for(behind_the_waivers):
    assert behind_the_waivers[0]["offered"]
    assert behind_the_waivers[0]["without"] == ["ranks"]
    assert behind_the_waivers[0]["declares"]["accumulator"] == "storage"


def test_nothing_is_wrong_in_route_but_what_is_waived(behind_the_waivers):
    failing = [f"{case.text} {x}" for case, x in behind_the_waivers[2] if x.status not in NOTHING_WRONG]
    assert not failing
    assert sum(outcome.status == "PASS" for _, outcome in behind_the_waivers[2]) > 60


def test_the_mends_are_what_the_kept_cases_of_route_fail_without(behind_the_waivers):
    _, corpus_cases, outcomes = behind_the_waivers
    passed = {case.id for case, outcome in outcomes if outcome.status in NOTHING_WRONG}
    assert {case.id for case in corpus_cases} == passed & {case.id for case in corpus_cases}
    assert len(corpus_cases) > 20  # all fail in the unfixed package: tests/peers/test_peers.py


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found_in_a_case_that_the_package_passes(elsewhere, name):
    assert elsewhere(outcome_of, name) == ("PASS", PLANTS[name][3])


def test_a_call_leaves_nothing_behind_but_the_state_it_returns(elsewhere):
    traces = elsewhere(left_behind)
    assert traces.pop("tracker") == {} and traces.pop("replay objects") == []
    assert all(traces.values()), traces


def test_counters_are_told_as_integers_only_where_they_are_whole(elsewhere):
    integral, half = elsewhere(counters, 0.0), elsewhere(counters, 0.5)
    assert set(integral) == set(STATE)
    assert {name for name, dtype in integral.items() if dtype == torch.int64} == set(STATE) - {"expert_bias"}
    assert all(dtype == torch.float32 for dtype in half.values())


def test_scores_that_the_package_does_not_have_are_declined_where_the_configuration_is_shown(elsewhere):
    assert elsewhere(refusals) == [None, "Invalid score_function: sqrtsoftplus", None]
