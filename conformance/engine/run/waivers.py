"""Known differences that do not fail a run, each with an owner, a reason and a date on which it ends.

[[waiver]]
function = "pad_routing_map"
check    = "input"                      # optional: the kind of finding, or a status such as CRASH
output   = "routing_map"                # optional
where    = { map_dtype = "bool" }       # optional: fields of the case
owner    = "kernels@example.org"
reason   = "writes into the caller's map; callers copy it"
expires  = 2027-06-30
"""

import datetime
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.child.runner import Outcome
from conformance.interface import UsageError

REQUIRED = ("function", "owner", "reason", "expires")
OPTIONAL = ("check", "output", "message", "where")


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
        return (
            " ".join(filter(None, (self.function, self.output, self.check, self.message, str(self.where or ""))))
            + f" ({self.owner})"
        )

    def covers(self, case: Case, outcome: Outcome) -> bool:
        finding = outcome.finding or {}
        return (
            outcome.status != "ERROR"  # of the suite itself
            and case.function == self.function
            and self.check in ("", finding.get("check"), outcome.status)
            and self.output in ("", finding.get("output"))
            and self.message in (finding.get("message") or outcome.reason)
            and all(_plain(getattr(case, name, None)) == value for name, value in self.where.items())
        )


def _plain(value: Any) -> Any:
    """A field as TOML can write it."""
    return list(value) if isinstance(value, tuple) else value


def read_waivers(path: Path, today: datetime.date) -> list[Waiver]:
    """The waivers in a TOML file.

    Raises:
        UsageError: the file cannot be read, a waiver lacks a field or has an unknown one, or has expired.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"--waivers {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--waivers {path}: {error}") from None
    tables, others = content.get("waiver", []), [name for name in content if name != "waiver"]
    if others or not isinstance(tables, list) or not all(isinstance(entry, dict) for entry in tables):
        raise UsageError(
            f"--waivers {path}: must hold [[waiver]] tables and nothing else{''.join(f', not {name}' for name in others)}"
        )
    return [_waiver(entry, f"--waivers {path}: waiver {index}", today) for index, entry in enumerate(tables, 1)]


def _waiver(entry: dict[str, Any], place: str, today: datetime.date) -> Waiver:
    """The waiver of one table, every field of it checked."""
    missing = [name for name in REQUIRED if name not in entry]
    unknown = [name for name in entry if name not in REQUIRED + OPTIONAL]
    if missing or unknown:
        raise UsageError(
            f"{place} {'lacks ' + ', '.join(missing) if missing else 'has the unknown field ' + ', '.join(unknown)}"
        )
    for name in entry:
        if name not in ("expires", "where") and not isinstance(entry[name], str):
            raise UsageError(f"{place}: {name} is {entry[name]!r}; it must be text")
    if entry["function"] not in CONTRACTS:
        raise UsageError(f"{place} is for {entry['function']!r}; the functions are {', '.join(CONTRACTS)}")
    fields, where = Case.family[entry["function"]].__dataclass_fields__, entry.get("where", {})
    if not isinstance(where, dict) or not all(name in fields for name in where):
        raise UsageError(
            f"{place}: where is {where!r}; it must be a table of fields of a {entry['function']} case: {', '.join(fields)}"
        )
    if type(entry["expires"]) is not datetime.date:  # a datetime is a date too, and cannot be compared with one
        raise UsageError(
            f"{place}: expires is {entry['expires']!r}; it must be a date such as 2027-06-30, without quotes"
        )
    if entry["expires"] < today:
        raise UsageError(f"{place} is stale: it expired on {entry['expires']} ({entry['reason']})")
    return Waiver(**entry)
