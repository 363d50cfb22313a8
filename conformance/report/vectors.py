"""Cases of one function as data for programs in any language: safetensors and JSON.

FUNCTION.json has the calls, with their settings and the rule of each output; the tensors that it
names are in FUNCTION.safetensors. docs/vectors.md describes both, `examples/read_vectors.py` reads
them with numpy alone.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance import __version__
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Contract, Opaque, Problem
from conformance.core.ranks import Collective
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.runner import Misbehaved, Runner
from conformance.engine.choose.plan import KINDS, Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.interface import Implementation
from conformance.judge import Expectation, Given, Resolved
from conformance.judge.stated import stated
from conformance.report.terminal import picture
from conformance.usage import UsageError, check_known

FORMAT = 1  # incremented when a reader of the files must change
# as safetensors calls them
NAMES = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32"}
NAMES |= {torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
NAMES |= {torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
PLAIN = (bool, int, str, type(None))


class Unwritable(Exception):
    """An argument that JSON cannot say."""


@dataclass
class Vectors:
    """The cases of a function, and what was left out."""

    function: str
    cases: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # numbers of cases, by reason
    unstated: Counter[str] = field(default_factory=Counter)  # numbers of outputs, by reason


def export(function: str, folder: Path, profile: str) -> Vectors:
    """Write FUNCTION.json and FUNCTION.safetensors into the folder, which is made.

    Raises:
        UsageError: an unknown function, or one that ranks call together; or safetensors is not
            installed.
    """
    check_known("--function", [function], CONTRACTS)
    if isinstance(CONTRACTS[function], Collective):
        raise UsageError(f"--function is {function!r}, which ranks call together; a file holds calls of one process")
    safetensors({})  # checked before the cases are computed, which takes seconds
    vectors = Vectors(function)
    for case in _cases(function, profile):
        _add(vectors, case)
    folder.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "suite": __version__, "function": function, "outputs": CONTRACTS[function].outputs}
    text = json.dumps(head | {"cases": vectors.cases}, indent=1, allow_nan=False)
    (folder / f"{function}.json").write_text(text + "\n")
    (folder / f"{function}.safetensors").write_bytes(safetensors(vectors.tensors))
    return vectors


def _cases(function: str, profile: str) -> Iterator[Case]:
    """The cases of a run, once each, because a file states no memory layouts, poison and laws."""
    cases_by_text: dict[str, Case] = {}
    for kind in KINDS[1:]:
        for case in cases_of(Section(kind, function), PROFILES[profile], Space(), 0):
            plain_case = case.changed(law="", poison="nan", layout="contiguous", layout_of="")
            cases_by_text.setdefault(plain_case.text, plain_case)
    yield from cases_by_text.values()


def _add(vectors: Vectors, case: Case) -> None:
    """Add the case, or count why it is left out."""
    contract = CONTRACTS[case.function]
    problem = contract.problem(case)
    tensors: dict[str, Tensor] = {}
    try:
        record = {"id": case.id, "case": case.record(), "shown": picture(case)}
        record |= _call(problem, f"{case.id}/", tensors)
        if problem.blame:
            record["must_raise"] = problem.blame
        else:
            record["outputs"] = _outputs(contract, case, problem, tensors, vectors.unstated)
    except Unwritable as reason:
        vectors.left_out[str(reason)] += 1
    else:
        vectors.cases.append(record)
        vectors.tensors |= tensors


def _call(problem: Problem, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments, cotangents and wanted gradients; the producer's call, where there is one."""
    passed = problem.required | problem.settings
    arguments = {name: _described(x, f"{prefix}{name}", tensors) for name, x in passed.items()}
    record: dict[str, Any] = {"arguments": arguments, "positional": list(problem.required)}
    if problem.script:
        record["several_calls"] = True
    if problem.wanted:
        record["gradients_of"] = list(problem.wanted)
        cotangents = problem.cotangents.items()
        record["cotangents"] = {name: _described(x, f"{prefix}d_{name}", tensors) for name, x in cotangents}
    if problem.producer:
        producer_record = _call(problem.producer, f"{prefix}{problem.producer.function}/", tensors)
        record["producer"] = {"function": problem.producer.function, **producer_record}
    return record


def _described(x: Any, key: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A tensor's key, a plain value, a list, a record of these, or the name of an opaque value.

    Raises:
        Unwritable: none of these.
    """
    if isinstance(x, Tensor) and x.dtype in NAMES and x.layout == torch.strided:
        tensors[key] = x
        return {"tensor": key}
    if isinstance(x, float):
        return {"value": x if x - x == 0 else repr(x)}
    if isinstance(x, PLAIN):
        return {"value": x}
    if isinstance(x, Opaque):
        return {"opaque": x.field_name}
    members = _members(x)
    if members is None:
        raise Unwritable(f"an argument is a {type(x).__name__}")
    described = {name: _described(value, f"{key}.{name}", tensors) for name, value in members.items()}
    return {"list": list(described.values())} if type(x) in (list, tuple) else {"record": described}


def _members(x: Any) -> dict[str, Any] | None:
    """The parts of a list, a dict, a named tuple or a dataclass by name."""
    if hasattr(x, "_asdict"):
        return dict(x._asdict())
    if type(x) in (list, tuple):
        return {str(index): element for index, element in enumerate(x)}
    if is_dataclass(x) and not isinstance(x, type):
        return {element.name: getattr(x, element.name) for element in fields(x)}
    return {str(name): element for name, element in x.items()} if isinstance(x, Mapping) else None


def _outputs(
    contract: Contract[Any], case: Case, problem: Problem, tensors: dict[str, Tensor], unstated: Counter[str]
) -> dict[str, Any]:
    """The rule of each output and gradient.

    A rule that depends on other outputs gets the reference's.
    """
    expected = contract.golden[case.golden][1] if case.golden else contract.expected(case, problem, {})
    if any(isinstance(x, Given) for x in expected.values()):
        try:
            outputs = Runner(Implementation(moe_ref), "cpu", case.poison, Outcome("PASS")).run(problem)
        except Misbehaved as error:
            raise Unwritable(f"the reference's own call: {error}") from error
    else:
        outputs = {}
    return {
        name: _rule(expectation, expectation.resolve(outputs), f"{case.id}/out/{name}", tensors, unstated)
        for name, expectation in expected.items()
    }


def _rule(
    expectation: Expectation, resolved: Resolved, key: str, tensors: dict[str, Tensor], unstated: Counter[str]
) -> dict[str, Any]:
    rule = stated(resolved)
    if not rule.rule:
        unstated[rule.without] += 1
        return {"rule": "unstated", "without": rule.without}
    arrays = {name: f"{key}.{name}" for name in rule.arrays}
    tensors |= {arrays[name]: x for name, x in rule.arrays.items()}
    dtype = NAMES.get(resolved.honest.dtype, "")
    record: dict[str, Any] = {"rule": rule.rule, "dtype": dtype, **arrays}
    record |= {"given_others": True} if isinstance(expectation, Given) else {}
    record |= {"may_be_absent": True} if resolved.optional else {}
    record |= {"axis": rule.axis} if rule.axis >= 0 else {}
    return record | ({"without": rule.without} if rule.without else {})


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's bytes; the library wants each tensor contiguous, with a storage of its own.

    Raises:
        UsageError: the library is not installed.
    """
    try:
        from safetensors.torch import save
    except ModuleNotFoundError as error:
        text = "export writes safetensors files, and that package is not installed"
        raise UsageError(f"{text}: pip install 'moe-conformance[vectors]', or pip install safetensors") from error
    return save(
        {name: x.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    )
