"""The page of results shows every record, and every record says where its figures come from."""

import json
import sys
from datetime import date

import pytest

from benchmarks import results

RECORDS = {path.stem: json.loads(path.read_text()) for path in results.FOLDER.glob("*.json")}


def test_the_page_is_written_from_the_records():
    shown = (results.FOLDER / "index.md").read_text()
    assert shown == results.page(), "stale: python -m benchmarks.results > docs/results/index.md"


def test_every_record_has_a_section():
    assert sorted(name for names in results.SECTIONS.values() for name in names) == sorted(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_an_origin_and_whole_rows(name):
    record = RECORDS[name]
    assert date.fromisoformat(record["date"]) and record["commands"] and record["machine"] and record["meaning"]
    for table in [*record["tables"], *record.get("details", [])]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert "picture" not in record or (results.FOLDER / record["picture"]).exists()


def test_a_measured_record_has_the_tables_that_its_command_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    earlier = {"title": "A kernel", "meaning": "It is fast.", "tables": [], "details": []}
    (tmp_path / "kernel.json").write_text(json.dumps(earlier))
    printed = "Sizes:\n| shape | µs |\n| --- | --: |\n| small | 3.5 |\n\nThe end."
    results.measure("kernel", [sys.executable, "-c", f"print({printed!r})"])
    record = json.loads((tmp_path / "kernel.json").read_text())
    assert record["tables"] == [{"title": "Sizes:", "columns": ["shape", "µs"], "rows": [["small", "3.5"]]}]
    shown = results.section("kernel", record)
    assert shown.splitlines()[2] == "### A kernel" and f"{date.today()} · " in shown
    assert "| small | 3.5 |" in shown and f"    {sys.executable} -c " in shown


def test_of_a_long_table_the_page_has_the_columns_and_the_file():
    record = RECORDS["reach"]
    shown = results.section("reach", record)
    assert len(record["tables"][0]["rows"]) > results.LONGEST
    assert f"table of {len(record['tables'][0]['rows'])} rows" in shown and "| `gate` |" not in shown
    record = record | {"tables": [record["tables"][0] | {"rows": record["tables"][0]["rows"][: results.LONGEST]}]}
    assert "| `gate` |" in results.section("reach", record)
