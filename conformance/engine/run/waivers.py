"""Known differences that do not fail a run, each with an owner, a reason and an expiry date.

[[waiver]]
function = "pad_routing_map"
check    = "input"                      # optional: the kind of finding, or a status such as CRASH
output   = "routing_map"                # optional
where    = { map_dtype = "bool" }       # optional: fields of the case
owner    = "kernels@example.org"
reason   = "writes into the caller's map; callers copy it"
expires  = 2027-06-30                   # at most a year ahead
"""

import datetime
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.known_names import checks_of, judged_of, makes_several_calls
from conformance.core.where import Term, word, wrong_value
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.verdict import WRONG
from conformance.interface import UsageError

REQUIRED = ("function", "owner", "reason", "expires")
OPTIONAL = ("check", "output", "message", "where")
LONGEST = datetime.timedelta(days=366)  # the longest duration of a waiver, from today


@dataclass(frozen=True)
class Waiver:
    """One known difference."""

    function: str
    owner: str
    reason: str
    expires: datetime.date
    check: str = ""
    output: str = ""
    message: str = ""
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = (self.function, self.output, self.check, self.message, str(self.where or ""), f"({self.owner})")
        return " ".join(filter(None, words))

    def covers(self, case: Case, outcome: Outcome) -> bool:
        finding = outcome.finding or {}
        return (
            outcome.status != "ERROR"  # of the suite itself
            and case.function == self.function
            and self.check in ("", finding.get("check"), outcome.status)
            and self.output in ("", finding.get("output"))
            and self.message in (finding.get("message") or outcome.reason)
            and all(Term(name, "=", (word(value),)).true_of(case) for name, value in self.where.items())
        )


def read_waivers(path: Path, today: datetime.date) -> list[Waiver]:
    """The waivers in a TOML file.

    Raises:
        UsageError: an unreadable file, a missing or unknown field, a waiver that has expired or
            expires too late, or one that no failure can match.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"--waivers {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--waivers {path}: {error}") from None
    tables, other_tables = content.get("waiver", []), [name for name in content if name != "waiver"]
    if other_tables or not isinstance(tables, list) or not all(isinstance(entry, dict) for entry in tables):
        unknown = "".join(f", not {name}" for name in other_tables)
        raise UsageError(f"--waivers {path}: must hold [[waiver]] tables and nothing else{unknown}")
    return [_waiver(entry, f"--waivers {path}: waiver {index}", today) for index, entry in enumerate(tables, 1)]


def _waiver(entry: dict[str, Any], name: str, today: datetime.date) -> Waiver:
    """The waiver of one table, with every field checked; messages start with `name`."""
    missing = [key for key in REQUIRED if key not in entry]
    unknown = [key for key in entry if key not in REQUIRED + OPTIONAL]
    if missing or unknown:
        fields = f"lacks {', '.join(missing)}" if missing else f"has the unknown field {', '.join(unknown)}"
        raise UsageError(f"{name} {fields}")
    for key, value in entry.items():
        if key not in ("expires", "where") and not (isinstance(value, str) and value.strip()):
            raise UsageError(f"{name}: {key} is {value!r}; it must be text, and not empty")
    if entry["function"] not in CONTRACTS:
        raise UsageError(f"{name} is for {entry['function']!r}; the functions are {', '.join(CONTRACTS)}")
    problem = _wrong_date(entry, today) or _wrong_names(entry) or _wrong_where(entry)
    if problem:
        raise UsageError(f"{name}{problem}")
    return Waiver(**entry)


def _wrong_date(entry: dict[str, Any], today: datetime.date) -> str:
    expires = entry["expires"]
    # datetime is a subclass of date that does not compare with date
    if type(expires) is not datetime.date:
        return f": expires is {expires!r}; it must be a date such as 2027-06-30, without quotes"
    if expires < today:
        return f" is stale: it expired on {expires} ({entry['reason']})"
    if expires > today + LONGEST:
        return f": expires on {expires}; it must be within a year from today, {today}"
    return ""


def _wrong_names(entry: dict[str, Any]) -> str:
    """A check or an output that no finding of the function has."""
    contract = CONTRACTS[entry["function"]]
    check, output = entry.get("check", "exact"), entry.get("output", "call")
    checks = {*checks_of(contract), *WRONG}
    if check not in checks and not check.startswith("raises "):
        return f": check is {check!r}; it must be raises … or one of {', '.join(sorted(checks))}"
    outputs = judged_of(contract)
    # outputs of several calls are numbered, or named after a field of a state
    if output not in outputs and not ("." in output and makes_several_calls(contract)):
        return f": output is {output!r}; it must be one of {', '.join(sorted(outputs))}"
    return ""


def _wrong_where(entry: dict[str, Any]) -> str:
    """A field that the function's cases do not have, or a value that the field cannot have."""
    cls, where = Case.family[entry["function"]], entry.get("where", {})
    known_fields = {field.name: field for field in fields(cls)}
    if not isinstance(where, dict) or not all(key in known_fields for key in where):
        return f": where is {where!r}; it must be a table of fields of its cases: {', '.join(known_fields)}"
    contract = CONTRACTS[entry["function"]]
    for key, value in where.items():
        if needed := wrong_value(contract, key, value):
            return f": where.{key} is {value!r}; it must be {needed}"
    return ""
