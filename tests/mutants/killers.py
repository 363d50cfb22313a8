"""Writes the id of the case that killed each listed defect, which the test of all tries first:

moe-conformance mutants --impl moe_ref --report report.json
python -m tests.mutants.killers report.json
"""

import json
import sys
from pathlib import Path

from conformance import catalogue as catalogue  # whose families `case_from` knows
from conformance.core.case import case_from

KILLERS = Path(__file__).with_name("killers.json")


def killers(report: list[dict[str, str]]) -> dict[str, str]:
    """By the name of a defect, the id of the case; without those that took several cases."""
    by_one_case = [result for result in report if result["case"] and result["check"] != "history"]
    return {result["mutant"]: case_from(json.loads(result["case"])).id for result in by_one_case}


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    KILLERS.write_text(json.dumps(killers(report), indent=0, sort_keys=True) + "\n")
