"""The adapter of `triton_kernels` reads weights, indices and bits as the package lays them out."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from conformance.engine.child.evaluate import evaluate
from conformance.families.router.cases import LogitsCase
from conformance.interface import Implementation

CASES = [
    LogitsCase(function="topk_routing", tokens=tokens, experts=experts, topk=topk, grads="logits")
    for tokens, experts, topk in ((5, 8, 2), (3, 40, 4), (1, 64, 1), (0, 8, 2))
]


def topk(logits, k, apply_softmax=True, shifted=0):
    """As the package's: the chosen ascending, their softmax, a bit per expert in words of 32."""
    indices = logits.topk(k, dim=1).indices.sort(dim=1).values
    weights = logits.gather(1, indices).softmax(1)
    bits = torch.zeros(len(logits), -(-logits.shape[1] // 32), dtype=torch.int64)
    for token, expert in ((t, int(e)) for t, row in enumerate(indices) for e in row):
        bits[token, expert // 32] |= 1 << (expert + shifted) % 32
    return weights, indices.short(), SimpleNamespace(storage=SimpleNamespace(data=bits.to(torch.uint32)))


@pytest.fixture
def adapter(monkeypatch):
    """The adapter of a stand-in."""
    package, module = ModuleType("triton_kernels"), ModuleType("triton_kernels.topk")
    package.topk, module.topk = module, topk
    monkeypatch.setitem(sys.modules, "triton_kernels", package)
    monkeypatch.setitem(sys.modules, "triton_kernels.topk", module)
    monkeypatch.delitem(sys.modules, "conformance.peers.triton_topk", raising=False)
    yield importlib.import_module("conformance.peers.triton_topk")
    sys.modules.pop("conformance.peers.triton_topk")


def statuses(adapter):
    return [evaluate(case, Implementation(adapter)).status for case in CASES]


def test_a_package_that_is_right_is_conformant_through_the_adapter(adapter):
    assert set(statuses(adapter)) <= {"PASS", "UNINFORMATIVE"}
    assert statuses(adapter).count("PASS") == 3


def test_bits_that_are_not_the_chosen_experts_are_found(adapter):
    adapter.package.topk = lambda logits, k, **settings: topk(logits, k, shifted=1, **settings)
    assert statuses(adapter)[0] == "FAIL"


def test_numbers_of_experts_that_the_kernel_has_no_range_for_are_unsupported(adapter):
    assert adapter.supports("topk_routing", topk=4) is None
    assert adapter.supports("topk_routing", topk=6) == "6 experts per token: no power of two"


def test_a_tensor_is_launched_without_the_wrapper(adapter):
    x = torch.zeros(2, 3)
    assert adapter.package.Tensor(x, shape=[2, 3], shape_max=[4, 3]) is x and x.shape_max == [4, 3]
    assert not isinstance(x, adapter.package.Tensor)
