"""All eight buckets of releases are judged in every function, and each symbol with and without."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import moe_ref
from conformance.core.space import Space
from conformance.engine.child.child import _description
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.families.experts.cases_mlp import MlpCase
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation
from conformance.peers.te import Adapter
from conformance.peers.te.features import GATES, TABLE
from tests.te.judging import Checked, symbols_of, wrong
from tests.te.judging import judged as every_kind_judged
from tests.te.standin import BUCKETS, standin
from tests.te.standin.matrix import parameters_of

EIGHT = ("1.11", "2.1", "2.6", "2.12", "2.15", "2.19", "2.20", "rocm")
SCALINGS = ("delayed", "current", "block", "mxfp8", "nvfp4")
READERS = ("codes", "scales", "amax", "dequantize")  # of what `quantize` returns, and judged with it
OTHERS = {  # symbols that no completed call of the newest release takes
    *("forward", "init_fp8_metadata"),  # methods
    *("Float8BlockQuantizer", "MXFP8Quantizer", "get_fp8_te_dtype"),  # quantised rows are ours
    "fp8_autocast",  # autocast is there
}
MOST = 10  # cases of a function
ROWS, PLAIN = {"tokens": 3, "width": 4}, {"tokens": 4, "experts": 2}
CURVES = ("", "silu", "gelu_tanh", "quick_gelu", "relu")
TURNS = (  # a case for each operation and recipe that the first cases do not reach
    *(ActivationCase(function="glu", kind=kind, **ROWS) for kind in ("", "geglu", "quick_geglu", "reglu")),
    *(ActivationCase(function="glu", clamp=8, offset=8, kind="quick_geglu", probs=x, **ROWS) for x in ("", "float32")),
    ActivationCase(function="glu", probs="float32", **ROWS),
    ActivationCase(function="activation", probs="float32", **ROWS),
    *(ActivationCase(function="activation", kind=kind, **ROWS) for kind in CURVES),
    MlpCase(function="grouped_mlp", hidden=4, width=4, probs="float32", **PLAIN),
    *(GroupedCase(function="grouped_linear", hidden=1, width=1, scaling=x, counts=(1, 3), **PLAIN) for x in SCALINGS),
    RoutingCase(function="permute", tokens=3, experts=2, hidden=4),
)
PAGE = (Path(__file__).parents[2] / "docs/te.md").read_text()


def completed(bucket, without=()):
    te = standin(bucket, without=without)
    return te, Adapter(te, ours=moe_ref)


def stays_tes(case):
    """Whether the page leaves it to TE (odd keys, a biased choice), or no adapter has its state."""
    odd = getattr(case, "spread", "") in ("minus_inf", "nan", "edges", "extreme")
    delayed = case.function == "quantize" and case.scaling == "delayed"
    return odd or delayed or (case.function in ("topk_routing", "topk_indices") and bool(case.bias))


@pytest.fixture(scope="module")
def covering():
    """The first small covering cases of each function; all completed adapters offer the same."""
    adapter = completed("2.20")[1]
    described = _description(Implementation(adapter, "te"), ChildOptions("te", device="cpu"))
    space, chosen = Space.of(described), {}
    for section in sections():
        if section.kind == "covering" and section.function in {*adapter.offered} - {*READERS}:
            gate_cases = cases_of(section, PROFILES["gate"], space, 0)
            small = [x for x in gate_cases if not (x.is_large or x.layout.startswith("wide") or stays_tes(x))]
            chosen[section.function] = [replace(x, law="") for x in small[:MOST]]
    return chosen


def judged(te, adapter, cases):
    """Each case's outcome and path, which is empty where the call was not made."""
    implementation, outcomes, paths = Implementation(Checked(te, adapter), "te"), [], []
    for case in cases:
        adapter.path.pop(case.function, None)
        outcomes.append((case, evaluate(case, implementation, "cpu")))
        paths.append(adapter.path.get(case.function, ""))
    return outcomes, paths


def test_the_page_names_every_bucket_symbol_and_variable():
    names = {x.symbol.removeprefix("pytorch.").removeprefix("router.").partition("GroupedLinear.")[0] for x in TABLE}
    others = {"fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"}  # "and two others"
    assert [name for name in sorted(names - others) if name not in PAGE] == []
    assert [gate.variable for gate in GATES if gate.variable not in PAGE] == []
    assert tuple(BUCKETS) == EIGHT
    row = PAGE.partition("a version matrix and computed by the reference:")[2].partition(". On a CPU")[0]
    assert tuple(re.findall(r"`([^`]+)`", row)) == EIGHT


@pytest.mark.parametrize("bucket", EIGHT)
def test_every_function_is_judged_through_every_bucket(covering, bucket):
    te, adapter = completed(bucket)
    assert {*adapter.offered} == {*covering, *READERS}
    outcomes, _ = judged(te, adapter, [case for cases in covering.values() for case in cases])
    assert not wrong(outcomes)
    assert {case.function for case, outcome in outcomes if outcome.status == "PASS"} == {*covering}


@pytest.mark.parametrize(
    ("bucket", "functions", "most", "least"),
    [
        ("1.11", ("permute", "unpermute", "sort_chunks"), 6, 25),
        ("2.20", ("permute", "unpermute", "sort_chunks"), 6, 25),
        ("2.20", ("grouped_linear", "glu", "activation"), 5, 20),
        ("2.20", ("grouped_dgrad", "grouped_wgrad"), 12, 40),
        ("2.20", ("grouped_mlp",), 8, 20),
    ],
)
def test_golden_calls_illegal_calls_laws_and_draws_are_right_too(bucket, functions, most, least):
    outcomes = every_kind_judged(Checked(*completed(bucket)), functions, most)
    assert not wrong(outcomes)
    passed = [case.function for case, outcome in outcomes if outcome.status == "PASS"]
    assert {*passed} == {*functions} and len(passed) > least


def test_without_a_symbol_the_calls_whose_path_has_it_take_another_and_are_right(covering):
    te, adapter = completed("2.20")
    all_cases = [*TURNS, *(case for cases in covering.values() for case in cases)]
    through = {}
    for case, path in zip(all_cases, judged(te, adapter, all_cases)[1], strict=True):
        for symbol in symbols_of(path, te):
            through.setdefault(symbol, []).append(case)
    assert {*through} == te.symbols - OTHERS
    for symbol, cases in through.items():
        methods = [name.rpartition(".")[2] for name in parameters_of(*BUCKETS["2.20"]) if f"{symbol}." in f".{name}"]
        outcomes, paths = judged(*completed("2.20", without=(symbol, *methods)), cases)
        assert not wrong(outcomes)
        assert not any(symbol in symbols_of(path, te) for path in paths), symbol


# that of the fused MLP changes no call: `test_variables` shows its path
@pytest.mark.parametrize("gate", [x for x in GATES if "Sequential" not in x.of], ids=lambda gate: gate.variable)
def test_each_gate_is_judged_with_and_without(covering, monkeypatch, gate):
    bucket = "rocm" if gate.feature else "2.20"
    cases = covering["topk_routing" if "topk" in gate.of else "grouped_linear"]
    monkeypatch.delenv(gate.variable, raising=False)
    ungated, without = judged(*completed(bucket), cases)
    monkeypatch.setenv(gate.variable, "1")
    gated, paths = judged(*completed(bucket), cases)
    assert not wrong(ungated + gated)
    assert not any(gate.variable in path for path in without)
    assert any(f"{gate.variable}=1" in path for path in paths)
