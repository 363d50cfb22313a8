"""The verdict as terminal output."""

import os
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import case_from
from conformance.engine.options import Options
from conformance.engine.run.corpus import NOT_SAVED, REACHED
from conformance.engine.run.launched import unjudged
from conformance.engine.run.search import Searched
from conformance.engine.run.verdict import NOT_CHOSEN, UNCHANGED, UNTOUCHED, Verdict
from conformance.interface import DEFAULTS
from conformance.report.tuned import tuned_lines
from conformance.texts import failure_text

REFUSALS = ("raises TypeError", "raises NotImplementedError")  # findings of a call that a kernel does not support
INDENT = 19  # columns of the name
WIDTH = 160
SHOWN = 5  # the most configurations that are listed as not judged; the JSON report has all
WIDE = ("float32", "float64")  # accumulators that are no narrower than they must be


def lines(verdict: Verdict) -> list[str]:
    """The verdict as lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    origin = f"{verdict.device} · profile {verdict.profile} · seed {verdict.seed}"
    out = [f"moe-conformance · impl {verdict.implementation} · {versions} · {origin}"]
    out += [*verdict.missing_parts, *scope_lines(verdict), *_declarations(verdict), *tuned_lines(verdict)]
    out += [*_transports(verdict), "", f"{verdict.verdict}   {_summary(verdict)}", "", *_specialised(verdict)]
    width = _column(verdict)
    for failure in sorted(verdict.failures, key=damage):
        if not _echo(failure, verdict):
            shown = failure_lines(failure, verdict.replayed, width)
            hint = way_out(failure, verdict.functions[failure["function"]].declares)
            out += [*shown, *([f"  {'way out':<{width - 2}} {hint}"] if hint else []), ""]
    echoing = [failure for failure in verdict.failures if _echo(failure, verdict)]
    for name in verdict.functions:
        if echoes := {failure["finding"]["check"] for failure in echoing if failure["function"] == name}:
            broken = f"the law{'s' * (len(echoes) > 1)} {', '.join(sorted(echoes))}"
            out += [f"{name:<{width}} also breaks {broken} (cases in the report)", ""]
    differ = {failure["function"] for failure in verdict.failures}
    for name, function in verdict.functions.items():
        if name not in differ and function.status not in UNTOUCHED:
            without = f", without {', '.join(function.without)}" if function.without else ""
            note = f", {function.note}" if function.note else ""
            count = f"{function.cases} cases"
            if function.status == "blocked":
                count = f"in {function.counts['BLOCKED']} of {count}: what makes their inputs is wrong"
            detail = f" · {count}{without}{note}" if function.cases else ""
            detail += f" · {function.reason}" if function.reason else ""
            out.append(f"{name:<{width}} {function.status}{detail}")
    for status in UNTOUCHED:
        names = [name for name, function in verdict.functions.items() if function.status == status]
        text = f"{in_words(status, verdict):<{width}} {', '.join(names)}" if names else ""
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent=" " * (width + 1))
        is_cut = status in ("not offered", NOT_CHOSEN) and len(wrapped) > 1
        out += [_cut(status, names, width)] if is_cut else wrapped
    if verdict.idle_kernels and not (verdict.chosen or verdict.where or verdict.ended_by or verdict.since):
        idle = f"{'not launched':<{width}} {', '.join(verdict.idle_kernels)}: kernels that no case has reached"
        out += textwrap.wrap(idle, WIDTH, subsequent_indent=" " * (width + 1))
    for configuration in unjudged(verdict.configurations)[:SHOWN]:
        text = f"{'not judged':<{width}} {configuration}: a configuration that no judged case has launched"
        out += textwrap.wrap(text, WIDTH, subsequent_indent=" " * (width + 1))
    out += [f"{'!':<{width}} {problem}" for problem in verdict.problems]
    return out


def _column(verdict: Verdict) -> int:
    """The width of the column of names: of the longest judged one, at least INDENT."""
    return max([INDENT, *(len(name) for name, f in verdict.functions.items() if f.status not in UNTOUCHED)])


def _cut(status: str, names: list[str], width: int) -> str:
    """As many of the names as fit on one line, and the number of the remaining ones."""
    end = ", … (and 00 more)"
    shown = textwrap.shorten(", ".join(names), WIDTH - width - len(end), placeholder="").rstrip(", ")
    return f"{status:<{width}} {shown}, … (and {len(names) - shown.count(',') - 1} more)"


def damage(failure: dict[str, Any]) -> int:
    """The order of failures: crashes, NaN, wrong results, then sums, roundings, and laws."""
    finding = failure["finding"] or {}
    check = finding.get("check", "")
    if failure["status"] in ("CRASH", "HANG", "OOM"):
        return 0
    if check in CONTRACTS[failure["function"]].laws:
        return 5
    return 1 if finding.get("nan") else {"bound": 3, "ratio": 4, "code": 4, "random": 4}.get(check, 2)


def way_out(failure: dict[str, Any], declares: dict[str, Any]) -> str:
    """What to declare if the difference comes from the kernel's rounding, or if the call is not
    supported; empty if no declaration helps.
    """
    finding, function = failure["finding"] or {}, failure["function"]
    case, check = case_from(failure["case"]), finding.get("check", "")
    if check.startswith("raises ") and case.layout != "contiguous" and declares.get("noncontiguous", True):
        return f'if inputs must be contiguous, declare it: declares("{function}") -> {{"noncontiguous": False}}'
    if check in REFUSALS:
        alternative = "leave it out of the signature, in which **settings stands for all"
        return f'if a setting is not supported, {alternative}; or let supports("{function}", …) return a reason'
    if check not in ("bound", "ratio") or finding.get("nan"):
        return ""
    scales = "scale" in finding["output"]
    if not scales and getattr(case, "dtype", "") in WIDE:
        return ""
    key, value = ("scale_arithmetic", "reciprocal") if scales else ("accumulator", "storage")
    if declares.get(key, DEFAULTS.get(key)) == value:
        return ""
    reason = "if a scale is a product with a reciprocal" if scales else "if sums are in the dtype of the tensors"
    return f'{reason}, declare it: declares("{function}") -> {{"{key}": "{value}"}}'


def scope_lines(verdict: Verdict) -> list[str]:
    """One line per scope: the cases for which functions are meant, if not all."""
    judged = ((name, f.scope) for name, f in verdict.functions.items() if f.status not in UNTOUCHED)
    return [f"scope: {names}: only cases where {scope}" for scope, names in _by_text(judged)]


def _by_text(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each text, but for empty ones, with the names that have it."""
    groups: dict[str, list[str]] = {}
    for name, text in texts:
        groups.setdefault(text, []).append(name)
    return [(text, ", ".join(names)) for text, names in groups.items() if text]


def in_words(status: str, verdict: Verdict) -> str:
    """The status; of unchanged functions, with the report and their status there."""
    if status != UNCHANGED:
        return status
    earlier = {str(f.earlier.get("status", "")) for f in verdict.functions.values() if f.status == UNCHANGED}
    return f"{status} {verdict.since}{''.join(f' ({x} there)' for x in sorted(earlier) if x)}:"


def _echo(failure: dict[str, Any], verdict: Verdict) -> bool:
    """Whether the failure is a broken law, and another one, most likely of one defect, is shown."""
    laws = CONTRACTS[failure["function"]].laws
    same = [candidate for candidate in verdict.failures if candidate["function"] == failure["function"]]
    value_failures = [candidate for candidate in same if (candidate["finding"] or {}).get("check") not in laws]
    return bool(value_failures) and (failure["finding"] or {}).get("check") in laws


def _declarations(verdict: Verdict) -> list[str]:
    """Declarations other than the defaults, one line per set of functions that share them."""

    def words_of(declares: dict[str, Any]) -> str:
        values = {key: x for key, x in declares.items() if x not in (DEFAULTS.get(key), (), [])}
        return ", ".join(_declared(key, value) for key, value in values.items())

    texts = ((name, words_of(function.declares)) for name, function in verdict.functions.items())
    return [f"declares: {names}: {words}" for words, names in _by_text(texts)]


def _transports(verdict: Verdict) -> list[str]:
    """How ranks reached each other, one line per set of functions judged alike."""
    ranked = ((name, f) for name, f in verdict.functions.items() if f.transports)
    texts = ((name, "; ".join(filter(None, (*function.transports, function.note)))) for name, function in ranked)
    return [f"between ranks: {names}: {text}" for text, names in _by_text(texts)]


def _declared(key: str, value: Any) -> str:
    if value is True:
        return key.replace("_", "-")
    if value is False:
        return f"not {key.replace('_', '-')}"
    return f"{key.replace('_', ' ')} {', '.join(value) if isinstance(value, (tuple, list)) else value}"


def _summary(verdict: Verdict) -> str:
    judged = [f for f in verdict.functions.values() if f.status not in UNTOUCHED]
    untouched = {status: sum(f.status == status for f in verdict.functions.values()) for status in UNTOUCHED}
    differing, blocked = (sum(f.status == status for f in judged) for status in ("differs", "blocked"))
    statuses = ("WAIVED", "DECLARED_UNSUPPORTED", "UNINFORMATIVE")
    total = {status: sum(f.counts.get(status, 0) for f in judged) for status in statuses}
    phrases = [
        f"{differing} of {len(judged)} functions differ"
        if differing or blocked
        else f"{len(judged)} functions{' judged' if verdict.since else ''}",
        f"{blocked} blocked" if blocked else "",
        *([f"{untouched[UNCHANGED]} unchanged since {verdict.since}"] if verdict.since else []),
        f"{verdict.cases} cases in {verdict.seconds:.0f} s{ended(verdict)}",
        f"{verdict.not_run} cases not run" if verdict.not_run else "",
        f"{len(verdict.not_drawn)} sections not drawn" if verdict.not_drawn else "",
        f"{total['WAIVED']} waived",
        *([f"{untouched['not run']} functions not run"] if untouched["not run"] else []),
        f"{untouched[NOT_CHOSEN]} functions not chosen" if untouched[NOT_CHOSEN] else "",
        "" if untouched[NOT_CHOSEN] else f"{untouched['not offered']} functions not offered",
        f"{total['DECLARED_UNSUPPORTED'] / max(verdict.cases, 1):.1%} declared unsupported",
        f"{total['UNINFORMATIVE'] / max(verdict.cases, 1):.1%} uninformative",
    ]
    if verdict.kernels_compiled:
        phrases.append(f"{verdict.kernels_compiled} kernels compiled")
    if verdict.configurations:
        num_unjudged = len(unjudged(verdict.configurations))
        judged_share = f"{num_unjudged} not judged" if num_unjudged else "all judged"
        phrases.append(f"{len(verdict.configurations)} configurations, {judged_share}")
    return " · ".join(filter(None, phrases))


def ended(verdict: Verdict) -> str:
    """What ended the run before its last case."""
    return f", ended early by {verdict.ended_by}" if verdict.ended_by else ""


def _specialised(verdict: Verdict) -> list[str]:
    """Fields that are declared as data, but whose changes compile kernels, which takes time."""
    named = {
        name: ", ".join(f"{field} ({kernels})" for field, kernels in function.specialised_by.items())
        for name, function in verdict.functions.items()
        if function.specialised_by
    }
    return [f"kernels compiled per change of data: {'; '.join(f'{k}: {v}' for k, v in named.items())}"] if named else []


def failure_lines(failure: dict[str, Any], replayed: str, width: int = INDENT) -> list[str]:
    """One failure: the finding, the smallest case, and the command that replays it."""
    finding, status = failure["finding"], failure["status"]
    text = failure_text(finding, f"{status}: {failure['reason']}")
    text = f"{status}: {text} ({failure['reason']})" if finding and status != "FAIL" else text
    size = "smallest case" if failure["smallest"] else "failing case"
    return [
        f"{failure['function']:<{width}} {text}",
        f"  {size:<{width - 2}} {picture(case_from(failure['case']))}",
        *([f"  {'not reduced':<{width - 2}} further: {failure['error']}"] if failure.get("error") else []),
        f"  {'replay':<{width - 2}} {replay_command(failure, replayed)}",
    ]


def replay_command(failure: dict[str, Any], replayed: str) -> str:
    """The command by the case's id, or by its text where its file could not be written.

    Args:
        replayed: the value of --impl and the flags after it.
    """
    saved = not failure.get("file", "").startswith(NOT_SAVED)
    case = failure["id"] if saved else shlex.quote(case_from(failure["case"]).text)
    return f"moe-conformance replay {case} --impl {replayed}"


def search_lines(searched: Searched, options: Options) -> list[str]:
    """What a search found: its failures, and per function the cases kept."""
    out = []
    for failure in searched.failures:
        out += [*failure_lines(failure.record(), options.implementation), ""]
    for name, num_kept in searched.kept.items():
        scores = " ".join(f"{kind} {score:.2f}" for kind, score in searched.best.get(name, {}).items())
        reached = f"{searched.lines.get(name, 0)} lines and kernels · {num_kept} cases kept"
        unsaved = f" ({NOT_SAVED}: {searched.unsaved[name]})" if name in searched.unsaved else ""
        folder = f"{options.corpus}/{REACHED}/{name}"
        out.append(f"{name:<{INDENT}} {scores or 'no scores'} · {reached} in {folder}{unsaved}")
    counts = f"{searched.cases} cases, {searched.judged} judged · {searched.waived} waived"
    ended = f" · ended by {searched.ended_by}" if searched.ended_by else ""
    return [*out, f"{len(searched.failures)} distinct failures · {counts}{ended}"]


def picture(case: Any) -> str:
    """The case in one line: sizes by their letters, the routing map as rows of digits."""
    if case.before:
        calls = (f"{earlier_case.function}({picture(earlier_case)})" for earlier_case in case.before)
        return f"{picture(replace(case, before=()))}, after {', then '.join(calls)}"
    if case.golden or case.illegal:
        return f"golden case {case.golden}" if case.golden else f"illegal call {case.illegal}"
    letters = {"tokens": "T", "hidden": "H", "experts": "E", "topk": "K"}
    record = {name: value for name, value in case.record().items() if name not in ("schema", "function")}
    named = [name for name in letters if hasattr(case, name) and (name != "topk" or "topk" in record)]
    phrases = [" ".join(f"{letters[name]}={getattr(case, name)}" for name in named)] if named else []
    routing = record.pop("routing", None)
    remaining_fields = [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in record.items()
        if name not in (*letters, "dtype")
    ]
    if hasattr(case, "dtype"):
        phrases.append(case.dtype)
    if routing is not None:
        shown = " ".join("".join(str(mask >> e & 1) for e in range(case.experts)) for mask in routing[:12])
        phrases.append(f"routing map {shown or '(no tokens)'}{' …' if len(routing) > 12 else ''}")
    return ", ".join([*phrases, *remaining_fields]) or "(all defaults)"


def annotations(verdict: Verdict) -> list[str]:
    """Annotations for GitHub Actions, at the lines of the failing functions; empty elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    out = []
    for failure in verdict.failures:
        function = verdict.functions.get(failure["function"])
        file, _, line = function.place.rpartition(":") if function else ("", "", "")
        text = " %0A".join(failure_lines(failure, verdict.replayed))
        position = f"file={file},line={line}," if file else ""
        out.append(f"::error {position}title={failure['function']} differs::{text}")
    return out
