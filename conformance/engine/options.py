"""The options of a run, and of a child process.

The flags of the command are the fields of `Options`. The flags of the pytest plugin are the same
with the prefix `--moe-`.
"""

import math
import re
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance.sanitizing import TOOLS, replayed
from conformance.usage import UsageError, check_report


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def _flag(flag: str, text: str, value: Any, **arguments: Any) -> Any:
    """A field with its default, its flag, and the other arguments of `add_argument`."""
    return field(default=value, metadata={"flag": flag, "arguments": {"help": text, "default": value, **arguments}})


class _Joined(Action):
    """An action of argparse: a flag that is given twice means both lists."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        earlier_values = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{earlier_values},{values}" if earlier_values else values)


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    return tuple(dict.fromkeys(name for word in text.split(",") if (name := word.strip())))


@dataclass(frozen=True)
class ChildOptions:
    """The options of a child process."""

    implementation: str
    device: str = "auto"  # auto, cpu or cuda
    trace: str = ""  # a package's folder, or a file: record the functions that a case runs in it
    scores: bool = False  # add to an outcome how near its case came to failing
    lines: bool = False  # add to an outcome the lines of the implementation that its case ran
    search: tuple[str, ...] = ()  # folders prepended to sys.path, such as a mutant's copy
    sanitize: str = ""  # a tool of `conformance.sanitizing`; empty: none
    faults: bool = False  # plant a fault in each configuration that a case judges, and judge it again


@dataclass(frozen=True)
class Options:
    """The user's options.

    Raises:
        UsageError: an illegal value.
    """

    implementation: str = _flag("--impl", "the namespace to judge: package.module or package.module:attribute", "")
    function: str = _flag("--function", "judge only these functions, separated by commas", "", action=_Joined)
    where: str = _flag("--where", "judge only cases that match, as 'dtype=bfloat16 and align in (16, 32)'", "")
    profile: str = _flag("--profile", "how much to test", "gate", choices=("smoke", "gate", "nightly"))
    device: str = _flag("--device", "where to run the implementation", "auto", choices=("auto", "cpu", "cuda"))
    seed: int = _flag("--run-seed", "seed of the drawn cases", 0, type=int)
    jobs: int = _flag(
        "--jobs",
        "child processes of one worker (default: 2 on a CPU, a core each and an eighth more on a GPU, 1 under xdist)",
        0,
        type=int,
    )
    case_seconds: float = _flag(
        "--case-seconds",
        "a case that uses more seconds of CPU time, or sleeps longer, runs again alone with five times the limit "
        "and hangs if it is over that: more for a slow implementation",
        60.0,
        type=float,
    )
    seconds: float = _flag(
        "--seconds", "end the run after this time, with the verdict so far (default: no limit)", 0.0, type=float
    )
    accept_partial: bool = _flag(
        "--accept-partial",
        "exit code 0 also for CONFORMANT SO FAR: --seconds ended the run before all fixed and covering cases had run",
        False,
        action="store_true",
    )
    corpus: str = _flag(
        "--corpus", "folder of kept cases: run first, and where failing cases are saved", ".moe-conformance"
    )
    waivers: str = _flag("--waivers", "TOML file of known differences", "")
    baseline: str = _flag("--baseline", "an earlier JSON report; what it had must not get worse", "")
    since: str = _flag(
        "--since", "an earlier JSON report, or a git revision: judge only functions that changed since", ""
    )
    shard: str = _flag("--shard", "i/n: run the i-th of n parts (from 1); an empty part is no failure", "")
    sanitize: str = _flag(
        "--sanitize", "watch the kernels on a GPU by this tool: consan, fpsan or memcheck", "", choices=TOOLS
    )
    report: Sequence[str] = _flag(
        "--report", "write the verdict to this file: .json, .xml (junit), .md or .html", (), action="append", default=[]
    )

    def __post_init__(self) -> None:
        folder = Path(self.corpus)
        _require(bool(self.implementation), "--impl is empty; it must be package.module or package.module:attribute")
        _require(self.jobs >= 0, f"--jobs is {self.jobs}; it must be 0 or more")
        _require(0 < self.case_seconds < math.inf, f"--case-seconds is {self.case_seconds}; it must be above 0")
        _require(0 <= self.seconds < math.inf, f"--seconds is {self.seconds}; it must be 0 (no limit) or more")
        _require(folder.is_dir() or not folder.exists(), f"--corpus {folder}: is no folder")
        _require(
            bool(re.fullmatch(r"(\d+/\d+)?", self.shard)), f"--shard is {self.shard!r}; it must be i/n, such as 2/4"
        )
        named = not self.function or bool(self.functions)
        _require(named, f"--function is {self.function!r}; it must be names of functions, separated by commas")
        number = f"--shard is {self.shard!r}; the first number must be from 1 to the second"
        _require(0 <= self.part[0] < self.part[1], number)
        for path in self.report:
            check_report(path)
        for flag, file in (("--waivers", self.waivers), ("--baseline", self.baseline)):
            _require(not file or Path(file).exists(), f"{flag} {file}: there is no such file")

    @property
    def functions(self) -> tuple[str, ...]:
        """The named functions; empty: all."""
        return split_names(self.function)

    @property
    def part(self) -> tuple[int, int]:
        """(i, n): the run has sections i, i + n, i + 2n, … of the plan, from 0."""
        shard_number, num_shards = self.shard.split("/") if self.shard else (1, 1)
        return int(shard_number) - 1, int(num_shards)

    @property
    def covered(self) -> bool:
        """Whether a report shows what the cases covered."""
        return any(path.endswith(".html") for path in self.report)

    @property
    def replayed(self) -> str:
        """The value of --impl and the flags after it, with which a failing case is replayed."""
        return replayed(self.implementation, self.sanitize)

    @property
    def child(self) -> ChildOptions:
        return ChildOptions(self.implementation, self.device, sanitize=self.sanitize)

    @classmethod
    def parsed(cls, namespace: Namespace, prefix: str = "") -> "Options":
        """The options parsed by argparse or pytest; an absent flag keeps its default.

        Args:
            prefix: of the names in `namespace`, such as `moe_`.
        """
        flags = {option.name: option.metadata["flag"].removeprefix("--") for option in fields(cls)}
        named = {name: prefix + flag.replace("-", "_") for name, flag in flags.items()}
        return cls(**{name: getattr(namespace, dest) for name, dest in named.items() if hasattr(namespace, dest)})


def flags() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every flag with the arguments of `add_argument`."""
    for option in fields(Options):
        yield option.metadata["flag"], option.metadata["arguments"]


def add_verb(verbs: Any, name: str, verb: Callable[[Namespace], int], text: str, *chosen: str) -> ArgumentParser:
    """A subparser that has the chosen flags of `Options`, and calls `verb`."""
    parser = verbs.add_parser(name, help=text, allow_abbrev=False, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(verb=verb)
    for flag, arguments in flags():
        if flag in chosen:
            parser.add_argument(flag, required=flag == "--impl", **arguments)
    return parser


class Version(Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        from conformance import __version__

        print(f"moe-conformance {__version__}")
        parser.exit()
