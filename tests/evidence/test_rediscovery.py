"""What counts as a defect found again, and which rows there are."""

from dataclasses import replace

import pytest

from evidence.environments import Unavailable
from evidence.rediscovery.__main__ import found
from evidence.rediscovery.checks import CHECKS, compared, r05
from evidence.rediscovery.checks_ranks import a07
from evidence.rediscovery.page import page
from evidence.rediscovery.ranks import on_ranks
from evidence.rediscovery.rows import MEGATRON, ROWS, Row

ROW = Row("X01", "a title", MEGATRON, "1.0", "2.0", check="r05", why="because")


def by(**wrong):
    """A judge that finds this in each release; None: it cannot be installed."""

    def of(row, release):
        text = wrong["v" + release.replace(".", "_")]
        if text is None:
            raise Unavailable(f"there is no {release}")
        return text

    return of


@pytest.mark.parametrize(
    ("row", "wrong", "outcome"),
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
def test_a_defect_counts_only_if_the_first_release_fails_and_the_second_passes(row, wrong, outcome):
    assert found(row, by(**wrong)).outcome == outcome


def test_every_row_has_a_check_or_a_reason_and_every_check_a_row():
    assert all(row.check in CHECKS or (row.check is None and row.why) for row in ROWS)
    assert {row.check for row in ROWS if row.check} == set(CHECKS)
    assert len({(row.package, row.bug) for row in ROWS}) == len(ROWS)


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
    assert "2.0 passes. 1.0: bad." in text and "a title. because" in text


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
