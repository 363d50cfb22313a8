"""Find known defects again, each release in an environment that is kept; write their section of
docs/second-opinions.md.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from conformance.peers import second_opinions
from evidence.environments import Unavailable, environment, install, install_source, revision, run, source
from evidence.rediscovery.on_a_gpu import devices, finding_of, kept
from evidence.rediscovery.page import Found, page
from evidence.rediscovery.rows import MAIN, MEGATRON, REPOSITORY, ROWS, Row


def of_release(row: Row, release: str) -> str:
    """What the row's check finds in that release; "" if nothing.

    Raises:
        Unavailable: the release cannot be installed, or the check cannot run on it.
    """
    if row.on_a_gpu:
        return kept(release, str(row.check))
    python = environment(f"{row.package}-{release}")
    installed(python, row.package, release)
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    variables = {"TE_WHEEL": str(packages), "TRITON_INTERPRET": "1"}  # read by the kernels on a CPU
    done = run(python, "-m", "evidence.rediscovery.checks", str(row.check), **variables)
    try:
        return finding_of(done)
    except Unavailable as why:
        raise Unavailable(f"the check does not run on {release}: {why}") from why


def installed(python: Path, package: str, release: str) -> None:
    """The release in that environment: of the index, or of the repository where the index lacks it.

    Raises:
        Unavailable: neither has it.
    """
    try:
        if release == MAIN:
            raise Unavailable("an index has releases")
        install(python, f"{package}=={release}")
    except Unavailable:
        if package != MEGATRON:
            raise
        install_source(python, REPOSITORY, "HEAD" if release == MAIN else f"core_v{release}", "megatron/core")


def found(row: Row, of: Callable[[Row, str], str] = of_release) -> Found:
    """Both releases of a row, judged."""
    if row.check is None:
        return Found(row, "not run", row.why)
    try:
        failure = of(row, row.broken)
    except Unavailable as why:
        return Found(row, "not run", f"{why}.")
    if not failure:
        return Found(row, "not shown", f"{row.broken} passes the contract. {row.why}".strip())
    if row.mended is None:
        return Found(row, "half", "No release has mended it.", failure)
    try:
        if not of(row, row.mended):
            return Found(row, "found again", "", failure)
        if row.mended_later and not of(row, row.mended_later):
            text = f"{row.mended}, said to have mended it, fails too; {row.mended_later} passes."
            return Found(row, "found again", text, failure)
    except Unavailable as why:
        return Found(row, "half", f"{row.broken} fails. {why}.", failure)
    return Found(row, "half", f"{row.broken} fails, and {row.mended} too.", failure)


def places() -> list[str]:
    """The revision that stands for `main`, and the machines of the kept runs."""
    on_a_gpu = [f"On a GPU: {devices()}"] if devices() else []
    try:
        return [f"{REPOSITORY}, {MAIN}: {revision(source(REPOSITORY))}", *on_a_gpu]
    except Unavailable:
        return on_a_gpu


def main() -> int:
    """0 if some row was found again."""
    results = []
    for row in ROWS:
        results.append(found(row))
        print(f"{row.package} {row.bug}: {results[-1].outcome}. {results[-1].text}", flush=True)
    second_opinions.replace_section(page(results, places()))
    return int(not any(result.outcome == "found again" for result in results))


if __name__ == "__main__":
    sys.exit(main())
