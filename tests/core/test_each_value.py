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
    """The values of axes, and the laws, that no case has."""
    scope = scope_of(function, space)
    drawn = [case for case in cases if not (case.golden or case.illegal)]
    lost = [
        group[0]
        for group in values(scope)
        if not any(
            all(getattr(case, name) == value for name, value in fields.items()) for case in drawn for fields in group
        )
    ]
    laws = {name for name, law in scope.contract.laws.items() if law.device in ("", space.device)}
    return lost + [{"law": name} for name in laws - {case.law for case in drawn}]


def impossible(function):
    """Values of an axis that no case of this function can have; others of its family have them."""
    if "glu" in function or function.startswith("activation"):
        return [{"kind": kind} for kind in (PLAIN if "glu" in function else GATED)]
    if function == "aux_loss_scores":
        return [{"score": "softmax_pre"}]
    absent = [{"law": "autocast"}] if function in ("pad_routing_map", "deepep_layout", "sequential_mlp") else []
    name = {"pad_routing_map": "routing_map", "deepep_layout": "indices"}.get(function)
    if name:  # negated integers
        absent += [{"layout": "negated", "layout_of": name}]
    if function.endswith(("_dispatch", "_combine")):  # cotangents of all ranks together
        absent += [{"layout": "expanded", "layout_of": f"d_{out}"} for out in ("rows", "tokens", "ordered")]
    if function in ("deepep_cached_dispatch", "deepep_combine"):  # rows without scales
        absent += [{"scale_dtype": dtype} for dtype in ("int32", "uint8", "float8_e8m0fnu")]
        absent += [{"layout": layout, "layout_of": "scales"} for layout in ("strided", "transposed")]
    if "low_latency" in function:
        absent += [{"drop_zeros": True}, {"fp8": "least"}]
    return absent


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize("function", CONTRACTS)
def test_each_value_and_each_law_has_a_case(function, device):
    cases = chosen(function, device)
    assert [lost for lost in missing(function, SPACES[device], cases) if lost not in impossible(function)] == []


def test_an_array_alone_lacks_values_and_laws_that_are_added_to_it():
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
    without_own_strides = ("contiguous", "shifted", "negated", "overlapping")
    return {case.layout_of for case in cases if case.layout not in without_own_strides}


@pytest.mark.parametrize("function", ["permute", "glu", "topk_routing", "gate"])
def test_with_few_kernels_sizes_of_1_and_strides_of_each_tensor_have_a_case(function):
    scope = scope_of(function, FEW)
    rows = scope.covering().cases[:5]
    cases = rows + left_out(scope, rows, rows)
    letters = {axis.name for axis in scope.axes if isinstance(axis, Size) and axis.letter}
    single, previous = ({name for name in letters for case in x if getattr(case, name) == 1} for x in (cases, rows))
    assert single == letters > previous
    assert strided(cases) == {name for name, _ in scope.signature.layouts(far=False)} > strided(rows)


def test_autocast_is_asked_of_float64_alone_on_a_gpu():
    law, cases = CONTRACTS["glu"].laws["autocast"], scope_of("glu", FEW).covering().cases
    float64, bfloat16 = (replace(cases[0], dtype=dtype, probs="", law="") for dtype in ("float64", "bfloat16"))
    assert (law.holds(float64, "cuda"), law.holds(bfloat16, "cuda")) == (True, False)
    assert law.holds(float64, "cpu") and law.holds(bfloat16, "cpu")


def test_the_cases_added_to_an_array_are_few_and_distinct():
    scope = scope_of("permute", SPACES["cpu"])
    rows = scope.covering().cases
    added = left_out(scope, rows, rows)
    assert 0 < len(added) < 25
    assert len({case.text for case in rows + added}) == len(rows) + len(added)
    assert left_out(scope, rows + added, rows) == []
    assert all(scope.fits(case) for case in added)


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize("function", ["gate", "permute", "grouped_linear", "grouped_mlp"])
def test_each_differentiable_input_is_the_only_frozen_one_in_some_case(function, device):
    signature = CONTRACTS[function].signature
    cases = chosen(function, device)
    frozen = {
        case: {*signature.all_gradients(case).split("+")} - {*signature.wanted(case)} for case in cases if case.grads
    }
    assert {name for names in frozen.values() if len(names) == 1 for name in names} == {*signature.gradients}


def test_cases_with_frozen_inputs_are_added_to_cases_with_all_gradients():
    scope = scope_of("grouped_mlp", FEW)
    rows = [case.changed(grads=scope.signature.all_gradients(case)) for case in scope.covering().cases[:9]]
    differentiated = [case for case in left_out(scope, rows, rows) if case.grads]
    missing_one = {
        name
        for case in differentiated
        for name in {*scope.signature.all_gradients(case).split("+")} - {*case.grads.split("+")}
    }
    assert missing_one >= {*scope.signature.gradients}
