"""Import laws that import-linter does not state: whole sets of packages, and names in strings.

The direction between packages, layers and families is in `pyproject.toml` (`make lint`).
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USES = {  # top-level packages besides the standard library
    "moe_ref": {"moe_ref", "torch"},
    "moe_fast": {"moe_fast", "moe_ref", "torch", "triton"},
    "moe_fast/integrations/torchtitan.py": {"moe_fast", "spmd_types", "torch", "torchtitan"},
    "moe_fast/integrations/transformers.py": {"moe_fast", "torch", "transformers"},
    "moe_fast/integrations/megatron.py": {"moe_fast", "torch", "megatron"},
    "moe_fast/integrations/megatron_experts.py": {"moe_fast", "torch", "megatron"},
    "fast_interpreter": {"fast_interpreter", "numpy", "torch", "triton"},
    "conformance": {
        "conformance",
        "fast_interpreter",
        "moe_ref",
        "torch",
        "numpy",
        "hypothesis",
        "pytest",
        "libcst",
        "rich",
    },
    "conformance/engine/run/cluster.py": {"conformance", "ray"},
    "conformance/report/vectors.py": {"conformance", "moe_ref", "torch", "safetensors"},
    "conformance/peers": {
        "conformance",
        "moe_ref",
        "torch",
        "megatron",
        "transformer_engine",
        "transformers",
        "torchao",
        "triton_kernels",
    },
    "conformance/peers/transformer_engine.py": {
        "conformance",
        "moe_fast",
    },  # by its name: it completes another implementation
}
FORBIDDEN_NAME = re.compile(r"moe_fast([.:][\w.:]*)?|conformance\.peers\.(?!reference_(?:world|layer)$)[\w.:]+")


def package_of(path: Path) -> str:
    """The key of `USES` for a file."""
    folder = "conformance/peers" if path.parts[:2] == ("conformance", "peers") else path.parts[0]
    return path.as_posix() if path.as_posix() in USES else folder


def violations(source: str, path: Path) -> list[str]:
    """Packages that the file may not use, and strings in conformance naming an implementation."""
    tree = list(ast.walk(ast.parse(source)))
    imported = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    allowed = USES[package_of(path)] | set(sys.stdlib_module_names)
    strings = [node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [text for text in strings if path.parts[0] == "conformance" and FORBIDDEN_NAME.fullmatch(text)]
    named = [text for text in named if text not in allowed]
    return [module for module in imported if module.split(".")[0] not in allowed] + named


@pytest.mark.parametrize("package", ["moe_ref", "moe_fast", "conformance", "fast_interpreter"])
def test_every_import_obeys_the_law(package):
    files = sorted((ROOT / package).rglob("*.py"))
    mistakes = {str(file): violations(file.read_text(), file.relative_to(ROOT)) for file in files}
    assert files and not {file: names for file, names in mistakes.items() if names}


@pytest.mark.parametrize(
    ("file", "source", "forbidden"),
    [
        ("moe_ref/a.py", "def f():\n    from numpy import array", "numpy"),
        ("moe_fast/a.py", "import torch, hypothesis", "hypothesis"),
        ("conformance/a.py", "import megatron.core", "megatron.core"),
        ("conformance/a.py", "DEFAULT = 'moe_fast.permutation'", "moe_fast.permutation"),
        ("conformance/a.py", "import_module('conformance.peers.megatron')", "conformance.peers.megatron"),
        ("conformance/peers/a.py", "import triton", "triton"),
    ],
)
def test_a_forbidden_import_or_name_is_reported(file, source, forbidden):
    assert violations(source, Path(file)) == [forbidden]


def test_prose_may_mention_an_implementation():
    assert not violations("'''Judges moe_fast.'''\nHELP = 'for example: --impl moe_fast'", Path("conformance/a.py"))
