"""moe-conformance: the command line. `run` is a thin front to the pytest suite; the other verbs look at one thing each."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from conformance.plugin import OPTIONS, UsageExit

USAGE, HARNESS = 2, 3
CODES = {
    "PASS": 0,
    "UNINFORMATIVE": 4,
    "NOT_OFFERED": 4,
    "DECLARED_UNSUPPORTED": 4,
    "ERROR": 3,
}  # of one case; others 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (see `conformance.engine.run.verdict`)."""
    options = _parser().parse_args(arguments)
    from conformance.core.case import CaseError
    from conformance.engine.child.child import Settings
    from conformance.engine.world.joined import attend, joined
    from conformance.interface import UsageError

    try:
        if getattr(options, "impl", None) == "":
            raise UsageError("--impl is empty; it must be package.module or package.module:attribute")
        place = joined()
        if place and options.verb not in (run, replay, minimize):
            raise UsageError(f"this process is one of {place.ranks}, which only run, replay and minimize can be")
        if place and place.rank:
            return attend(place, Settings(options.impl, options.device))
        return options.verb(options)
    except (UsageError, CaseError) as error:
        print(f"moe-conformance: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("moe-conformance: interrupted; nothing was concluded", file=sys.stderr)
        return HARNESS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-conformance",
        allow_abbrev=False,
        description="Compare an implementation of the Mixture-of-Experts pipeline with the reference.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add(
        verbs,
        "run",
        run,
        "judge an implementation; ends with a verdict",
        *(name for name, _ in OPTIONS if name != "--replay"),
        required=("--impl",),
    )
    one_case = ("--impl", "--device", "--corpus", "--case-seconds")
    _add(verbs, "replay", replay, "run one case and say what it does", *one_case, case=True, required=("--impl",))
    _add(
        verbs,
        "minimize",
        minimize,
        "find the smallest case that fails like this one",
        *one_case,
        case=True,
        required=("--impl",),
    )
    _add(verbs, "list", list_, "list the functions, their laws, illegal calls and golden cases")
    _add(verbs, "doctor", doctor, "say what this machine has and whether the suite works on it")
    _add(
        verbs,
        "check-adapter",
        check_adapter,
        "say what of a namespace is offered and what is missing",
        "--impl",
        "--device",
        required=("--impl",),
    )
    planted = _add(
        verbs,
        "mutants",
        mutants,
        "plant defects and count how many the suite finds",
        "--impl",
        "--run-seed",
        "--jobs",
        required=("--impl",),
    )
    kinds = "listed defects, those made from the implementation's source, or both"
    planted.add_argument("--kind", choices=("planted", "automatic", "all"), default="planted", help=kinds)
    planted.add_argument(
        "--sample", type=int, default=0, help="only so many of the automatic ones, spread over all of them"
    )
    planted.add_argument(
        "--function", default="", help="only this function's cases, and of the automatic mutants those that they reach"
    )
    planted.add_argument("--only", default="", help="only mutants whose name contains this")
    planted.add_argument("--report", default="", help="write the results to this .json file")
    return parser


def _add(
    verbs: Any,
    name: str,
    verb: Callable[..., int],
    text: str,
    *flags: str,
    required: tuple[str, ...] = (),
    case: bool = False,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, allow_abbrev=False, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(verb=verb)
    if case:
        parser.add_argument("case", help="the case's id, its file, or its JSON text")
    for flag, how in OPTIONS:
        if flag in flags:
            parser.add_argument(flag, required=flag in required, **how)
    return parser


def run(options: argparse.Namespace) -> int:
    """Hand the options to pytest and print the verdict."""
    import pytest

    from conformance import plugin
    from conformance.report.terminal import annotations, lines

    flags = []
    for name, _ in OPTIONS:
        value = getattr(options, name.removeprefix("--").replace("-", "_"), None)
        for item in value if isinstance(value, list) else [value] if value not in (None, "") else []:
            flags.append(f"{name}={item}")
    catcher = _Catcher()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # no plugins or configuration of the user's, no cache, no output of pytest's own
    quiet = ["-c", os.devnull, f"--rootdir={Path(plugin.__file__).parent}", "--capture=no"]
    quiet += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "conformance.plugin"]
    code = pytest.main([*quiet, *flags, str(Path(plugin.__file__).with_name("test_conformance.py"))], plugins=[catcher])
    if catcher.ended_early:
        return USAGE
    verdict = catcher.verdict
    if verdict is None:
        print(f"moe-conformance: the run ended without a verdict (pytest exit code {int(code)})", file=sys.stderr)
        return HARNESS
    print("\n".join([*lines(verdict), *annotations(verdict)]))
    return verdict.exit_code


class _Catcher:
    """Takes the verdict out of pytest, or the fact that a sentence on stderr ended the run."""

    def __init__(self) -> None:
        self.verdict: Any = None
        self.ended_early = False

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        if not isinstance(excinfo.value, UsageExit):
            raise KeyboardInterrupt
        self.ended_early = True

    def pytest_unconfigure(self, config: Any) -> None:
        finished = config.pluginmanager.get_plugin("moe-conformance-run")
        self.verdict = finished.verdict if finished else None


def _session(options: argparse.Namespace, folder: str) -> Any:
    from conformance.engine.run.session import Options, Session

    session = Session(
        Options(options.impl, device=options.device, corpus=options.corpus, case_seconds=options.case_seconds),
        Path(folder),
    )
    session.start()
    return session


def replay(options: argparse.Namespace) -> int:
    """Exit code 0 if the case passes, 1 if it fails, 4 if it says nothing."""
    from conformance.engine.run.corpus import find
    from conformance.report.terminal import picture

    case = find(options.case, Path(options.corpus))
    with tempfile.TemporaryDirectory() as folder, closing(_session(options, folder)) as session:
        outcome = session.pool.run_alone(case)
        print(f"{case.function} {case.id}: {picture(case)}")
        finding = outcome.finding
        print(
            f"{outcome.status}: {finding['output']} [{finding['check']}] {finding['message']}"
            if finding
            else f"{outcome.status} {outcome.reason}".strip()
        )
        print(f"case: {case.text}")
    return CODES.get(outcome.status, 1)


def minimize(options: argparse.Namespace) -> int:
    """Exit code 1 with the smallest case; if the case does not fail, the one that `replay` has."""
    from conformance.engine.run.corpus import find
    from conformance.engine.run.reduction import reduce
    from conformance.engine.run.session import FAILING
    from conformance.report.terminal import failure_lines

    case = find(options.case, Path(options.corpus))
    with tempfile.TemporaryDirectory() as folder, closing(_session(options, folder)) as session:
        outcome = session.pool.run_alone(case)
        if outcome.status not in FAILING:
            print(f"{case.function} {case.id}: {outcome.status} {outcome.reason}; there is nothing to minimize")
            return CODES.get(outcome.status, 1)
        found = reduce(case, outcome, session.attempt, seconds=120)
        from conformance.engine.run import corpus

        path = corpus.save(
            Path(options.corpus),
            found.case,
            {"implementation": options.impl, "status": found.outcome.status, "finding": found.outcome.finding},
        )
        failure = {
            "function": case.function,
            "finding": found.outcome.finding,
            "status": found.outcome.status,
            "reason": found.outcome.reason,
        }
        print(
            "\n".join(
                failure_lines(
                    failure | {"case": found.case.record(), "id": found.case.id, "smallest": found.finished},
                    options.impl,
                )
            )
        )
        print(f"saved as {path} after {found.attempts} attempts")
    return 1


def list_(options: argparse.Namespace) -> int:
    """Print what the suite knows."""
    from conformance.catalogue import CONTRACTS
    from conformance.core.ranks import Collective
    from conformance.core.space import Space
    from conformance.engine.choose.draw import covering_cases
    from conformance.engine.choose.profiles import PROFILES

    for name, contract in CONTRACTS.items():
        covered = covering_cases(name, Space())
        print(f"{name}({', '.join(contract.optional)}) -> {', '.join(contract.outputs)}")
        if isinstance(contract, Collective):
            print("  ranks    call it together, each with its own part and `group`")
        print(f"  laws     {', '.join(contract.laws)}")
        print(f"  illegal  {', '.join(contract.illegal)}")
        print(f"  golden   {', '.join(contract.golden)}")
        print(
            f"  covering {len(covered.cases)} cases for {covered.pairs} pairs of values; {covered.impossible} pairs are no legal call"
        )
    for profile in PROFILES.values():
        counts = ", ".join(f"{name} {profile.count(name) * profile.shards}" for name in CONTRACTS)
        print(f"profile {profile.name}: drawn {counts}; covering arrays {'yes' if profile.covering else 'no'}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Exit code 0 if the suite can run here, 3 if not."""
    from conformance.report.doctor import checkup

    findings = list(checkup())
    for fine, text in findings:
        print(f"{'ok  ' if fine else 'FAIL'}  {text}")
    return 0 if all(fine for fine, _ in findings) else HARNESS


def check_adapter(options: argparse.Namespace) -> int:
    """Exit code 0 if the namespace offers anything that can be judged, else 4."""
    from conformance.engine.child.child import Settings
    from conformance.engine.run.pool import Pool
    from conformance.report.adapter import described

    with Pool(Settings(options.impl, options.device)) as pool:
        offered, text = described(pool.start())
    print(text)
    return 0 if offered else 4


def mutants(options: argparse.Namespace) -> int:
    """Exit code 0 if every mutant was killed, 1 if some survived."""
    from conformance.mutants.score import hunt

    results = hunt(
        options.impl,
        options.kind,
        options.run_seed,
        options.jobs or min(os.cpu_count() or 1, 2),
        options.sample,
        options.only,
        options.function,
    )
    if options.report:
        Path(options.report).write_text(json.dumps([result.record() for result in results], indent=1) + "\n")
    return 0 if all(result.killed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
