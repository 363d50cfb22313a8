"""moe_fast as an implementation of the experts of Hugging Face transformers."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.results import FOLDER
from tests.common.compiled import assert_compiles
from tests.common.fast import interpreted, normal, record_reads

transformers = pytest.importorskip("transformers")
evidence = importlib.import_module("evidence.transformers_families")
integration = importlib.import_module("moe_fast.integrations.transformers")
registry = importlib.import_module("transformers.integrations.moe")

pytestmark = interpreted
NORM = "a norm of each expert's output"
OTHER_GATE = "the gate that _apply_gate computes"
REFUSED = {
    "inkling2": ("Inkling2Experts", OTHER_GATE),
    "inkling2_loop": ("Inkling2LoopExperts", OTHER_GATE),
    "muse_spark": ("MuseSparkExperts", NORM),
}
INDEX = torch.tensor([[0, 1], [2, 3], [1, 4], [2, 2], [4, 4], [3, 0]])  # 4 is of another rank; 2 is chosen twice
TOKENS, HIDDEN, WIDTH, EXPERTS = len(INDEX), 16, 8, 4


class Experts(nn.Module):
    """Experts as transformers decorates them; `forward` is the registry's function of that name."""

    def __init__(self, implementation="moe_fast", activation="silu", dtype=torch.float32, **stated):
        super().__init__()
        flags = {name: name in ("is_concatenated", "has_gate") for name in integration.STATED} | stated
        self.__dict__.update(flags, num_experts=EXPERTS, _is_expert_parallel=True, implementation=implementation)
        self.act_fn = transformers.activations.ACT2FN[activation]
        first = "gate_up_proj" if self.has_gate else "up_proj"
        rows = 2 * WIDTH if self.has_gate else WIDTH
        for seed, (name, *shape) in enumerate(((first, rows, HIDDEN), ("down_proj", HIDDEN, WIDTH))):
            weight = normal(EXPERTS, *(shape[::-1] if self.is_transposed else shape), seed=seed, dtype=dtype)
            setattr(self, name, nn.Parameter(weight))
            if self.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(normal(EXPERTS, shape[0], seed=seed + 2, dtype=dtype)))

    _apply_gate = registry._default_apply_gate

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return registry.ALL_EXPERTS_FUNCTIONS[self.implementation](self, tokens, index, weights)


def inputs(dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and their weights, which are 0 for experts of other ranks."""
    weights = normal(TOKENS, 2, seed=9).abs() * (INDEX < EXPERTS)
    return normal(TOKENS, HIDDEN, seed=8, dtype=dtype).requires_grad_(), INDEX, weights.to(dtype).requires_grad_()


def step(experts: Experts, tokens: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of the tokens, their weights and all parameters."""
    out = experts(tokens, index, weights)
    leaves = [tokens, weights, *experts.parameters()]
    gradients = torch.autograd.grad(out, leaves, normal(*out.shape, seed=7).to(out.dtype))
    return [out.detach(), *(torch.where(index < EXPERTS, x, 0) if x.shape == index.shape else x for x in gradients)]


def far(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, in units of the largest value of its tensor."""
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("family", evidence.families())
def test_a_family_trains_as_by_eager_or_is_refused_by_name(family):
    outcome = evidence.outcome(family)
    if family not in REFUSED:
        assert outcome.verdict == "agrees", outcome
        return
    experts, lacking = REFUSED[family]
    assert outcome.refused == f'moe_fast does not run {experts}, which needs {lacking}: use "grouped_mm"'
    with pytest.raises(ValueError) as refused:
        evidence.step(evidence.tiny_model(family), "moe_fast")
    assert str(refused.value) == outcome.refused


def test_the_record_has_the_verdict_of_every_family():
    record = json.loads((FOLDER / "transformers.json").read_text())
    verdicts = {family: verdict for family, _, verdict, *_ in record["details"][0]["rows"]}
    expected = {family: "refused" if family in REFUSED else "agrees" for family in evidence.families()}
    assert verdicts == expected, "stale: python -m evidence.transformers_families"


def test_a_wrong_gradient_of_experts_is_a_difference():
    expected = {"mlp.experts.down_proj": torch.tensor([1e-3, 0]), "embed.weight": torch.tensor([1.0])}
    result = expected | {"mlp.experts.down_proj": torch.tensor([1e-3, 2e-8])}
    assert evidence.differences(expected, expected) == dict.fromkeys(expected, 0.0)
    assert max(evidence.differences(result, expected).values()) > evidence.LIMIT


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"has_bias": True},
        {"is_transposed": True},
        {"has_gate": False, "activation": "relu2"},
        {"has_gate": False, "has_bias": True, "is_transposed": True},
    ],
    ids=str,
)
def test_experts_are_those_of_batched_mm(stated):
    ours, theirs = (step(Experts(name, **stated), *inputs()) for name in ("moe_fast", "batched_mm"))
    assert far(ours, theirs) <= evidence.LIMIT


def test_tokens_without_an_expert_of_this_rank_are_zero():
    out = Experts()(*inputs())
    assert not out[INDEX[:, 0] == EXPERTS].any() and out[INDEX[:, 0] < EXPERTS].any(dim=1).all()
    assert Experts()(normal(0, HIDDEN, seed=0), INDEX[:0], normal(0, 2, seed=0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", sorted(transformers.activations.ACT2FN))
def test_an_activation_is_the_same_function_or_refused(activation, gated):
    experts = Experts(activation=activation, has_gate=gated)
    kinds = integration.GATED if gated else integration.PLAIN
    if type(experts.act_fn) not in kinds:
        with pytest.raises(ValueError, match="which needs the activation"):
            experts(*inputs())
        return
    theirs = Experts("batched_mm", activation=activation, has_gate=gated)
    assert far(step(experts, *inputs()), step(theirs, *inputs())) <= evidence.LIMIT


def test_a_changed_gate_is_not_recognised():
    def halved(self, h):
        return 0.5 * registry._default_apply_gate(self, h)

    def with_attribute(self, h):
        return registry._default_apply_gate(self, h) * self.temperature

    method = registry._default_apply_gate
    assert integration.GATES[integration.index_of_gate(method)] == ("act_fn", None, 0.0, None)
    assert [integration.index_of_gate(x) for x in (halved, with_attribute)] == [-1, -1]


def test_each_gate_is_told_from_all_others():
    methods = [lambda experts, h, gate=gate: gate(experts, h) for gate in integration.GATES]
    assert [integration.index_of_gate(method) for method in methods] == list(range(len(methods)))


def test_the_host_never_waits(monkeypatch):
    experts, arguments = Experts(has_bias=True), inputs()
    experts(*arguments)  # the gate is read once
    reads = record_reads(monkeypatch)
    step(experts, *arguments)
    assert reads == []


@pytest.mark.parametrize("transposed", [True, False])
def test_weights_are_read_in_place(transposed, monkeypatch):
    experts, passed = Experts(is_transposed=transposed), []

    def grouped_mlp(rows, counts, *weights, **settings):
        passed.extend(weights)
        return original(rows, counts, *weights, **settings)

    original = integration.grouped_mlp
    monkeypatch.setattr(integration, "grouped_mlp", grouped_mlp)
    experts(*inputs())
    assert [x.data_ptr() for x in passed] == [x.data_ptr() for x in experts.parameters()]


@pytest.mark.parametrize("stated", [{}, {"has_bias": True, "is_transposed": True}], ids=str)
def test_one_graph_is_the_same_bits(stated):
    experts = Experts(**stated)
    assert_compiles(experts, inputs(), (inputs()[0], INDEX.flip(0), inputs()[2]))


def test_autocast_computes_in_its_dtype():
    tokens, index, weights = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = Experts()(tokens, index, weights)
    low = Experts(dtype=torch.bfloat16)(tokens.bfloat16(), index, weights)
    assert out.dtype == torch.float32 and torch.equal(out, low.float())


def test_a_checkpointed_layer_has_the_same_gradients():
    model = evidence.tiny_model("qwen3_moe")
    loss, expected = evidence.step(model.train(), "moe_fast")
    model.gradient_checkpointing_enable()
    recomputed_loss, gradients = evidence.step(model, "moe_fast")
    assert torch.equal(loss, recomputed_loss) and all(torch.equal(gradients[name], x) for name, x in expected.items())


def test_evaluation_is_the_forward_of_training():
    experts, arguments = Experts(), inputs()
    expected = experts(*arguments)
    with torch.no_grad():
        assert torch.equal(experts.eval()(*arguments), expected)
    with torch.inference_mode():
        assert torch.equal(experts(*arguments), expected)


def test_the_configuration_chooses_the_implementation():
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, experts_implementation="moe_fast",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    assert model.get_experts_implementation() == {"": "moe_fast"}
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 32)


def test_another_decorator_is_one_sentence():
    def decorator(experts_class, *, experts_interface, is_transposed=False, has_router=False):
        pass

    with pytest.raises(
        ImportError, match=r"needs transformers 5\.24: experts of [\d.]+ also differ in has_bias, .*has_router"
    ):
        integration._checked(decorator)
    integration._checked(registry.use_experts_implementation)


@pytest.mark.parametrize("installed", [None, SimpleNamespace(__version__="4.57")], ids=["missing", "old"])
def test_a_missing_or_old_package_is_one_sentence(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", installed)
    monkeypatch.setitem(sys.modules, "transformers.integrations", None)
    monkeypatch.setitem(sys.modules, "transformers.activations", None)
    monkeypatch.delitem(sys.modules, "moe_fast.integrations.transformers")
    with pytest.raises(ImportError, match=r"^moe_fast\.integrations\.transformers needs transformers 5\.24: "):
        importlib.import_module("moe_fast.integrations.transformers")
