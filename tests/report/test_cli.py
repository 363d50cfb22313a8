"""The command line: every verb does its job, and every bad input ends in one clear sentence."""

import json
import re

import pytest

from conformance.catalogue import CONTRACTS
from conformance.engine.choose.plan import KINDS, sections
from conformance.engine.run import corpus
from conformance.families.permutation.cases import RoutingCase
from tests.report.cli_helpers import smoke


def only(label: str) -> tuple[str, str]:
    """The shard that is this section of a smoke run of permute."""
    labels = ["corpus", "fixed-permute", "drawn-permute"]
    return "--shard", f"{labels.index(label) + 1}/{len(labels)}"


# ---- bad input


BAD = [
    (smoke("moe_ref:nothing"), "moe_ref has no 'nothing'"),
    (smoke("broken"), "importing it raised RuntimeError: no such card"),
    (smoke("leaving"), "importing it raised SystemExit: 3"),
    (smoke("dying"), "the process died while importing it (exit code 3)"),
    (smoke("moe_ref", "--function", "premute"), "--function is 'premute'; the nearest is permute; known are gate, "),
    (smoke("two", "--function", "permute,gate"), "--function gate is not offered by two, which offers permute, unperm"),
    (smoke("two", "--function", "gate", "--function", "permute"), "--function gate is not offered by two, which off"),
    (smoke("two", "--where", "colour=1"), "--where: no case has the field 'colour'; the fields are function, golden, "),
    (smoke("moe_ref", "--function", ","), "--function is ','; it must be names of functions"),
    (smoke("moe_ref", "--case-seconds", "0"), "--case-seconds is 0"),
    (smoke("moe_ref", "--seconds", "-1"), "--seconds is -1.0; it must be 0 (no limit) or more"),
    (smoke("moe_ref", "--report", "nowhere/out.json"), "there is no folder"),
    (smoke("moe_ref", "--waivers", "bad.toml"), "--waivers bad.toml"),
    (smoke("moe_ref", "--waivers", "expired.toml"), "waiver 1 is stale: it expired on 2020-01-01 (known)"),
    (smoke("moe_ref", "--baseline", "text.json"), "--baseline text.json: not a JSON report"),
    (smoke("moe_ref", "--baseline", "list.json"), "--baseline list.json: not a JSON report"),
    (smoke("moe_ref", "--baseline", "number.json"), "--baseline number.json: not a JSON report"),
    (smoke("moe_ref", "--baseline", "empty.json"), "--baseline empty.json: not a JSON report"),
    (smoke("moe_ref", "--corpus", "text.txt"), "--corpus text.txt: is no folder"),
    (smoke("moe_ref", "--corpus", "."), "case_field.json: 'tokenz' is no field"),
    (("replay", "0123456789ab", "--impl", "moe_ref"), "there is no case '0123456789ab'"),
    (("replay", "missing.json", "--impl", "moe_ref"), "missing.json: there is no such file"),
    (("replay", "text.json", "--impl", "moe_ref"), "text.json: not JSON"),
    (("replay", "list.json", "--impl", "moe_ref"), "list.json: a case is a JSON object, not list"),
    (("replay", "case_field.json", "--impl", "moe_ref"), "case_field.json: 'tokenz' is no field of a permute case"),
    (("replay", "case_type.json", "--impl", "moe_ref"), "case_type.json: tokens is 'two'; it must be of type int"),
    (("replay", '{"function": ', "--impl", "moe_ref"), "the case text is not JSON"),
    (("replay", '{"function": "permute", "law": "gravity"}', "--impl", "moe_ref"), "law is 'gravity'"),
    (("minimize", "0123456789ab", "--impl", "moe_ref"), "there is no case '0123456789ab'"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=lambda x: " ".join(x)[:50] if isinstance(x, tuple) else "")
def test_a_bad_input_ends_in_one_clear_sentence(call, arguments, sentence):
    code, out, err = call(*arguments)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in out + err
    assert "INTERNALERROR" not in out + err
    assert (
        len([line for line in err.splitlines() if line.startswith("moe-conformance")]) == 1
    )  # the rest is argparse's usage
    assert "CONFORMANT" not in out


def test_a_missing_gpu_is_reported(call, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for arguments in (
        smoke("moe_ref"),
        ("replay", '{"function": "permute"}', "--impl", "moe_ref"),
        ("check-adapter", "--impl", "moe_ref"),
    ):
        code, _, err = call(*arguments, "--device", "cuda")
        assert (code, err) == (2, err)
        assert "--device cuda: torch sees no GPU here" in err


def test_a_stale_waiver_is_an_error_of_the_harness(call):
    code, out, _ = call(*smoke("good", "--waivers", "unused.toml"))
    assert (code, "HARNESS ERROR" in out) == (3, True)
    assert "the waiver permute (me) waived nothing: remove it" in out


# ---- run


def test_only_chosen_functions_are_judged(call, workdir):
    """`two` has a right `unpermute`, which needs the row map of the function that is not chosen."""
    code, out, _ = call(*smoke("two", "--function", "unpermute", "--report", "out.json"))
    report = json.loads((workdir / "out.json").read_text())
    assert (code, report["chosen"], report["functions"]["permute"]["cases"]) == (0, ["unpermute"], 0)
    assert {name for name, f in report["functions"].items() if f["status"] != "not chosen"} == {"unpermute"}
    assert f"CONFORMANT   1 functions · {report['cases']} cases" in out
    assert f"{len(CONTRACTS) - 1} functions not chosen" in out


def test_a_baseline_compares_what_both_runs_chose(call):
    assert call(*smoke("two", "--report", "both.json"))[0] == 0
    assert call(*smoke("good", "--function", "permute", "--baseline", "both.json", "--report", "one.json"))[0] == 0
    assert call(*smoke("two", "--baseline", "one.json"))[0] == 0
    code, out, _ = call(*smoke("good", "--baseline", "both.json"))
    assert (code, "unpermute was conformant in the baseline and is not offered any more" in out) == (5, True)


def test_only_matching_cases_are_judged(call, workdir):
    """`wrong` mixes up the rows of the third expert."""
    code, out, _ = call(*smoke("wrong", "--where", "experts<3 and dtype=bfloat16", "--report", "few.json"))
    report = json.loads((workdir / "few.json").read_text())
    assert (code, report["where"]) == (0, "experts<3 and dtype=bfloat16")
    assert "CONFORMANT (where experts<3 and dtype=bfloat16)" in out
    code, out, err = call(*smoke("wrong", "--baseline", "few.json"))
    assert (code, "was judged with --where 'experts<3 and dtype=bfloat16', this run with ''" in err) == (2, True)


def test_the_reduced_case_matches_the_predicate(call, workdir):
    assert call(*smoke("wrong", "--where", "experts>=7 and dtype=bfloat16", "--report", "out.json"))[0] == 1
    cases = [failure["case"] for failure in json.loads((workdir / "out.json").read_text())["failures"]]
    assert cases
    assert all(case["experts"] >= 7 and case["dtype"] == "bfloat16" for case in cases)


def test_a_run_with_too_few_matching_cases_is_too_little_tested(call):
    code, out, _ = call(*smoke("two", "--where", "golden!=''"))
    assert (code, "TOO LITTLE TESTED" in out) == (4, True)
    assert re.search(r"permute: \d informative cases where golden!=''; the profile smoke asks for 9", out)


def test_a_specialist_is_conformant_within_its_scope(call, workdir):
    code, out, _ = call(*smoke("specialist", "--report", "out.json"))
    functions = json.loads((workdir / "out.json").read_text())["functions"]
    assert (code, functions["quantize"]["counts"].get("DECLARED_UNSUPPORTED")) == (0, None)
    assert {name: functions[name]["scope"] for name in ("quantize", "permute")} == {
        "quantize": "scaling=mxfp8",
        "permute": "",
    }
    head, verdict = out.split("\n\n")[:2]
    assert "scope: quantize: only cases where scaling=mxfp8" in head
    assert verdict.startswith("CONFORMANT (within scope)   2 functions")
    code, out, _ = call("check-adapter", "--impl", "specialist")
    assert (code, "scope scaling=mxfp8: other cases are left out" in out) == (0, True)


def test_a_function_that_differs_within_its_scope_fails(call, workdir):
    (workdir / "wide.py").write_text((workdir / "specialist.py").read_text().replace("mxfp8", "block", 1))
    assert call(*smoke("wide", "--function", "quantize"))[0] == 1


def test_a_scope_that_shrinks_is_a_regression(call, workdir):
    assert call(*smoke("two", "--function", "permute", "--report", "all.json"))[0] == 0
    (workdir / "two.py").write_text("from moe_ref import permute\nscope = {'permute': 'dtype=float32'}\n")
    code, out, _ = call(*smoke("two", "--baseline", "all.json"))
    assert (code, "permute has the scope 'dtype=float32', '' in the baseline" in out) == (5, True)


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ("3", "has scope = 3; it must be a predicate such as 'dtype=bfloat16', or a dict of them by function"),
        ("'colour=1'", "has scope: no case has the field 'colour'; the fields are"),
        ("{'premute': 'align=3'}", "has scope for premute; known are gate"),
    ],
)
def test_a_scope_that_is_none_ends_in_one_sentence(call, workdir, scope, sentence):
    (workdir / "scoped.py").write_text(f"from moe_ref import permute\nscope = {scope}\n")
    code, _, err = call("check-adapter", "--impl", "scoped")
    assert (code, f"scoped {sentence}" in err) == (2, True)


def test_since_a_report_of_other_functions_judges_what_that_run_left_out(call, workdir):
    assert call(*smoke("two", "--function", "permute", "--report", "one.json"))[0] == 0
    code, _, _ = call(*smoke("two", "--since", "one.json", "--report", "all.json"))
    functions = json.loads((workdir / "all.json").read_text())["functions"]
    assert (code, functions["permute"]["status"]) == (0, "unchanged since")
    assert (functions["unpermute"]["status"], functions["unpermute"]["reason"]) == (
        "conformant",
        "not chosen in one.json",
    )
    assert call(*smoke("two", "--since", "all.json", "--function", "permute"))[0] == 0


def test_the_reference_conforms_and_the_report_says_so(call, workdir):
    code, out, _ = call(*smoke("moe_ref", "--report", "out.json", "--report", "out.xml", "--report", "out.md"))
    assert code == 0
    assert f"CONFORMANT   {len(CONTRACTS)} functions" in out
    report = json.loads((workdir / "out.json").read_text())
    fields = "verdict exit_code cases seconds functions failures problems versions suite profile seed device"
    assert {*fields.split()} <= set(report)
    assert (report["verdict"], report["exit_code"], report["implementation"]) == ("CONFORMANT", 0, "moe_ref")
    assert set(report["functions"]) == set(CONTRACTS)
    for function in report["functions"].values():
        assert function["status"] == "conformant"
        assert sum(function["counts"].values()) == function["cases"] > 0
    assert (workdir / "out.xml").read_text().startswith("<?xml")
    assert (workdir / "out.md").read_text().startswith("# CONFORMANT")


def test_a_wrong_permute_is_found_replayed_and_minimized(call, workdir, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, _ = call(*smoke("wrong"))
    assert [
        line for line in out.splitlines() if line.startswith("::error file=wrong.py,line=5,title=permute differs::")
    ]
    assert code == 1
    assert "NOT CONFORMANT   1 of 1 functions differ" in out
    assert re.search(
        r"row \d+ \(expert 2, place \d+ of its segment\) holds token \d+; the reference puts token \d+ there", out
    )
    assert re.search(r"smallest case +T=2 H=1 E=3, float32, routing map 001 001", out)
    identity = re.search(r"replay +moe-conformance replay ([0-9a-f]{12}) --impl wrong", out).group(1)
    assert (workdir / ".moe-conformance" / f"{identity}.json").exists()

    code, out, _ = call("replay", identity, "--impl", "wrong")
    assert (code, "FAIL: rows [exact]" in out) == (1, True)
    (workdir / "below").mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(workdir / "below")
        code, out, _ = call("replay", identity, "--impl", "moe_ref")
    assert (code, "PASS" in out) == (0, True)

    large = RoutingCase(
        function="permute", tokens=30, experts=6, hidden=9, topk=3, spread="uniform", probs="bfloat16", dtype="bfloat16"
    )
    code, out, _ = call("minimize", large.text, "--impl", "wrong")
    assert code == 1
    assert re.search(r"smallest case +T=2 H=1 E=3, float32, routing map 001 001", out)
    code, out, _ = call("minimize", large.text, "--impl", "moe_ref")
    assert (code, "there is nothing to minimize" in out) == (0, True)


def test_an_implementation_that_raises_fails_and_the_run_goes_on(call):
    code, out, err = call(*smoke("raising"))
    assert code == 1
    assert "raised RuntimeError on a legal call: no kernel for so many columns" in out
    assert re.search(r"smallest case +T=0 H=4 E=1, float32", out)
    assert "Traceback" not in out + err


def test_a_supports_that_raises_is_the_implementations_fault(call):
    code, out, _ = call(*smoke("refusing"))
    assert code == 1
    assert (
        "supports [raises ZeroDivisionError] supports raised ZeroDivisionError about a legal call: division by zero"
        in out
    )


def test_offering_nothing_is_not_conformant(call):
    code, out, _ = call(*smoke("nothing"))
    assert (code, f"nothing offers none of {next(iter(CONTRACTS))}" in out) == (4, True)


def test_a_signature_without_a_setting_is_judged_without_it(call):
    code, out, _ = call(*smoke("unshaped"))
    assert (code, "unpermute           conformant" in out) == (0, True)


def test_shards_run_every_case_once_and_an_empty_one_is_no_failure(call, workdir):
    counts = {}
    for shard in ("1/2", "2/2", "4/4", ""):
        code, out, _ = call(*smoke("good", "--shard", shard, "--report", "out.json"))
        assert code == 0, out
        report = json.loads((workdir / "out.json").read_text())
        counts[shard] = report["cases"]
        assert report["verdict"] == ("EMPTY SHARD" if shard == "4/4" else "CONFORMANT")
        assert report["functions"]["permute"]["status"] == ("not run" if shard == "4/4" else "conformant")
    assert counts["1/2"] > 0 < counts["2/2"] and not counts["4/4"]
    assert counts["1/2"] + counts["2/2"] == counts[""]
    assert len({section.label for section in sections()}) == 1 + (len(KINDS) - 1) * len(CONTRACTS)


@pytest.mark.parametrize("folder", [".", f"{corpus.REACHED}/permute"])
def test_cases_of_the_corpus_and_of_a_search_run_first(call, workdir, folder):
    saved = RoutingCase(
        function="permute", tokens=3, experts=3, hidden=5, routing=(4, 4, 4), dtype="float16", law="split"
    )
    corpus.save(workdir / "saved" / folder, saved, {})
    assert sections()[0].label == "corpus"
    for implementation, expected in (("good", (0, {"PASS": 1})), ("wrong", (1, {"FAIL": 1}))):
        code, _, _ = call(*smoke(implementation, "--corpus", "saved", *only("corpus"), "--report", "out.json"))
        assert (code, json.loads((workdir / "out.json").read_text())["functions"]["permute"]["counts"]) == expected


def test_the_committed_corpus_is_part_of_every_run(call, workdir, monkeypatch):
    monkeypatch.setattr(corpus, "COMMITTED", workdir / "committed")
    corpus.save(workdir / "committed", RoutingCase(function="permute", tokens=2, experts=3, routing=(4, 4)), {})
    code, _, _ = call(*smoke("wrong", *only("corpus")))
    assert code == 1
    assert corpus.read_folder(corpus.COMMITTED)
