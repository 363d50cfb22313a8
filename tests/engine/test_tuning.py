"""A tuned kernel is judged in each configuration, without timing any, and by the case alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.engine.child import autotuning, child
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.tuned import EACH, FIRST, UNKNOWN, joined
from conformance.engine.child.tuning import MOST, Tuning
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.merging import merge
from conformance.engine.run.session import judge
from conformance.interface import Implementation
from conformance.report.files import markdown
from conformance.report.terminal import lines
from tests.engine import tuned_kernels as kernels
from tests.engine.tuned_kernels import configs, copied, loop, namespace, pruned, tuned
from tests.engine.verdict_helpers import Book

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU interprets no kernel")
CASE = CONTRACTS["activation"].case_type(function="activation", tokens=3, width=4)
COPY = "tests.engine.tuned_kernels.copy_kernel"


@pytest.fixture
def compiled(monkeypatch) -> None:
    """Interpreted kernels count as compiled ones: each configuration runs."""
    monkeypatch.setattr(autotuning, "_is_interpreted", lambda tuner: False)


def judged(implementation: Any, case=CASE) -> Outcome:
    return evaluate(case, Implementation(implementation), "cpu")


def message_of(outcome: Outcome) -> str:
    assert outcome.status == "FAIL", outcome
    return (outcome.finding or {})["message"]


def blocks_of(outcome: Outcome) -> list[int]:
    """BLOCK of each configuration that was judged."""
    return sorted(int(label.split(",")[0].removeprefix("BLOCK: ")) for label in outcome.tuned[COPY]["judged"])


# ---- Triton's autotuner


@no_gpu
def test_the_interpreter_runs_the_first_configuration_alone():
    outcome = judged(kernels.THIRD_WRONG)
    assert (outcome.status, blocks_of(outcome)) == ("PASS", [64])
    assert (outcome.tuned[COPY]["by"], outcome.tuned[COPY]["total"]) == (FIRST, 3)
    assert message_of(judged(kernels.FIRST_WRONG)).endswith("with the configuration " + label(64, 1))
    assert judged(kernels.WITHOUT_DEVICE).status == "PASS"


def label(block: int, added: int = 0, warps: int = 4) -> str:
    return f"BLOCK: {block}, ADDED: {added}, num_warps: {warps}, num_stages: 3"


def test_each_configuration_is_judged_and_a_wrong_one_is_named(compiled):
    outcome = judged(kernels.HONEST)
    assert (outcome.status, blocks_of(outcome), outcome.tuned[COPY]["by"]) == ("PASS", [64, 128, 256], EACH)
    assert message_of(judged(kernels.THIRD_WRONG)).endswith("; with the configuration " + label(256, 1))
    assert message_of(judged(namespace(tuned(configs(0, 1, 0))))).endswith(label(128, 1, warps=8))


def never(*_: object, **__: object) -> None:
    raise AssertionError("a configuration is timed")


def test_nothing_is_timed_and_the_tuner_is_left_as_it_was(compiled):
    kernel = tuned(configs(0, 0, 0), do_bench=never)
    listed = kernel.configs
    assert judged(namespace(kernel)).status == "PASS"
    assert kernel.configs is listed and not kernel.cache


def test_a_call_outside_a_case_is_tuned_as_ever(compiled):
    timed = []
    kernel = tuned(configs(0, 0), do_bench=lambda call, quantiles: timed.append(call()) or [1.0, 1.0, 1.0])
    autotuning.install()
    x = torch.arange(6.0)
    assert torch.equal(copied(kernel)(x), x)
    assert len(timed) == 2


def test_a_cached_choice_of_the_tuner_is_not_read(compiled):
    kernel = tuned(configs(0, 0, 1), do_bench=lambda call, quantiles: call() or [1.0, 1.0, 1.0])
    copied(kernel)(torch.ones(12))  # of the case's size: the choice is cached
    assert kernel.cache
    assert judged(namespace(kernel)).status == "FAIL"


def test_what_ran_before_changes_no_choice(compiled):
    case = CASE.changed(seed=1)
    outcome = judged(kernels.LONG, case)
    for seed in (5, 3):
        judged(kernels.LONG, CASE.changed(seed=seed))
    assert judged(kernels.LONG, case).tuned == outcome.tuned


def test_a_long_list_is_judged_by_several_cases(compiled):
    tuned_by_seed = [judged(kernels.LONG, CASE.changed(seed=seed)).tuned for seed in range(3)]
    assert [len(tuned_once[COPY]["judged"]) for tuned_once in tuned_by_seed] == [MOST] * 3
    assert len(joined(tuned_by_seed)[COPY]["judged"]) == tuned_by_seed[0][COPY]["total"] == 20


def test_the_seed_says_which_case_shows_a_wrong_configuration(compiled):
    failing = [seed for seed in range(10) if judged(kernels.LONG_LAST_WRONG, CASE.changed(seed=seed)).status == "FAIL"]
    last = [seed for seed in range(10) if 19 in {(MOST * seed + step) % 20 for step in range(MOST)}]
    assert failing == last and 0 < len(failing) < 10
    smaller = CASE.changed(seed=failing[0], tokens=1, width=1)  # a reduction keeps the seed
    assert judged(kernels.LONG_LAST_WRONG, smaller).status == "FAIL"


def test_what_the_tuner_prunes_is_not_judged(compiled):
    outcome = judged(kernels.LAST_REFUSED)
    assert (outcome.status, blocks_of(outcome), outcome.tuned[COPY]["total"]) == ("PASS", [64, 128], 3)
    model = {"perf_model": lambda **settings: -settings["BLOCK"], "top_k": 2}
    assert blocks_of(judged(namespace(tuned(configs(0, 0, 0), prune_configs_by=model)))) == [128, 256]
    nothing = judged(pruned(lambda listed, arguments, **settings: [], 0, 0))
    assert "No valid autotuner configs after pruning" in message_of(nothing)


def too_large(_: object) -> None:
    raise kernels.triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")


def with_hook(hook: Callable, *which: int) -> Any:
    listed = configs(0, 0, 0)
    for index in which:
        listed[index].pre_hook = hook
    return namespace(tuned(listed))


def test_a_configuration_that_does_not_fit_is_passed_over_and_counted(compiled):
    outcome = judged(with_hook(too_large, 1))
    assert (outcome.status, blocks_of(outcome), outcome.tuned[COPY]["unfit"]) == ("PASS", [64, 256], [label(128, 0, 8)])
    none = message_of(judged(with_hook(too_large, 0, 1, 2)))
    assert none.startswith("raised OutOfResources on a legal call")


def test_the_hook_of_a_configuration_sees_its_arguments(compiled):
    arguments_seen = []
    assert judged(with_hook(arguments_seen.append, 2)).status == "PASS"
    assert [(call["BLOCK"], call["count"]) for call in arguments_seen] == [(256, 12)]


@pytest.mark.parametrize(("start", "status"), [(torch.zeros_like, "PASS"), (torch.ones_like, "FAIL")])
def test_arguments_are_reset_only_where_triton_times(compiled, start, status):
    kernel = tuned(configs(0, 0), kernels.sum_kernel, reset_to_zero=["y_ptr"])

    def activation(h: torch.Tensor, **settings: Any) -> torch.Tensor:
        x = kernels.moe_ref.activation(h, **settings)
        y = start(x)  # Triton sets it to zero before it times, and not in the later calls of a cached choice
        kernel[(1,)](x, y, x.numel())
        return y

    assert judged(SimpleNamespace(activation=activation)).status == status


def test_two_tuners_of_a_call_go_through_their_lists_together(compiled):
    first, second = copied(tuned(configs(0, 0))), copied(tuned(configs(0, 0, 1, block=8)))
    both = SimpleNamespace(activation=lambda h, **settings: second(first(kernels.moe_ref.activation(h, **settings))))
    text = message_of(judged(both))
    assert text.endswith(f"with the configurations copy_kernel ({label(64)}), copy_kernel ({label(32, 1)})")


def test_heuristics_inside_and_outside_see_the_configuration(compiled):
    last = {"ADDED": lambda arguments: int(arguments["BLOCK"] == 128)}
    listed = [kernels.triton.Config({"BLOCK": block}) for block in (64, 128)]
    jitted = kernels.triton.jit(kernels.copy_kernel)
    tuned_inside = kernels.triton.autotune(listed, ["count"])(kernels.triton.heuristics(last)(jitted))
    assert message_of(judged(namespace(tuned_inside))).endswith("BLOCK: 128, num_warps: 4, num_stages: 3")
    tuned_blocks = kernels.triton.autotune(listed, ["count"])(jitted)
    tuned_outside = kernels.triton.heuristics({"ADDED": lambda arguments: 0})(tuned_blocks)
    assert len(judged(namespace(tuned_outside)).tuned[COPY]["judged"]) == 2


def test_the_gradient_is_judged_in_each_configuration(compiled):
    failing = tuned(configs(0, 0, 1))

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return copied(failing)(grad)

    activation = lambda h, **settings: Through.apply(kernels.moe_ref.activation(h, **settings))  # noqa: E731
    outcome = judged(SimpleNamespace(activation=activation), CASE.changed(grads="h"))
    assert (outcome.finding or {})["output"] == "d_h" and message_of(outcome).endswith(label(256, 1))


def test_ranks_make_one_call_each(compiled):
    case, calls = CASE.changed(seed=4), []
    with Tuning(Implementation(None), case, Outcome("PASS"), single_process=False) as block:
        block.choice.longest = 3
        block.each([], lambda: (calls.append(block.choice.index), {}, None))
    assert calls == [4]


def test_a_lost_device_names_the_configuration(compiled, monkeypatch):
    def lost(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    outcome = child._answer(CASE, Implementation(with_hook(lost, 1)), "cpu", None, ChildOptions("nobody"))
    assert outcome.status == "CRASH"
    assert outcome.reason.endswith("was encountered; with the configuration " + label(128, 0, 8))


def test_a_tuner_that_is_not_known_is_left_alone_and_reported(monkeypatch):
    class Other:
        """Takes its configuration from another place than `configs`."""

        def __init__(self, fn, arg_names, listed, *_: object) -> None:
            self.fn = self.base_fn = fn
            self.arg_names, self.configs, self.table = arg_names, listed, listed

        def run(self, *args: object, **settings: object) -> object:
            return self.fn.run(*args, **settings, **self.table[0].all_kwargs())

        def prune_configs(self, settings: dict) -> list:
            return self.configs

    monkeypatch.setattr(kernels.triton.runtime.autotuner, "Autotuner", Other)
    autotuning.install()
    asking = Other.run
    autotuning.install()
    assert Other.run is asking and not autotuning._uses_forced_choice(Other, asking)
    choice = autotuning.Choice()
    kernel = SimpleNamespace(run=lambda **settings: settings["BLOCK"], __module__="a", __qualname__="b_kernel")
    with autotuning.chosen(choice):
        assert Other(kernel, [], configs(0, 0)).run() == 64
    assert choice.launched == {"a.b_kernel": record(total=2, by=UNKNOWN)}


# ---- the tuner of a namespace


def test_each_configuration_of_a_namespace_is_judged_and_a_wrong_one_is_named():
    outcome = judged(kernels.LOOP)
    assert (outcome.status, outcome.tuned["activation"]) == ("PASS", record("narrow", "vector", "wide"))
    assert message_of(judged(kernels.LOOP_THIRD_WRONG)).endswith("; with the configuration vector")
    assert kernels.LOOP.used == kernels.LOOP_THIRD_WRONG.used == ["narrow"]  # each block was left


EACH_ONCE = "it must return a list of names, each once"


def failing(error: Exception) -> Callable:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("hooks", "output", "text"),
    [
        ({"configurations": failing(ValueError("no table"))}, "configurations", "raised ValueError: no table"),
        ({"configurations": lambda function: "narrow"}, "configurations", EACH_ONCE),
        ({"configurations": lambda function: ["a", "a"]}, "configurations", EACH_ONCE),
        ({"configurations": lambda function: [1, 2]}, "configurations", EACH_ONCE),
        ({"configured": failing(KeyError("wide"))}, "configured", "configured raised KeyError"),
        ({"configured": lambda function, name: None}, "configured", "configured raised TypeError"),
    ],
)
def test_a_hook_that_misbehaves_fails_the_case(hooks, output, text):
    outcome = judged(SimpleNamespace(**vars(kernels.LOOP) | hooks))
    assert text in message_of(outcome)
    assert (outcome.finding or {})["output"] == output


def test_one_hook_alone_is_no_tuner():
    for name in ("configurations", "configured"):
        outcome = judged(SimpleNamespace(**vars(kernels.LOOP) | {name: None}))
        assert (outcome.status, {*outcome.tuned} - {COPY}) == ("PASS", set())


def test_a_law_that_fails_names_the_configuration(monkeypatch):
    rounds = iter(range(100))
    unsteady = loop(0, 0, 0)
    honest = unsteady.activation
    unsteady.activation = lambda h, **settings: honest(h, **settings) * (1 if next(rounds) < 3 else 2)
    assert message_of(judged(unsteady, CASE.changed(law="repeated"))).endswith("; with the configuration vector")


# ---- runs and reports


def options(attribute: str, folder: Path) -> Options:
    where = {"function": "activation", "profile": "smoke", "device": "cpu", "corpus": str(folder)}
    return Options(f"tests.engine.tuned_kernels:{attribute}", jobs=1, **where)


@no_gpu
def test_a_run_says_that_the_interpreter_had_one_configuration(tmp_path):
    verdict = judge(options("THIRD_WRONG", tmp_path))
    assert verdict.verdict == "CONFORMANT"
    head = "tuned kernels: first configuration only, in the interpreter: copy_kernel (3 configurations)"
    assert head in lines(verdict) and f"{head}." in markdown(verdict)


def test_a_run_reduces_the_failure_of_one_configuration(tmp_path):
    verdict = judge(options("LOOP_THIRD_WRONG", tmp_path))
    assert verdict.verdict == "NOT CONFORMANT"
    assert "tuned kernels: judged configurations: activation 3 of 3" in lines(verdict)
    failure = verdict.failures[0]
    assert failure["smallest"] and failure["finding"]["message"].endswith("with the configuration vector")
    assert json.loads(Path(failure["file"]).read_text())["case"] == failure["case"]


def record(*judged_labels: str, total: int = 3, by: str = EACH, unfit: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"total": total, "by": by, "judged": [*judged_labels], "unfit": [*unfit]}


def test_the_report_counts_what_cases_and_shards_have_judged(tmp_path):
    book = Book(tmp_path).all_pass("permute")
    for labels in (("a",), ("b",)):
        book.section("x", "permute", "PASS", tuned={"m.k": record(*labels, unfit=("c",))})
    book.section("y", "permute", "UNINFORMATIVE", tuned={"m.k": record("c")})
    verdict = book.verdict()
    assert "tuned kernels: judged configurations: k 2 of 3 (1 does not fit the device)" in lines(verdict)
    second_shard = verdict.record() | {"shard": "2/2", "tuned": {"m.k": record("c"), "m.l": record(by=UNKNOWN)}}
    merged = merge([verdict.record() | {"shard": "1/2"}, second_shard])
    assert "tuned kernels: judged configurations: k 3 of 3" in lines(merged)
    assert any(line.startswith("tuned kernels: only the configuration that the tuner chose") for line in lines(merged))


def test_joining_changes_no_part():
    records = [{"k": record("b")}, {"k": record("a", unfit=("b",))}]
    text = json.dumps(records)
    assert joined(records) == {"k": record("a", "b")}
    assert json.dumps(records) == text
