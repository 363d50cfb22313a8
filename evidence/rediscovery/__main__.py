"""Find known defects again, each release in an environment that is kept; writes
docs/rediscovery.md.
"""

import sys
from collections.abc import Callable

from evidence.environments import ROOT, Unavailable, environment, install, run
from evidence.rediscovery.page import Found, page
from evidence.rediscovery.rows import ROWS, Row


def of_release(row: Row, release: str) -> str:
    """What the row's check finds in that release; "" if nothing.

    Raises:
        Unavailable: the release cannot be installed, or the check cannot run on it.
    """
    python = environment(f"{row.package}-{release}")
    install(python, f"{row.package}=={release}")
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    variables = {"TE_WHEEL": str(packages), "TRITON_INTERPRET": "1"}  # read by the kernels on a CPU
    done = run(python, "-m", "evidence.rediscovery.checks", str(row.check), **variables)
    if done.returncode < 0:
        return f"the process ends by signal {-done.returncode}"
    line = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not line.startswith("FOUND"):
        raise Unavailable(f"the check does not run on {release}: {(done.stderr.splitlines() or ['no error'])[-1]}")
    return line.removeprefix("FOUND").strip()


def found(row: Row, of: Callable[[Row, str], str] = of_release) -> Found:
    """Both releases of a row, judged."""
    if row.check is None:
        return Found(row, "not run", row.why)
    try:
        wrong = of(row, row.broken)
    except Unavailable as why:
        return Found(row, "not run", f"{why}.")
    if not wrong:
        return Found(row, "not shown", f"{row.broken} passes the contract. {row.why}".strip())
    if row.mended is None:
        return Found(row, "half", f"{row.broken} fails. No release has mended it.", wrong)
    try:
        if not of(row, row.mended):
            return Found(row, "found again", f"{row.mended} passes.", wrong)
        if row.mended_later and not of(row, row.mended_later):
            text = f"{row.mended}, said to have mended it, fails too; {row.mended_later} passes."
            return Found(row, "found again", text, wrong)
    except Unavailable as why:
        return Found(row, "half", f"{row.broken} fails. {why}.", wrong)
    return Found(row, "half", f"{row.broken} fails, and {row.mended} too.", wrong)


def main() -> int:
    """0 if some row was found again."""
    results = []
    for row in ROWS:
        results.append(found(row))
        print(f"{row.package} {row.bug}: {results[-1].outcome}. {results[-1].text}", flush=True)
    (ROOT / "docs" / "rediscovery.md").write_text(page(results))
    return int(not any(result.outcome == "found again" for result in results))


if __name__ == "__main__":
    sys.exit(main())
