"""Compares two reports: what became worse, what became better, and what it costs."""

from typing import Any

from conformance.core.case import case_from
from conformance.engine.run.verdict import effective
from conformance.report.terminal import picture
from conformance.texts import failure_text

DRIFT = 1.25  # the ratio of seconds or cases up to which a change is noise
NEARER = 2  # bins of a histogram of scores, below which a change is noise
Report = dict[str, Any]


def compared(old: Report, new: Report) -> tuple[list[str], bool]:
    """The differences as lines, and whether anything became worse.

    Worse are a new failure, and a function that was conformant and is not. A failure is the same if
    its function, output, check and status are, and both are NaN or neither.
    """
    worse = _statuses(old, new) + [f"new        {_failure(x)}" for x in _only(new, old)]
    better = [f"fixed      {_failure(x)}" for x in _only(old, new)]
    lines = [f"{old['verdict']} → {new['verdict']}   {old['implementation']} → {new['implementation']}"]
    differing = [name for name in ("profile", "seed", "device", "versions") if old.get(name) != new.get(name)]
    lines += [f"other {name}: {old.get(name)} → {new.get(name)}" for name in differing]
    lines += ["", *worse, *better, *_drift(old, new)]
    return lines, bool(worse)


def _statuses(old: Report, new: Report) -> list[str]:
    """Functions that were conformant in the old report and are not in the new one."""
    old_functions, new_functions = ({k: effective(v) for k, v in report["functions"].items()} for report in (old, new))
    return [
        f"worse      {name} was conformant and is {new_functions.get(name, {}).get('status', 'not offered')}"
        for name, function in old_functions.items()
        if function.get("status") == "conformant" and new_functions.get(name, {}).get("status") != "conformant"
    ]


def _only(report: Report, second_report: Report) -> list[dict[str, Any]]:
    known_kinds = {_kind(failure) for failure in second_report["failures"]}
    return [failure for failure in report["failures"] if _kind(failure) not in known_kinds]


def _kind(failure: dict[str, Any]) -> tuple[Any, ...]:
    finding = failure["finding"] or {}
    identity = finding.get("output"), finding.get("check"), bool(finding.get("nan"))
    return failure["function"], *identity, failure["status"]


def _failure(failure: dict[str, Any]) -> str:
    text = failure_text(failure["finding"], failure["reason"])
    return f"{failure['function']}: {failure['status']} {text} ({picture(case_from(failure['case']))})"


def _drift(old: Report, new: Report) -> list[str]:
    """Changes of the numbers of cases and kernels, of time, and of what is unsupported."""
    out = [f"run        {old['cases']} → {new['cases']} cases, {old['seconds']:.0f} → {new['seconds']:.0f} s"]
    if old["kernels_compiled"] or new["kernels_compiled"]:
        out[0] += f", {old['kernels_compiled']} → {new['kernels_compiled']} kernels"
    for name in new["functions"]:
        old_function, new_function = (effective(report["functions"].get(name, {})) for report in (old, new))
        if not old_function.get("cases") or not new_function.get("cases"):
            continue
        differences = []
        if _differs(old_function["cases"], new_function["cases"]):
            differences.append(f"{old_function['cases']} → {new_function['cases']} cases")
        shares = [f["counts"].get("DECLARED_UNSUPPORTED", 0) / f["cases"] for f in (old_function, new_function)]
        if abs(shares[0] - shares[1]) > 0.02:
            differences.append(f"{shares[0]:.0%} → {shares[1]:.0%} declared unsupported")
        costs = [report.get("coverage", {}).get(name) for report in (old, new)]
        if all(costs) and _differs(*(cost["seconds"] for cost in costs)):
            differences.append(f"{costs[0]['seconds']:.1f} → {costs[1]['seconds']:.1f} s")
        lost = sorted(_values(costs[0]) - _values(costs[1])) if all(costs) else []
        differences += [f"no longer covered: {', '.join(lost)}"] if lost else []
        differences += _errors(*costs) if all(costs) else []
        out += [f"{name:<10} {'; '.join(differences)}"] if differences else []
    return out


def _errors(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Kinds of errors whose largest has moved, as shares of the limit."""
    out = []
    for kind, bins in new.get("scores", {}).items():
        old_error, new_error = (_end_of_last_bin(x.get("scores", {}).get(kind, [])) for x in (old, new))
        if old_error and abs(new_error - old_error) >= NEARER:
            out.append(f"largest {kind} {old_error / len(bins):.2f} → {new_error / len(bins):.2f} of its limit")
    return out


def _end_of_last_bin(bins: list[int]) -> int:
    """The upper end of the last bin with a case; 0 without one."""
    return max((i + 1 for i, cases in enumerate(bins) if cases), default=0)


def _differs(old: float, new: float) -> bool:
    return max(old, new) > DRIFT * max(min(old, new), 1e-9) and abs(old - new) > 1


def _values(covered: dict[str, Any]) -> set[str]:
    return {f"{field}={value}" for field, values in covered["fields"].items() for value in values}
