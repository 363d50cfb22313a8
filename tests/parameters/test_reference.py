"""Parameters of both packages: names, shards, extra states and upcycled layers do what they say."""

import pytest
import torch

import moe_fast
import moe_ref
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.parameters import FAMILY
from moe_ref.config import LayerConfig, LayerParameters, RouterConfig
from tests.common.suite import assert_accepted

both = pytest.mark.parametrize("package", [moe_ref, moe_fast], ids=["ref", "fast"])


@both
@pytest.mark.parametrize("function", [contract.function for contract in FAMILY.contracts])
def test_fixed_and_drawn_cases_are_passed(package, function):
    cases = [*fixed_cases(function, Space()), *drawn(strategy(function, Space()), 5, 24)]
    assert_accepted(cases, package, share=0)


@both
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(("kind", "granularity", "topk"), [("relu", 2, 2), ("squared_relu", 4, 4), ("relu", 1, 2)])
def test_an_upcycled_layer_computes_what_the_dense_layer_does(package, kind, granularity, topk, pre_softmax):
    """Where routing weighs all experts alike: a copy's slices are chosen, and sum to the MLP."""
    generator = torch.Generator().manual_seed(3)
    x, fc1, fc2 = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (8, 5), (5, 8)))
    upcycled = package.upcycle(
        torch.zeros(8, 5, dtype=torch.float64), fc1, fc2, topk=topk, granularity=granularity, kind=kind,
        pre_softmax=pre_softmax,
    )  # fmt: skip
    h = torch.relu(x @ fc1.T)
    dense = (h**2 if kind == "squared_relu" else h) @ fc2.T
    router = RouterConfig(num_experts=8, topk=topk, score_function="softmax", pre_softmax=pre_softmax)
    parameters = LayerParameters(upcycled.router_weight, upcycled.fc1_weight, upcycled.fc2_weight)
    out = moe_ref.moe_layer(
        [x], [parameters], LayerConfig(router=router, kind=kind), states=[moe_ref.new_state(router)]
    )
    torch.testing.assert_close(out.output[0], dense)
