"""The numbers of cases that two pages print after a planted defect are those of today."""

import re
from pathlib import Path

import pytest

import moe_ref.permutation
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.run import corpus

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md")


@pytest.fixture(scope="module")
def cases() -> dict[str, int]:
    """How many cases of a gate on a CPU each function of the permutation has."""
    committed = [case.function for case in corpus.read_folder(corpus.COMMITTED)]
    counts = {name: committed.count(name) for name in CONTRACTS if hasattr(moe_ref.permutation, name)}
    for section in sections():
        if section.function in counts:
            counts[section.function] += len(cases_of(section, PROFILES["gate"], Space(), 0))
    return counts


def stale(text: str, cases: dict[str, int]) -> list[str]:
    """What a page says of numbers of cases, and is not so."""
    shown = [(f"all {len(cases)}", n) for n in re.findall(r"of 6 functions differ · (\d+) cases", text)]
    shown += re.findall(r"(\w+) +conformant · (\d+) cases", text)
    assert len(shown) > 2, "the page shows no verdict"
    now = cases | {f"all {len(cases)}": sum(cases.values())}
    return [f"{name}: {number}, now {now[name]}" for name, number in shown if int(number) != now[name]]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_numbers_of_cases_that_the_suite_has(cases, page):
    assert stale((ROOT / page).read_text(), cases) == []


def test_a_stale_number_of_cases_is_found(cases):
    text = (ROOT / "README.md").read_text()
    old = text.replace(f"conformant · {cases['sort_chunks']} cases", "conformant · 1 cases")
    assert stale(old, cases) == [f"sort_chunks: 1, now {cases['sort_chunks']}"]
