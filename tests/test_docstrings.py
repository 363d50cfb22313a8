"""The docstring of each public function of the reference says all that a caller must know."""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moe_ref
from conformance.catalogue import CONTRACTS

PUBLIC = {name: getattr(moe_ref, name) for name in CONTRACTS}


def _described(function: Callable[..., Any]) -> str:
    """Its docstring, and those of the public functions that a docstring here names in backticks."""
    texts, names = {}, [function.__name__]
    while names:
        name = names.pop()
        if name in PUBLIC and name not in texts:
            texts[name] = inspect.getdoc(PUBLIC[name]) or ""
            names += re.findall(r"`(?:[\w.]*\.)?(\w+)`", texts[name])
    return "\n".join(texts.values())


def _module_text(function: Callable[..., Any]) -> str:
    return inspect.getdoc(sys.modules[inspect.unwrap(function).__module__]) or ""


@pytest.mark.parametrize("name", PUBLIC)
def test_each_argument_is_described(name):
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    names = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD]
    stems = {x: re.sub(r"_[A-Z0-9]+$", "", x) for x in names}  # formulas leave the suffix out
    text = _described(PUBLIC[name])
    assert [x for x, stem in stems.items() if not re.search(rf"\b{stem}(_[A-Z0-9]+)?\b", text)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_each_tensor_has_a_shape(name):
    """In the suffix of its name, such as `logits_TE`, or in the text: "probs: [T,E]"."""
    signature = inspect.signature(PUBLIC[name], eval_str=True)
    types = {x.name: str(x.annotation) for x in signature.parameters.values()}
    tensors = [x for x, type_text in types.items() if "Tensor" in type_text and "Callable" not in type_text]
    without_a_suffix = [x for x in tensors if not re.search(r"_[A-Z0-9]+$", x)]
    text = _described(PUBLIC[name])
    described = r"[^:\n]*:(.|\n){0,200}?(\[|shape|one\s+element)"
    assert [x for x in without_a_suffix if not re.search(rf"\b{x}\b{described}", text)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_are_named(name):
    assert re.search(r"Raises:\n +\w+(Error)?: ", _described(PUBLIC[name]))


@pytest.mark.parametrize("name", PUBLIC)
def test_the_source_that_it_mirrors_is_named(name):
    assert re.search(r"Mirrors |Source: ", _described(PUBLIC[name]) + _module_text(PUBLIC[name]))


def _names_of_megatron() -> set[tuple[str, str]]:
    """Each (name, module) that a docstring says it mirrors, of the form `name` of megatron.core…"""
    texts = {_module_text(function) for function in PUBLIC.values()} | {*map(_described, PUBLIC.values())}
    pairs = set()
    for text in texts:
        for names, module in re.findall(r"((?:`[\w.]+`(?:,\s+|\s+and\s+|\s+))+)of\s+(megatron\.[\w.]*\w)", text):
            pairs |= {(name, module) for name in re.findall(r"`([\w.]+)`", names)}
    return pairs


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_what_is_mirrored_exists_in_the_installed_megatron():
    (folder,) = importlib.util.find_spec("megatron").submodule_search_locations  # its parts are not imported
    missing = []
    for name, module in sorted(_names_of_megatron()):
        path = Path(folder, *module.split(".")[1:])
        paths = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        defined = {
            node.name
            for path in paths
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        missing += [f"{module} has no {name}"] * (name.split(".")[0] not in defined)
    assert _names_of_megatron() and missing == []
