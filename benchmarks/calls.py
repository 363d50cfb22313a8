"""How every judged function is called: docs/reference/calls.md from the catalogue.

python -m benchmarks.calls > docs/reference/calls.md
"""

import inspect
import textwrap
from collections.abc import Iterator

from conformance.catalogue import FAMILIES, NAMES
from conformance.core.family import Family
from conformance.interface import imported

INTRODUCTION = """# Calls of an implementation

Every function that the suite judges, as the suite calls it, with the names of its results. Letters
after the last underscore are dimensions: T tokens, H hidden size, E experts, L local experts, K
experts per token, F expert width, R routed rows, P padded rows. The `**settings` of `topk_routing`
are those of `topk_indices`, and the `**settings` of `sequential_mlp` those of `grouped_mlp`. [The
interface of an implementation](../writing-an-implementation.md) has the rules of calls and results,
and the following pages define maths, shapes, dtypes and errors. The page is written from the
catalogue of the suite:

    python -m benchmarks.calls > docs/reference/calls.md
"""


def document() -> str:
    """docs/reference/calls.md."""
    sections = (_section(name, family) for name, family in zip(NAMES, FAMILIES, strict=True))
    return "\n".join([INTRODUCTION, *(line for section in sections for line in section)])


def _section(name: str, family: Family) -> Iterator[str]:
    yield f"## {name}\n"
    for contract in family.contracts:
        results = "" if name == "parameters" else f" -> {', '.join(contract.outputs)}"
        text = f"{_call(contract.function)}{results}"
        yield textwrap.indent(textwrap.fill(text, 92, subsequent_indent="    ", break_on_hyphens=False), "    ") + "\n"


def _call(function: str) -> str:
    """The call without types; a collective's with the arguments of one rank."""
    signature = inspect.signature(getattr(imported("moe_ref"), function))
    parameters = [x.replace(annotation=inspect.Parameter.empty) for x in signature.parameters.values()]
    return f"{function}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


if __name__ == "__main__":
    print(document(), end="")
