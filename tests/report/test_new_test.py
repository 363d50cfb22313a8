"""`new-test` writes hypothesis tests that judge what a namespace offers."""

import runpy

import pytest

OWN = """
import moe_ref

def pad_routing_map(routing_map, *, align):
    return moe_ref.pad_routing_map(routing_map, align=align)

def indices_to_multihot(indices, probs=None, *, num_experts):
    routing_map, multihot = moe_ref.indices_to_multihot(indices, probs, num_experts=num_experts)
    return ~routing_map, multihot

def alltoall_dispatch(*arguments, group=None, **settings): ...
"""


@pytest.fixture()
def own_kernels(workdir):
    (workdir / "own.py").write_text(OWN)


def test_each_offered_function_has_a_test_that_finds_what_is_wrong(call, workdir, own_kernels, monkeypatch):
    code, out, err = call("new-test", "--impl", "own", "--device", "cpu")
    assert (code, out, err) == (0, "wrote test_own.py; run it: pytest test_own.py\n", "")
    monkeypatch.syspath_prepend(str(workdir))  # as pytest does
    written = runpy.run_path(str(workdir / "test_own.py"))
    tests = {name: test for name, test in written.items() if name.startswith("test_")}
    assert set(tests) == {"test_pad_routing_map", "test_indices_to_multihot"}
    tests["test_pad_routing_map"]()
    with pytest.raises(AssertionError, match="routing_map"):
        tests["test_indices_to_multihot"]()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--impl", "own", "--function", "permute"), "--function is 'permute'; it must be one that own offers"),
        (("--impl", "own", "--function", "alltoall_dispatch"), "a rank calls alone: pad_routing_map, indices_to_multi"),
        (("--impl", "nobody"), "there is no module 'nobody'"),
    ],
)
def test_what_cannot_be_tested_is_said_and_nothing_is_written(call, workdir, own_kernels, words, sentence):
    code, _, err = call("new-test", *words, "--device", "cpu")
    assert (code, sentence in err) == (2, True), err
    assert not list(workdir.glob("test_*.py"))


def test_no_file_is_written_over(call, workdir, own_kernels):
    (workdir / "test_own.py").write_text("mine")
    code, _, err = call("new-test", "--impl", "own", "--function", "pad_routing_map", "--device", "cpu")
    assert (code, "test_own.py exists" in err) == (2, True)
    assert (workdir / "test_own.py").read_text() == "mine"
