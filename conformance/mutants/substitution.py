"""Planted defects as text: each changes lines of a source file.

    R03 aux_loss_scores: scores of a top-1 router are not normalised [TransformerEngine #2720]
    @ moe_ref/router/balancing.py
    -    if score_function != "softmax":
    +    if score_function != "softmax" and topk > 1:
             scores_TE = normalised(scores_TE)

The header has the defect's name, its functions, what goes wrong, and in brackets where the defect
comes from. The first function is wrong; the others read what it returns, or are wrong in the same
way. Each `@` names a file; the lines after it stand there once and together, `-` ones are replaced
by `+` ones, and those that begin with a space stay. Paragraphs that begin with `#` are comments.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADER = re.compile(r"([A-Z]+\d+[a-z]?) ([\w, ]+): (.+) \[([^]]+)\]")


class Header(NamedTuple):
    """The first line of a defect."""

    name: str
    functions: tuple[str, ...]
    title: str
    origin: str


class Hunk(NamedTuple):
    """Whole lines of a file, and the lines in their place."""

    file: str  # such as moe_ref/permutation/permute.py
    old: str
    new: str


class Substitution(NamedTuple):
    """A defect that is a change of source."""

    header: Header
    hunks: tuple[Hunk, ...]


def header(line: str) -> Header:
    """The header that the line holds.

    Raises:
        ValueError: it holds none.
    """
    match = HEADER.fullmatch(line)
    if match is None:
        raise ValueError(f"a defect begins `NAME function, function: what goes wrong [origin]`, not {line!r}")
    name, functions, title, origin = match.groups()
    return Header(name, tuple(functions.split(", ")), title, origin)


def read(path: Path) -> Iterator[Substitution]:
    """The substitutions of a file.

    Raises:
        ValueError: a paragraph is no defect.
    """
    for paragraph in re.split(r"\n{2,}", path.read_text(encoding="utf-8").strip("\n")):
        if paragraph and not paragraph.startswith("#"):
            first, *blocks = re.split(r"\n@ ", paragraph)
            if not blocks:
                raise ValueError(f"{path.name}: a defect changes no line: {first!r}")
            yield Substitution(header(first), tuple(_hunk(block) for block in blocks))


def _hunk(block: str) -> Hunk:
    file, *lines = block.split("\n")
    if unknown := [line for line in lines if line[:1] not in ("-", "+", " ")]:
        raise ValueError(f"{file}: a line of a hunk begins with -, + or a space, unlike {unknown[0]!r}")
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in marks) for marks in ("- ", "+ "))
    return Hunk(file, old, new)


def substituted(source: str, hunk: Hunk) -> str:
    """The source with the change.

    Raises:
        ValueError: the old lines do not stand in the source, or more than once; the error names the
            line of the source that is most like the first one missing.
    """
    positions = [match.start() for match in re.finditer(f"(?m)^(?={re.escape(hunk.old)})", source)]
    if len(positions) == 1 and hunk.old:
        return source[: positions[0]] + hunk.new + source[positions[0] + len(hunk.old) :]
    lines = source.splitlines()
    missing = next((line for line in hunk.old.splitlines() if line not in lines), None)
    if missing is None:
        raise ValueError(f"{hunk.file} has {len(positions)} times, not once, these lines together:\n{hunk.old}")
    nearest = difflib.get_close_matches(missing, lines, 1, cutoff=0.0)
    hint = f"the nearest is line {lines.index(nearest[0]) + 1}: {nearest[0]!r}" if nearest else "it is empty"
    raise ValueError(f"{hunk.file} has no line {missing!r}; {hint}")
