"""The search for a GPU's sizes, and the tables that it writes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_fast
from benchmarks import tune
from benchmarks.tune import KERNELS, Verdict, candidates, record_at, search
from conformance.interface import Implementation
from moe_fast.launch import tables, tuning
from moe_fast.launch.tables import Gpu, Table, nearest
from tests.common.fast import interpreted

SIZES = tuning.INTERPRETER
ACTIVATION = KERNELS[0]
WIDE = 2 * SIZES.activation.columns


def columns() -> int:
    return tuning.INTERPRETER.activation.columns


def wrong_if_wide(*arguments: Any, **settings: Any) -> torch.Tensor:
    """glu, whose results are wrong with tiles of more columns."""
    out = moe_fast.glu(*arguments, **settings)
    return out if columns() < WIDE else out * 1.5


def faster_if_wide(calls: Any) -> dict[str, float]:
    """A clock by which tiles of more columns take half as long, and all others as long."""
    return {name: 1.0 if call() < WIDE else 0.5 for name, call in calls.items()}


def found_with(glu: Any, clock: Any = faster_if_wide) -> tune.SearchResult:
    namespace = SimpleNamespace(**vars(moe_fast) | {"glu": glu})
    kernel = replace(ACTIVATION, cases=ACTIVATION.cases[:1])
    return search(kernel, SIZES, [columns], Implementation(namespace), clock)


@interpreted
def test_a_candidate_that_is_fast_and_wrong_does_not_enter(monkeypatch):
    chosen = found_with(wrong_if_wide)
    assert chosen.sizes["columns"] < WIDE and chosen.ratio == 1.0
    assert any("glu FAIL" in reason for reason in chosen.refused)
    monkeypatch.setattr(tune, "judged", lambda *_: Verdict(True))  # a search that does not judge
    assert found_with(wrong_if_wide).sizes["columns"] == WIDE


@interpreted
def test_a_candidate_that_is_fast_and_right_enters():
    chosen = found_with(moe_fast.glu)
    assert (chosen.sizes["columns"], chosen.ratio, chosen.refused) == (WIDE, 0.5, [])
    assert tuning.INTERPRETER is SIZES


@interpreted
def test_sizes_that_are_wrong_to_begin_with_are_reported():
    with pytest.raises(RuntimeError, match=r"activation is wrong before the search: glu FAIL"):
        found_with(lambda *arguments, **settings: 0 * moe_fast.glu(*arguments, **settings))


@interpreted
def test_neither_noise_nor_what_the_compiler_refuses_enters():
    less = {"current": 1.0, "candidate": 1 - tune.GAIN / 2}
    noise = found_with(moe_fast.glu, lambda calls: less)
    assert (noise.ratio, noise.sizes["columns"]) == (1.0, SIZES.activation.columns)

    def refused(calls: Any) -> dict[str, float]:
        raise MemoryError

    chosen = found_with(moe_fast.glu, refused)
    assert chosen.timed == 0 and set(chosen.refused) == {"MemoryError"}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.path)
def test_each_kernel_has_candidates_that_differ_in_one_number(kernel):
    record = record_at(kernel.path)(tuning.DEFAULTS)
    chosen = candidates(record)
    assert len(chosen) >= 2
    for candidate in chosen:
        changed = record_at(kernel.path)(tables.changed(tuning.DEFAULTS, kernel.path, candidate))
        assert sum(getattr(changed, name) != getattr(record, name) for name in candidate) == 1


H100, H200 = Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 << 30), Gpu("NVIDIA H200", 9, 0, 132, 141 << 30)
TABLES = [Table(H100, {}), Table(H200, {}), Table(Gpu("Blackwell", 10, 0, 148, 180 << 30), {})]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (H100, H100.name),
        (H200._replace(memory=80 << 30), H200.name),  # the name decides
        (Gpu("NVIDIA H100 NVL", 9, 0, 132, 94 << 30), H100.name),
        (Gpu("NVIDIA GH200 144G", 9, 0, 132, 144 << 30), H200.name),
        (Gpu("GB300", 10, 3, 160, 288 << 30), "Blackwell"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_gpu_without_a_table_takes_the_nearest(gpu, name):
    assert nearest(gpu, TABLES).gpu.name == name


def test_a_gpu_of_another_capability_takes_the_defaults():
    assert nearest(Gpu("A100", 8, 0, 108, 80 << 30), TABLES) is None
    assert tables.with_table(tuning.DEFAULTS, None) is tuning.DEFAULTS


def test_the_tables_of_the_package_name_records_that_exist():
    for table in tables.measured():
        changed = tables.with_table(tuning.DEFAULTS, table)
        for path, values in table.sizes.items():
            assert values == {name: getattr(record_at(path)(changed), name) for name in values}


def test_a_table_of_records_that_do_not_exist_is_found():
    for path, values in (("nothing", {}), ("activation", {"depth": 1}), ("grouped.by_rows.9", {"rows": 1})):
        with pytest.raises((AttributeError, IndexError, TypeError)):
            tables.with_table(tuning.DEFAULTS, Table(H100, {path: values}))
