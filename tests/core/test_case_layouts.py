"""Memory layouts of a case's tensors."""

from dataclasses import replace

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.core.tensors import WIDE, laid_out, payload
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import load
from conformance.judge.exact import bits

X = payload(0, "tokens", (5, 6), "float32")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "shifted", "sliced"])
@pytest.mark.parametrize(
    "x",
    [X, X[:, 0].clone(), X[:0], X.to(torch.bfloat16), X.to(torch.float8_e4m3fn), X > 0],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_layouts_keep_the_values(x, layout):
    placed = laid_out(x, layout)
    assert placed.dtype == x.dtype
    assert placed.shape == x.shape
    assert (bits(placed) == bits(x)).all()


@pytest.mark.parametrize(
    "x", [X, X[:, 0].clone(), X[:0], X.to(torch.bfloat16)], ids=lambda x: f"{x.dtype}{list(x.shape)}"
)
def test_a_negated_layout_is_a_pending_minus_over_the_negative_values(x):
    placed = laid_out(x, "negated")
    assert placed.is_neg() and torch.equal(placed, x)
    memory = torch.empty(0, dtype=x.dtype).set_(placed.untyped_storage(), 0, x.shape, x.stride())
    assert torch.equal(memory, -x)


def test_a_tensor_is_negated_only_where_a_minus_changes_one_bit_of_each_value():
    legal = RoutingCase(function="permute", tokens=4, experts=2, layout="negated", layout_of="tokens", probs="float32")
    signature = CONTRACTS["permute"].signature
    assert signature.fits(legal) is None and signature.fits(replace(legal, layout_of="probs")) is None
    for change in ({"layout_of": "routing_map"}, {"dtype": "float8_e4m3fn"}, {"values": "special"}):
        assert "no tensor that torch can negate" in signature.fits(replace(legal, **change))


def test_layouts_have_the_strides_they_promise():
    assert laid_out(X, "contiguous").stride() == (6, 1)
    assert laid_out(X, "transposed").stride() == (1, 5)
    assert laid_out(X, "strided").stride() == (24, 2)
    assert laid_out(X[:, 0].clone(), "transposed").stride() == (2,)
    matrices = payload(0, "weight", (6, 5), "float32").reshape(2, 3, 5)
    assert laid_out(matrices, "transposed").stride() == (15, 1, 3)
    shifted = laid_out(X, "shifted")
    assert (shifted.stride(), shifted.storage_offset()) == ((6, 1), 1)


def test_a_slice_has_adjacent_elements_and_rows_as_well_aligned_as_contiguous_ones():
    assert laid_out(X, "sliced").stride() == (22, 1)
    assert laid_out(X[:, 0].clone(), "sliced").stride() == (17,)
    assert laid_out(torch.zeros(2, 3, 32), "sliced").stride() == (3 * 48, 48, 1)
    assert torch.empty(0).set_(laid_out(X, "sliced").untyped_storage())[6].isnan()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_rows_that_overlap_share_all_but_one_element_and_are_their_own_layout(dtype):
    placed = laid_out(payload(0, "tokens", (5, 6), dtype), "overlapping")
    assert (placed.shape, placed.stride()) == ((5, 6), (1, 1))
    assert (bits(placed[1:, :-1]) == bits(placed[:-1, 1:])).all()
    assert (bits(laid_out(placed.clone(), "overlapping")) == bits(placed)).all()
    assert laid_out(torch.zeros(2, 3, 4), "overlapping").stride() == (6, 1, 1)
    assert laid_out(X[:0], "overlapping").shape == (0, 6)


@pytest.mark.parametrize("function", ["permute", "grouped_dgrad", "glu", "topk_routing", "latent_projection"])
def test_each_input_whose_rows_may_overlap_has_a_case_and_a_slow_function_one_case(function):
    scope = scope_of(function, Space())
    names = scope.signature.overlapping
    cases = scope.overlapping()
    assert [case.layout_of for case in cases] == (names[:1] if function == "latent_projection" else names)
    assert set(cases) <= set(scope.always())
    assert {evaluate(case, load("moe_ref")).status for case in cases} == {"PASS"}


def test_maps_and_indices_have_no_rows_that_overlap():
    case = RoutingCase(function="permute", tokens=4, experts=2, layout="overlapping", layout_of="routing_map")
    assert "may not share memory" in CONTRACTS["permute"].signature.fits(case)
    assert CONTRACTS["permute"].signature.fits(replace(case, layout_of="tokens")) is None


def test_another_choice_is_not_judged_by_the_nan_of_a_token_that_it_does_not_route():
    """Rows overlap in memory, so a NaN of an unrouted token is also in the row of a routed one."""
    scope = scope_of("drop_tokens", Space())
    assert scope.signature.overlapping == ["d_probs"]
    (case,) = scope.overlapping()
    assert evaluate(case, load("tests.honest.routers:OneByOne")).status == "PASS"


def test_an_expanded_layout_repeats_its_first_entry_without_memory():
    expanded = laid_out(X, "expanded")
    assert expanded.stride() == (0, 1)
    assert torch.equal(expanded, X[:1].repeat(5, 1))
    assert laid_out(X[:0], "expanded").shape == (0, 6)


def test_the_memory_between_strided_values_holds_nan():
    raw = laid_out(X, "strided").untyped_storage()
    memory = torch.empty(0).set_(raw)
    assert memory.isnan().any()


@pytest.mark.parametrize(("layout", "dim"), [("wide_rows", 0), ("wide_columns", 1), ("wide_depth", 2)])
@pytest.mark.parametrize("entries", [2, 3, 4])
def test_wide_layouts_pass_every_32_bit_offset(layout, dim, entries):
    x = (
        payload(0, "tokens", (entries, entries), "uint8")
        if dim < 2
        else payload(0, "tokens", (entries**2, entries), "uint8").reshape(entries, entries, -1)
    )
    placed = laid_out(x, layout)
    assert placed.stride(dim) * (entries - 1) > 2**31
    assert placed.stride(dim) * (entries - 1) <= WIDE
    assert torch.equal(placed, x)


def test_a_vector_is_wide_in_its_only_dimension():
    x = payload(0, "probs", (3, 1), "uint8").flatten()
    placed = laid_out(x, "wide_columns")
    assert placed.stride(0) * 2 > 2**31
    assert torch.equal(placed, x)


@pytest.mark.parametrize("name", ["d_rows", "tokens"])
def test_an_expanded_input_repeats_in_the_master_copy_too(name):
    case = RoutingCase(
        function="permute", tokens=4, experts=2, hidden=3, grads="tokens", layout="expanded", layout_of=name
    )
    problem = CONTRACTS["permute"].problem(case)
    master = problem.cotangents["rows"] if name == "d_rows" else problem.required["tokens"]
    assert torch.equal(master, master[:1].expand(master.shape))
