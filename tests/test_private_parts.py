"""What lies below the public interface of other packages is read in one listed place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.private_parts import PARTS

ROOT = Path(__file__).parents[1]
PACKAGES = ("moe_ref", "moe_fast", "conformance", "fast_interpreter")
# names with an underscore that the documentation of their package describes
PUBLISHED = {
    "os._exit",
    "sys._getframe",
    "sys._current_frames",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.distributed._symmetric_memory",
    "torch.distributed._symmetric_memory.empty",
    "torch.distributed._symmetric_memory.rendezvous",
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_version",  # of a tensor, in the notes on autograd
}
# places that read private parts under a check of their own, which their docstrings describe
LISTED_PLACES = {
    "moe_fast/launch/torch_parts.py": "each function says what happens without its part",
    "fast_interpreter": "each replaced function of Triton's interpreter has a digest",
    "moe_fast/integrations": "each module checks the version that it was read in",
}
# modules on which no verdict depends, or which check the part where they read it
TOOLS = {
    "conformance/compiled.py": ("torch._dynamo", "torch._functorch"),
    "moe_fast/launch/tracing.py": ("torch.utils._pytree",),
    "conformance/peers/reference_layer.py": ("torch.utils._pytree",),
    "conformance/engine/child/saved_memory.py": ("torch.utils._pytree",),
    "conformance/peers/te": ("_rowwise_data", "_rowwise_scale_inv"),
    "conformance/peers/transformers.py": ("_apply_gate",),
    "conformance/engine/world/torchrun.py": ("_socket",),
}


def _is_private(path: str) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in path.split("."))


def _defined(trees: list[ast.Module]) -> set[str]:
    """Private names of functions, classes, attributes and variables that the project defines."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def _private_uses(tree: ast.Module, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each private part of another package that a module names."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            path, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                path, base = [base.attr, *path], base.value
            root = modules.get(base.id) if isinstance(base, ast.Name) else None
            names = [".".join([root, *path])] if root else [name for name in path if name not in defined]
        for name in names:
            if _is_private(name) and name.split(".")[0] not in PACKAGES:
                yield node.lineno, name


def _unlisted(path: str, uses: Iterator[tuple[int, str]]) -> list[str]:
    tools = next((names for module, names in TOOLS.items() if path.startswith(module)), ())
    listed = {name for part in PARTS.values() for name in (f"{part.module}.{part.path}", part.path.split(".")[-1])}
    return [
        f"{path}:{line}: {name}"
        for line, name in uses
        if name not in PUBLISHED | listed and name.split(".")[-1] not in PUBLISHED and not name.startswith(tuple(tools))
    ]


def test_no_private_part_is_read_outside_of_the_lists():
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    defined = _defined(list(trees.values()))
    unlisted = [
        line
        for path, tree in trees.items()
        if not path.startswith(tuple(LISTED_PLACES))
        for line in _unlisted(path, _private_uses(tree, defined))
    ]
    assert not unlisted, (
        "private parts of other packages belong into conformance/private_parts.py "
        "or moe_fast/launch/torch_parts.py:\n" + "\n".join(unlisted)
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor",
        "from torch._dynamo import config",
        "import torch\ntorch._C._something()",
        "from triton.runtime import jit\njit.JITFunction._cache = {}",
        "def read(storage):\n    return storage._cdata",
    ],
)
def test_a_private_part_outside_of_the_lists_is_named(line):
    assert _unlisted("conformance/somewhere.py", _private_uses(ast.parse(line), set()))
