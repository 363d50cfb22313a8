"""The example that runs Transformer Engine's own kernels on a CPU, here with a wheel of our own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = """
_PERMUTATION_AUTOTUNE_BLOCK_SIZES = (64, 128)
CONFIGS = [
            triton.Config({"BLOCK_SIZE": 64}),
            triton.Config({"BLOCK_SIZE": 128}),
]
"""
PERMUTATION = """
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

DEVICE = "cuda"

def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    assert inp.is_cuda
    return inp

def moe_permute_mask_map(inp): ...
"""
CALL = """
import torch
from examples.te_kernels_on_a_cpu import FOLDER, Path, alone, te
print(sorted(vars(te.pytorch)), alone.offered)
print(alone.sort_chunks(torch.ones(2, 3), torch.tensor([2]), torch.tensor([0])).rows.shape)
for name in ("common/triton/permutation.py", "pytorch/permutation.py"):
    print(Path(FOLDER.name, "transformer_engine", name).read_text())
"""


def run(wheel):
    environment = {"TE_WHEEL": str(wheel), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, env=environment)


def test_sources_are_copied_with_a_cpu_for_a_device_and_one_block_size(tmp_path):
    folder = tmp_path / "transformer_engine"
    for name, text in {"common/triton": KERNELS, "pytorch/triton": "", "pytorch": PERMUTATION}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "permutation.py").write_text(text)
    done = run(tmp_path)
    symbols, shape, sources = done.stdout.split("\n", 2) if not done.returncode else (done.stderr, "", "")
    assert (symbols, shape) == ("['moe_sort_chunks_by_index'] ['sort_chunks']", "torch.Size([2, 3])")
    assert "BLOCK_SIZES = (64,)" in sources and '"BLOCK_SIZE": 64' in sources and "128" not in sources
    assert 'DEVICE = "cpu"' in sources and "assert True" in sources


def test_a_missing_wheel_is_one_sentence(tmp_path):
    assert "it must be the folder of an unpacked wheel" in run(tmp_path / "none").stderr
