"""moe_fast's kernels compiled for sm_90 and judged, in a process where Triton compiles."""

import ast
from functools import cache
from pathlib import Path

import moe_fast
from evidence.machine_code.calls import calls
from evidence.machine_code.check import all_judged, in_turn
from evidence.machine_code.compiling import compiled
from evidence.machine_code.findings import cast_twice_used
from evidence.machine_code.launches import Configuration, recorded

FOLDER = Path(moe_fast.__file__).parent
JOBS = 2
OTHERS = ("Qwen", "gpt-oss", "torch.float16")  # in the texts of calls that are left to a full run
# beginnings of the names of the constants that the layout and the uses of an 8-bit cast depend on
LAYOUT = ("BLOCK_M", "BLOCK_N", "BLOCK_T", "BLOCK_H", "RULE", "ERROR", "SQUARE", "codes", "row_codes", "column_codes")


@cache
def configurations() -> list[Configuration]:
    """What the launchers choose for two models, one of odd sizes; each kernel comes early."""
    return in_turn(recorded((text, call) for text, call in calls() if not any(x in text for x in OTHERS))[0])


def names_of_kernels() -> set[str]:
    """Every function of moe_fast that is named a kernel."""
    names = set()
    for file in FOLDER.rglob("_*.py"):
        module = ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
        nodes = ast.walk(ast.parse(file.read_text()))
        functions = (node.name for node in nodes if isinstance(node, ast.FunctionDef))
        names |= {f"{module}.{name}" for name in functions if name.endswith("_kernel")}
    return names


def first_of_every_kernel() -> tuple[list[str], dict[str, list[str]], int]:
    """(kernels without a launch, findings by kernel, kernels compiled)."""
    first: dict[str, Configuration] = {}
    for configuration in configurations():
        first.setdefault(configuration.name, configuration)
    results = list(all_judged(list(first.values()), float("inf"), JOBS))
    defects = {configuration.kernel: configuration.findings for configuration in results if configuration.findings}
    return sorted(names_of_kernels() - first.keys()), defects, len(results)


def casts_twice_used() -> tuple[list[str], dict[str, int]]:
    """(configurations with the pattern in their PTX, how many of each kernel that casts)."""
    layouts: dict[str, Configuration] = {}
    for configuration in configurations():
        constants = configuration.named_constants
        chosen = {name: value for name, value in constants.items() if name.startswith(LAYOUT)}
        if "FORMAT" in constants or "HARDWARE" in constants:
            layouts.setdefault(str((configuration.name, configuration.options["num_warps"], chosen)), configuration)
    counted: dict[str, int] = {}
    defects = []
    for layout, configuration in layouts.items():
        ptx = compiled(configuration).ptx
        counted[configuration.name] = counted.get(configuration.name, 0) + ("satfinite.e" in ptx)
        defects += [layout] if cast_twice_used(ptx) else []
    return defects, counted
