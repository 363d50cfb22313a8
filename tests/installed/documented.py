"""The commands of the documents: which are run by `test_commands`, how, and why others are not."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("moe-conformance", "python", "python3", "pytest", "pip", "make", "git", "sbatch", "torchrun")
LINE = re.compile(r"^ {4}(?:\$ )?((?:[A-Z_]+=\S+ )*(?:[\w.-]+)(?: .*(?:\\\n.*)*)?)$", re.MULTILINE)
# makes a run short: of an option that is given twice the last one counts
SMOKE = "--profile smoke --jobs 1"
P21 = "moe-conformance run --impl conformance.mutants.planted:P21.moe_ref.permutation"
MINE = "moe-conformance run --impl my_kernels"


@dataclass(frozen=True)
class Run:
    """A command with its exit code, and what is added to it to make it short."""

    command: str
    code: int = 0
    short: str = SMOKE


RUNS = (  # in this order, in one folder
    Run(P21, 1, "--function permute"),
    Run("moe-conformance mutants --impl moe_ref --only P21", short="--function permute"),
    Run(f"{MINE} --report verdict.html"),
    Run(MINE),
    Run("moe-conformance check-adapter --impl my_kernels", short=""),
    Run(f"{MINE} --profile gate --corpus tests/corpus --report verdict.json --report verdict.xml"),
    Run(f"{MINE} --report new.json --since verdict.json"),
    Run(f"{MINE} --shard 1/8 --report verdict-1.json", short=f"{SMOKE} --shard 1/2"),
    Run(f"{MINE} --shard 2/2 --report verdict-2.json"),  # the other job, which no page shows
    Run("moe-conformance merge verdict-*.json --report verdict.html", short=""),
    Run(
        "moe-conformance fuzz --impl my_kernels --function permute,unpermute --minutes 5 --seed 1 --corpus kept",
        short="--function permute --minutes 0.01 --jobs 1",
    ),
    Run("moe-conformance run --impl moe_ref.layer"),
    Run("moe-conformance run --impl my_dispatch --profile smoke", short="--function allgather_combine --jobs 1"),
    Run("moe-conformance export vectors --function permute,z_loss", short="--profile smoke"),
    Run("python examples/read_vectors.py vectors", short=""),
    Run(
        "moe-conformance speed --impl my_kernels --against moe_fast --report speed.json",
        short='--against moe_ref --device cpu {"function":"permute","tokens":3}',
    ),
    Run("moe-conformance list", short=""),
    Run("moe-conformance doctor", short=""),
)


@dataclass(frozen=True)
class Left:
    """Commands that no test runs as they stand, with the reason, and the test of the same code."""

    pattern: str
    reason: str
    tested: str = ""  # a file, or a file with the name of a test


LEFT = (
    Left(r"(make|git|pip|\.) ", "network, or a new environment", "tests/installed/conftest.py"),
    Left(r".* --cluster auto", "cluster", "tests/engine/test_cluster.py"),
    Left(r"pytest --pyargs conformance .* -n 4", "a process of its own", "tests/report/test_cli_verbs.py"),
    Left(r"python -m pytest -q tests/|pytest evidence/megatron_claims", "tests", "tests/permutation"),
    Left(r"torchrun ", "processes of its own", "tests/engine/test_world_forming.py"),
    Left(r"python examples/train_moe.py", "minutes", "tests/layer/test_example.py"),
    Left(r"moe-conformance bench --only router", "minutes", "tests/report/test_bench.py"),
    Left(r"(moe-conformance|python -m conformance) (run|mutants) --impl moe_fast\b", "minutes or a GPU", "tests/layer"),
    Left(r"moe-conformance run --impl conformance.compiled:", "minutes", "tests/test_compiled_implementation.py"),
    Left(r"moe-conformance bench --(report|baseline)", "a GPU", "tests/report/test_bench.py"),
    Left(r"(PYTHONPATH=\S+ )?moe-conformance mutants --impl moe_(ref|copy)", "minutes",
         "tests/mutants/test_mutants.py"),
    Left(r"((TE_WHEEL=te )?moe-conformance|python -m conformance) run --impl \S*(peers|te_kernels|te_permutation)",
         "another package", "tests/peers/test_peers.py"),
    Left(r"python -m zipfile|PYTHONPATH=\.evidence/megatron", "another package", "tests/peers/test_peers.py"),
    Left(r"moe-conformance replay .* --sanitize", "a GPU", "tests/engine/test_sanitizer.py"),
    Left(r"(\S+=\S+ )*python3? -m (benchmarks|pytest -p)", "minutes or a GPU", "tests/test_benchmarks.py"),
    Left(r"python -m evidence.formulations", "minutes", "tests/evidence/test_formulations.py"),
    Left(r"python -m evidence.transformers_families", "minutes", "tests/integrations/test_transformers.py"),
    Left(r"python -m evidence.transformers_layers", "minutes", "tests/layer/test_transformers_layers.py"),
    Left(r"python -m evidence.machine_code", "minutes", "tests/evidence/test_machine_code.py"),
    Left(r"python -m evidence.outward", "a GPU", "tests/evidence/test_outward.py"),
)  # fmt: skip


def commands() -> dict[str, list[Path]]:
    """Every command of the documents without its comment, with its pages."""
    pages_of: dict[str, list[Path]] = {}
    for page in PAGES:
        for line in LINE.findall(page.read_text()):
            text = re.sub(r"\\\n\s*", "", re.split(r"\s+# ", line)[0])
            for command in re.sub(r"^\. \.venv/bin/activate(?: && )?", "", text).split(" && "):
                words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
                if len(words) > 1 and words[0] in PROGRAMS and words[1] != "·":
                    pages_of.setdefault(command.split(" > ")[0].strip(), []).append(page.relative_to(ROOT))
    return pages_of


def could_run(command: str) -> bool:
    """Whether nothing that a command names is missing on any machine that runs the tests, and a
    short form of it takes seconds.
    """
    words = shlex.split(command)
    if words[0] != "moe-conformance" or words[1] in ("mutants", "bench") or "--cluster" in words:
        return False
    implementation = words[words.index("--impl") + 1] if "--impl" in words else "my_kernels"
    return implementation.startswith(("my_", "moe_ref", "conformance.mutants"))
