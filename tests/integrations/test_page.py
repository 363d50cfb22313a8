"""The blocks of the page "Use it in your training" run in their order."""

import re
from pathlib import Path

import pytest
import torch

from tests.common.fast import interpreted

pytest.importorskip("transformers")
pytestmark = interpreted
PAGE = (Path(__file__).parents[2] / "docs" / "use-in-training.md").read_text()


def test_the_blocks_of_the_page_train_a_saved_model(tmp_path):
    from evidence.transformers_families import tiny_model

    tiny_model("mixtral").save_pretrained(tmp_path)
    names = {"folder": tmp_path, "tokens": torch.arange(2, 16).view(2, 7)}
    loading, switching, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(loading, names)
    model = names["model"]
    assert model.get_experts_implementation() == {"": "moe_fast"}
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.any()
    exec(switching, names)
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_the_page_shows_the_sentence_of_a_refused_family():
    from evidence.transformers_families import outcome

    assert f"    ValueError: {outcome('muse_spark').refused}\n" in PAGE
