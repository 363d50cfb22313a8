"""moe-conformance: the command line. `run` judges an implementation; other verbs do one thing."""

import json
import math
import os
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance import sanitizing
from conformance.engine.collecting import uncollected
from conformance.engine.options import Options, Version, add_verb, flags, split_names
from conformance.usage import UsageError, check_module

KINDS_OF_MUTANTS = ("planted", "automatic", "all", "configurations")
USAGE, HARNESS, TOO_LITTLE, REGRESSION = 2, 3, 4, 5
# of one case; others 1
CODES = {"PASS": 0, "UNINFORMATIVE": 4, "NOT_OFFERED": 4, "DECLARED_UNSUPPORTED": 4, "ERROR": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (see `conformance.engine.run.verdict`)."""
    parsed = parser().parse_args(arguments)
    try:
        _check(parsed)
    except UsageError as error:
        print(f"moe-conformance: {error}", file=sys.stderr)
        return USAGE
    from conformance.engine.run import interrupt

    with interrupt.noted() if parsed.verb in (run, fuzz) else interrupt.raised():
        return _checked(parsed)


def _check(arguments: Namespace) -> None:
    """Find the user's errors before torch is imported, because that import takes seconds.

    With `--sanitize memcheck` the command is started again under the sanitizer.

    Raises:
        UsageError: an illegal value.
    """
    if "impl" in arguments:
        options = Options.parsed(arguments)
        check_module(arguments.impl)
        sanitizing.begin(options.sanitize)
    if "against" in arguments:
        check_module(arguments.against, "--against")
    if not 0 < getattr(arguments, "minutes", 1) < math.inf:
        raise UsageError(f"--minutes is {arguments.minutes}; it must be above 0")


def _checked(arguments: Namespace) -> int:
    """Run the verb; an error becomes a message and an exit code."""
    if arguments.verb in (run, fuzz, replay, minimize, speed, check_adapter, new_test, doctor):
        from conformance.engine.child import server

        server.start()  # children fork from it; it imports torch while this process does
    with uncollected():
        from conformance import catalogue as catalogue
        from conformance.core.case import CaseError
    try:
        return _verb(arguments)
    except (UsageError, CaseError) as error:
        print(f"moe-conformance: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("moe-conformance: interrupted; there is no verdict", file=sys.stderr)
        return TOO_LITTLE
    except Exception:
        traceback.print_exc()
        return HARNESS


def _verb(arguments: Namespace) -> int:
    """Run the verb. A process that is another rank than 0 under torchrun serves rank 0 instead."""
    from conformance.engine.world.torchrun import lend_rank, torchrun_rank

    world = torchrun_rank()
    if world and arguments.verb not in (run, replay, minimize):
        raise UsageError(f"this process is one of {world.ranks}, which only run, replay and minimize can be")
    if world and world.rank:
        return lend_rank(world, Options.parsed(arguments).child)
    return arguments.verb(arguments)


def parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="moe-conformance",
        allow_abbrev=False,
        description="Compare an implementation of the Mixture-of-Experts pipeline with the reference.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version of the package")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    all_flags = [flag for flag, _ in flags()]
    judging = add_verb(verbs, "run", run, "judge an implementation; ends with a verdict", *all_flags)
    text = "judge on the workers of a Ray cluster: its address, auto (one that runs here, or a new one), or local"
    judging.add_argument("--cluster", default="", metavar="ADDRESS", help=text)
    for name, verb, text in (
        ("replay", replay, "run one case and say what it does"),
        ("minimize", minimize, "find the smallest case that fails like this one"),
        ("explain", explain, "run a case's stages one by one and name the first that is wrong"),
    ):
        sanitized = ("--sanitize",) if verb is not explain else ()
        one_case = add_verb(verbs, name, verb, text, "--impl", "--device", "--corpus", "--case-seconds", *sanitized)
        one_case.add_argument("case", help="the case's id, its file, or its JSON text")
    chosen = ("--impl", "--device", "--jobs", "--corpus", "--case-seconds", "--waivers")
    searching = add_verb(verbs, "fuzz", fuzz, "search for failing cases for some minutes", *chosen)
    text = "functions to search, separated by commas (default: all that are offered, in equal shares of the time)"
    searching.add_argument("--function", default="", help=text)
    searching.add_argument("--minutes", type=float, default=5.0, help="time of the search (default: 5)")
    text = "seed of the search (default: 0)"
    searching.add_argument("--seed", "--run-seed", dest="run_seed", type=int, default=0, metavar="N", help=text)
    shards = add_verb(verbs, "merge", merge, "make one verdict of the JSON reports of all shards", "--report")
    shards.add_argument("reports", nargs="+", metavar="REPORT", help="a report of each shard")
    two = add_verb(verbs, "compare", compare, "show what differs between two JSON reports")
    two.add_argument("old", help="the earlier report")
    two.add_argument("new", help="the later one")
    text = "list the functions, their laws, illegal calls and golden cases, and the profiles"
    listed = add_verb(verbs, "list", list_, text)
    text = "list these functions alone, separated by commas, also with the sizes of their covering arrays"
    listed.add_argument("--function", default="", help=text)
    add_verb(verbs, "doctor", doctor, "say what this machine has and whether the suite works on it")
    add_verb(
        verbs, "check-adapter", check_adapter, "say what a namespace offers and what is missing", "--impl", "--device"
    )
    new = add_verb(verbs, "new-adapter", new_adapter, "write the start of an adapter, NAME.py, in this folder")
    new.add_argument("name", metavar="NAME", help="the module's name, such as my_adapter")
    text = "functions to write stubs of, separated by commas (default: a whole example)"
    new.add_argument("--function", default="", help=text)
    text = "write test_NAMESPACE.py in this folder: hypothesis tests of the functions that the namespace offers"
    tests = add_verb(verbs, "new-test", new_test, text, "--impl", "--device")
    tests.add_argument("--function", default="", help="functions to test, separated by commas (default: all)")
    _add_more(verbs)
    return parser


def _add_more(verbs: Any) -> None:
    """Verbs for other programs, and for work on the suite and on `moe_fast`."""
    text = "write a function's cases, with their inputs, results and limits, as safetensors and JSON"
    written = add_verb(verbs, "export", export, text, "--profile")
    written.add_argument("folder", metavar="FOLDER", help="where FUNCTION.safetensors and FUNCTION.json are written")
    text = "functions to export, separated by commas, a pair of files for each"
    written.add_argument("--function", required=True, help=text)
    text = "time right results beside another implementation's and the memory's speed, and compare with earlier ratios"
    chosen = ("--impl", "--device", "--corpus", "--case-seconds", "--function", "--report", "--baseline")
    raced = add_verb(verbs, "speed", speed, text, *chosen)
    text = "ids, files or JSON texts (default: a case of a model's size for each function that is offered)"
    raced.add_argument("case", nargs="*", metavar="CASE", help=text)
    raced.add_argument("--against", default="", metavar="MODULE", help="the rival, such as moe_fast (default: none)")
    text = "time moe_fast beside its peers (in a checkout, on a GPU), and compare the ratios with earlier ones"
    timing = add_verb(verbs, "bench", bench, text)
    timing.add_argument("--only", default="", help="names of benchmarks, separated by commas (default: all)")
    timing.add_argument("--report", default="", metavar="FILE", help="write all figures to this JSON file")
    text = "an earlier --report: exit code 5 if a ratio fell by more than 5 %%"
    timing.add_argument("--baseline", default="", metavar="FILE", help=text)
    text = "plant defects and count how many the suite finds"
    planted = add_verb(verbs, "mutants", mutants, text, "--impl", "--run-seed", "--jobs", "--report")
    kinds = "listed defects, those made from the source, both, or a fault in each configuration of a kernel (on a GPU)"
    planted.add_argument("--kind", choices=KINDS_OF_MUTANTS, default="planted", help=kinds)
    planted.add_argument("--sample", type=int, default=0, help="number of automatic ones, spread over all of them")
    text = "only the cases of these functions, separated by commas, and the automatic mutants that they reach"
    planted.add_argument("--function", default="", help=text)
    planted.add_argument("--only", default="", help="only mutants whose name contains this")
    text = "use the cases of a gate on one GPU; on a CPU without the laws that need a GPU"
    planted.add_argument("--one-gpu", action="store_true", help=text)
    text = "a mutant's time limit in seconds; what cases are left then do not run (default: no limit)"
    planted.add_argument("--mutant-seconds", type=float, default=math.inf, help=text)


def run(arguments: Namespace) -> int:
    """Judge the implementation, print the verdict and write the reports."""
    from conformance.engine.run.cluster import judge_on
    from conformance.engine.run.session import judge
    from conformance.report import conclude

    options = Options.parsed(arguments)
    verdict = judge_on(options, arguments.cluster) if arguments.cluster else judge(options)
    return conclude(verdict, options.report)


def fuzz(arguments: Namespace) -> int:
    """Exit code 0 if nothing was found, 1 with the smallest case of each failure."""
    from conformance.engine.run.search import fuzz as search
    from conformance.report.delivery import show
    from conformance.report.terminal import search_lines

    options = Options.parsed(arguments)
    searched = search(options, arguments.minutes)
    show(search_lines(searched, options))
    return searched.exit_code


def replay(arguments: Namespace) -> int:
    """Exit code 0 if the case passes, 1 if it fails, 4 if it gives no verdict."""
    from conformance.engine.run.corpus import find
    from conformance.engine.run.explain import told
    from conformance.engine.run.pool import Pool
    from conformance.report.terminal import picture

    options = Options.parsed(arguments)
    case = find(arguments.case, Path(options.corpus))
    with Pool(options.child, case_seconds=options.case_seconds) as pool:
        pool.start()
        outcome = pool.run_alone(case)
    print(f"{case.function} {case.id}: {picture(case)}")
    print(told(outcome))
    print(f"case: {case.text}")
    return CODES.get(outcome.status, 1)


def explain(arguments: Namespace) -> int:
    """Exit code 0 if nothing is wrong, 1 if the case or a stage is, 4 without a verdict."""
    from conformance.engine.run.corpus import find
    from conformance.engine.run.explain import explain as explained
    from conformance.engine.run.pool import Pool

    options = Options.parsed(arguments)
    with Pool(options.child, case_seconds=options.case_seconds) as pool:
        pool.start()
        explanation = explained(find(arguments.case, Path(options.corpus)), pool)
    print("\n".join(explanation.lines()))
    return 1 if explanation.is_wrong else CODES.get(explanation.case.status, 1)


def minimize(arguments: Namespace) -> int:
    """Exit code 1 with the smallest case that fails.

    A case that does not fail gives the exit code that `replay` gives.
    """
    from conformance.engine.run import corpus
    from conformance.engine.run.failure import Failure
    from conformance.engine.run.reduction import reduce
    from conformance.engine.run.session import FAILING, Session
    from conformance.report.terminal import failure_lines

    options = Options.parsed(arguments)
    case = corpus.find(arguments.case, Path(options.corpus))
    with tempfile.TemporaryDirectory() as folder, closing(Session(options, Path(folder))) as session:
        session.start()
        outcome = session.pool.run_alone(case)
        if outcome.status not in FAILING:
            print(f"{case.function} {case.id}: {outcome.status} {outcome.reason}; there is nothing to minimize")
            return CODES.get(outcome.status, 1)
        reduced = reduce(case, outcome, session.attempts(case), seconds=120)
    finding = {name: getattr(reduced.outcome, name) for name in ("status", "finding")}
    finding = {"implementation": options.implementation} | finding
    saved_path = corpus.try_save(Path(options.corpus), reduced.case, finding)
    failure = Failure(reduced.case, reduced.outcome, "", reduced.attempts, reduced.finished, reduced.error, saved_path)
    print("\n".join(failure_lines(failure.record(), options.replayed)))
    saved = saved_path if saved_path.startswith(corpus.NOT_SAVED) else f"saved as {saved_path}"
    print(f"{saved} after {reduced.attempts} attempts")
    return 1


def merge(arguments: Namespace) -> int:
    """The exit code of the whole run."""
    from conformance.engine.run.merging import merge as merged
    from conformance.engine.run.verdict import read_baseline
    from conformance.report import conclude
    from conformance.usage import check_report

    for path in arguments.report:
        check_report(path)
    verdict = merged([read_baseline(Path(path), "merge") for path in arguments.reports])
    return conclude(verdict, arguments.report)


def compare(arguments: Namespace) -> int:
    """Exit code 0 if nothing became worse, else 5."""
    from conformance.engine.run.verdict import read_baseline
    from conformance.report.compare import compared

    reports = [read_baseline(Path(path), "compare") for path in (arguments.old, arguments.new)]
    lines, worse = compared(*reports)
    print("\n".join(lines))
    return REGRESSION if worse else 0


def list_(arguments: Namespace) -> int:
    """Print the suite's contents."""
    from conformance.report.contents import contents

    print("\n".join(contents(split_names(arguments.function))))
    return 0


def doctor(arguments: Namespace) -> int:
    """Exit code 0 if the suite can run here, 3 if not."""
    from conformance.report.doctor import checkup

    findings = list(checkup())
    for fine, text in findings:
        print(f"{'ok  ' if fine else 'FAIL'}  {text}")
    return 0 if all(fine for fine, _ in findings) else HARNESS


def check_adapter(arguments: Namespace) -> int:
    """Exit code 0 if the namespace offers anything that can be judged, else 4."""
    from conformance.engine.run.pool import Pool
    from conformance.report.adapter import described

    with Pool(Options.parsed(arguments).child) as pool:
        offered, text = described(pool.start())
    print(text)
    return 0 if offered else TOO_LITTLE


def new_adapter(arguments: Namespace) -> int:
    """Write a file to fill in."""
    from conformance.report.new_adapter import write_adapter

    path = write_adapter(arguments.name, split_names(arguments.function))
    print(f"wrote {path}; call your kernels in it, then: moe-conformance check-adapter --impl {path.stem}")
    return 0


def new_test(arguments: Namespace) -> int:
    """Write tests of the namespace's functions."""
    from conformance.engine.run.pool import Pool
    from conformance.report.new_test import write_test

    options = Options.parsed(arguments)
    with Pool(options.child) as pool:
        offered = [name for name, about in pool.start()["functions"].items() if about["offered"]]
    path = write_test(options.implementation, offered, split_names(arguments.function))
    print(f"wrote {path}; run it: pytest {path}")
    return 0


def export(arguments: Namespace) -> int:
    """Write the cases as data, and print what the rules in the files do not state."""
    from conformance.report.vectors import export as exported

    for name in split_names(arguments.function):
        vectors = exported(name, Path(arguments.folder), arguments.profile)
        print(f"{name}: {len(vectors.cases)} cases, {len(vectors.tensors)} tensors")
        for what, reasons in (("cases left out", vectors.left_out), ("outputs without a rule", vectors.unstated)):
            print("".join(f"  {count} {what}: {reason}\n" for reason, count in reasons.items()), end="")
    return 0


def speed(arguments: Namespace) -> int:
    """Exit code 0, 1 if a result is wrong, 4 if nothing was timed, 5 if a ratio fell."""
    from conformance.report.speed import speed as timed

    return timed(Options.parsed(arguments), arguments.against, arguments.case)


def bench(arguments: Namespace) -> int:
    """Exit code 0, 1 if a benchmark found a wrong result, 5 if a ratio fell."""
    from conformance.report.bench import bench as benchmarks

    return benchmarks(split_names(arguments.only), arguments.report, arguments.baseline)


def mutants(arguments: Namespace) -> int:
    """Exit code 0 if every mutant was killed, 1 if some survived."""
    from conformance.engine.run.session import default_jobs
    from conformance.mutants.configurations import plant_in_configurations
    from conformance.mutants.score import score_mutants
    from conformance.report.delivery import deliver

    options = Options.parsed(arguments)
    if refused := [path for path in options.report if Path(path).suffix != ".json"]:
        raise UsageError(f"--report {refused[0]}: the report of mutants is a .json file")
    if arguments.kind == "configurations":
        return plant_in_configurations(options, options.jobs or default_jobs(options))
    jobs = options.jobs or default_jobs(replace(options, device="cpu"))
    results = score_mutants(
        *(options.implementation, arguments.kind, options.seed, jobs, arguments.sample, arguments.only),
        functions=split_names(arguments.function),
        one_gpu=arguments.one_gpu,
        seconds=arguments.mutant_seconds,
    )
    text = json.dumps([result.record() for result in results], indent=1) + "\n"
    return deliver(0 if all(result.killed for result in results) else 1, options.report, lambda path: text)


if __name__ == "__main__":
    sys.exit(main())
