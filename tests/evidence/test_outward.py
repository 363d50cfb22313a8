"""Other packages' tests over `moe_fast`: the shims compute what the reference does."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from evidence.outward import modules, plugin
from evidence.outward.__main__ import kind, table
from evidence.outward.experts import experts
from evidence.outward.transformer_engine import DType, Float8BlockQuantizer, NVFP4Quantizer
from moe_ref import grouped_mlp, quantization
from moe_ref.config import Recipe
from tests.common.fast import normal


def test_packed_codes_and_scales_are_those_of_the_reference():
    x = normal(32, 48, dtype=torch.bfloat16)
    mine = NVFP4Quantizer(with_rht=False)(x)
    recipe = Recipe("nvfp4", hadamard=False)
    quantized = quantization.quantize(x, recipe, columnwise=True).quantized
    for columnwise, direction in enumerate(("rowwise", "columnwise")):
        packed = getattr(mine, f"_{direction}_data")
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        expected = quantization.codes(quantized, columnwise=bool(columnwise))
        scales = quantization.scales(quantized, columnwise=bool(columnwise))
        assert torch.equal(codes, expected.T if columnwise else expected)
        assert torch.equal(getattr(mine, f"_{direction}_scale_inv"), scales.T if columnwise else scales)


def test_experts_by_index_are_the_sum_over_the_experts():
    x, weights = normal(5, 16), torch.tensor([[0.5, 0.25]]).repeat(5, 1)
    indices = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    fc1, fc2 = normal(3, 8, 16, seed=2), normal(3, 16, 4, seed=3)
    expected = torch.zeros_like(x)
    for token, (chosen, factors) in enumerate(zip(indices.tolist(), weights, strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            row = grouped_mlp(x[token, None], torch.tensor([1]), fc1[expert, None], fc2[expert, None])
            expected[token] += factor * row[0]
    close = 1e-5  # why: float32 sums of 16 terms, in another order; swapped experts differ by far more
    assert torch.allclose(experts(x, indices, weights, fc1, fc2), expected, atol=close)
    assert not torch.allclose(experts(x, indices.flip(1), weights, fc1, fc2), expected, atol=1000 * close)


def test_a_missing_option_skips_the_test_and_is_counted_apart():
    quantizer = Float8BlockQuantizer(DType.kFloat8E5M2)
    with pytest.raises(pytest.skip.Exception, match=r"^not offered: square blocks of E5M2"):
        quantizer.recipe()
    assert kind({"outcome": "skipped", "text": "Skipped: not offered: square blocks"}) == "not offered"
    assert kind({"outcome": "skipped", "text": "needs another device"}) == "skipped"


def test_a_stub_offers_the_given_names_and_skips_on_any_other():
    module = modules.stub("a_package_of_another", known=1)
    assert module.known == 1
    with pytest.raises(pytest.skip.Exception, match=r"a_package_of_another\.unknown"):
        module.unknown(3)
    sys.meta_path.pop()
    del sys.modules["a_package_of_another"]


def test_a_name_that_the_package_lacks_is_not_replaced():
    with pytest.raises(AttributeError):
        modules.replace("json", no_such_function=None)


def test_a_failure_is_recorded_with_its_message(tmp_path):
    path = tmp_path / "record"
    report = SimpleNamespace(when="call", outcome="failed", nodeid="a.py::test", duration=1.0, longrepr="wrong row 3")
    plugin.Recorder(str(path)).pytest_runtest_logreport(report)
    assert json.loads(path.read_text()) == {
        "test": "a.py::test",
        "outcome": "failed",
        "seconds": 1.0,
        "text": "wrong row 3",
    }


def test_the_table_has_a_row_per_file_with_each_count():
    counts = dict.fromkeys(("passed", "failed", "not offered", "skipped", "xfailed", "not run"), 0) | {"failed": 7}
    row = {"package": "A", "file": "b.py", "select": "", "counts": counts, "seconds": 3, "end": "exit code 1"}
    assert table([row]).splitlines()[-1] == "| A | b.py | 0 | 7 | 0 | 0 | 0 | 0 | 3 | exit code 1 |"
