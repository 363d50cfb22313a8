"""The verdict as one self-contained page: what was covered, what failed, what it cost."""

import html
import json
from importlib.resources import files
from typing import Any

from conformance.core.case import case_from
from conformance.engine.run.verdict import UNTOUCHED, FunctionVerdict, Verdict
from conformance.report.terminal import ended, in_words, picture
from conformance.texts import failure_text

CELL = 14  # pixels of a cell of a routing map
MOST_TOKENS, MOST_EXPERTS = 64, 64  # the most rows and columns of a drawn routing map
# what a function without cases has covered
NOTHING: dict[str, Any] = {"fields": {}, "seconds": 0.0, "kernels": 0, "scores": {}}
HIGH = 24  # pixels of a histogram
escape = html.escape


def page(verdict: Verdict) -> str:
    """HTML with its style, its script and its data, which loads nothing from elsewhere."""
    judged = {name: f for name, f in verdict.functions.items() if f.status not in UNTOUCHED}
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    facts = [
        f"{verdict.cases:,} cases in {verdict.seconds:.0f} s{ended(verdict)}",
        f"profile {verdict.profile}, seed {verdict.seed}",
        *(x for x in (verdict.device, versions) if x),
        *([f"{verdict.kernels_compiled:,} kernels compiled"] if verdict.kernels_compiled else []),
    ]
    kind = "good" if verdict.exit_code == 0 else "bad" if verdict.exit_code == 1 else "open"
    body = [
        f'<header class="{kind}"><h1>{escape(verdict.verdict)}</h1>',
        f"<p><code>{escape(verdict.implementation)}</code></p><p>{escape(' · '.join(facts))}</p></header>",
        *(f'<p class="problem">{escape(problem)}</p>' for problem in verdict.problems),
        *(_failure(failure, verdict) for failure in verdict.failures),
        "<h2>Functions and settings</h2>",
        "<p>A square is a value of a setting; the darker, the more cases were judged with it. Red: "
        "some were wrong. A click on a function shows pairs of settings. Errors: the passing cases by "
        "their largest error, from that of a correctly rounded result (left) to the limit (right), "
        "higher for twice as many.</p>",
        "<table><thead><tr><th>function<th>verdict<th>cases<th>seconds<th>kernels<th>errors<th>settings</thead><tbody>",
        *(_row(name, function, verdict) for name, function in judged.items()),
        "</tbody></table>",
        *_untouched(verdict),
    ]
    pairs = {name: verdict.coverage[name]["pairs"] for name in judged if name in verdict.coverage}
    data = json.dumps(pairs, separators=(",", ":")).replace("<", "\\u003c")
    style, script = ((files("conformance.report") / name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = escape(f"{verdict.verdict} · {verdict.implementation}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style>\n'
        + "\n".join(body)
        + f'\n<script type="application/json" id="pairs">{data}</script><script>{script}</script></html>\n'
    )


def _row(name: str, function: FunctionVerdict, verdict: Verdict) -> str:
    """A function: its verdict, its costs, and a square per value of each setting."""
    covered: dict[str, Any] = verdict.coverage.get(name, NOTHING)
    strips = "".join(_strip(field, values) for field, values in covered["fields"].items())
    status = ", ".join(filter(None, (function.status, function.note, function.reason)))
    kind = "good" if function.status == "conformant" else "bad"
    counts = ", ".join(f"{count} {status}" for status, count in function.counts.items())
    return (
        f'<tr class="{kind}" data-function="{escape(name)}"><td><button>{escape(name)}</button>'
        f'<td>{escape(status)}<td class="n" title="{escape(counts)}">{function.cases:,}'
        f'<td class="n">{covered["seconds"]:.1f}<td class="n">{covered["kernels"]}'
        f"<td>{''.join(_histogram(kind, bins) for kind, bins in covered['scores'].items())}<td>{strips}"
    )


def _histogram(kind: str, bins: list[int]) -> str:
    """The cases by their score, from correctly rounded at the left to the limit at the right."""
    most, width = max(bins), 5
    bars = "".join(
        f'<rect x="{i * width}" y="{HIGH * (1 - _depth(cases, most)):.1f}" width="{width - 1}" height="{HIGH}">'
        f"<title>{kind} {i / len(bins):.2f} to {(i + 1) / len(bins):.2f} of the limit: {cases} cases</title></rect>"
        for i, cases in enumerate(bins)
        if cases
    )
    size = f'width="{width * len(bins)}" height="{HIGH}"'
    return f'<figure class="scores"><figcaption>{escape(kind)}</figcaption><svg {size} role="img">{bars}</svg></figure>'


def _strip(field: str, values: dict[str, list[int]]) -> str:
    """The values of a setting as squares."""
    most = max(cases for cases, _ in values.values())
    squares = "".join(
        f'<i class="{"w" if failing else ""}" style="--d:{_depth(cases, most):.2f}" '
        f'title="{escape(f"{field} = {value}: {cases} cases" + (f", {failing} wrong" if failing else ""))}"></i>'
        for value, (cases, failing) in values.items()
    )
    return f'<span class="strip" title="{escape(field)}"><b>{escape(field)}</b>{squares}</span>'


def _depth(cases: int, most: int) -> float:
    """A depth of colour from 0.15 to 1, by the logarithm: one case shows beside thousands."""
    return 0.15 + 0.85 * (cases.bit_length() / max(most.bit_length(), 1))


def _untouched(verdict: Verdict) -> list[str]:
    """Functions without a verdict, in one line per reason."""
    out = []
    for status in UNTOUCHED:
        names = ", ".join(name for name, function in verdict.functions.items() if function.status == status)
        out += [f'<p class="rest"><b>{escape(in_words(status, verdict))}</b> {escape(names)}</p>'] if names else []
    return out


def _failure(failure: dict[str, Any], verdict: Verdict) -> str:
    """A failure: the finding, its smallest case as text and picture, the command to replay it."""
    case = case_from(failure["case"])
    text = failure_text(failure["finding"], f"{failure['status']}: {failure['reason']}")
    size = "Smallest case" if failure["smallest"] else "Failing case"
    command = f"moe-conformance replay '{case.text}' --impl {verdict.replayed}"
    return (
        f'<section class="failure"><h3>{escape(failure["function"])}</h3><p>{escape(text)}</p>'
        f"<p>{size}: {escape(picture(case))}</p>{routing_map(case)}<pre>{escape(command)}</pre></section>"
    )


def routing_map(case: Any) -> str:
    """The routing map of a case as SVG, tokens by experts; empty for a case without one."""
    masks = getattr(case, "routing", None)
    experts = getattr(case, "experts", 0)
    if not masks or not experts or isinstance(masks, str):
        return ""
    rows, columns = min(len(masks), MOST_TOKENS), min(experts, MOST_EXPERTS)
    squares = "".join(
        f'<rect x="{e * CELL}" y="{t * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
        f'class="{"on" if masks[t] >> e & 1 else "off"}"><title>token {t}, expert {e}</title></rect>'
        for t in range(rows)
        for e in range(columns)
    )
    is_whole = (rows, columns) == (len(masks), experts)
    note = "" if is_whole else f"<p>The first {rows} tokens and {columns} experts.</p>"
    size = f'width="{columns * CELL}" height="{rows * CELL}"'
    return f'<figure><svg class="map" {size} role="img" aria-label="routing map">{squares}</svg>{note}</figure>'
