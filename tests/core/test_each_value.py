"""Each value of each axis, and each law, is in some case of the gate, on a CPU and on a GPU."""

from dataclasses import replace
from functools import cache

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.axes import Size
from conformance.core.each_value import left_out, values
from conformance.core.space import Space
from conformance.engine.child.child import MOST_RANKS
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES

GATE = PROFILES["gate"]
WITHOUT_DRAWS = ("fixed", "covering")  # sections that do not count on what is drawn
FEW = Space("cuda", ranks=1, few_kernels=True)
SPACES = {"cpu": Space(ranks=4), "cuda": Space(device="cuda", ranks=1, shared_ranks=MOST_RANKS)}
PLAIN = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")
GATED = ("geglu", "geglu_erf", "quick_geglu", "reglu", "swiglu")


@cache
def chosen(function, device):
    return [case for kind in WITHOUT_DRAWS for case in cases_of(Section(kind, function), GATE, SPACES[device], 0)]


def missing(function, space, cases):
    """The values that no case has, and the laws."""
    scope = scope_of(function, space)
    drawn = [case for case in cases if not (case.golden or case.illegal)]
    lost = [
        each[0]
        for each in values(scope)
        if not any(all(getattr(case, name) == value for name, value in one.items()) for case in drawn for one in each)
    ]
    known = {name for name, law in scope.contract.laws.items() if law.device in ("", space.device)}
    return lost + [{"law": name} for name in known - {case.law for case in drawn}]


def impossible(function):
    """Values that no case has, though the axis does: other functions of the family have them."""
    if "glu" in function or function.startswith("activation"):
        return [{"kind": kind} for kind in (PLAIN if "glu" in function else GATED)]
    if function == "aux_loss_scores":
        return [{"score": "softmax_pre"}]
    found = [{"law": "autocast"}] if function in ("pad_routing_map", "deepep_layout", "sequential_mlp") else []
    name = {"pad_routing_map": "routing_map", "deepep_layout": "indices"}.get(function)
    if name:  # negated integers
        found += [{"layout": "negated", "layout_of": name}]
    if function.endswith(("_dispatch", "_combine")):  # cotangents of all ranks together
        found += [{"layout": "expanded", "layout_of": f"d_{out}"} for out in ("rows", "tokens", "ordered")]
    if function in ("deepep_cached_dispatch", "deepep_combine"):  # rows without scales
        found += [{"scale_dtype": dtype} for dtype in ("int32", "uint8", "float8_e8m0fnu")]
        found += [{"layout": layout, "layout_of": "scales"} for layout in ("strided", "transposed")]
    if "low_latency" in function:
        found += [{"drop_zeros": True}, {"fp8": "least"}]
    return found


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize("function", CONTRACTS)
def test_each_value_and_each_law_has_a_case(function, device):
    cases = chosen(function, device)
    assert [lost for lost in missing(function, SPACES[device], cases) if lost not in impossible(function)] == []


def test_without_them_values_and_laws_are_missing():
    scope = scope_of("glu", SPACES["cuda"])
    rows = scope.covering().cases[:3]
    without, with_them = (missing("glu", SPACES["cuda"], cases) for cases in (rows, rows + left_out(scope, rows, rows)))
    for lost in ({"kind": "geglu"}, {"law": "host_sync"}, {"dtype": "float64"}):
        assert lost in without
        assert lost not in with_them


def empty(function, cases):
    """The sizes of 0 that cases have, with whether they have gradients."""
    named = [axis.name for axis in scope_of(function, FEW).axes if isinstance(axis, Size)]
    return {(name, bool(case.grads)) for case in cases for name in named if getattr(case, name) == 0}


def full(function, cases):
    """The laws of cases with all gradients."""
    signature = scope_of(function, FEW).signature
    return {case.law for case in cases if case.grads and case.grads == signature.all_gradients(case)}


@pytest.mark.parametrize("function", ["attach_loss", "grouped_linear", "unpermute", "glu"])
def test_with_few_kernels_sizes_of_0_and_each_law_with_gradients_have_a_case(function):
    scope = scope_of(function, FEW)
    rows = [case for case in scope.covering().cases[:5] if case.law != "autocast"]
    laws = {"autocast", "interleaved", "accumulated"} & {*CONTRACTS[function].laws}
    cases = rows + left_out(scope, rows, rows)
    letters = [axis.name for axis in scope.axes if isinstance(axis, Size) and axis.letter and not axis.at_least]
    assert empty(function, rows) == set() and "autocast" not in full(function, rows)
    assert empty(function, cases) >= {(name, turn % 2 == 0) for turn, name in enumerate(letters)}
    assert full(function, cases) >= laws
    assert all(scope.fits(case) for case in cases)


def strided(cases):
    """The tensors that have strides of their own in some case."""
    plain = ("contiguous", "shifted", "negated", "overlapping")
    return {case.layout_of for case in cases if case.layout not in plain}


@pytest.mark.parametrize("function", ["permute", "glu", "topk_routing", "gate"])
def test_with_few_kernels_sizes_of_1_and_strides_of_each_tensor_have_a_case(function):
    scope = scope_of(function, FEW)
    rows = scope.covering().cases[:5]
    cases = rows + left_out(scope, rows, rows)
    letters = {axis.name for axis in scope.axes if isinstance(axis, Size) and axis.letter}
    single, before = ({name for name in letters for case in some if getattr(case, name) == 1} for some in (cases, rows))
    assert single == letters > before
    assert strided(cases) == {name for name, _ in scope.signature.layouts(far=False)} > strided(rows)


def test_autocast_is_asked_of_float64_alone_on_a_gpu():
    law, cases = CONTRACTS["glu"].laws["autocast"], scope_of("glu", FEW).covering().cases
    wide, narrow = (replace(cases[0], dtype=dtype, probs="", law="") for dtype in ("float64", "bfloat16"))
    assert (law.holds(wide, "cuda"), law.holds(narrow, "cuda")) == (True, False)
    assert law.holds(wide, "cpu") and law.holds(narrow, "cpu")


def test_what_is_left_out_is_little_and_nothing_comes_twice():
    scope = scope_of("permute", SPACES["cpu"])
    rows = scope.covering().cases
    found = left_out(scope, rows, rows)
    assert 0 < len(found) < 25
    assert len({case.text for case in rows + found}) == len(rows) + len(found)
    assert left_out(scope, rows + found, rows) == []
    assert all(scope.fits(case) for case in found)


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize("function", ["gate", "permute", "grouped_linear", "grouped_mlp"])
def test_each_input_that_has_a_gradient_is_once_frozen_alone(function, device):
    signature = CONTRACTS[function].signature
    cases = chosen(function, device)
    left = {
        case: {*signature.all_gradients(case).split("+")} - {*signature.wanted(case)} for case in cases if case.grads
    }
    assert {name for names in left.values() if len(names) == 1 for name in names} == {*signature.gradients}


def test_without_a_case_of_its_own_a_frozen_input_is_missing():
    scope = scope_of("grouped_mlp", FEW)
    rows = [case.changed(grads=scope.signature.all_gradients(case)) for case in scope.covering().cases[:9]]
    found = [case for case in left_out(scope, rows, rows) if case.grads]
    missing_one = {
        name for case in found for name in {*scope.signature.all_gradients(case).split("+")} - {*case.grads.split("+")}
    }
    assert missing_one >= {*scope.signature.gradients}
