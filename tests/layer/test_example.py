"""`examples/train_moe.py`: its loss falls on one rank and on two, and its gradients are averaged
where they have to be.
"""

import importlib.util
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.common.fast import interpreted
from tests.layer.ranks import on_ranks

pytestmark = interpreted
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_moe.py"
TINY = {"steps": 6, "words": 8, "dialects": 2, "length": 4, "batch": 6, "blocks": 1, "hidden": 8, "width": 8}
TINY |= {"experts": 4, "topk": 2}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["one", "torchrun"])
def test_the_loss_falls(launcher):
    options = [f"--{name}={value}" for name, value in TINY.items()]
    command = [sys.executable, *launcher, str(EXAMPLE), *options, "--recompute=moe"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == TINY["steps"], done.stdout
    assert sum(losses[-2:]) < 0.85 * sum(losses[:2])


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(group: Any, rank: int, parameters: dict[str, Tensor], x: Tensor, y: Tensor, mistake: str = "") -> Any:
    """Each parameter's gradient on this rank, from its share of the sentences."""
    module, ranks = example(), 1 if group is None else group.size()
    model = module.Model(Namespace(**TINY, recompute=None), group)
    local = {name: tensor.chunk(ranks)[rank] if ".experts." in name else tensor for name, tensor in parameters.items()}
    model.load_state_dict(local)
    for layer in model.layers:
        unbalanced = replace(layer.config.router, aux_loss_coeff=0.0)  # the loss is of each rank's tokens
        layer.config = replace(layer.config, router=unbalanced)
    words, dialects = x.chunk(ranks, 1)[rank], y.chunk(ranks)[rank]
    cross_entropy(model(words[:-1], dialects).flatten(0, 1), words[1:].flatten()).backward()
    if mistake == "experts averaged":
        model.parameters_of_all_ranks = lambda: [*model.parameters()]
    if mistake == "nothing averaged":
        model.parameters_of_all_ranks = list
    if group is not None:
        module.average_gradients(model, group)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


MISTAKES = ("experts averaged", "nothing averaged")


def of_every_way(group: Any, rank: int, *inputs: Any) -> list[dict[str, Tensor]]:
    return [gradients(group, rank, *inputs, mistake) for mistake in ("", *MISTAKES)]


@pytest.fixture(scope="module")
def on_one_and_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[Any]]:
    """Gradients of one rank that has all sentences and experts; of each of two, right and wrong."""
    module, options = example(), Namespace(**TINY, recompute=None)
    torch.manual_seed(3)
    parameters = module.Model(options, None).state_dict()
    x, y = module.sentences(options, torch.Generator().manual_seed(0))
    ranks = on_ranks(2, of_every_way, tmp_path_factory.mktemp("ranks"), parameters, x, y)
    return gradients(None, 0, parameters, x, y), ranks


def compare(expected: dict[str, Tensor], ranks: list[dict[str, Tensor]]) -> None:
    for rank, got in enumerate(ranks):
        for name, gradient in got.items():
            wanted = expected[name].chunk(2)[rank] if ".experts." in name else expected[name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_the_gradients_of_two_ranks_are_those_of_one(on_one_and_two):
    expected, ranks = on_one_and_two
    compare(expected, [ways[0] for ways in ranks])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_average_is_found(mistake, on_one_and_two):
    expected, ranks = on_one_and_two
    with pytest.raises(AssertionError, match="not close"):
        compare(expected, [ways[1 + MISTAKES.index(mistake)] for ways in ranks])
