"""The reference next to other people's code, where it is installed; and the comparison itself."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch

import moe_ref
from evidence.oracles import formats, te_gemm
from evidence.oracles.catalogue import oracles
from evidence.oracles.compare import EITHER, OURS, Comparison, Known, compare, merged, shrunk
from evidence.oracles.page import Result, page, record
from evidence.oracles.random_inputs import blocks
from evidence.oracles.source import load, run, statements
from moe_ref.config import Recipe

INSTALLED = {"torch": "torch", "megatron_core": "megatron"}  # oracles of the ordinary test environment, by package
ZERO = torch.zeros(3)


def placed(at: tuple[int, ...], cause: str) -> str:
    return f"at {at}"


def compared(name: str) -> list[Comparison]:
    """The oracle's comparisons, in a process of its own: a package's process groups are global."""
    return merged(list(oracles()[name].comparisons(None)))


@pytest.mark.parametrize("name", INSTALLED)
def test_every_difference_from_an_installed_peer_is_explained(name):
    if find_spec(INSTALLED[name]) is None:
        pytest.skip(f"{INSTALLED[name]} is not installed: pip install --no-deps {' '.join(oracles()[name].packages)}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        comparisons = executor.submit(compared, name).result(timeout=3000)
    assert sum(result.values for result in comparisons) > 10**5
    assert {result.subject: result.differences for result in comparisons if result.unexplained} == {}


def test_no_oracle_is_forgotten():
    """Each is run above, or needs a package or a source that the test environment lacks."""
    uninstalled = [oracle for name, oracle in oracles().items() if name not in INSTALLED]
    assert len(uninstalled) == 9 and all(oracle.packages or oracle.source for oracle in uninstalled)


def test_a_wrong_code_of_the_reference_is_reported_with_its_value(monkeypatch):
    encode = formats.encode

    def one_off(x, format):
        wrong = (x == 17) & (format is formats.E4M3)
        return torch.where(wrong, encode(x, format) + 1, encode(x, format))

    monkeypatch.setattr(formats, "encode", one_off)
    wrong = [result for result in formats.by_torch() if result.unexplained]
    assert [result.subject for result in wrong] == ["torch: e4m3 codes of rounded values"]
    assert wrong[0].differences[-1].smallest.startswith("x = 17: moe_ref 89, the peer 88")


def test_a_wrong_weight_of_the_reference_is_outside_the_bound(monkeypatch):
    topk_routing = moe_ref.topk_routing
    pytest.importorskip("megatron")

    def heavier(logits, **settings):
        routed = topk_routing(logits, **settings)
        return routed._replace(probs=routed.probs * (1 + 1e-3))

    monkeypatch.setattr(moe_ref, "topk_routing", heavier)
    comparisons: Iterator[Comparison] = oracles()["megatron_core"].comparisons(None)
    weights = next(result for result in comparisons if result.subject == "weights")
    assert weights.unexplained


@pytest.mark.parametrize(("slope", "differ"), [(1.0, 0), (1.001, 3)])
def test_block_scaled_products_are_compared_by_codes_and_scales(slope, differ):
    def product_of(a, b, dtype, scale_a, scale_b, tile_a, tile_b, *, use_split_accumulator):
        sides = []
        for codes, scale, (lines, columns) in ((a, scale_a, tile_a), (b, scale_b, tile_b)):
            scale_of_each_element = scale.repeat_interleave(columns, 1).repeat_interleave(lines, 0)
            sides.append(codes.double() * scale_of_each_element[: codes.shape[0], : codes.shape[1]])
        return (slope * sides[0] @ sides[1].T).to(dtype)

    comparisons = [*te_gemm.products(product_of, (20, 144, 160), Recipe("block", fp8_format="hybrid"))]
    assert sum(bool(result.unexplained) for result in comparisons) == differ and len(comparisons) == 3


def test_a_cause_explains_only_the_values_it_covers():
    peer = torch.tensor([1.0, 0, 1])
    causes = [Known("the first", OURS, torch.tensor([True, False, False]))]
    result = compare("x", ZERO, peer, case=placed, known_causes=causes)
    assert (result.values, result.equal, result.unexplained) == (3, 1, 1)
    assert [difference.smallest for difference in result.differences] == [
        "at (0,)",
        "at (2,): moe_ref 0.0, the peer 1.0",
    ]


def test_bits_decide_without_a_bound_and_nan_is_within_none():
    assert compare("x", ZERO, -ZERO, case=placed).unexplained == 3
    nan = torch.full((3,), torch.nan)
    assert compare("x", nan, -nan, case=placed).unexplained == 0
    assert compare("x", ZERO, nan, case=placed, bound=ZERO + 1).unexplained == 3
    assert compare("x", ZERO, ZERO + 0.5, case=placed, bound=ZERO + 1).unexplained == 0
    with pytest.raises(ValueError, match="of torch"):
        compare("x", ZERO, ZERO.double(), case=placed)


def test_a_case_is_shrunk_to_the_elements_that_its_difference_needs():
    x = torch.arange(6.0).reshape(2, 3) + 1
    assert shrunk(x, lambda y: bool(y[1, 2] > 5)) == "2×3 of float32, 0 but [1, 2] = 6"


def test_drawn_blocks_hold_what_is_special_and_stay_the_same():
    x = blocks(4, 32, torch.bfloat16, 448.0)
    assert x.isnan().any() and x.isinf().any() and (x == 0).all(1).any()
    assert torch.equal(x.isnan(), blocks(4, 32, torch.bfloat16, 448.0).isnan())


def test_functions_and_statements_are_read_out_of_a_source(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(
        'import nowhere\nSIZE = 3\n@torch.compile()\ndef ones(n: nowhere.X):\n    return torch.ones(n, device="cuda")\n'
        "def test_main(n):\n    print(n)\n    a = n + 1\n    b = a * 2\n    return b\n"
    )
    assert load(path, ["ones", "SIZE"]).ones(2).tolist() == [1, 1]
    assert run(statements(path, "test_main", "a", "b"), "theirs.py", {"n": 2})["b"] == 6
    with pytest.raises(LookupError, match="has no twos"):
        load(path, ["ones", "twos"])


def test_the_page_says_what_was_not_run_and_what_is_not_explained():
    unexplained = compare("sums", ZERO, ZERO + 1, case=placed)
    explained = compare("scales", ZERO, ZERO + 1, case=placed, known_causes=[Known("both may", EITHER, ZERO == 0)])
    text = page([Result("one", "one 1", [unexplained, explained]), Result("two", "two 2", [], "the index has none")])
    assert "| one | one 1 | 6 | 0 | 3 | 3 |" in text and "| two | two 2 | not run |" in text
    assert "- one: not explained. Right: not decided. 3 values; smallest case (sums): at (0,)" in text
    assert "- one: both may. Right: either. 3 values" in text and "two: not run. the index has none." in text
    (table,) = record([Result("one", "one 1", [unexplained])])["details"]
    assert table["rows"] == [["one", "sums", unexplained.rule, "3", "0"]]
