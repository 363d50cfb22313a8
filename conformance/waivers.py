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

from conformance.case import Case
from conformance.execute.evaluate import Outcome
from conformance.interface import UsageError
from conformance.registry import CONTRACTS

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
        return " ".join(filter(None, (self.function, self.output, self.check, self.message, str(self.where or "")))) + f" ({self.owner})"

    def covers(self, case: Case, outcome: Outcome) -> bool:
        finding = outcome.finding or {}
        return (
            case.function == self.function
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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--waivers {path}: {error}") from None
    out = []
    for index, entry in enumerate(content.get("waiver", [])):
        place = f"--waivers {path}: waiver {index + 1}"
        missing = [name for name in REQUIRED if name not in entry]
        unknown = [name for name in entry if name not in REQUIRED + OPTIONAL]
        if missing or unknown:
            raise UsageError(f"{place} {'lacks ' + ', '.join(missing) if missing else 'has the unknown field ' + ', '.join(unknown)}")
        if entry["function"] not in CONTRACTS:
            raise UsageError(f"{place} is for {entry['function']!r}; the functions are {', '.join(CONTRACTS)}")
        if not isinstance(entry["expires"], datetime.date):
            raise UsageError(f"{place}: expires is {entry['expires']!r}; it must be a date such as 2027-06-30, without quotes")
        waiver = Waiver(**entry)
        if waiver.expires < today:
            raise UsageError(f"{place} is stale: it expired on {waiver.expires} ({waiver.reason})")
        out.append(waiver)
    return out
