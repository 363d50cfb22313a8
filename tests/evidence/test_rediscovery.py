"""The outcome of a defect's check in two releases, and the table of defects."""

import json
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest

from evidence import environments
from evidence.environments import Unavailable, install_source
from evidence.rediscovery import checks_gpu, on_a_gpu
from evidence.rediscovery.__main__ import found, of_release
from evidence.rediscovery.checks import CHECKS, compared, d02, r05
from evidence.rediscovery.checks_ranks import a07
from evidence.rediscovery.page import page
from evidence.rediscovery.ranks import on_ranks
from evidence.rediscovery.rows import MEGATRON, ROWS, Row

MODULE = """
from ..fp8 import FP8GlobalStateManager
class Fp8Padding:
    def __init__(self, num_gemms):
        self.align = None
        LINE
    def __call__(self, rows, counts):
        align = self.align or (32 if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else 16)
        return rows, [-(-count // align) * align for count in counts]
"""
ROW = Row("X01", "a title", MEGATRON, "1.0", "2.0", check="r05", why="because")


def by(**findings):
    """A judge that finds this in each release; None: it cannot be installed."""

    def of(row, release):
        text = findings["v" + release.replace(".", "_")]
        if text is None:
            raise Unavailable(f"there is no {release}")
        return text

    return of


@pytest.mark.parametrize(
    ("row", "findings", "outcome"),
    [
        (ROW, {"v1_0": "bad", "v2_0": ""}, "found again"),
        (ROW, {"v1_0": "bad", "v2_0": "bad"}, "half"),
        (ROW, {"v1_0": "bad", "v2_0": None}, "half"),
        (ROW, {"v1_0": "", "v2_0": ""}, "not shown"),
        (ROW, {"v1_0": None}, "not run"),
        (replace(ROW, mended=None), {"v1_0": "bad"}, "half"),
        (replace(ROW, mended_later="3.0"), {"v1_0": "bad", "v2_0": "bad", "v3_0": ""}, "found again"),
        (replace(ROW, mended_later="3.0"), {"v1_0": "bad", "v2_0": "bad", "v3_0": "bad"}, "half"),
        (replace(ROW, check=None), {}, "not run"),
    ],
)
def test_a_defect_counts_only_if_the_first_release_fails_and_the_second_passes(row, findings, outcome):
    assert found(row, by(**findings)).outcome == outcome


def test_every_row_has_a_check_or_a_reason_and_every_check_a_row():
    assert all(row.check in CHECKS or (row.check is None and row.why) for row in ROWS)
    assert {row.check for row in ROWS if row.check} == set(CHECKS)
    assert len({(row.package, row.bug) for row in ROWS}) == len(ROWS)


def test_a_check_of_compiled_kernels_is_marked_so():
    assert {row.check for row in ROWS if row.on_a_gpu} == {
        name for name, check in CHECKS.items() if check.__module__ == checks_gpu.__name__
    }


def test_what_a_gpu_found_is_read_from_the_kept_runs(monkeypatch, tmp_path):
    row = replace(ROW, check="r03", on_a_gpu=True)
    monkeypatch.setattr(on_a_gpu, "KEPT", tmp_path / "kept.json")
    with pytest.raises(Unavailable, match=r"no run of 1\.0 on a GPU is kept"):
        of_release(row, "1.0")
    run = {"device": "a GPU", "torch": "2", "checks": {"r03": {"found": "bad"}, "r04": {"why": "no memory"}}}
    on_a_gpu.KEPT.write_text(json.dumps({"1.0": run}))
    assert of_release(row, "1.0") == "bad" and on_a_gpu.devices() == "a GPU, torch 2"
    with pytest.raises(Unavailable, match=r"does not run on 1\.0: no memory"):
        of_release(replace(row, check="r04"), "1.0")


def test_a_release_that_no_index_has_comes_from_its_repository(monkeypatch, tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    packages = tmp_path / "env/lib/python3/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "core").mkdir()
    (tmp_path / "core/name.py").write_text("NAME = 1")
    for words in (["init", "-q"], ["add", "core"], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        git(*words)
    monkeypatch.setattr(environments, "source", lambda repository: tmp_path)
    install_source(tmp_path / "env/bin/python", "a/b", "v1", "core")
    assert (packages / "core/name.py").read_text() == "NAME = 1"
    with pytest.raises(Unavailable, match="a/b has no revision v2"):
        install_source(tmp_path / "env/bin/python", "a/b", "v2", "core")


@pytest.mark.parametrize(("line", "finding"), [("self.align = 16", "5 rows are padded to 16"), ("pass", "")])
def test_padding_aligns_by_the_recipe_of_the_call(monkeypatch, tmp_path, line, finding):
    folder = tmp_path / "transformer_engine/pytorch/module"
    folder.mkdir(parents=True)
    (folder / "fp8_padding.py").write_text(MODULE.replace("LINE", line))
    monkeypatch.setenv("TE_WHEEL", str(tmp_path))
    with mock.patch.dict(sys.modules):
        assert d02().startswith(finding) and bool(d02()) == bool(finding)


def test_the_installed_release_passes_a_check_of_a_mended_defect(monkeypatch):
    pytest.importorskip("megatron")
    from evidence.rediscovery import releases

    assert r05() == ""
    monkeypatch.setattr(
        releases, "_routing", lambda *args, **_: releases.moe_utils.topk_routing_with_score_function(*args)
    )
    assert "routing_map row 0 chooses" in r05()


def test_a_loss_is_compared_to_float32_s_precision():
    assert compared("the loss", 1.0 + 1e-7, 1.0) == ""
    assert compared("the loss", 2.0, 1.0) == "the loss is 2; the reference has 1"


def test_the_page_counts_the_outcomes():
    results = [found(ROW, by(v1_0="bad", v2_0="")), found(replace(ROW, check=None), by())]
    text = page(results)
    assert "2 defects: 1 found again, 0 half, 0 not shown, 1 not run." in text
    assert f"| {MEGATRON} | X01: a title | 1.0 | 2.0 | found again |" in text
    assert "- X01. 1.0: bad." in text and "- X01: because" in text


def test_a_check_over_ranks_finds_the_installed_release_s_defect_and_passes_once_it_is_mended(monkeypatch):
    pytest.importorskip("megatron")
    from megatron.core.transformer.moe.router import TopKRouter

    attach = TopKRouter.attach_and_log_load_balancing_loss

    def of_all_ranks(self, activation, coeff, value, name, group, *, valid_token_count):
        return attach(self, activation, coeff, value, name, group, valid_token_count=valid_token_count * group.size())

    assert a07() == "shared out to two ranks, the gradient is 0.5 × that of one rank"
    monkeypatch.setattr(TopKRouter, "attach_and_log_load_balancing_loss", of_all_ranks)
    assert a07() == ""


def test_an_error_of_a_rank_is_the_error_of_all():
    pytest.importorskip("megatron")

    def fails(rank):
        if rank == 1:
            raise ValueError("no")

    with pytest.raises(RuntimeError, match="rank 1: ValueError: no"):
        on_ranks(2, fails)
