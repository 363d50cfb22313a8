"""The document's cases are cases, and are kept with the adapter."""

import json
from pathlib import Path

from conformance.core.case import case_from
from conformance.engine.run import corpus

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "conformance" / "peers" / "transformer_engine.corpus"
LINES = [line.strip() for line in (ROOT / "docs" / "findings.md").read_text().splitlines()]


def test_every_case_of_the_findings_is_kept():
    cases = [corpus.checked(case_from(json.loads(line))) for line in LINES if line.startswith("{")]
    assert len(cases) == 20
    assert {case.id for case in cases} <= {path.stem for path in KEPT.glob("*.json")}


def test_every_kept_case_was_found_in_the_package():
    for path in KEPT.glob("*.json"):
        record = json.loads(path.read_text())["found"]
        assert corpus.read_case(path).id == path.stem and record["versions"]["transformer_engine"] == "2.20.2"
