"""Run all oracles, each in an environment of its own, and write their section of
docs/second-opinions.md.

python -m evidence.oracles           # all
python -m evidence.oracles NAME      # one, in this environment: its comparisons as JSON
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.results import save
from conformance.peers import second_opinions
from evidence.environments import Unavailable, environment, install, revision, run, source
from evidence.oracles.catalogue import Oracle, oracles
from evidence.oracles.compare import Comparison, merged
from evidence.oracles.page import Result, page, record


def here(oracle: Oracle, folder: Path | None) -> str:
    """The comparisons as JSON, after whatever the package prints."""
    warnings.simplefilter("ignore")
    return json.dumps([comparison.record() for comparison in merged(list(oracle.comparisons(folder)))])


def elsewhere(oracle: Oracle) -> Result:
    """The oracle's comparisons, or why there are none."""
    against = ", ".join(package.replace("==", " ") for package in oracle.packages)
    try:
        python = environment(oracle.name)
        install(python, *oracle.packages, dependencies=oracle.dependencies)
        folder = source(oracle.source) if oracle.source else None
        if oracle.source and folder:
            against = f"{oracle.source} at {revision(folder)}"
        done = run(python, "-m", "evidence.oracles", oracle.name)
        if done.returncode:
            raise Unavailable(f"it fails: {done.stderr.strip().splitlines()[-1]}")
    except Unavailable as why:
        return Result(oracle.peer, against, [], str(why))
    records: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return Result(oracle.peer, against or "torch, as installed", [Comparison.of(record) for record in records])


def main(arguments: list[str]) -> int:
    """0 if every difference is explained."""
    if arguments:
        oracle = oracles()[arguments[0]]
        print("\n" + here(oracle, source(oracle.source) if oracle.source else None))
        return 0
    results = []
    for oracle in oracles().values():
        results.append(elsewhere(oracle))
        print(results[-1].line, flush=True)
    second_opinions.replace_section(page(results))
    save("oracles", record(results), ["make oracles"])
    return int(any(result.unexplained for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
