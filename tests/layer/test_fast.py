"""`moe_fast.layer` on one rank beyond the gate: the module, reads of the device, files."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import moe_fast
import moe_ref
from moe_fast import MoELayer
from moe_ref.config import LayerConfig, RouterConfig
from tests.common.fast import interpreted, normal, record_reads

pytestmark = interpreted
HIDDEN, WIDTH, EXPERTS = 8, 6, 4
EVERYTHING = {"latent": 4, "shared_width": 4, "shared_gate": True, "bias": True}


def config(**router) -> LayerConfig:
    settings = {"num_experts": EXPERTS, "topk": 2, "score_function": "sigmoid"} | router
    return LayerConfig(router=RouterConfig(**settings), dispatcher="alltoall")


def layer(layer_config: LayerConfig | None = None, seed: int = 0, **options) -> MoELayer:
    torch.manual_seed(seed)
    module = MoELayer(layer_config or config(), HIDDEN, WIDTH, init_std=0.5, **options)
    for name, x in module.named_parameters():
        if name.endswith("bias"):
            assert not x.any()
            torch.nn.init.normal_(x)
    return module


def test_noise_that_is_not_given_is_that_of_the_jitter():
    layer_config = replace(config(), jitter_eps=0.25)
    module, x = layer(layer_config), normal(7, HIDDEN)
    torch.manual_seed(5)
    jittered = moe_fast.jitter(x, eps=0.25)
    torch.manual_seed(5)
    drawn = moe_fast.moe_layer(x, module.layer_parameters, layer_config, state=moe_ref.new_state(layer_config.router))
    assert_close(drawn.logits, moe_fast.gate(jittered, module.router.weight))


@pytest.mark.parametrize(
    "router",
    [{}, {"capacity_factor": 0.5}, {"capacity_factor": 3.0, "pad_to_capacity": True}, {"aux_loss_coeff": 0.5}],
    ids=str,
)
def test_no_stage_of_one_rank_waits_for_the_device(router, monkeypatch):
    module, x = layer(config(expert_bias=True, **router), **EVERYTHING), normal(7, HIDDEN).requires_grad_()
    mask = torch.arange(7) > 4
    reads = record_reads(monkeypatch)
    module(x).sum().backward()
    module(x, mask).sum().backward()
    assert reads == []
    moe_fast.permute(x, torch.ones(7, EXPERTS, dtype=torch.bool))  # its number of rows is not given
    assert len(reads) == 1


@pytest.mark.parametrize("recompute", [None, "moe"])
def test_padding_has_the_shared_output_alone_and_the_mask_has_the_inputs_shape(recompute):
    losses = {"aux_loss_coeff": 0.5, "seq_aux_loss_coeff": 0.5, "expert_bias": True}
    module, x = layer(config(**losses), shared_width=4, recompute=recompute), normal(6, HIDDEN).requires_grad_()
    mask = torch.tensor([[False, False], [False, True], [True, True]])
    out = module(x.reshape(3, 2, HIDDEN), mask).reshape(6, HIDDEN)
    options = {"batch_size": 2, "padding_mask": [mask.reshape(-1)]}
    states = [moe_ref.new_state(module.config.router)]
    expected = moe_ref.moe_layer([x], [module.layer_parameters], module.config, states=states, **options)
    assert_close(out, expected.output[0])
    assert_close(out[mask.reshape(-1)], expected.shared[0][mask.reshape(-1)])
    assert module.router.tokens_per_expert.sum() == 2 * 3
    with pytest.raises(ValueError, match="padding_mask is of shape"):
        module(x, mask)


def test_a_sequence_first_input_keeps_its_shape_and_an_empty_one_has_no_rows():
    module, x = layer(), normal(6, HIDDEN)
    assert_close(module(x.reshape(3, 2, HIDDEN)), module(x).reshape(3, 2, HIDDEN))
    assert module(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_learns_a_linear_map(dtype):
    layer_config = config(aux_loss_coeff=1e-3, expert_bias=True)
    module = layer(layer_config, dtype=dtype, shared_width=4)
    x, matrix = normal(24, HIDDEN, dtype=dtype), normal(HIDDEN, HIDDEN, seed=1, dtype=dtype) / HIDDEN**0.5
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=0.02), []
    for _ in range(12):
        loss = (module(x) - x @ matrix).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        module.finish_batch()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    assert module.router.expert_bias.any() and module.losses.aux_loss is not None


def test_the_state_counts_in_training_alone_and_keeps_its_dtypes():
    module, x = layer(config(expert_bias=True)).bfloat16(), normal(6, HIDDEN, dtype=torch.bfloat16)
    module(x)
    assert module.router.tokens_per_expert.sum() == 12
    module.eval()(x)
    with torch.no_grad():
        module.train()(x)
    assert module.router.tokens_per_expert.sum() == 12
    module.finish_batch()
    assert not module.router.tokens_per_expert.any()
    assert module.router.expert_bias.dtype == torch.float32
    assert module.router.tokens_per_expert.dtype == torch.int64


NAMES = ["router.weight", "router.expert_bias", "experts.linear_fc1.weight", "experts.linear_fc2.weight"]
NAMES += ["experts.linear_fc1.bias", "experts.linear_fc2.bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight"]
NAMES += [f"shared_experts.{name}" for name in ("gate_weight", "linear_fc1.weight", "linear_fc2.weight")]


@pytest.mark.parametrize("packed", [True, False])
def test_a_saved_layer_has_megatrons_names_and_loads_into_both_forms(packed):
    module = layer(config(expert_bias=True), packed=packed, **EVERYTHING)
    saved = module.state_dict()
    grouped = [name for name in NAMES if "experts.linear" in name and "shared" not in name]
    by_expert = [f"{name}{i}" for name in grouped for i in range(EXPERTS)]
    assert set(saved) == set(NAMES) - {*(() if packed else grouped)} | {*(() if packed else by_expert)}
    shapes = {"experts.linear_fc1.weight": (2 * WIDTH, 4), "experts.linear_fc2.weight": (4, WIDTH)}
    shapes |= {"experts.linear_fc1.bias": (2 * WIDTH,), "experts.linear_fc2.bias": (4,)}
    for name, shape in shapes.items():
        assert tuple(saved[name if packed else f"{name}0"].shape) == ((EXPERTS, *shape) if packed else shape)
    for layout in (True, False):
        loaded = layer(config(expert_bias=True), seed=1, packed=layout, **EVERYTHING)
        assert not torch.equal(loaded.experts.linear_fc1.weight, module.experts.linear_fc1.weight)
        loaded.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


def test_a_missing_expert_is_named():
    saved = layer(packed=False).state_dict()
    del saved["experts.linear_fc1.weight2"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*experts.linear_fc1.weight"):
        layer().load_state_dict(saved)


@pytest.mark.parametrize(("layer_config", "x", "reason"), [
    (config(), torch.zeros(2, HIDDEN, dtype=torch.complex64), "dtype"),
    (config(), torch.zeros(2, HIDDEN), None),
], ids=["complex", "supported"])  # fmt: skip
def test_what_has_no_kernel_is_declared(layer_config, x, reason):
    sentence = moe_fast.supports("moe_layer", x=x, parameters=layer().layer_parameters, config=layer_config)
    assert (reason in sentence) if reason else sentence is None
