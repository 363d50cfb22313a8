"""The stand-ins have the symbols, parameters and behaviour of their releases."""

import inspect
import os
from itertools import pairwise

import pytest
import torch

from conformance.peers.te.features import FEATURES, GATES, TABLE, Features, usable
from tests.te.standin import BUCKETS, standin
from tests.te.standin.matrix import BEHAVIOUR, NEVER, SYMBOLS, parameters_of

MAP = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
NEWER = [name for name in BUCKETS if name not in ("1.11", "2.1")]
SINCE = {  # the features of a bucket that the one before lacks
    "1.11": """unpermute_indices grouped_linear splits swiglu geglu reglu gelu_tanh relu ops_sequential fp8_dtype
               fp8_autocast scales delayed""",
    "2.1": """permute permute_with_probs unpermute sort_chunks sort_chunks_with_probs padding unpadding block_quantizer
              mxfp8_quantizer grouped_recipes current block mxfp8 quantizer_parameters""",
    "2.6": """fused_topk fused_scores fused_aux_loss quick_geglu quick_gelu squared_relu silu clamped_swiglu autocast
              nvfp4""",
    "2.12": "permute_and_pad unpermute_pad_offsets scaled_swiglu interleaved_swiglu ops_grouped_linear",
    "2.15": """fused_topk_indices tensor_splits scaled_clamped_geglu scaled_srelu clamped_swiglu_offset ops_scale_bias
               backward_override nvfp4_row_scaled nvfp4_four_over_six""",
    "2.19": "mxfp8_square",
}
FIRST = {feature: bucket for bucket, features in SINCE.items() for feature in features.split()}


def test_every_feature_is_probed_in_every_release():
    buckets = [name for name in BUCKETS if name != "rocm"]
    for name in FEATURES:
        present = [Features(standin(bucket))[name] for bucket in buckets]
        first = buckets.index(FIRST[name]) if name in FIRST else len(buckets)
        expected = [bucket == "1.11" if name == "permute_indices" else i >= first for i, bucket in enumerate(buckets)]
        assert present == expected, name
    assert Features(standin("rocm"))["splits_on_device"]
    assert not Features(standin("rocm"))["permute_and_pad"]


@pytest.mark.parametrize("feature", TABLE, ids=lambda feature: feature.name)
def test_a_feature_is_missing_without_its_symbol_or_one_of_its_keywords(feature):
    symbol = feature.symbol.removeprefix("pytorch.")
    newest = {"splits_on_device": "rocm", "permute_indices": "1.11"}.get(feature.name, "2.20")
    parameters = parameters_of(*BUCKETS[newest])[symbol]
    assert Features(standin(newest))[feature.name]
    for name in feature.passes:
        without = ", ".join(x for x in parameters.split(", ") if x.split("=")[0].split(":")[0] != name)
        assert not Features(standin(newest, changed={symbol: without}))[feature.name]
    required = f"novel, {parameters}" if parameters else "novel"
    assert not Features(standin(newest, changed={symbol: required}))[feature.name]
    optional = f"{parameters}, novel=None" if parameters else "novel=None"
    features = Features(standin(newest, changed={symbol: optional}))
    assert features[feature.name] and "novel" in features.unknown[feature.symbol]


def test_a_signature_that_cannot_be_read_counts_as_missing():
    assert not usable(print, ("inp",))
    assert not usable(type("Odd", (), {"__call__": None})(), ())
    assert not usable(None, ())
    assert usable(lambda inp, **settings: inp, ("inp",))


def test_the_version_decides_nothing():
    te = standin("2.1")
    te.__version__ = "2.20.2"
    assert not Features(te)["permute_and_pad"]


def test_gates_are_reported_where_a_release_reads_them(monkeypatch):
    for gate in GATES:
        monkeypatch.delenv(gate.variable, raising=False)
    assert Features(standin("rocm")).gates == {}
    for gate in GATES:
        monkeypatch.setenv(gate.variable, "1")
    assert len(Features(standin("rocm")).gates) == len(GATES)
    assert "NVTE_USE_GROUPED_GEMM_TRITON=1" not in Features(standin("2.20")).gates
    assert all(os.environ[gate.variable] for gate in GATES)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_stand_in_takes_the_parameters_of_its_release_alone(bucket):
    te = standin(bucket)
    for symbol, text in parameters_of(*BUCKETS[bucket]).items():
        call = te if symbol.startswith("common.") else te.pytorch
        for attribute in symbol.split("."):
            call = getattr(call, attribute)
        parameters = inspect.signature(call).parameters
        assert len(parameters) == len([x for x in text.split(", ") if x not in ("", "*")])
        with pytest.raises(TypeError, match="unexpected keyword argument 'novel'"):
            call(**{name: None for name, x in parameters.items() if x.kind is not x.VAR_POSITIONAL}, novel=1)


def test_the_rows_of_the_matrix_are_in_order():
    for symbol in {row.symbol for row in SYMBOLS}:
        assert all(
            a.since < b.since for a, b in pairwise(row for row in SYMBOLS if row.symbol == symbol and not row.rocm)
        )
    assert all((1, 11) <= since <= (2, 20) or since == NEVER for since in BEHAVIOUR.values())


def test_the_row_id_map_has_the_layout_of_its_release():
    tokens = torch.zeros(4, 16)
    narrow = standin("2.1").pytorch.moe_permute(tokens, MAP, 5)[1]
    assert narrow.tolist() == [[0, 1, -1, -1], [-1, 2, -1, -1], [3, -1, -1, 4]]
    for bucket in NEWER:
        row_id_map = standin(bucket).pytorch.moe_permute(tokens, MAP, 5)[1]
        assert (row_id_map.dtype, row_id_map.shape, row_id_map[:, -1].tolist()) == (torch.int32, (4, 7), [2, 2, 0, 1])
        assert (row_id_map[0, :2].tolist(), row_id_map[0, 3:5].tolist()) == ([3, 0], [2, 0])
        assert (row_id_map[1, :2].tolist(), row_id_map[1, 3:5].tolist()) == ([2, 1], [1, 0])
        assert (row_id_map[3, :1].tolist(), row_id_map[3, 3:4].tolist()) == ([4], [2])


@pytest.mark.parametrize("bucket", ["2.1", *NEWER])
def test_sums_go_by_ascending_expert_before_2_6_and_by_descending_expert_since(bucket):
    te, ones = standin(bucket).pytorch, torch.ones(1, 3, dtype=torch.bool)
    tokens = torch.zeros(1, 16, requires_grad=True)
    rows, row_id_map = te.moe_permute(tokens, ones, 3)
    large = torch.tensor([2.0**30, -(2.0**30), 1.0])[:, None].expand(3, 16)
    expected = 1.0 if bucket == "2.1" else 0.0  # 1 vanishes next to -2^30
    assert te.moe_unpermute(large, row_id_map, restore_shape=tokens.shape)[0, 0] == expected
    assert torch.autograd.grad(rows, tokens, large)[0][0, 0] == expected


@pytest.mark.parametrize("bucket", ["2.1", *NEWER])
def test_a_row_of_probability_0_is_zeros_since_2_6_and_its_gradient_is_a_copys(bucket):
    te, ones = standin(bucket).pytorch, torch.ones(1, 4, dtype=torch.bool)
    tokens = torch.ones(1, 16, requires_grad=True)
    probs = torch.tensor([[0.0, -0.0, torch.nan, 1e-38]])
    rows = te.moe_permute_with_probs(tokens, probs, ones, 4)[0]
    assert rows[:, 0].tolist() == ([1.0] * 4 if bucket == "2.1" else [0.0, 0.0, 1.0, 1.0])
    assert torch.autograd.grad(rows.sum(), tokens)[0][0, 0] == 4


@pytest.mark.parametrize("bucket", ["2.1", *NEWER])
def test_nothing_to_permute_is_as_documented(bucket):
    te = standin(bucket)
    newer = te.behaviour
    nothing, row_id_map = te.pytorch.moe_permute(torch.zeros(0, 16), MAP[:0], 5)
    shape = (0, 7) if newer.typed_empty_maps else (0,)
    assert (row_id_map.shape, row_id_map.dtype.is_floating_point) == (shape, not newer.typed_empty_maps)
    assert te.pytorch.moe_unpermute(nothing, row_id_map, restore_shape=(4, 16)).shape == (0, 16)
    if newer.asserts_rows:
        with pytest.raises(AssertionError):
            te.pytorch.moe_permute(torch.zeros(4, 16), torch.zeros_like(MAP), 0)
    else:
        assert te.pytorch.moe_permute(torch.zeros(4, 16), torch.zeros_like(MAP), 0)[0].shape == (0, 16)


def test_addresses_out_of_bounds_raise():
    te = standin("2.20").pytorch
    rows, row_id_map = te.moe_permute(torch.zeros(4, 16), MAP, 5)
    with pytest.raises(IndexError, match="num_out_tokens is 4; 5 rows are written"):
        te.moe_permute(torch.zeros(4, 16), MAP, 4)
    with pytest.raises(IndexError, match="5 tokens of 5 rows are restored; the map is of 4"):
        te.moe_unpermute(rows, row_id_map)


def test_calls_are_listed_in_order():
    te = standin("2.20")
    rows, row_id_map = te.pytorch.moe_permute(torch.zeros(4, 16), MAP, 5)
    te.pytorch.moe_unpermute(rows, row_id_map, restore_shape=(4, 16))
    assert te.calls == ["moe_permute", "moe_unpermute"]
