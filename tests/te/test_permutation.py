"""Permutation through every release of Transformer Engine: right, by the path that it claims."""

import threading
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.engine.child.evaluate import evaluate
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation
from conformance.peers.te import Adapter
from conformance.peers.te.permutation import Permutation
from conformance.peers.te.trace import Trace
from tests.te.judging import Checked, judged, leaf, symbols_of, wrong
from tests.te.standin import standin
from tests.te.standin.permutation import Permutation as Kernels

FUNCTIONS = ("permute", "unpermute", "sort_chunks")
FUSED = "moe_permute_and_pad_with_probs"
MAP = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)


def round_trip(adapter):
    """Outputs and gradients of permute and unpermute, and the paths."""
    tokens, probs = leaf(5, 16), leaf(5, 3, seed=1)
    permuted = adapter.permute(tokens, MAP, probs=probs, align=4)
    out = adapter.unpermute(permuted.rows, permuted.row_map, restore_shape=(5, 16), probs=probs)
    loss = out.square().sum() + permuted.probs.square().sum()
    gradients = torch.autograd.grad(loss, [tokens, probs])
    outputs = [permuted.rows, permuted.probs, permuted.tokens_per_expert, permuted.pad_offsets, out, *gradients]
    return [x for x in outputs if x is not None], [adapter.path["permute"], adapter.path["unpermute"]]


def test_a_release_without_routing_maps_gets_lists_of_experts():
    adapter = Adapter(standin("1.11"), ours=moe_ref)
    outputs, paths = round_trip(adapter)
    assert paths == [
        "moe_permute of indices, then probs by an index, then pad by an index",
        "unpad by an index, then moe_unpermute of indices",
    ]
    expected = round_trip(moe_ref_adapter())[0]
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(outputs, expected, strict=True))
    uncompleted = Adapter(standin("1.11"))
    products = ["grouped_linear", "grouped_dgrad", "grouped_wgrad"]
    assert uncompleted.offered == ["permute", "unpermute", *products, "glu", "activation"]
    narrow = uncompleted.supports("permute", tokens=leaf(5, 3), routing_map=MAP)
    assert narrow == "permute of 3 columns of float32: no whole 16 bytes"


def test_a_row_map_that_ours_cannot_read_is_refused_by_name():
    adapter = Adapter(standin("2.20"), ours=moe_ref)
    permuted = adapter.permute(leaf(5, 16), MAP)
    rows = permuted.rows.double()
    assert adapter.supports("unpermute", rows=rows) == "unpermute of float64"
    with pytest.raises(TypeError, match="row_map is Transformer Engine's, which cannot do this call"):
        adapter.unpermute(rows, permuted.row_map, restore_shape=(5, 16))
    from_ours = adapter.permute(leaf(5, 16).double(), MAP)  # by ours
    assert adapter.unpermute(from_ours.rows, from_ours.row_map, restore_shape=(5, 16)).dtype == torch.float64


def moe_ref_adapter():
    """An adapter of nothing: all is ours."""
    return Adapter(SimpleNamespace(), ours=moe_ref)


def test_a_path_that_did_not_run_is_found(monkeypatch):
    te = standin("2.6")
    checked = Checked(te, Adapter(te, ours=moe_ref))
    monkeypatch.setattr(Permutation, "unpad_rows", lambda self, rows, cut: self.trace.step("Fp8Unpadding") or rows)
    failing = wrong(judged(checked, ["unpermute"]))
    assert any("claims ['Fp8Unpadding', 'moe_unpermute'], ran ['moe_unpermute']" in text for text in failing)


OFFSETS = "moe_unpermute with pad_offsets"
UNPADDED = {"moe_unpermute": "inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask'"}
FALLBACKS = [  # the symbols that are left out, changed parameters, the paths
    ((), {}, [FUSED, OFFSETS]),
    ((FUSED,), {}, ["moe_permute_with_probs, then Fp8Padding", OFFSETS]),
    ((FUSED, "Fp8Padding"), {}, ["moe_permute_with_probs, then pad by an index", OFFSETS]),
    (
        (FUSED, "Fp8Padding", "moe_permute_with_probs"),
        {},
        ["moe_permute, then probs by an index, then pad by an index", OFFSETS],
    ),
    ((), UNPADDED, [FUSED, "Fp8Unpadding, then moe_unpermute"]),
    (("Fp8Unpadding",), UNPADDED, [FUSED, "unpad by an index, then moe_unpermute"]),
]


@pytest.mark.parametrize(("without", "changed", "paths"), FALLBACKS)
def test_every_fallback_gives_the_bits_of_the_fused_kernel(without, changed, paths):
    fused = round_trip(Adapter(standin("2.20")))[0]
    outputs, taken = round_trip(Adapter(standin("2.20", without=without, changed=changed)))
    assert taken == paths
    assert all(torch.equal(x, y) for x, y in zip(outputs, fused, strict=True))


def test_an_unknown_release_is_probed_and_reported_and_nothing_is_guessed():
    changed = {
        "moe_unpermute": "inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask', order='any'",
        FUSED: "inp, probs, routing_map, tokens_per_expert, align_size, layout",  # what `layout` is, no one knows
    }
    adapter = Adapter(te := standin("2.20", changed=changed))
    outputs, paths = round_trip(adapter)
    assert paths == ["moe_permute_with_probs, then Fp8Padding", "Fp8Unpadding, then moe_unpermute"]
    assert all(torch.equal(x, y) for x, y in zip(outputs, round_trip(Adapter(standin("2.20")))[0], strict=True))
    assert adapter.features.unknown["pytorch.moe_unpermute"] == ["order", "probs"][:1]
    assert adapter.features.unknown[f"pytorch.{FUSED}"] == ["layout"]
    assert [line.partition("(")[0] for line in adapter.features.report()][:2] == [
        f"pytorch.{FUSED}",
        "pytorch.moe_unpermute",
    ]
    assert symbols_of(paths[0], te) == ["moe_permute_with_probs", "Fp8Padding"]


def test_probs_alone_get_a_gradient_from_releases_that_have_none():
    for bucket, has_gradient in (("2.12", False), ("2.15", True)):
        probs = leaf(5, 3)
        te = standin(bucket)
        rows = te.pytorch.moe_permute_with_probs(leaf(5, 3).detach(), probs, MAP, 7)[1]
        gradient = torch.autograd.grad(rows.sum(), probs, allow_unused=True)[0]
        assert (gradient is not None) == has_gradient
        adapter = Adapter(te, ours=moe_ref)
        permuted = adapter.permute(leaf(5, 3).detach(), MAP, probs=probs)
        assert torch.equal(torch.autograd.grad(permuted.probs.sum(), probs)[0], MAP.float())
        out = adapter.unpermute(torch.ones(7, 3), permuted.row_map, probs=probs)
        assert torch.equal(torch.autograd.grad(out.sum(), probs)[0], 3 * MAP.float())


def test_rows_without_a_chunk_are_ours():
    nothing = torch.zeros(0, dtype=torch.int64)
    adapter = Adapter(standin("2.20"), ours=moe_ref)
    assert torch.equal(adapter.sort_chunks(leaf(2, 3), nothing, nothing).rows, leaf(2, 3))
    assert adapter.path["sort_chunks"] == "ours: no row, no column or no chunk"
    with pytest.raises(ValueError, match="split_sizes is empty"):
        Adapter(standin("2.20")).sort_chunks(leaf(2, 3), nothing, nothing)


@pytest.mark.parametrize("bucket", ["1.11", "2.20"])
def test_rows_without_a_column_become_tokens_without_a_column(bucket):
    adapter = Adapter(standin(bucket), ours=moe_ref)
    row_map = adapter.permute(leaf(5, 3), MAP).row_map
    rows, probs = leaf(7, 0), torch.where(MAP, 0.5, torch.nan).requires_grad_()
    out = adapter.unpermute(rows, row_map, probs=probs)
    assert (out.shape, adapter.path["unpermute"]) == ((5, 0), "no column")
    d_rows, d_probs = torch.autograd.grad(out.sum(), [rows, probs])
    assert d_rows.shape == (7, 0) and not d_probs.any()


def test_sizes_and_order_of_chunks_are_given_without_strides():
    te, contiguous = standin("2.20"), []
    te.pytorch.moe_sort_chunks_by_index = lambda inp, split_sizes, sorted_index: (
        contiguous.append((split_sizes.is_contiguous(), sorted_index.is_contiguous())) or inp
    )
    sizes, order = torch.tensor([[1, 0], [1, 1]]).unbind(1)
    for adapter in (Adapter(te), Adapter(te, ours=moe_ref)):
        assert adapter.probes.rows_past_the_chunks is True
        contiguous.clear()
        adapter.sort_chunks(leaf(2, 3), sizes, order)
        assert contiguous == [(adapter.ours is not None,) * 2]


def test_each_thread_has_the_steps_of_its_own_call():
    trace = Trace()
    trace.begin()
    trace.step("moe_permute")
    thread = threading.Thread(target=lambda: (trace.begin(), trace.step("ours"), trace.end("glu", {})))
    thread.start()
    thread.join()
    trace.end("permute", {})
    assert trace.path == {"glu": "ours", "permute": "moe_permute"}


class CopiedRows(Kernels):
    """A kernel that copies rows of probability 0 at bf16 alone."""

    def moe_permute_with_probs(self, inp, probs, routing_map, num_out_tokens):
        tiny = probs.abs().detach() < 1e-3
        return super().moe_permute_with_probs(inp, torch.where(tiny, 0, probs), routing_map, num_out_tokens)


def test_a_release_that_zeroes_other_rows_is_not_conformant():
    te = standin("2.20")
    te.pytorch.moe_permute_with_probs = CopiedRows(te.behaviour).moe_permute_with_probs
    assert wrong(judged(Adapter(te, ours=moe_ref), ["permute"]))


@pytest.mark.parametrize("bucket", ["1.11", "2.1", "2.20"])
@pytest.mark.parametrize(("dtype", "probs"), [("float32", ""), ("bfloat16", "float32"), ("float16", "float16")])
def test_rows_of_whole_vectors_go_through_every_release(bucket, dtype, probs):
    adapter = Adapter(te := standin(bucket), ours=moe_ref)
    checked = Implementation(Checked(te, adapter), bucket)
    for function, align, spread in product(("permute", "unpermute"), (0, 4), ("ragged", "skewed", "middle_empty")):
        payload = "tokens" if function == "permute" else "rows"
        shape = {"tokens": 7, "experts": 5, "topk": 3, "hidden": 16, "spread": spread, "align": align, "seed": align}
        case = RoutingCase(
            function=function, dtype=dtype, probs=probs, grads=f"{payload}+probs" if probs else payload, **shape
        )
        outcome = evaluate(case, checked, "cpu")
        assert outcome.status == "PASS", (case.text, outcome.finding)
        assert not adapter.path[function].startswith("ours")
        assert ("indices" in adapter.path[function]) == (bucket == "1.11")
