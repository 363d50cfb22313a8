"""`new-adapter` writes a file that runs: an example, or stubs of the functions that are named."""

import ast

import pytest

from conformance.catalogue import CONTRACTS


def test_the_example_is_conformant_as_it_stands(call, workdir):
    code, out, _ = call("new-adapter", "mine")
    assert (code, "check-adapter --impl mine" in out) == (0, True)
    assert "run --impl mine" in (workdir / "mine.py").read_text()
    code, out, _ = call("run", "--impl", "mine", "--profile", "smoke", "--device", "cpu", "--jobs", "1")
    assert (code, "CONFORMANT   1 functions" in out) == (0, True)


def test_a_stub_fails_until_it_is_filled_in(call, workdir):
    code, _, _ = call("new-adapter", "filled.py", "--function", "pad_routing_map,sort_chunks")
    code, out, _ = call("check-adapter", "--impl", "filled")
    assert (code, "ok   pad_routing_map" in out, "ok   sort_chunks" in out) == (0, True, True)
    judge = ("run", "--impl", "filled", "--function", "pad_routing_map", "--profile", "smoke", "--device", "cpu")
    code, out, _ = call(*judge, "--jobs", "1")
    assert (code, "call your kernel here" in out) == (1, True)
    text = (workdir / "filled.py").read_text()
    reference = "import moe_ref\n    return moe_ref.pad_routing_map(routing_map_TE, align=align)"
    (workdir / "filled.py").write_text(text.replace('raise NotImplementedError("call your kernel here")', reference, 1))
    code, out, _ = call(*judge, "--jobs", "1")
    assert (code, "CONFORMANT   1 functions" in out) == (0, True)


def test_every_function_has_a_stub(call, workdir):
    assert call("new-adapter", "all", "--function", ",".join(CONTRACTS))[0] == 0
    stubs = {node.name: node for node in ast.parse((workdir / "all.py").read_text()).body if hasattr(node, "name")}
    assert {*CONTRACTS} <= {*stubs} and not any("moe_ref.config" in ast.unparse(s.args) for s in stubs.values())
    assert "group" in ast.unparse(stubs["alltoall_dispatch"].args)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("new-adapter", "two"), "two.py exists; give another name"),
        (("new-adapter", "my-adapter"), "NAME is 'my-adapter'; it must be the name of a module"),
        (("new-adapter", "../other"), "NAME is '../other'"),
        (
            ("new-adapter", "other", "--function", "premute"),
            "--function is 'premute'; the nearest is permute; known are gate, ",
        ),
    ],
)
def test_nothing_is_written_over_and_no_wrong_name_is_taken(call, workdir, arguments, sentence):
    contents = {path: path.read_bytes() for path in workdir.glob("*.py")}
    code, _, err = call(*arguments)
    assert (code, sentence in err) == (2, True)
    assert {path: path.read_bytes() for path in workdir.glob("*.py")} == contents
