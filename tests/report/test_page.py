"""The page: what it shows comes from the run, and it loads nothing from elsewhere."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.core.case import case_from
from conformance.engine.options import Options
from conformance.engine.run.coverage import coverage, settings_of
from conformance.engine.run.ledger import entries
from conformance.engine.run.session import judge_with
from conformance.engine.run.verdict import INFORMATIVE, WRONG, FunctionVerdict, Verdict
from conformance.families.permutation.cases import RoutingCase
from conformance.report.page import page, routing_map

CASE = RoutingCase(function="permute", tokens=3, experts=2, hidden=5, routing=(0b01, 0b11, 0b10), align=16)


COSTS = {"seconds": 0.0, "kernels": 0, "scores": {}}


def line(case: RoutingCase, status: str = "PASS", kernels: tuple[str, ...] = ("a",)) -> dict:
    return {
        "function": case.function,
        "status": status,
        "settings": settings_of(case),
        "seconds": 0.25,
        "kernels": list(kernels),
        "scores": {},
    }


def covered(*lines: dict) -> dict:
    return coverage(lines, INFORMATIVE, WRONG)["permute"]


def verdict_of(**fields) -> Verdict:
    out = Verdict("NOT CONFORMANT", 1, "my_kernels", "smoke", 0, 2.0, 3)
    out.functions["permute"] = FunctionVerdict("differs", 3, {"PASS": 2, "FAIL": 1})
    out.functions["gate"] = FunctionVerdict("not offered")
    out.failures = [
        {"function": "permute", "case": CASE.record(), "finding": None, "status": "CRASH", "reason": "signal 11"}
        | {"id": CASE.id, "smallest": True}
    ]
    out.coverage = coverage([line(CASE), line(replace(CASE, align=0), "FAIL")], INFORMATIVE, WRONG)
    return replace(out, **fields)


# ---- coverage


def test_numbers_are_grouped_by_powers_of_two_and_sequences_by_length():
    settings = settings_of(CASE)
    named = {name: settings[name] for name in ("tokens", "hidden", "align", "routing")}
    assert named == {"tokens": "3", "hidden": "4 …", "align": "16", "routing": "3 entries"}
    assert settings["law"] == "none" and "seed" not in settings


def test_a_value_is_counted_with_its_wrong_cases_and_uninformative_ones_are_not():
    lines = (line(CASE), line(CASE, "FAIL"), line(replace(CASE, align=0)), line(CASE, "UNINFORMATIVE"))
    assert covered(*lines)["fields"]["align"] == {"0": [1, 0], "16": [2, 1]}


def test_pairs_that_never_meet_are_absent():
    second = replace(CASE, align=0, dtype="bfloat16")
    covered_pairs = covered(line(CASE), line(second), line(second, "CRASH"))["pairs"]
    pair = next(name for name in covered_pairs if set(name.split(" × ")) == {"dtype", "align"})
    assert sorted(covered_pairs[pair].values()) == [[1, 0], [2, 1]]  # of four
    assert not any("tokens" in name or "hidden" in name for name in covered_pairs)


def test_a_kernel_of_two_cases_is_one():
    covered_kernels = covered(line(CASE, kernels=("a", "b")), line(CASE, kernels=("b",)))
    assert (covered_kernels["kernels"], covered_kernels["seconds"]) == (2, 0.5)


def test_passing_cases_are_counted_by_how_near_they_come_to_the_limit():
    near, far, none = (line(CASE) | {"scores": scores} for scores in ({"error": 0.97}, {"error": 0.0}, {}))
    beyond = line(CASE) | {"scores": {"error": 1.0, "ratio": 0.52}}
    scores = covered(near, far, none, beyond)["scores"]
    assert scores == {"error": [1, *[0] * 18, 2], "ratio": [*[0] * 10, 1, *[0] * 9]}
    text = page(verdict_of(coverage={"permute": {"fields": {}, "pairs": {}, **COSTS, "scores": scores}}))
    assert "error 0.95 to 1.00 of the limit: 2 cases" in text and text.count("<figcaption>") == 2


# ---- the page


def test_the_page_loads_nothing_and_shows_the_failure():
    text = page(verdict_of())
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)
    assert "<h1>NOT CONFORMANT</h1>" in text and "CRASH: signal 11" in text
    assert case_from(json.loads(re.search(r"replay &#x27;(.*?)&#x27;", text)[1].replace("&quot;", '"'))) == CASE
    assert "align = 0: 1 cases, 1 wrong" in text and "align = 16: 1 cases" in text
    assert "<b>not offered</b> gate" in text


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", '"><img onerror=alert(1)>'])
def test_texts_of_an_implementation_stay_texts(hostile):
    text = page(
        verdict_of(
            implementation=hostile,
            problems=[hostile],
            coverage={"permute": {"fields": {hostile: {hostile: [1, 0]}}, "pairs": {hostile: {}}, **COSTS}},
        )
    )
    assert text.count("<script") == 2 and text.count("</script") == 2 and "<img" not in text


def test_a_routing_map_is_drawn_token_by_expert():
    drawn = routing_map(CASE)
    places = [(int(x) // 14, int(y) // 14) for x, y in re.findall(r'x="(\d+)" y="(\d+)"[^>]*class="on"', drawn)]
    assert sorted((token, expert) for expert, token in places) == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert drawn.count("<rect") == 6
    assert routing_map(replace(CASE, routing=(), tokens=0)) == ""


def test_a_run_keeps_settings_for_a_page_alone(tmp_path: Path):
    for name, has_settings in (("verdict.html", True), ("verdict.json", False)):
        folder = tmp_path / name.replace(".", "_")
        options = Options("moe_ref", function="permute", profile="smoke", jobs=1, device="cpu", report=[name])
        verdict = judge_with(replace(options, corpus=str(tmp_path / "corpus")), folder)
        outcomes = [entry for entry in entries(folder) if entry["kind"] == "outcome"]
        assert all(("settings" in entry) == has_settings for entry in outcomes) and len(outcomes) == verdict.cases
        assert any(entry.get("scores") for entry in outcomes) == has_settings
        assert set(verdict.coverage) == ({entry["function"] for entry in outcomes} if has_settings else set())
