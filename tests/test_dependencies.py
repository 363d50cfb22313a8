"""The law of who may know whom.

moe_ref      → torch
moe_fast     → torch, triton, transformer_engine; of moe_ref only moe_ref.config
conformance  → moe_ref and the tools it is built from; never moe_fast
conformance/peers/*.py also import the package that they adapt, and nobody imports them: they are met by name, like any --impl

The standard library is everybody's. A module's name in a string counts like an import: by itself anywhere in conformance,
and as the argument of an import call everywhere.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_KNOW = {
    "moe_ref": {"moe_ref", "torch"},
    "moe_fast": {"moe_fast", "torch", "triton", "transformer_engine", "moe_ref.config"},
    "conformance": {"conformance", "moe_ref", "torch", "numpy", "hypothesis", "pytest", "libcst"},
}
ADAPTED = {"megatron", "transformer_engine"}  # the packages behind conformance/peers
IMPORT_CALLS = {"import_module", "__import__", "find_spec", "importorskip", "run_module", "resolve_name"}
FORBIDDEN_NAME = re.compile(r"moe_fast([.:][\w.:]*)?")


def violations(root: Path) -> list[str]:
    """Every import under `root` that breaks the law, as "file:line module"."""
    return [
        f"{path.as_posix()}:{line} {module}"
        for package in MAY_KNOW
        for path in (found.relative_to(root) for found in sorted((root / package).rglob("*.py")))
        for line, module in imports(ast.parse((root / path).read_text()), path)
        if not allowed(package, module, path)
    ]


def allowed(package: str, module: str, path: Path) -> bool:
    known = set(MAY_KNOW[package]) | set(sys.stdlib_module_names)
    if path.parent == Path("conformance/peers") and path.name != "__init__.py":
        known |= ADAPTED
    beside = path.parent == Path("conformance/peers")  # an adapter may be several files
    return any(within(module, name) for name in known) and (beside or not within(module, "conformance.peers"))


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, and of every string that counts like one."""
    for node in ast.walk(tree):
        for module in modules_named_by(node, path):
            yield getattr(node, "lineno", 0), module


def modules_named_by(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        here = path.parts[: len(path.parts) - node.level] if node.level else ()
        origin = [*here, node.module] if node.module else list(here)
        return [
            ".".join([*origin, alias.name]) for alias in node.names
        ]  # `from moe_ref import config` names moe_ref.config
    if isinstance(node, ast.Call) and called_name(node.func) in IMPORT_CALLS:
        return [
            text for argument in [*node.args, *(k.value for k in node.keywords)][:1] if (text := leading_text(argument))
        ]
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and path.parts[0] == "conformance"
        and FORBIDDEN_NAME.fullmatch(node.value)
    ):
        return [node.value]
    return []


def called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def leading_text(argument: ast.expr) -> str:
    """The constant text that the string starts with; empty if that is not known."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def test_every_import_obeys_the_law():
    assert violations(ROOT) == []


def test_all_three_packages_are_looked_at():
    assert all(list((ROOT / package).rglob("*.py")) for package in MAY_KNOW)


@pytest.mark.parametrize(
    ("path", "source", "module"),
    [
        ("moe_ref/a.py", "import triton", "triton"),
        ("moe_ref/a.py", "def f():\n    from numpy import array", "numpy.array"),
        ("moe_ref/a.py", "from conformance.judge import judge", "conformance.judge.judge"),
        ("moe_ref/a.py", "from .. import moe_fast", "moe_fast"),
        ("moe_fast/a.py", "from moe_ref import permute", "moe_ref.permute"),
        ("moe_fast/a.py", "import moe_ref", "moe_ref"),
        ("moe_fast/permutation/a.py", "from moe_ref.permutation import RowMap", "moe_ref.permutation.RowMap"),
        (
            "moe_fast/a.py",
            "import importlib\nx = importlib.import_module('moe_ref.permutation.routing_map')",
            "moe_ref.permutation.routing_map",
        ),
        ("moe_fast/a.py", "import torch, conformance", "conformance"),
        ("conformance/a.py", "import moe_fast.launch.tuning", "moe_fast.launch.tuning"),
        ("conformance/families/a.py", "if True:\n    from moe_fast import permute", "moe_fast.permute"),
        ("conformance/a.py", "__import__('moe_fast')", "moe_fast"),
        ("conformance/a.py", "from importlib import import_module\nimport_module(f'moe_fast.{1}')", "moe_fast."),
        ("conformance/a.py", "DEFAULT = 'moe_fast.launch'", "moe_fast.launch"),
        ("conformance/a.py", "def f():\n    import megatron.core", "megatron.core"),
        ("conformance/peers/__init__.py", "import megatron.core", "megatron.core"),
        ("conformance/peers/a.py", "import triton", "triton"),
        ("conformance/a.py", "from conformance.peers import megatron", "conformance.peers.megatron"),
    ],
)
def test_a_forbidden_import_is_reported(tmp_path, path, source, module):
    write(tmp_path / path, source)
    assert [found.split(" ")[1] for found in violations(tmp_path)][:1] == [module]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "moe_ref/a.py",
            "import math\nfrom torch.nn import functional\nfrom moe_ref.config import require\nfrom . import config",
        ),
        (
            "moe_fast/a.py",
            "from moe_ref.config import Permuted\nfrom moe_ref import config\nimport triton.language as tl",
        ),
        (
            "conformance/a.py",
            "'''Judges moe_fast.'''\nfrom moe_ref.permutation import permute\nHELP = 'for example: --impl moe_fast'",
        ),
        (
            "conformance/peers/a.py",
            "try:\n    from megatron.core.transformer.moe import moe_utils\nexcept ImportError:\n    import transformer_engine",
        ),
    ],
)
def test_a_lawful_import_is_not_reported(tmp_path, path, source):
    write(tmp_path / path, source)
    assert violations(tmp_path) == []


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(source)
