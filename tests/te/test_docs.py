"""docs/te.md names every feature, variable and stand-in that there is."""

from pathlib import Path

from conformance.peers.te.features import GATES, TABLE
from tests.te.standin import BUCKETS

PAGE = (Path(__file__).parents[2] / "docs/te.md").read_text()


def test_the_page_names_every_symbol_variable_and_stand_in():
    names = {x.symbol.removeprefix("pytorch.").removeprefix("router.").partition("GroupedLinear.")[0] for x in TABLE}
    others = {"fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"}  # "and two others"
    assert [x for x in sorted(names - others) if x not in PAGE] == []
    assert [x.variable for x in GATES if x.variable not in PAGE] == []
    assert [x for x in BUCKETS if f"`{x}`" not in PAGE] == []
