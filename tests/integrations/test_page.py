"""The blocks of the page "Use it in your training" run in their order."""

import re
from pathlib import Path

import pytest
import torch

from tests.common.fast import interpreted

pytest.importorskip("transformers")
pytestmark = interpreted
PAGE = (Path(__file__).parents[2] / "docs" / "use-in-training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_blocks_of_the_page_train_a_saved_model(tmp_path):
    from evidence.transformers_families import tiny_model

    tiny_model("mixtral").save_pretrained(tmp_path)
    names = {"folder": tmp_path, "tokens": torch.arange(2, 16).view(2, 7)}
    loading, switching, *_ = BLOCKS
    exec(loading, names)
    model = names["model"]
    assert model.get_experts_implementation() == {"": "moe_fast"}
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.any()
    exec(switching, names)
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_the_page_shows_the_sentence_of_a_refused_family():
    from evidence.transformers_families import outcome

    assert f"    ValueError: {outcome('muse_spark').refused}\n" in PAGE


def test_the_block_of_a_configuration_makes_the_layer_of_a_saved_model(tmp_path):
    from evidence.transformers_families import tiny_model

    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    x = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    names = {"folder": tmp_path, "device": "cpu", "weights": dict(weights), "x": x}
    exec(next(block for block in BLOCKS if "from_config" in block), names)
    torch.testing.assert_close(names["output"], model.model.layers[0].mlp(x))
    assert names["weights"].keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in names["weights"].items())


def test_the_page_shows_the_sentence_of_a_refused_option():
    from moe_fast import MoELayer

    with pytest.raises(ValueError, match="hidden_act") as refused:
        MoELayer.from_config(
            {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "hidden_act": "mish"}
        )
    assert f"    ValueError: {refused.value}\n" in PAGE


def test_the_block_of_torchtitan_makes_a_model_of_converted_layers():
    pytest.importorskip("torchtitan")
    names = {}
    exec(next(block for block in BLOCKS if "torchtitan" in block), names)
    with torch.device("meta"):
        model = names["spec"].model.build()
    layers = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
    assert layers
    assert {type(layer.inner_experts).__name__ for layer in layers} == {"FastGroupedExperts"}
    assert {type(layer.token_dispatcher).__name__ for layer in layers} == {"FastAllToAllDispatcher"}
