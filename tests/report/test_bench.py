"""`bench`: a ratio that falls is a regression, a time that rises is none."""

import copy
import json

import pytest
import torch

from benchmarks import experts
from benchmarks.common import Operation, timed
from conformance.report import bench as report_of_bench
from conformance.report.bench import NAMES, OF_RANKS, OWN_TOKENS, SAME, bench
from conformance.report.ratios import FALL, compared, ratios, read

ROW = {"us": {"moe_fast": 100.0, "walk": 50.0, "argsort": 300.0}, "ours": ["moe_fast", "walk"], "floor_us": 90.0}
OLD = {"device": "H200", "tokens": 8192, "benchmarks": {"permutation": {"operations": {"tiny": {"row map": ROW}}}}}


def changed(**us: float) -> dict:
    new = copy.deepcopy(OLD)
    row = new["benchmarks"]["permutation"]["operations"]["tiny"]["row map"]
    row["us"] |= us
    return new


def of(report: dict) -> dict:
    return {key[3:]: ratio for key, ratio in ratios(report, "permutation")}


def test_a_ratio_is_of_an_own_version_to_the_floor_or_a_peer():
    assert of(OLD) == {
        ("moe_fast", "÷ floor"): 0.9,
        ("moe_fast", "÷ argsort"): 3.0,
        ("walk", "÷ floor"): 1.8,
        ("walk", "÷ argsort"): 6.0,
    }


@pytest.mark.parametrize(
    ("us", "fallen"),
    [
        ({}, 0),
        ({"moe_fast": 104.0}, 0),
        ({"moe_fast": 106.0}, 2),
        ({"moe_fast": 106.0, "argsort": 318.0}, 1),  # slower as a whole: of the floor alone
        ({"moe_fast": 50.0, "walk": 25.0}, 0),
        ({"walk": 60.0}, 2),
    ],
)
def test_a_fall_of_more_than_five_percent_is_a_regression(capsys, us, fallen):
    assert compared(OLD, changed(**us), NAMES, SAME) == (5 if fallen else 0)
    head, *lines = capsys.readouterr().out.splitlines()
    assert (head, len(lines)) == (f"{fallen} of 4 ratios of the baseline fell by more than 5%", fallen)
    assert FALL == 0.05


def test_slower_hardware_alone_is_no_regression():
    new = changed(moe_fast=200.0, walk=100.0, argsort=600.0)
    new["benchmarks"]["permutation"]["operations"]["tiny"]["row map"]["floor_us"] = 180.0
    assert compared(OLD, new, NAMES, SAME) == 0


def test_what_is_no_longer_measured_is_a_regression(capsys):
    new = copy.deepcopy(OLD)
    new["benchmarks"]["permutation"]["operations"]["tiny"] = {}
    assert compared(OLD, new, NAMES, SAME) == 5
    assert "permutation, tiny, row map, moe_fast, ÷ floor: 0.900, and is no longer measured" in capsys.readouterr().out
    assert compared(OLD, new, ("router",), SAME) == 0


def test_a_baseline_of_another_gpu_or_size_is_refused():
    for name, value in (("device", "H100"), ("tokens", 1024)):
        with pytest.raises(Exception, match=f"the baseline's {name} is"):
            compared(OLD | {name: value}, OLD, NAMES, SAME)


def test_a_recorded_file_is_read_back_and_another_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    assert read(str(path), SAME, "bench") == OLD
    bad = copy.deepcopy(OLD)
    del bad["benchmarks"]["permutation"]["operations"]["tiny"]["row map"]["us"]["walk"]
    for text in ("{", "[]", json.dumps({"benchmarks": {}}), json.dumps(bad)):
        path.write_text(text)
        with pytest.raises(Exception, match="not a JSON report of bench"):
            read(str(path), SAME, "bench")
    with pytest.raises(Exception, match="cannot be read"):
        read(str(tmp_path / "none.json"), SAME, "bench")


SCRIPT = "import sys, pathlib; pathlib.Path('ran').write_text(' '.join(sys.argv[1:])); sys.exit({code})\n"


def checkout(folder, code: int):
    """A folder whose only benchmark ends so."""
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "router.py").write_text(SCRIPT.format(code=code))
    return folder


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are so many GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")

    return pretend


def test_one_gpu_runs_no_benchmark_of_several_ranks(tmp_path, monkeypatch, gpus):
    ran = []
    monkeypatch.setattr(report_of_bench, "_ran", lambda name, arguments, root: ran.append((name, arguments)))
    for count, names in ((1, NAMES), (2, NAMES + OF_RANKS)):
        gpus(count)
        ran.clear()
        assert bench((), "", "", checkout(tmp_path, 0)) == 1  # none has written its figures
        assert [name for name, _ in ran] == [*names]
        assert {name for name, words in ran if "--tokens" in words} == {*NAMES} - {*OWN_TOKENS}
    gpus(1)
    with pytest.raises(Exception, match="--only dispatch: it needs two GPUs or more"):
        bench(("dispatch",), "", "", checkout(tmp_path, 0))


def test_without_a_gpu_tiny_shapes_are_checked_and_nothing_is_timed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(("router",), "", "", checkout(tmp_path / "right", 0)) == 0
    assert (tmp_path / "right" / "ran").read_text() == "--quick"
    assert "time nothing" in capfd.readouterr().out
    assert bench(("router",), "", "", checkout(tmp_path / "wrong", 1)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_refuses_unusable_arguments_in_one_sentence(call, tmp_path):
    for words, sentence in (
        (("--baseline", "old.json"), "--baseline old.json: bench needs a GPU to time anything"),
        (("--report", "new.json"), "--report new.json: bench needs a GPU to time anything"),
        (("--only", "routers"), "--only is 'routers'; the nearest is router; known are permutation"),
    ):
        code, _, err = call("bench", *words)
        assert (code, sentence in err) == (2, True)
    with pytest.raises(Exception, match=r"bench needs a checkout of the repository: .* has no folder benchmarks"):
        bench((), "", "", tmp_path)


def test_a_benchmark_reports_which_versions_are_its_own():
    clock = lambda versions, blocks, reps: dict.fromkeys(versions, 2.0)  # noqa: E731
    operation = Operation("sum", {"moe_fast": None, "own": None, "peer": None}, clock=clock, ours=("own",))
    timing = timed(operation, 1.0, type("Options", (), {"blocks": 1, "reps": 1}))
    report = {"benchmarks": {"permutation": {"operations": {"tiny": {"sum": timing}}}}}
    assert of(report) == {("moe_fast", "÷ peer"): 1.0, ("own", "÷ peer"): 1.0}


def test_the_quick_check_of_products_finds_a_wrong_one():
    layer = next(x for name, x in experts.TINY.items() if name == "linear, few rows")
    x, counts = experts.make_operands(layer)
    versions = experts.scaled_versions(experts.quantized(x, counts, "block"), counts, layer.rows)
    experts.check_scaled(x, counts, "block", versions)
    with pytest.raises(AssertionError, match="forward"):
        experts.check_scaled(x, counts, "block", versions | {"forward": lambda: versions["forward"]() * 1.1})
