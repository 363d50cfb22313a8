"""Permanent cases: one JSON file each, named by the case's id.

The committed corpus runs first in every profile. A run saves each failing case, with the versions
used, in the folder `--corpus`, by default `.moe-conformance` in the working directory.
"""

import json
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS, runs_in_one_place
from conformance.core.case import Case, CaseError, case_from, placed
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.storage import write_whole

COMMITTED = Path(__file__).parents[2] / "corpus"
DEFAULT = Path(".moe-conformance")
NOT_SAVED = "not saved"  # begins the text that takes the place of a failing case's file
REACHED = "fuzz"  # folder of a search's interesting cases, a folder for each function


def read_case(path: Path) -> Case:
    """The case in a file.

    Raises:
        CaseError: an unreadable file, no JSON, or no case; the message names the file.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CaseError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise CaseError(f"{path}: not JSON: {error}") from None
    try:
        return checked(case_from(record.get("case", record) if isinstance(record, dict) else record))
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None


def checked(case: Case) -> Case:
    """The case, if its names exist and it describes a call.

    Raises:
        CaseError: an unknown law, golden case, illegal call or word, or illegal settings.
    """
    contract = CONTRACTS[case.function]
    for name, known_names in (("law", contract.laws), ("golden", contract.golden), ("illegal", contract.illegal)):
        value = getattr(case, name)
        if value and value not in known_names:
            raise CaseError(f"{name} is {value!r}; {case.function} has {', '.join(known_names)}")
    for index, earlier in enumerate(case.before):
        placed(index, checked, earlier)
    if not runs_in_one_place(case):
        raise CaseError("before: calls of several ranks run before one of several ranks, others before others")
    reason = None if case.golden or case.illegal else scope_of(case.function, Space()).refused(case)
    if reason:
        raise CaseError(reason)
    try:
        problem = contract.problem(case)
        if not case.golden and not case.illegal:
            contract.expected(case, problem, {})
    except Exception as error:
        raise CaseError(f"describes no call of {case.function}: {type(error).__name__}: {error}") from None
    for name in problem.wanted:
        x = problem.tensors.get(name)
        if x is None or not x.is_floating_point() or x.element_size() == 1:
            raise CaseError(f"grads asks for {name!r}, which has no gradient in this call")
    return case


def read_folder(folder: Path) -> list[Case]:
    """All cases in a folder, in the order of file names.

    There are none if the folder does not exist.
    """
    return [read_case(path) for path in sorted(folder.glob("*.json"))]


def read_all(folder: Path) -> list[Case]:
    """All cases in a folder, failing ones first, then those that a search has kept below it."""
    cases_of_searches = (read_folder(subfolder) for subfolder in sorted((folder / REACHED).glob("*")))
    return [*read_folder(folder), *(case for cases in cases_of_searches for case in cases)]


def save(folder: Path, case: Case, finding: dict[str, Any]) -> Path:
    """Write the case and its finding; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.id}.json"
    write_whole(path, json.dumps({"case": case.record(), "found": finding}, indent=1) + "\n")
    return path


def try_save(folder: Path, case: Case, finding: dict[str, Any]) -> str:
    """Write the case; returns its file, or NOT_SAVED and the reason where it cannot be written."""
    try:
        return str(save(folder, case, finding))
    except OSError as error:
        return f"{NOT_SAVED}: {error}"


def find(name: str, folder: Path) -> Case:
    """The case of a file name, JSON text, or the id of a saved or committed case.

    Raises:
        CaseError: no such case.
    """
    if name.lstrip().startswith("{"):
        try:
            return checked(case_from(json.loads(name)))
        except json.JSONDecodeError as error:
            raise CaseError(f"the case text is not JSON: {error}") from None
    if name.endswith(".json"):
        return read_case(Path(name))
    above = [parent / folder for parent in Path.cwd().parents]  # none but `folder` if it is absolute
    for root in (folder, *above, COMMITTED):
        if (root / f"{name}.json").exists():
            return read_case(root / f"{name}.json")
    hint = "give its file, its id, or its JSON text"
    raise CaseError(f"there is no case {name!r} in {folder}, here or above, or in the committed corpus; {hint}")
