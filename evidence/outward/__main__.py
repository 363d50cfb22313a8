"""Run the fetched test files of a folder, and write what came of them.

    python -m evidence.outward FOLDER OUT

FOLDER/manifest.json lists packages and their files:

    [{"package": "torchao", "version": "0.19.0", "folder": "torchao", "shim": "torchao",
      "files": [{"path": "test/test_a.py", "select": "not slow", "workers": 4, "seconds": 200}]}]

OUT gets summary.json (counts per file), failures.txt (each failed test and its message) and
tests.tsv (each test, its outcome and its reason).
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from evidence.environments import ROOT
from evidence.outward.modules import NOT_OFFERED

AT_ONCE = 5  # how many files at a time
SECONDS = 400  # seconds for a file
MOST_SECONDS = 460  # seconds for the whole run
COUNTS = ("passed", "failed", "not offered", "skipped", "xfailed", "not run")


def run(folder: Path, package: dict[str, Any], file: dict[str, Any], record: Path, end: float) -> dict[str, Any]:
    """Run one file under its shim; the counts by outcome, and each test's line."""
    sources = (folder / package["folder"]).resolve()
    test = sources / file["path"]
    paths = [ROOT, sources, *(sources / path for path in package.get("paths", [])), test.parent]
    variables = {
        "OUTWARD_SHIM": f"evidence.outward.{package['shim']}",
        "OUTWARD_SOURCES": str(sources),
        "OUTWARD_RECORD": str(record),
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "evidence.outward.plugin", "-p", "no:cacheprovider", "-q"]
    command += ["-c", os.devnull, "--rootdir", str(sources), "--tb=short", "-n", str(file.get("workers", 4)), str(test)]
    command += ["-k", file["select"]] if "select" in file else []
    command += ["--timeout=120"] if importlib.util.find_spec("pytest_timeout") else []
    start = time.time()
    log = record.with_suffix(".log")
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=sources, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            limit = min(file.get("seconds", SECONDS), end - start)
            ended_by = f"exit code {process.wait(max(limit, 0))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers
            ended_by = "stopped at its time limit"
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    tests = {line["test"]: line for line in lines if "test" in line}
    counts = Counter(kind(line) for line in tests.values())
    collected = max((line["collected"] for line in lines if "collected" in line), default=0)
    counts["not run"] = max(collected - len(tests), 0)
    return {
        "package": package["package"], "version": package["version"], "file": file["path"],
        "select": file.get("select", ""), "end": ended_by, "seconds": round(time.time() - start), "counts": counts,
        "tests": tests, "tail": "" if tests else log.read_text()[-2000:],
    }  # fmt: skip


def kind(line: dict[str, Any]) -> str:
    """The outcome of a test, with calls that `moe_fast` does not offer apart from other skips."""
    return "not offered" if line["outcome"] == "skipped" and NOT_OFFERED in line["text"] else str(line["outcome"])


def table(results: list[dict[str, Any]]) -> str:
    """A row per file, in Markdown."""
    rows: list[tuple[str, ...]] = [("package", "file", *COUNTS, "seconds", "end")]
    rows += [("---",) * len(rows[0])]
    for result in results:
        name = result["file"] + (f" -k '{result['select']}'" if result["select"] else "")
        rows.append(
            (
                result["package"],
                name,
                *(str(result["counts"][x]) for x in COUNTS),
                str(result["seconds"]),
                result["end"],
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write(results: list[dict[str, Any]], out: Path) -> None:
    """The three files of OUT."""
    short = [{key: value for key, value in result.items() if key != "tests"} for result in results]
    (out / "summary.json").write_text(json.dumps(short, indent=1))
    tests = [(result, line) for result in results for line in result["tests"].values()]
    with open(out / "tests.tsv", "w") as file:
        for result, line in tests:
            reason = " ".join(line["text"].split())[-300:]
            print(result["package"], line["test"], kind(line), f"{line['seconds']:.2f}", reason, sep="\t", file=file)
    with open(out / "failures.txt", "w") as file:
        for result, line in tests:
            if line["outcome"] == "failed":
                print(f"=== {result['package']} {line['test']}\n{line['text']}\n", file=file)


def main(folder: Path, out: Path) -> None:
    """Run all files, several at once, the ones with the longest limit first."""
    packages = json.loads((folder / "manifest.json").read_text())
    jobs = [(package, file) for package in packages for file in package["files"]]
    jobs.sort(key=lambda job: -job[1].get("seconds", SECONDS))
    records, end = Path(mkdtemp()), time.time() + MOST_SECONDS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(run, folder, *job, records / f"{i}.jsonl", end) for i, job in enumerate(jobs)]
        results = []
        for future in futures:
            results.append(future.result())
            write(results, out)
    print(table(sorted(results, key=lambda result: (result["package"], result["file"], result["select"]))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
