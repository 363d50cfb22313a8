"""Names of variables and parameters say what the thing is: no pronouns, adverbs or participles."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFUSED = {
    "after", "again", "ahead", "alone", "asked", "back", "before", "beside", "each", "early", "every", "few",
    "found", "free", "given", "how", "inside", "kept", "known", "later", "left", "made", "more", "one", "other",
    "others", "outside", "over", "own", "part", "parts", "place", "plain", "rest", "right", "said", "seen",
    "sent", "stay", "told", "way", "whole", "wide", "wrong",
}  # fmt: skip
LIMITS = {  # refused names per 1,000 lines
    "moe_ref": 1,
    "moe_fast": 1,
    "conformance": 3,
    "fast_interpreter": 6,
    "evidence": 1,
    "tests": 42,
    "benchmarks": 1,
}


def refused_names(source: str) -> Counter[str]:
    """The refused names that the source assigns, or has as parameters, with their numbers."""
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.arg):
            names[node.arg] += 1
    return Counter({name: count for name, count in names.items() if name in REFUSED})


@pytest.mark.parametrize("package", LIMITS)
def test_names_say_what_the_thing_is(package):
    by_file = {path: refused_names(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    assert by_file
    num_lines = sum(path.read_text().count("\n") for path in by_file)
    num_refused = sum(names.total() for names in by_file.values())
    worst = sorted(by_file, key=lambda path: -by_file[path].total())[:5]
    listed = [f"{path.relative_to(ROOT)}: {', '.join(by_file[path])}" for path in worst]
    assert num_refused <= LIMITS[package] * num_lines / 1000, listed


def test_refused_names_are_counted():
    source = "def f(own, *, given, **rest):\n    for part, x in own:\n        kept = lambda more: more.found + part\n"
    assert refused_names(source) == Counter(["own", "given", "rest", "part", "kept", "more"])
    assert not refused_names("def kept(tokens):\n    tokens.own = given(right=1)\n")
