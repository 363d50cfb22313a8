"""A changed copy of the reference: the change is there, once, and nothing else is another's."""

import pytest
import torch

import moe_ref
from conformance import catalogue as catalogue  # which lists the defects
from conformance.core.rewritten import COPIES, Rewrite, changed, of_copy, rewritten
from conformance.mutants.planted import DEFECTS

MAP = torch.tensor([[True, False], [True, True]])


@pytest.mark.parametrize("copy", sorted(COPIES.changes))
def test_every_change_is_of_a_text_that_occurs_once_and_gives_python(copy):
    change = COPIES.changes[copy]
    source = (COPIES.reference() / change.file).read_text()
    assert changed(source, change) != source
    compile(of_copy(changed(source, change), copy, {}), change.file, "exec")


def test_a_text_that_is_not_there_or_twice_is_refused():
    for source in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="not once"):
            changed(source, Rewrite("layer.py", "x = 1", "x = 2"))


def test_a_copy_has_the_change_and_the_reference_has_not(monkeypatch):
    routed = "tokens = [t for t, wanted in enumerate(routed) if wanted]"
    change = Rewrite("permutation/permute.py", routed, "tokens = []")
    monkeypatch.setattr(COPIES, "changes", dict(COPIES.changes))
    defect = rewritten("RC999", "nothing is routed", "invited", ("permute",), change)
    tokens = torch.arange(2.0)[:, None]
    assert len(defect.wrappers["permute"](moe_ref.permute, tokens, MAP).rows) == 0
    assert len(moe_ref.permute(tokens, MAP).rows) == 3


def test_a_copy_takes_its_settings_from_the_reference():
    source = "from moe_ref.config import Recipe\nfrom moe_ref.layer import x\nfrom conformance.peers.peer import y"
    expected = "from moe_ref.config import Recipe\nfrom c.layer import x\nfrom c.peer import y"
    assert of_copy(source, "c", {"peer": "c.peer"}) == expected
    assert {"moe_ref_rc001", "moe_ref_rc240"} <= set(COPIES.changes)
    assert len([name for name in DEFECTS if name.startswith("RC")]) == 240
