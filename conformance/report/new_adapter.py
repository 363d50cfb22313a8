"""Writes the start of an adapter: the template, or a stub of each function that is named."""

import importlib
import inspect
import textwrap
from pathlib import Path

from conformance.catalogue import CONTRACTS
from conformance.interface import imported
from conformance.peers import template
from conformance.usage import UsageError, check_known

HEAD = '''"""An adapter: call your kernels in these functions, and judge them.

    moe-conformance check-adapter --impl {name}        the functions found
    moe-conformance run --impl {name} --profile smoke  a first verdict

Required tensors are passed by position, settings by keyword unless they are None; omit unsupported
settings from the signatures. Do not repair your kernel's results here: differences must show.
"""

from typing import Any


def supports(function: str, **arguments: Any) -> str | None:
    """Why this call is not supported, or None. Meta tensors: shapes and dtypes, no values."""
    return None


def declares(function: str) -> dict[str, Any]:
    """Guarantees in terms of `conformance.interface.VOCABULARY`: printed in the verdict, tested."""
    return {{}}
'''
STUB = '''

def {name}(
{parameters}
):
    """{summary}

    Returns a tensor, or a tuple in this order, or any object with these fields:
{outputs}

    The reference: {module}.{name}.
    """
    raise NotImplementedError("call your kernel here")
'''


def write_adapter(name: str, functions: tuple[str, ...]) -> Path:
    """Write NAME.py: stubs of these functions with the reference's signatures, or the template.

    Raises:
        UsageError: NAME is no name of a module, the file exists, or a function is unknown.
    """
    name = name.removesuffix(".py")
    path = Path(f"{name}.py")
    if not name.isidentifier():
        raise UsageError(f"NAME is {name!r}; it must be the name of a module in this folder, such as my_adapter")
    check_known("--function", functions, CONTRACTS)
    whole_example = inspect.getsource(template).replace("my_adapter", name)
    text = HEAD.format(name=name) + "".join(map(_stub, functions)) if functions else whole_example
    return write_new(path, text)


def write_new(path: Path, text: str) -> Path:
    """Write a file that was not there.

    Raises:
        UsageError: it was.
    """
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; give another name, or move it away") from None
    return path


def _stub(name: str) -> str:
    function = getattr(importlib.import_module("moe_ref"), name)
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    outputs = _indented(", ".join(CONTRACTS[name].outputs))
    module = function.__module__
    return STUB.format(name=name, parameters=_parameters(name), summary=summary, outputs=outputs, module=module)


def _parameters(name: str) -> str:
    """The parameters with their defaults, without annotations; those of one rank with `group`."""
    signature = inspect.signature(getattr(imported("moe_ref"), name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return _indented(f"{text[1:-1]},")


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    ")
