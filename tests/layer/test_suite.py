"""The layer's contract: its values are the reference's, its bounds are narrow, its cases decide."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.families.layer import laws
from conformance.families.layer.cases import (
    LayerCase,
    config_of_layer,
    expert_bias_of,
    logits_of_rows,
    margins,
    noise_of,
    padding_of,
    parameters_of,
    router_weight_of,
    tokens_of,
)
from conformance.interface import load
from moe_ref.config import OF_EXPERTS, LayerParameters, split_experts
from tests.common.suite import outcome_of

LAYER = CONTRACTS["moe_layer"]
SMALL = {"tokens": 7, "hidden": 6, "width": 5, "experts": 4, "topk": 2}
RANKED = ["allgather", "alltoall", "deepep", "hybridep"]


def case(**fields) -> LayerCase:
    layer_case = LayerCase(function="moe_layer", **SMALL | fields)
    assert LAYER.signature.fits(layer_case) is None
    return layer_case


def with_gradients(layer_case: LayerCase) -> LayerCase:
    return replace(layer_case, grads=LAYER.signature.all_gradients(layer_case))


def some_cases(count: int, seed: int = 3, ranks: int = 1) -> list[LayerCase]:
    return [
        layer_case
        for layer_case in drawn(strategy("moe_layer", Space(ranks=ranks)), seed, count)
        if not layer_case.golden
    ]


def in_float64(layer_case: LayerCase) -> dict[str, Tensor]:
    """The reference's output and gradients of all ranks, by the float64 values of the inputs."""
    parameters, config, bias = parameters_of(layer_case), config_of_layer(layer_case), expert_bias_of(layer_case)
    x = tokens_of(layer_case, parameters, bias)
    leaves = {name: y.double().requires_grad_() for name, y in ({"x": x} | parameters).items()}
    counts = list(layer_case.counts) or [layer_case.tokens]
    p = LayerParameters(**{name: y for name, y in leaves.items() if name != "x"})
    state = moe_ref.new_state(config.router)._replace(**({"expert_bias": bias} if layer_case.bias else {}))
    settings = {"training": not layer_case.evaluation, "batch_size": layer_case.sequences}
    settings |= {"padding_mask": padding_of(layer_case).split(counts)} if layer_case.padding else {}
    settings |= {"noise": noise_of(layer_case).split(counts)} if layer_case.jitter else {}
    ranks = len(counts)
    out = moe_ref.moe_layer(
        leaves["x"].split(counts), split_experts(p, ranks, config), config, states=[state] * ranks, **settings
    )
    output = torch.cat(list(out.output))
    cotangents = torch.cat([call.cotangents["output"] for call in LAYER.calls(layer_case)]).double()
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangents, allow_unused=True)
    named = {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return {"output": output.detach()} | named


@pytest.mark.parametrize("counts", [(), (4, 3), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("fields", [
    {"latent": 3, "shared": 2, "gate": True, "router_bias": True, "fc1_bias": True, "fc2_bias": True},
    {"losses": "aux+seq+global+z", "bias": True, "dispatcher": "allgather", "jitter": True},
    {"capacity": 2, "kind": "geglu", "score": "softmax", "dispatcher": "deepep"},
    {"padding": 3, "losses": "aux+seq+global+z", "bias": True, "capacity": 2, "pad": True, "shared": 2},
    {"on_input": True, "groups": 2, "group_topk": 1, "dispatcher": "hybridep", "kind": "squared_relu"},
], ids=str)  # fmt: skip
def test_the_expected_values_are_the_references_in_float64(fields, counts):
    assert_expected(with_gradients(case(**fields, counts=counts, experts=6 if len(counts) == 3 else 4)))


@pytest.mark.parametrize("dispatcher", RANKED)
@pytest.mark.parametrize(
    "fields", [{}, {"kind": "geglu", "interleave": 1}, {"kind": "squared_relu", "latent": 3}], ids=str
)
def test_shards_of_experts_add_up_to_the_layer(dispatcher, fields):
    common = {"dispatcher": dispatcher, "width": 6, "fc1_bias": True, "shared": 2} | fields
    for counts, experts in (((4, 3), 3), ((2, 1, 2, 2), 4)):
        layer_case = with_gradients(case(counts=counts, experts=experts, shards=2, **common))
        assert_expected(layer_case)
        unsharded = with_gradients(case(counts=(sum(counts),), experts=experts, **common))
        sharded, single_rank = in_float64(layer_case)["output"], in_float64(unsharded)["output"]
        assert_close(sharded, single_rank, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("budget", "dispatcher"), [(1, "hybridep"), (4, "allgather"), (4, "alltoall"), (30, "hybridep")]
)
def test_rows_beyond_a_budget_have_no_part(budget, dispatcher):
    layer_case = with_gradients(case(counts=(4, 3), dispatcher=dispatcher, budget=budget, bias=True))
    assert_expected(layer_case)
    unlimited = LAYER.right(replace(layer_case, budget=0), LAYER.calls(replace(layer_case, budget=0)), {})
    same = [
        torch.equal(a["output"].value, b["output"].value)
        for a, b in zip(LAYER.right(layer_case, LAYER.calls(layer_case), {}), unlimited, strict=True)
    ]
    assert all(same) is (budget == 30)


def assert_expected(layer_case: LayerCase) -> None:
    expected = LAYER.right(layer_case, LAYER.calls(layer_case), {})
    values = in_float64(layer_case)
    for name, wanted in values.items():
        shards = [rank[name].value for rank in expected]
        if (parameter := name.removeprefix("d_")) in OF_EXPERTS:
            gradients = LayerParameters(**{p: values[f"d_{p}"] for p in parameters_of(layer_case)})
            split = split_experts(gradients, layer_case.world, config_of_layer(layer_case))
            shards, wanted = torch.cat(shards), torch.cat([getattr(local, parameter) for local in split])
        else:
            shards = torch.cat(shards) if parameter in ("output", "x") else sum(shards)
        assert_close(shards, wanted, rtol=1e-9, atol=1e-9)


def test_the_bounds_of_float32_are_some_units_in_the_last_place_and_no_output_is_unchecked():
    for layer_case in some_cases(25):
        layer_case = with_gradients(replace(layer_case, dtype="float32", recipe="", align=0, law=""))
        expected = LAYER.expected(layer_case, LAYER.problem(layer_case), {})
        for name in ("output", "d_fc1_weight", "d_fc2_weight") if expected else ():
            bound, value = expected[name].bound, expected[name].value
            assert bound.isfinite().all()
            assert bound.norm() <= 2**-12 * value.norm()  # of a gradient whose terms cancel, 1.3 · 2^-13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [1, 6, 64, 512])
def test_logits_are_exact_in_any_order(hidden, dtype):
    layer_case = case(hidden=hidden, dtype=dtype, tokens=9)
    weight, x = (
        router_weight_of(layer_case),
        tokens_of(layer_case, parameters_of(layer_case), expert_bias_of(layer_case)),
    )
    expected = logits_of_rows(x, weight, None, torch.float64)
    assert weight.any()
    for order in (torch.arange(hidden), torch.arange(hidden).flip(0), torch.randperm(hidden)):
        sums = torch.zeros(expected.shape)
        for h in order.tolist():
            sums = sums + x[:, h : h + 1].float() * weight[None, :, h].float()
        assert torch.equal(sums.double(), expected)


def test_cases_seldom_have_choices_that_rounding_decides():
    cases = some_cases(150, seed=5)
    open_ = [layer_case for layer_case in cases if not LAYER.expected(layer_case, LAYER.problem(layer_case), {})]
    assert len(open_) <= 0.03 * len(cases)


def test_a_margin_is_the_least_difference_that_changes_a_choice():
    config = config_of_layer(case(score="softmax")).router
    logits = torch.tensor([[3.0, 2.0, 1.5, 0.0], [1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert margins(logits, config, torch.zeros(4)).tolist() == [0.5, 0.0]
    biased = config_of_layer(case(bias=True)).router
    assert margins(torch.zeros(1, 4).double(), biased, torch.tensor([0.3, 0.2, 0.1, 0.0])).tolist() == [0.0]
    grouped = config_of_layer(case(score="softmax", groups=2, group_topk=1)).router
    # groups {0, 1} and {2, 3}: best pairs 5 and 4.5; in the group nothing is left to choose
    assert margins(torch.tensor([[3.0, 2.0, 4.5, 0.0]]).double(), grouped, torch.zeros(4)).tolist() == [0.5]


def namespace(**replacements) -> SimpleNamespace:
    reference = load("moe_ref").namespace
    names = ("moe_layer", "new_state", "state_tensors", "state_from")
    return SimpleNamespace(**{name: getattr(reference, name) for name in names} | replacements)


def test_a_layer_in_float64_is_accepted_where_logits_are_exact():
    reference_layer = load("moe_ref").namespace.moe_layer

    def in_double(x, parameters, config, **settings):
        wider = LayerParameters(*(None if y is None else y.double() for y in parameters))
        out = reference_layer(x.double(), wider, config, **settings)
        routed = out.routed._replace(probs=out.routed.probs.float())
        losses = {name: loss.float() for name, loss in out.routed.losses._asdict().items() if loss is not None}
        routed = routed._replace(losses=routed.losses._replace(**losses))
        return out._replace(output=out.output.float(), routed=routed)

    for layer_case in some_cases(20, seed=8):
        float32_case = replace(
            layer_case, dtype="float32", recipe="", align=0, law="", layout="contiguous", layout_of=""
        )
        outcome = outcome_of(float32_case, namespace(moe_layer=in_double))
        assert outcome.status in ("PASS", "UNINFORMATIVE"), (float32_case.text, outcome.finding)


@pytest.mark.parametrize("fields", [{}, {"latent": 3, "shared": 2}, {"dtype": "bfloat16"}], ids=str)
def test_one_expert_that_is_an_eighth_too_large_is_found(fields):
    reference_layer = load("moe_ref").namespace.moe_layer

    def too_large(x, parameters, config, **settings):
        scale = torch.ones(len(parameters.fc2_weight), 1, 1, dtype=x.dtype)
        scale[0] = 1.125 if x.dtype == torch.float32 else 2
        return reference_layer(x, parameters._replace(fc2_weight=parameters.fc2_weight * scale), config, **settings)

    assert outcome_of(case(**fields), namespace()).status == "PASS"
    assert outcome_of(case(**fields), namespace(moe_layer=too_large)).status == "FAIL"


def unplaced(cases) -> set[str]:
    """The layer's inputs that have no strides of their own in any of these cases."""
    signature, dense_layouts = CONTRACTS["moe_layer"].signature, ("contiguous", "shifted", "negated")
    return {x.name for x in signature.inputs} - {case.layout_of for case in cases if case.layout not in dense_layouts}


def test_every_input_of_the_layer_has_strides_in_some_case_of_the_gate():
    sections = [Section(kind, "moe_layer") for kind in ("fixed", "covering", "drawn")]
    cases = [case for section in sections for case in cases_of(section, PROFILES["gate"], Space(), 0)]
    assert unplaced(cases) == set()
    rows = scope_of("moe_layer", Space()).covering().cases
    assert unplaced(rows) and unplaced(case for case in cases if case.layout != "strided")


def test_the_checkpoint_of_a_layer_has_no_arguments_but_tensors(monkeypatch):
    leaves = []

    def watched(function, *arguments, **options):
        leaves.extend(pytree.tree_leaves(arguments))
        return checkpoint(function, *arguments, **options)

    monkeypatch.setattr(laws, "checkpoint", watched)
    assert outcome_of(with_gradients(case(law="recompute")), load("moe_ref")).status == "PASS"
    assert leaves and all(isinstance(x, Tensor) for x in leaves)
