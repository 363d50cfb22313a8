"""`speed`: a wrong result has no speed, and a ratio that falls is a regression."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.case import case_from
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.engine.options import Options
from conformance.engine.speed import clocks
from conformance.engine.speed.prepared import (
    BOTH,
    FORWARD,
    Calls,
    Inputs,
    Untimed,
    is_interpreted,
    problem_of,
    tensors_in,
)
from conformance.engine.speed.race import OWN
from conformance.interface import Implementation, load
from conformance.report.speed import speed

CASE = '{"function":"permute","tokens":6,"experts":3,"hidden":4,"grads":"tokens"}'
FORWARD_ALONE = '{"function":"permute","tokens":6,"experts":3,"hidden":4}'
CALLS = 50  # of the reference in one call of `late`
LATE = f"""
import moe_ref

def permute(*arguments, **settings):
    for _ in range({CALLS} - 1):
        moe_ref.permute(*arguments, **settings)
    return moe_ref.permute(*arguments, **settings)
"""
REAL = [name for name, contract in CONTRACTS.items() if contract.shapes.real]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU interprets no kernel")


@pytest.fixture
def late(workdir):
    (workdir / "late.py").write_text(LATE)
    return workdir


def taking(**us: float):
    """A clock that shows these times of the own side and of the rival."""
    return lambda versions, *_: {name: us["own" if name == OWN else "rival"] for name in versions}


def test_a_slower_implementation_is_a_regression_of_a_quicker_ones_ratios(late, call):
    code, out, _ = call("speed", FORWARD_ALONE, "--impl", "good", "--against", "moe_ref", "--report", "good.json")
    assert (code, "of the floor's speed" in out) == (0, True)
    code, out, _ = call(
        *("speed", FORWARD_ALONE, "--impl", "late", "--against", "moe_ref"),
        *("--report", "late.json", "--baseline", "good.json"),
    )
    assert (code, "2 of 2 ratios of the baseline fell by more than 5%" in out) == (5, True)
    (timed,) = json.loads((late / "late.json").read_text())["benchmarks"]["permute"]["operations"].values()
    us = timed[FORWARD]["us"]
    assert us[OWN] > us["moe_ref"] > 0


def test_equal_ratios_are_no_regression_and_another_device_or_rival_is_refused(late):
    first = Options("good", device="cpu", report=["old.json"])
    assert speed(first, "moe_ref", [CASE], taking(own=100.0, rival=100.0)) == 0
    report = json.loads((late / "old.json").read_text())
    for timed in report["benchmarks"]["permute"]["operations"].values():
        for result in timed.values():
            result["floor_us"] = 0.0  # which each run measures
    baseline = late / "good.json"
    baseline.write_text(json.dumps(report))
    repeated = Options("good", device="cpu", baseline=str(baseline))
    assert speed(repeated, "moe_ref", [CASE], taking(own=104.0, rival=100.0)) == 0
    assert speed(repeated, "moe_ref", [CASE], taking(own=106.0, rival=100.0)) == 5
    for name in ("device", "against"):
        baseline.write_text(json.dumps(report | {name: "another"}))
        with pytest.raises(Exception, match=f"the baseline's {name} is 'another'"):
            speed(repeated, "moe_ref", [CASE], taking(own=100.0, rival=100.0))


def test_without_a_rival_the_floor_is_left(call):
    code, out, _ = call("speed", FORWARD_ALONE, "--impl", "good")
    assert (code, "of the floor's speed" in out, "rival" in out) == (0, True, False)


def test_a_wrong_result_has_no_speed(call):
    code, out, _ = call("speed", CASE, "--impl", "wrong", "--against", "moe_ref")
    assert (code, "not timed: FAIL: rows" in out, "µs" in out) == (1, True, False)


def test_a_rival_with_wrong_results_is_not_timed(call):
    code, out, _ = call("speed", CASE, "--impl", "good", "--against", "wrong")
    assert (code, "no rival: wrong: FAIL: rows" in out, "× its speed" in out) == (0, True, False)
    assert "of the floor's speed" in out


@no_gpu
def test_the_time_of_triton_s_interpreter_is_no_kernel_s(call):
    small = '{"function":"glu","tokens":3,"width":4}'
    code, out, _ = call("speed", small, "--impl", "moe_fast", "--against", "moe_ref")
    assert (code, "moe_fast runs in Triton's interpreter here" in out, "µs" in out) == (4, True, False)
    code, out, _ = call("speed", small, "--impl", "moe_ref", "--against", "moe_fast")
    assert (code, "no rival: moe_fast runs in Triton's interpreter here" in out, "µs" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--impl", "good", "--against", "good"), "--against good is --impl itself; name another implementation"),
        (("--impl", "good", "--report", "out.md"), "--report out.md: the report of speed is a .json file"),
        (("--impl", "good", "--baseline", "text.json"), "--baseline text.json: not a JSON report of speed"),
        ((CASE, "--impl", "good", "--function", "permute"), "--function chooses among the suite's own cases"),
        (
            ("--impl", "good", "--against", "two", "--function", "premute"),
            "--function is 'premute'; the nearest is permute; known are gate",
        ),
        (("--impl", "good", "--against", "two", "--function", "unpermute"), "good and two must offer it"),
        (("{}", "--impl", "good", "--against", "two"), "function is None; known are"),
    ],
    ids=lambda x: "",
)
def test_speed_refuses_unusable_arguments_in_one_sentence(call, words, sentence):
    code, _, err = call("speed", *words)
    assert (code, sentence in err, len(err.splitlines())) == (2, True, 1)


# ---- what is timed


def inputs_of(**fields) -> Inputs:
    return Inputs.of(problem_of(case_from(fields)), "cpu")


def test_each_storage_that_a_call_takes_or_returns_is_moved_once():
    inputs = inputs_of(function="glu", tokens=3, width=4, dtype="bfloat16", grads="h")
    calls = Calls.of(inputs, load("moe_ref"))
    assert calls.moved(inputs, FORWARD) == 2 * (3 * 8 + 3 * 4)
    assert calls.moved(inputs, BOTH) == 2 * (3 * 8 + 3 * 4) * 2
    x = torch.zeros(5)
    assert len(list(tensors_in({"rows": x, "map": (x[1:], [x], moe_ref)}))) == 3


def test_of_several_calls_the_first_is_timed_unless_it_takes_a_state():
    inputs = inputs_of(function="quantize", tokens=1, hidden=1, scaling="mxfp8", grads="x", direction="both")
    calls = Calls.of(inputs, load("moe_ref"))
    assert [*calls.by_title] == [FORWARD]
    assert calls.forward().quantized is not None
    for fields in ({"scaling": "delayed"}, {"illegal": "recipe"}):
        with pytest.raises(Untimed):
            inputs_of(function="quantize", tokens=1, hidden=1, **fields)


@no_gpu
def test_the_first_launch_in_the_interpreter_is_seen():
    inputs = inputs_of(function="glu", tokens=3, width=4)
    assert is_interpreted(inputs, load("moe_fast"))
    assert not is_interpreted(inputs, load("moe_ref"))
    assert Calls.of(inputs, load("moe_fast")).forward() is not None  # launches run again


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("function", REAL)
def test_a_case_of_real_size_is_a_call_of_its_function(function, device):
    scope = Scope(CONTRACTS[function], Space(device))
    case = scope.case(CONTRACTS[function].shapes.real(scope))
    assert scope.fits(case.changed(grads=scope.signature.all_gradients(case)))


def test_families_with_kernels_have_cases_of_real_size():
    families = {
        type(CONTRACTS[name]).__module__.split(".")[2] for name in REAL if name not in ("gate", "shared_experts")
    }
    assert families == {"router", "permutation", "quantization", "fused", "experts"}


def test_a_clock_shows_the_median_and_pays_for_nothing_else(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    spans = iter([9.0, 1.0, 2.0, 6.0])  # the first warms up
    versions = {"one": lambda: advance(next(spans)), "two": lambda: advance(5.0)}
    medians = clocks.medians(versions, 1, 3, setup=lambda: advance(100.0), device="cpu")
    assert medians == {"one": 2e6, "two": 5e6}


def test_an_implementation_that_omits_outputs_is_timed():
    class Omitting:
        @staticmethod
        def permute(tokens, routing_map):
            return {name: x for name, x in moe_ref.permute(tokens, routing_map)._asdict().items() if name != "overflow"}

        @staticmethod
        def declares(function):
            return {"omits": ("overflow",)}

    inputs = inputs_of(**json.loads(CASE))
    _, gradients = Calls.of(inputs, Implementation(Omitting)).both()
    assert gradients["d_tokens"].shape == (6, 4)


@pytest.mark.parametrize(("launch", "writes"), [(0.0, 1), (64.0, 3), (160.0, 6), (1e9, clocks.MOST_WRITES)])
def test_the_memory_is_written_until_the_next_call_is_launched(launch, writes):
    """A write takes 64 µs; they last for twice the time of a launch, but for MOST_WRITES."""
    assert clocks.writes_for(launch, 64.0) == writes
    assert writes == clocks.MOST_WRITES or (writes - 1) * 64.0 <= clocks.AHEAD * launch < writes * 64.0


@pytest.mark.parametrize("writes", [1, 3])
def test_every_timed_call_follows_the_writes(writes, monkeypatch):
    done = []
    monkeypatch.setattr(clocks, "_flushed", lambda device: SimpleNamespace(zero_=lambda: done.append("write")))
    clocks.interleaved({"call": lambda: done.append("call")}, 1, 2, "cpu", writes)
    assert done == ["call"] * 2 + (["write"] * writes + ["call"]) * 2


class HostEvent:
    """A GPU's event, on the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end.at - self.at) * 1e3


def test_a_call_that_takes_long_to_launch_waits_behind_more_writes(monkeypatch):
    done, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def own() -> None:
        now[0] += 0.02

    def write() -> None:
        done.append("write")
        now[0] += 1e-3

    monkeypatch.setattr(clocks.torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(clocks.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clocks, "_flushed", lambda device: SimpleNamespace(zero_=write))
    medians = clocks.queued({"own": own, "rival": lambda: done.append("call")}, 1, 2)
    assert medians == pytest.approx({"own": 2e4, "rival": 0.0})
    writes = "".join("w" if x == "write" else "c" for x in done).split("c")[-2]
    assert 1 < len(writes) <= clocks.MOST_WRITES
