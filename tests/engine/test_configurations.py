"""Launches are recorded by configuration, and the verdict counts those that were judged."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.engine.child import configurations
from conformance.engine.run.launched import by_kernel, merged, unjudged
from conformance.engine.run.launched import configurations as of_ledger
from conformance.report.files import markdown
from conformance.report.terminal import lines
from tests.engine.verdict_helpers import book as book

COMPILED = SimpleNamespace(num_warps=4, num_stages=2, maxnreg=None, num_ctas=1)


class Lazy:
    """The metadata of a launch, as Triton hands them to a hook."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.get = lambda: data


def scale_kernel() -> None:
    """Stands for the Python function of a kernel."""


@pytest.fixture
def kernel() -> Any:
    """A kernel with a pointer, an optional pointer and a constant, that is watched."""
    parameters = [("x_ptr", False), ("bias_ptr", False), ("BLOCK", True)]
    params = [SimpleNamespace(name=name, is_constexpr=constant) for name, constant in parameters]
    out = SimpleNamespace(fn=scale_kernel, params=params, launch_metadata=None)
    configurations.watch(out)
    configurations.take()
    configurations.take_descriptions()
    return out


def launch(kernel: Any, grid: tuple[int, ...], compiled: Any = COMPILED, **arguments: Any) -> str:
    configurations._entered(Lazy(kernel.launch_metadata(grid, compiled, arguments)))
    (name,) = configurations.take()
    return name


def test_the_same_constants_and_options_are_one_configuration(kernel):
    first = launch(kernel, (2,), x_ptr=1, bias_ptr=2, BLOCK=64)
    assert launch(kernel, (9, 3), x_ptr=5, bias_ptr=7, BLOCK=64) == first
    assert first.startswith("scale_kernel ")


MORE_WARPS = SimpleNamespace(**vars(COMPILED) | {"num_warps": 8})
CHANGES = ({"BLOCK": 128}, {"bias_ptr": None}, {"bias_ptr": (1, None)}, {"grid": (1,)}, {"compiled": MORE_WARPS})


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_another_constant_option_or_grid_is_another_configuration(kernel, change):
    arguments: dict[str, Any] = {"grid": (2,), "x_ptr": 1, "bias_ptr": 2, "BLOCK": 64}
    assert launch(kernel, **arguments) != launch(kernel, **arguments | change)


def test_a_configuration_is_described_once(kernel):
    name = launch(kernel, (1,), x_ptr=1, bias_ptr=None, BLOCK=64)
    described = configurations.take_descriptions()[name]
    assert described["kernel"].endswith("test_configurations.scale_kernel")
    assert described["constants"] == "BLOCK=64 bias_ptr=None"
    assert described["options"] == "4 warps, 2 stages, 1 ctas, one program"
    launch(kernel, (1,), x_ptr=1, bias_ptr=None, BLOCK=64)
    assert not configurations.take_descriptions()


def test_the_metadata_of_the_kernel_itself_stay(kernel):
    kernel.launch_metadata = lambda *_: {"flops": 8}
    configurations.watch(kernel)
    assert kernel.launch_metadata((1,), COMPILED, {"BLOCK": 1})["flops"] == 8


def test_a_kernel_is_watched_once(kernel):
    watched = kernel.launch_metadata
    configurations.watch(kernel)
    assert kernel.launch_metadata is watched


def test_a_launch_of_another_kernel_is_no_configuration():
    configurations.take()
    configurations._entered(Lazy({"name": "another"}))
    assert not configurations.take()


# ---- what a run has of them

DESCRIBED = {
    name: {"kernel": f"m.{name[0]}", "constants": name, "options": "1 warps"} for name in ("a 1", "a 2", "b 3")
}


def outcome(status: str, judged: list[str], launched: Sequence[str] = (), kind: str = "outcome") -> dict[str, Any]:
    names = {"configurations": judged, "launched": [*launched], "descriptions": DESCRIBED}
    return {"kind": kind, "status": status, **names}


def test_a_configuration_is_judged_by_informative_cases_alone():
    ledger = [outcome("PASS", ["a 1"], ["a 2"]), outcome("UNINFORMATIVE", ["b 3"]), outcome("FAIL", ["a 1"])]
    judged = of_ledger(ledger, ("PASS", "FAIL"))
    counts = {name: (x["judged"], x["launched"]) for name, x in judged.items()}
    assert counts == {"a 1": (2, 2), "a 2": (0, 1), "b 3": (0, 1)}
    assert unjudged(judged) == ["m.a (a 2, 1 warps)", "m.b (b 3, 1 warps)"]
    assert by_kernel(judged) == {"m.a": (2, 1, 2), "m.b": (1, 0, 0)}


def test_launches_that_reduce_a_failure_judge_nothing():
    judged = of_ledger([outcome("FAIL", ["a 1"], kind="request")], ("FAIL",))
    assert judged["a 1"]["judged"] == 0


def test_shards_add_up():
    first, second = (of_ledger([outcome("PASS", names)], ("PASS",)) for names in (["a 1"], ["a 1", "b 3"]))
    assert {name: x["judged"] for name, x in merged([first, second]).items()} == {"a 1": 2, "b 3": 1}


def test_the_verdict_counts_configurations_and_names_those_that_no_case_judged(book):
    launches = {"configurations": ["a 1"], "launched": ["a 2"], "descriptions": DESCRIBED}
    verdict = book.section("drawn-permute", "permute", "PASS", **launches).verdict()
    text = " ".join("\n".join(lines(verdict)).split())
    assert "2 configurations, 1 not judged" in text
    assert "m.a (a 2, 1 warps): a configuration that no judged case has launched" in text
    assert "| `m.a` | 2 | 1 | 1 |" in markdown(verdict)


def test_a_verdict_whose_configurations_are_all_judged_says_so(book):
    launches = {"configurations": ["a 1", "b 3"], "launched": [], "descriptions": DESCRIBED}
    verdict = book.section("drawn-permute", "permute", "PASS", **launches).verdict()
    assert "2 configurations, all judged" in "\n".join(lines(verdict))
    assert "not judged" not in markdown(verdict)
