"""Transformer Engine's own permutation, from an unpacked wheel, in Triton's interpreter.

    pip download --no-deps --only-binary=:all: transformer-engine==2.20.2
    unzip -d te transformer_engine-2.20.2-py3-none-any.whl
    TE_WHEEL=te moe-conformance run --impl examples.te_kernels_on_a_cpu:completed \\
        --where 'dtype=float32 and probs in ("", float32)' --function permute,unpermute,sort_chunks

`alone` is Transformer Engine and nothing else. The wheel has Python and Triton, and not the
compiled library, which routing maps do not need: stubs stand for it. The sources are changed as
they are copied: tensors of a CPU are allowed, and each kernel has one block size, so that none is
measured. In bf16 the interpreter cuts digits where a GPU rounds.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import moe_ref
from conformance.peers.te import Adapter

FILES = ("common/triton/permutation.py", "pytorch/triton/permutation.py", "pytorch/permutation.py")
CHANGES = (
    (r"\b\w+\.is_cuda", "True"),
    (r'"cuda"', '"cpu"'),
    (r"(?m)^_PERMUTATION_AUTOTUNE_BLOCK_SIZES = .*$", "_PERMUTATION_AUTOTUNE_BLOCK_SIZES = (64,)"),
    (r'(?m)^ *triton\.Config\({"BLOCK_SIZE": (?!64})\d+}\),\n', ""),
)
STUBS: dict[str, dict[str, Any]] = {  # names that permutation imports from parts that need the compiled library
    "transformer_engine_torch": {},
    "transformer_engine.pytorch.constants": {"TE_DType": {}},
    "transformer_engine.pytorch.quantized_tensor": {
        "QuantizedTensor": type("QuantizedTensor", (), {}),
        "_quantized_tensor_passthrough_ops": set(),
    },
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    "transformer_engine.pytorch.tensor.quantized_tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": {
        "Float8BlockwiseQTensor": type("Float8BlockwiseQTensor", (), {})
    },
    "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": type("MXFP8Tensor", (), {})},
}


def changed_copy(wheel: Path, folder: Path) -> None:
    """The three files of permutation as packages in the folder, with CHANGES."""
    for name in FILES:
        source, copy = wheel / "transformer_engine" / name, folder / "transformer_engine" / name
        for package in copy.relative_to(folder).parents:
            (folder / package).mkdir(parents=True, exist_ok=True)
            if package.name:
                (folder / package / "__init__.py").touch()
        if source.exists():  # before 2.10 one file holds the kernels and their launches
            text = source.read_text()
            for pattern, replacement in CHANGES:
                text = re.sub(pattern, replacement, text)
            copy.write_text(text)


def kernels(wheel: Path) -> SimpleNamespace:
    """A namespace like `transformer_engine`, with the functions of permutation alone."""
    changed_copy(wheel, Path(FOLDER.name))
    for name, content in STUBS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    sys.path.insert(0, FOLDER.name)
    from transformer_engine.pytorch import permutation

    functions = {name: x for name, x in vars(permutation).items() if name.startswith("moe_") and "_map" not in name}
    return SimpleNamespace(pytorch=SimpleNamespace(**functions))


if not os.path.isdir(os.environ.get("TE_WHEEL", "")):
    raise ImportError(f"TE_WHEEL is {os.environ.get('TE_WHEEL')!r}; it must be the folder of an unpacked wheel")
FOLDER = tempfile.TemporaryDirectory(prefix="te_kernels_")  # removed when the process ends
te = kernels(Path(os.environ["TE_WHEEL"]))
alone = Adapter(te)
completed = Adapter(te, ours=moe_ref)
