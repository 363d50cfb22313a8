"""Automatic mutants: one change each, of every kind, only in code that computes results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from conformance.interface import UsageError
from conformance.mutants.automatic import MOST_PER_LINE, SourceMutant, source_mutants, write_copy
from conformance.mutants.operators import OPERATORS

PACKAGE = "row_sums_for_mutants"
KERNELS = '''
"""A docstring with a < b, x + 1 and mask=a & b."""

import triton
import triton.language as tl

@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(x_ptr, stride_x_r, stride_x_h, out_ptr, calls_ptr, num_rows, num_columns,
               BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """out[r] = sum of x[r, h] where a < b and x + 1."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R], tl.float32)
    for first in range(0, num_columns, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        inside = (r < num_rows)[:, None] & (h < num_columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride_x_r + h[None, :] * stride_x_h, mask=inside, other=0.0)
        acc += tl.sum(x, axis=1)
    tl.store(out_ptr + r, acc, mask=r < num_rows)
    tl.atomic_add(calls_ptr, 1)
'''
LAUNCHER = """
import torch
import triton
from torch import Tensor

from row_sums_for_mutants.kernels import sum_kernel


def check_rows(x):
    if x.dim() < 2 or x.dim() > 2:
        raise ValueError("rows must be a matrix")


def supports(function, x):
    return None if x.dtype == torch.float32 else "dtype"


def sums(x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    check_rows(x)
    if scale is not None and scale < 0:
        raise ValueError("scale < 0")
    rows, columns = x.shape[0], x.shape[1]
    out, calls = torch.empty(rows), torch.zeros(1, dtype=torch.int32)
    if rows == 0 or not columns:
        return out.zero_(), calls
    sum_kernel[(triton.cdiv(rows, 4),)](x, *x.stride(), out, calls, rows, columns, BLOCK_R=4, BLOCK_H=4, num_warps=1)
    return (out if scale is None else out * scale), calls
"""
RUN = """
import importlib, json, sys
import torch
x = (torch.arange(42, dtype=torch.float32) + 257).reshape(7, 6).t().contiguous().t()
results = []
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("row_sums_for_mutants")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    package = importlib.import_module("row_sums_for_mutants")
    out, calls = package.sums(x)
    results.append((package.__file__, torch.equal(out, x.sum(1)) and calls.tolist() == [2]))
    del sys.path[0]
print(json.dumps(results))
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The folder of a small package in the working directory, importable by `--impl`."""
    folder = tmp_path / "home" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "__init__.py").write_text(LAUNCHER)
    (folder / "tuning.py").write_text("def block(n):\n    return n + 1\n")
    (folder / "data.txt").write_text("kept")
    monkeypatch.chdir(folder.parent)
    return folder.parent


def mutant_of(mutants: list[SourceMutant], operator: str, changed: str) -> SourceMutant:
    (chosen,) = (mutant for mutant in mutants if mutant.operator == operator and changed in mutant.after)
    return chosen


def run(folders: list[Path]) -> list[tuple[str, bool]]:
    """For the package in each folder its file, and whether Triton's interpreter gets it right."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", RUN, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folders[0])
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_mutants_are_the_same_every_time_and_have_names_of_their_own(home):
    mutants = source_mutants(PACKAGE)
    assert mutants == source_mutants(PACKAGE)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    lines = [(mutant.file, mutant.line) for mutant in mutants]
    assert lines == sorted(lines)


def test_a_name_says_where_and_what(home):
    mutant = mutant_of(source_mutants(PACKAGE), "accumulation_dtype", "acc = (acc +")
    assert mutant.name == "kernels.py:17 accumulation_dtype 1"
    assert mutant.file == f"{PACKAGE}/kernels.py"
    assert mutant.before == "acc += tl.sum(x, axis=1)"


def test_each_mutant_changes_exactly_one_place_and_compiles(home):
    for mutant in source_mutants(PACKAGE):
        original = (home / mutant.file).read_text()
        lines = original.splitlines(keepends=True)
        begin = len("".join(lines[: mutant.line - 1]))
        places = [i for i in range(begin, begin + len(lines[mutant.line - 1])) if original.startswith(mutant.before, i)]
        assert mutant.before != mutant.after
        changes = [original[:i] + mutant.after + original[i + len(mutant.before) :] for i in places]
        assert mutant.source in changes, mutant.name
        compile(mutant.source, mutant.file, "exec")


def test_mutants_of_a_line_are_few_and_all_different(home):
    mutants = source_mutants(PACKAGE)
    places = [(mutant.file, mutant.line) for mutant in mutants]
    assert max(map(places.count, places)) == MOST_PER_LINE
    assert len({(mutant.file, mutant.source) for mutant in mutants}) == len(mutants)


@pytest.mark.parametrize("operator", [operator.__name__ for operator in OPERATORS])
def test_every_operator_occurs_in_a_small_package(home, operator):
    assert any(mutant.operator == operator for mutant in source_mutants(PACKAGE))


def test_every_operator_says_which_defect_it_stands_for():
    assert all(operator.__doc__ for operator in OPERATORS)


def test_docstrings_validation_promises_and_block_sizes_are_left_alone(home):
    mutants = source_mutants(PACKAGE)
    changed = {(home / mutant.file).read_text().splitlines()[mutant.line - 1].strip() for mutant in mutants}
    validation = ("raise", "check_rows", "if x.dim()", "return None if x.dtype", "if scale is not None")
    assert not [line for line in changed if line.startswith(('"""', "import", "def ", "@", *validation))]
    assert not [mutant.file for mutant in mutants if mutant.file.endswith("tuning.py")]
    launchers = [mutant.source for mutant in mutants if mutant.file.endswith("__init__.py")]
    assert all("BLOCK_R=4" in source and "num_warps=1" in source for source in launchers)


def test_a_module_is_mutated_alone_but_copied_with_its_package(home, tmp_path):
    mutants = source_mutants(f"{PACKAGE}.kernels:anything")
    assert {mutant.file for mutant in mutants} == {f"{PACKAGE}/kernels.py"}
    write_copy(mutants[0], f"{PACKAGE}.kernels", tmp_path / "copy")
    assert (tmp_path / "copy" / PACKAGE / "__init__.py").read_text() == LAUNCHER


def test_a_lone_file_has_mutants_too(home, tmp_path):
    (home / "lone_module_for_mutants.py").write_text("def f(x):\n    return x < 1\n")
    (mutant,) = source_mutants("lone_module_for_mutants")
    write_copy(mutant, "lone_module_for_mutants", tmp_path / "copy")
    assert (tmp_path / "copy" / "lone_module_for_mutants.py").read_text() == "def f(x):\n    return x <= 1\n"


@pytest.mark.parametrize("name", ["no_such_package_for_mutants", f"{PACKAGE}.absent", "math", "sys", ""])
def test_a_name_without_python_source_is_a_usage_error(home, name):
    with pytest.raises(UsageError, match="no Python source"):
        source_mutants(name)


def test_a_copy_has_the_mutant_and_everything_else_as_it_was(home, tmp_path):
    mutant = source_mutants(PACKAGE)[-1]
    write_copy(mutant, PACKAGE, tmp_path / "copy")
    original, copy = home / PACKAGE, tmp_path / "copy" / PACKAGE
    assert (tmp_path / "copy" / mutant.file).read_text() == mutant.source
    same = [file.name for file in original.iterdir() if file.read_text() == (copy / file.name).read_text()]
    assert sorted(same) == sorted(file.name for file in original.iterdir() if file.name != Path(mutant.file).name)


def test_a_copy_never_overwrites_the_original_or_another_mutant(home, tmp_path):
    mutants = source_mutants(PACKAGE)
    write_copy(mutants[0], PACKAGE, tmp_path / "copy")
    for folder in (home, tmp_path / "copy"):
        with pytest.raises(FileExistsError):
            write_copy(mutants[1], PACKAGE, folder)
    assert (home / PACKAGE / "kernels.py").read_text() == KERNELS
    assert (home / PACKAGE / "__init__.py").read_text() == LAUNCHER


def test_mutants_are_imported_in_place_of_the_original_and_give_wrong_results(home, tmp_path):
    changes = {
        "off_by_one": "(rows // 4)",  # the last tile is not launched
        "swapped_axes": "x.stride()[::-1]",
        "accumulation_dtype": "acc = (acc +",  # bfloat16 sums above 256 lose units
        "arithmetic": "acc = tl.sum",  # only the last block counts
        "dropped_store": "pass",
    }
    mutants = source_mutants(PACKAGE)
    for operator, changed in changes.items():
        mutant = next(mutant for mutant in mutants if mutant.operator == operator and changed in mutant.after)
        write_copy(mutant, PACKAGE, tmp_path / operator)
    folders = [home, *(tmp_path / operator for operator in changes)]
    results = run(folders)
    assert all(Path(file).is_relative_to(folder) for folder, (file, _) in zip(folders, results, strict=True))
    assert [correct for _, correct in results] == [True] + [False] * len(changes)
