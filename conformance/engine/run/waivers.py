"""Known differences that do not fail a run, each with an owner, a reason and an expiry date.

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
        parts = (self.function, self.output, self.check, self.message, str(self.where or ""), f"({self.owner})")
        return " ".join(filter(None, parts))

    def covers(self, case: Case, outcome: Outcome) -> bool:
        finding = outcome.finding or {}
        return (
            outcome.status != "ERROR"  # of the suite itself
            and case.function == self.function
            and self.check in ("", finding.get("check"), outcome.status)
            and self.output in ("", finding.get("output"))
            and self.message in (finding.get("message") or outcome.reason)
            and all(_toml(getattr(case, name, None)) == value for name, value in self.where.items())
        )


def _toml(value: Any) -> Any:
    """A field's value as TOML represents it."""
    return list(value) if isinstance(value, tuple) else value


def read_waivers(path: Path, today: datetime.date) -> list[Waiver]:
    """The waivers in a TOML file.

    Raises:
        UsageError: an unreadable file, a missing or unknown field, or an expired waiver.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"--waivers {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--waivers {path}: {error}") from None
    tables, others = content.get("waiver", []), [name for name in content if name != "waiver"]
    if others or not isinstance(tables, list) or not all(isinstance(entry, dict) for entry in tables):
        unknown = "".join(f", not {name}" for name in others)
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
        if key not in ("expires", "where") and not isinstance(value, str):
            raise UsageError(f"{name}: {key} is {value!r}; it must be text")
    function, expires, where = entry["function"], entry["expires"], entry.get("where", {})
    if function not in CONTRACTS:
        raise UsageError(f"{name} is for {function!r}; the functions are {', '.join(CONTRACTS)}")
    known = Case.family[function].__dataclass_fields__
    if not isinstance(where, dict) or not all(key in known for key in where):
        table = f"a table of fields of a {function} case: {', '.join(known)}"
        raise UsageError(f"{name}: where is {where!r}; it must be {table}")
    # datetime is a subclass of date that does not compare with date
    if type(expires) is not datetime.date:
        raise UsageError(f"{name}: expires is {expires!r}; it must be a date such as 2027-06-30, without quotes")
    if expires < today:
        raise UsageError(f"{name} is stale: it expired on {expires} ({entry['reason']})")
    return Waiver(**entry)
