"""Defects of fused kernels and their launchers, each one change of text in `moe_fast`.

Written from what kernels of this kind get wrong, not from the cases. `tests.mutants.kernels.run`
plants them.
"""

from typing import NamedTuple

from conformance.core.rewritten import Rewrite


class KernelDefect(NamedTuple):
    """A change of `moe_fast`, and the functions of the interface whose cases are to show it."""

    name: str
    title: str
    functions: tuple[str, ...]
    change: Rewrite


def series(letter: str, planted: tuple[tuple[str, str, str, str, str], ...]) -> tuple[KernelDefect, ...]:
    """Defects KP001, KP002, … of the letter P: (title, functions, file of moe_fast, old, new)."""
    return tuple(
        KernelDefect(f"K{letter}{number:03}", title, tuple(functions.split()), Rewrite(file, old, new))
        for number, (title, functions, file, old, new) in enumerate(planted, start=1)
    )
