"""Counts stay on the device where the release takes them there; pairs of counts are accepted."""

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.peers.te import Adapter
from moe_fast.dispatch import CountsOnHost
from moe_ref.config import Recipe
from tests.common.fast import normal
from tests.te.standin import experts, standin

COUNTS = torch.tensor([2, 0, 3])
EXACT = Recipe("current", power_of_two_scales=True)
READS = ("tolist", "item", "cpu", "numpy", "__int__", "__index__", "__bool__", "__float__", "__iter__")


class OnDevice(Tensor):
    """Counts that raise where the host reads them, or what is computed from them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            raise RuntimeError(f"the host waits for the counts: {function.__name__}")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def counts(monkeypatch):
    """Counts that the stand-in alone may read."""
    product, operation = experts.GroupedLinear._product, experts._Operation.forward

    def readable(x):
        return x.as_subclass(Tensor) if isinstance(x, OnDevice) else x

    monkeypatch.setattr(
        experts.GroupedLinear,
        "_product",
        lambda self, **settings: product(self, **{name: readable(x) for name, x in settings.items()}),
    )
    monkeypatch.setattr(experts._Operation, "forward", lambda self, *args: operation(self, *map(readable, args)))
    return COUNTS.as_subclass(OnDevice)


def outputs(implementation, counts, recipe=None):
    """The output of each function of the experts, by name."""
    rows, weight, d_out = normal(5, 4), normal(3, 6, 4, seed=1), normal(5, 6, seed=2)
    layers = normal(3, 16, 4, seed=1), normal(3, 4, 8, seed=2)
    precision = {} if recipe is None else {"recipe": recipe}
    return {
        "grouped_linear": implementation.grouped_linear(rows, weight, counts, **precision),
        "grouped_dgrad": implementation.grouped_dgrad(d_out, weight, counts, **precision),
        "grouped_wgrad": implementation.grouped_wgrad(d_out, rows, counts, **precision),
        "grouped_mlp": implementation.grouped_mlp(rows, counts, *layers),
    }


def assert_equal(actual, expected):
    for function, x in expected.items():
        assert torch.allclose(actual[function], x, rtol=1e-5, atol=1e-5), function


def test_the_host_reads_no_counts_where_the_release_takes_a_tensor(counts):
    assert_equal(outputs(Adapter(standin("2.20")), counts), outputs(moe_ref, COUNTS))


def test_the_host_reads_counts_where_the_release_takes_a_list_or_the_adapter_is_complete(counts):
    for adapter in (Adapter(standin("2.12")), Adapter(standin("2.20"), ours=moe_ref)):
        with pytest.raises(RuntimeError, match="the host waits for the counts: tolist"):
            outputs(adapter, counts)


@pytest.mark.parametrize("ours", [None, moe_ref])
@pytest.mark.parametrize("bucket", ["2.12", "2.20"])
@pytest.mark.parametrize("recipe", [None, EXACT])
def test_of_a_pair_the_host_reads_its_copy_alone(counts, bucket, ours, recipe):
    outs = outputs(Adapter(standin(bucket), ours=ours), (COUNTS, counts), recipe)
    assert_equal(outs, outputs(moe_ref, COUNTS, recipe))


def test_ours_gets_the_counts_on_the_device_of_a_pair():
    adapter = Adapter(standin("1.11"), ours=moe_ref)
    assert_equal(outputs(adapter, (COUNTS, COUNTS)), outputs(moe_ref, COUNTS))
    assert adapter.path["grouped_mlp"].startswith("ours: ")


def test_the_pair_of_a_dispatch_is_taken():
    pair = CountsOnHost(COUNTS)
    adapter = Adapter(standin("2.12"), ours=moe_ref)
    assert_equal(outputs(adapter, (pair.host, pair.device)), outputs(moe_ref, COUNTS))


def test_a_copy_of_another_shape_or_device_is_refused():
    for host in (COUNTS[:2], COUNTS.to("meta")):
        with pytest.raises(ValueError, match="tokens_per_expert"):
            outputs(Adapter(standin("2.20")), (host, COUNTS))
