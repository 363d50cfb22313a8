"""Environment variables decide what the adapter passes to Transformer Engine."""

import warnings

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter, experts
from conformance.peers.te.features import FUSED_GROUPED_MLP, TRITON_GROUPED_GEMM
from tests.common.fast import normal
from tests.te.standin import standin
from tests.te.standin.experts import GroupedLinear

COUNTS = torch.tensor([2, 0, 3])
ROWS, WEIGHT = normal(5, 4), normal(3, 6, 4, seed=1)


@pytest.fixture(autouse=True)
def _no_warning_was_given():
    experts._warn_of_no_triton_grouped_gemm.cache_clear()


@pytest.fixture
def arguments_of_forward(monkeypatch):
    """The keywords of each call of the stand-in's grouped linear layer."""
    calls, forward = [], GroupedLinear.forward
    monkeypatch.setattr(
        GroupedLinear, "forward", lambda self, **settings: calls.append(settings) or forward(self, **settings)
    )
    return calls


@pytest.mark.parametrize(("value", "passes"), [(None, False), ("0", False), ("1", True)])
def test_the_variable_of_tritons_grouped_gemm_decides_whether_the_device_tensor_is_passed(
    monkeypatch, arguments_of_forward, value, passes
):
    monkeypatch.delenv(TRITON_GROUPED_GEMM, raising=False)
    if value is not None:
        monkeypatch.setenv(TRITON_GROUPED_GEMM, value)
    out = Adapter(standin("rocm")).grouped_linear(ROWS, WEIGHT, COUNTS)
    assert torch.equal(out, moe_ref.grouped_linear(ROWS, WEIGHT, COUNTS))
    (arguments,) = arguments_of_forward
    assert arguments["m_splits"] == [2, 0, 3]
    assert ("m_splits_tensor" in arguments) is passes
    if passes:
        assert torch.equal(arguments["m_splits_tensor"], COUNTS.int())
        assert arguments["m_splits_tensor"].dtype == torch.int32


@pytest.mark.parametrize("bucket", ["2.12", "2.20"])
def test_a_release_without_the_parameter_warns_once_that_the_variable_has_no_effect(monkeypatch, bucket):
    monkeypatch.setenv(TRITON_GROUPED_GEMM, "1")
    with pytest.warns(UserWarning, match="takes no m_splits_tensor") as caught:
        for adapter in (Adapter(standin(bucket)), Adapter(standin(bucket), ours=moe_ref)):
            for _ in range(2):
                adapter.grouped_linear(ROWS, WEIGHT, COUNTS)
    assert len(caught) == 1


@pytest.mark.parametrize(("bucket", "value"), [("rocm", "1"), ("2.12", "0"), ("2.20", "0")])
def test_no_warning_is_given_where_the_variable_has_its_effect_or_is_off(monkeypatch, bucket, value):
    monkeypatch.setenv(TRITON_GROUPED_GEMM, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adapter(standin(bucket)).grouped_linear(ROWS, WEIGHT, COUNTS)


def test_the_variable_of_the_fused_grouped_mlp_is_in_the_path_of_grouped_mlp_alone(monkeypatch):
    monkeypatch.setenv(FUSED_GROUPED_MLP, "1")
    adapter = Adapter(standin("2.20"))
    adapter.grouped_mlp(ROWS, COUNTS, normal(3, 16, 4, seed=1), normal(3, 4, 8, seed=2))
    adapter.grouped_linear(ROWS, WEIGHT, COUNTS)
    assert adapter.path["grouped_mlp"].endswith(f"[{FUSED_GROUPED_MLP}=1]")
    assert FUSED_GROUPED_MLP not in adapter.path["grouped_linear"]
