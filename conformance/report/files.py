"""The verdict as junit XML and as markdown."""

import re
from xml.etree import ElementTree

from conformance.core.case import case_from
from conformance.engine.run.launched import by_kernel, unjudged
from conformance.engine.run.verdict import NOT_CHOSEN, UNCHANGED, UNTOUCHED, FunctionVerdict, Verdict
from conformance.report.terminal import ended, failure_lines, in_words, picture, replay_command, scope_lines
from conformance.report.tuned import tuned_lines

FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0


def junit(verdict: Verdict) -> str:
    """One test case per function, with the text of its failures; those that are not offered or not
    chosen are a property of the suite.
    """
    chosen_functions = {name: f for name, f in verdict.functions.items() if f.status not in ("not offered", NOT_CHOSEN)}
    broken = sum(f.status not in ("conformant", *UNTOUCHED) for f in verdict.functions.values())
    skipped = sum(f.status in UNTOUCHED for f in chosen_functions.values())
    numbers = {"tests": len(chosen_functions), "failures": broken, "skipped": skipped, "errors": len(verdict.problems)}
    suite = ElementTree.Element(
        "testsuite",
        {"name": "moe-conformance", "time": f"{verdict.seconds:.3f}", **{k: str(v) for k, v in numbers.items()}},
    )
    properties = ElementTree.SubElement(suite, "properties")
    for status in ("not offered", NOT_CHOSEN):
        names = ", ".join(name for name, f in verdict.functions.items() if f.status == status)
        ElementTree.SubElement(properties, "property", name=in_words(status, verdict), value=names)
    for name, function in chosen_functions.items():
        test = ElementTree.SubElement(suite, "testcase", classname=f"conformance.{verdict.implementation}", name=name)
        if function.status in UNTOUCHED:
            ElementTree.SubElement(test, "skipped", message=in_words(function.status, verdict))
        elif function.status != "conformant":
            failures = [failure for failure in verdict.failures if failure["function"] == name]
            text = "\n\n".join("\n".join(failure_lines(failure, verdict.replayed)) for failure in failures)
            ElementTree.SubElement(test, "failure", message=f"{function.status}: {function.counts}").text = text
    if verdict.problems:
        ElementTree.SubElement(suite, "system-err").text = "\n".join(verdict.problems)
    ElementTree.indent(suite)
    text = FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", ElementTree.tostring(suite, encoding="unicode"))
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


def markdown(verdict: Verdict) -> str:
    """A table of the functions, then a section per failure."""
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    extent = f"{_judged(verdict)}{verdict.cases} cases in {verdict.seconds:.0f} s{ended(verdict)}"
    extent += f", profile {verdict.profile}, seed {verdict.seed}"
    out = [f"# {verdict.verdict}: `{verdict.implementation}`", "", f"{extent}, on {verdict.device}; {versions}.", ""]
    out += [text for line in scope_lines(verdict) + tuned_lines(verdict) for text in (f"{line}.", "")]
    out += ["| function | verdict | cases | by status | without | between ranks |", "|---|---|--:|---|---|---|"]
    for name, function in verdict.functions.items():
        counts = ", ".join(f"{count} {status}" for status, count in function.counts.items())
        status = ", ".join(filter(None, (_status(function, verdict), function.note)))
        between = ", ".join(f"{count} {transport}" for transport, count in function.transports.items())
        cells = (f"`{name}`", status, str(function.cases), counts, ", ".join(function.without), between)
        out.append(f"| {' | '.join(cells)} |")
    for failure in verdict.failures:
        finding = failure["finding"]
        text = f"{failure['status']}: {failure['reason']}"
        if finding:
            text = f"`{finding['output']}` ({finding['check']}): {finding['message']}"
        smallest = f"Smallest case: {picture(case_from(failure['case']))}"
        out += ["", f"## `{failure['function']}`", "", text, "", smallest, ""]
        out += ["```", replay_command(failure, verdict.replayed), "```"]
    if verdict.configurations:
        out += ["", "## Configurations of kernels", "", *_configurations(verdict)]
    if verdict.problems:
        out += ["", "## Problems", "", *(f"- {problem}" for problem in verdict.problems)]
    return "\n".join(out) + "\n"


def _configurations(verdict: Verdict) -> list[str]:
    """A table with a row per kernel, and a line for each configuration that no case judged."""
    rows = [
        f"| `{kernel}` | {num_configurations} | {judged} | {cases} |"
        for kernel, (num_configurations, judged, cases) in by_kernel(verdict.configurations).items()
    ]
    unjudged_lines = [f"- not judged: {configuration}" for configuration in unjudged(verdict.configurations)]
    table = ["| kernel | configurations | judged | by cases |", "|---|--:|--:|--:|", *rows]
    return [*table, *(["", *unjudged_lines] if unjudged_lines else [])]


def _judged(verdict: Verdict) -> str:
    """In a run with --since, the numbers of functions that were judged and that were not."""
    if not verdict.since:
        return ""
    unchanged = sum(f.status == UNCHANGED for f in verdict.functions.values())
    judged = sum(f.status not in UNTOUCHED for f in verdict.functions.values())
    return f"{judged} functions judged, {unchanged} unchanged since `{verdict.since}`; "


def _status(function: FunctionVerdict, verdict: Verdict) -> str:
    """The status, with what --since says about the function."""
    words = in_words(function.status, verdict).removesuffix(":")
    return f"{words}; {function.reason}" if function.reason else words
