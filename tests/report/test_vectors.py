"""`export`: a program that has numpy alone judges a function as the suite does."""

import ast
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import Collective
from conformance.judge.bound import Bounded
from conformance.judge.choice import Chosen
from conformance.judge.codes import DIVISION, Codes, code_values
from conformance.judge.exact import Exact
from conformance.judge.stated import stated
from conformance.report.vectors import NAMES, export, safetensors
from examples import read_vectors
from examples.read_vectors import Tensor, judge, load, permute, wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    for function in ("permute", "unpermute", "z_loss", "quantize"):
        export(function, folder, "smoke")
    return folder


def test_a_right_function_in_numpy_passes_every_case(folder):
    judged, failed = judge(folder, "permute", permute)
    assert judged > 4 and failed == []


@pytest.mark.parametrize("output", ["rows", "probs", "tokens_per_expert"])
def test_a_wrong_function_in_numpy_fails(folder, output):
    def mistaken(**arguments):
        outputs = permute(**arguments)
        if outputs and output in outputs:
            kind, words = outputs[output]
            outputs[output] = Tensor(kind, np.roll(words, 1, axis=0))
        return outputs

    assert judge(folder, "permute", mistaken)[1]


def test_an_output_that_is_absent_or_of_another_dtype_or_shape_is_wrong(folder):
    def changed(change, **arguments):
        outputs = permute(**arguments)
        return outputs and outputs | {"rows": change(outputs["rows"])}

    for change in (lambda x: None, lambda x: Tensor("I8", x.words), lambda x: Tensor(x.dtype, x.words[1:])):
        judged, failed = judge(folder, "permute", partial(changed, change))
        assert len(failed) >= judged - 1  # one has no rows


def test_the_sums_of_a_loss_are_judged_by_their_bound(folder):
    def z_loss(logits, coeff, shift=0.0, **unknown):
        if unknown:
            return None
        numbers = logits.numbers
        peak = numbers.max(1, keepdims=True, initial=-np.inf)
        log_sum = np.log(np.exp(numbers - peak).sum(1)) + peak[:, 0]
        loss = (log_sum**2).mean() * coeff + shift if len(numbers) else np.float64(0)
        return {"loss": Tensor("F64", loss) if logits.dtype == "F64" else Tensor("F32", np.float32(loss))}

    judged, failed = judge(folder, "z_loss", z_loss)
    assert judged > 2 and failed == []
    assert judge(folder, "z_loss", partial(z_loss, shift=1e-2))[1]


def test_every_function_of_one_process_is_written_and_every_tensor_is_read_back(folder):
    for path in folder.glob("*.json"):
        cases = json.loads(path.read_text())["cases"]
        tensors = load(path.with_suffix(".safetensors"))
        keys = {rule[name] for case in cases for rule in case.get("outputs", {}).values() for name in rule
                if name in ("value", "bound", "least", "most", "places", "keys", "error", "counts")}  # fmt: skip
        assert cases and keys and keys <= tensors.keys()
        assert all(("must_raise" in case) != ("outputs" in case) for case in cases)
    producers = [case["producer"]["function"] for case in json.loads((folder / "unpermute.json").read_text())["cases"]]
    assert {*producers} == {"permute"}


def test_a_tensor_of_any_dtype_comes_back_as_it_was():
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind).T for kind in NAMES}
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3)
    tensors["repeated"] = torch.ones(1, 1).expand(4, 1)
    tensors["part"] = tensors["torch.float32"][1:]  # of the same storage
    path = SimpleNamespace(read_bytes=lambda: safetensors(tensors))
    for name, tensor in load(path).items():
        assert tensor.words.shape == tuple(tensors[name].shape)
        if "float8" not in name:
            assert np.array_equal(tensor.numbers, tensors[name].double().numpy())


def test_the_words_for_dtypes_are_those_of_the_library():
    by_word = {word: torch.zeros(1, dtype=kind) for kind, word in NAMES.items()}
    loaded = load(SimpleNamespace(read_bytes=lambda: safetensors(by_word)))
    assert {word: x.dtype for word, x in loaded.items()} == {word: word for word in by_word}


def test_without_the_library_one_sentence_says_what_to_install(call, workdir, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    code, _, err = call("export", "vectors", "--function", "permute")
    assert (code, "pip install 'moe-conformance[vectors]'" in err, err.count("\n")) == (2, True, 1)
    assert not (workdir / "vectors").exists()


def by_rule(expectation, observed: torch.Tensor) -> bool:
    """Whether the reader of the example finds the output wrong."""
    rule = stated(expectation)
    loaded = load(SimpleNamespace(read_bytes=lambda: safetensors({**rule.arrays, "y": observed})))
    return wrong({"rule": rule.rule, "dtype": "", **{name: name for name in rule.arrays}}, loaded, loaded["y"])


TABLE = code_values(torch.float8_e4m3fn)
MIDPOINT = (TABLE[8:10].sum() / 2).reshape(1)
PAIRS = [  # an expectation, outputs that are right, outputs that are wrong
    (Exact(torch.tensor([0.0, 1])), [torch.tensor([0.0, 1])], [torch.tensor([-0.0, 1])]),
    (Exact(torch.tensor([0.0, torch.nan]), "values"), [torch.tensor([-0.0, torch.nan])], [torch.tensor([0.0, 1])]),
    (Exact(torch.tensor([True, False]), "integers"), [torch.tensor([1, 0])], [torch.tensor([2, 0])]),
    (
        Bounded(torch.tensor([1.0, torch.inf]).double(), torch.tensor([0.5, 0]).double(), torch.float32, torch.float32),
        [torch.tensor([1.5, torch.inf])],
        [torch.tensor([1.6, torch.inf]), torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, torch.inf])],
    ),
    (
        Codes(torch.tensor([8], dtype=torch.uint8), scaled=MIDPOINT, table=TABLE, window=DIVISION),
        [torch.tensor([8], dtype=torch.uint8), torch.tensor([9], dtype=torch.uint8)],
        [torch.tensor([7], dtype=torch.uint8), torch.tensor([10], dtype=torch.uint8)],
    ),
]


@pytest.mark.parametrize(("expectation", "accepted", "mistakes"), PAIRS, ids=lambda x: type(x).__name__)
def test_a_rule_agrees_with_the_check_that_it_states(expectation, accepted, mistakes):
    for outputs, is_wrong in ((accepted, False), (mistakes, True)):
        for observed in outputs:
            assert by_rule(expectation, observed) is is_wrong
            if not is_wrong or not isinstance(expectation, Codes):
                assert (expectation.wrong(observed) is not None) is is_wrong


def test_what_no_rule_states_says_so():
    keys = torch.tensor([[3.0, 2, 1, 0]]).double()
    chosen = Chosen(keys > 1.5, keys, torch.zeros_like(keys), torch.tensor([2]), groups=2, group_topk=1)
    assert (stated(chosen).rule, stated(chosen).without) == ("", "a choice under group limits")
    ungrouped = stated(Chosen(keys > 1.5, keys, torch.zeros_like(keys), torch.tensor([2])))
    assert (ungrouped.rule, ungrouped.axis, ungrouped.arrays["counts"].tolist()) == ("choice", 1, [2])


def test_the_reader_needs_numpy_alone():
    tree = ast.walk(ast.parse(Path(read_vectors.__file__).read_text()))
    names = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"json", "struct", "sys", "numpy"}


def test_the_command_says_what_it_wrote_and_what_has_no_vectors(call, workdir):
    code, out, _ = call("export", "vectors", "--function", "gate,topk_routing", "--profile", "smoke")
    assert (code, "gate: 10 cases" in out, "outputs without a rule: a choice under group limits" in out) == (
        0,
        True,
        True,
    )
    assert {path.name for path in (workdir / "vectors").iterdir()} == {
        f"{name}.{kind}" for name in ("gate", "topk_routing") for kind in ("json", "safetensors")
    }
    several = next(name for name, contract in CONTRACTS.items() if isinstance(contract, Collective))
    for name, sentence in ((several, "which ranks call together"), ("premute", "known are gate")):
        code, _, err = call("export", "vectors", "--function", name)
        assert (code, sentence in err) == (2, True)
