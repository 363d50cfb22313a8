"""The names that a declaration or a waiver of one function may use."""

from typing import Any

from conformance.core.case import Case
from conformance.core.contract import Contract
from conformance.core.scope import Scope
from conformance.core.space import Space

# findings that are not about a result: about the whole call, or about what a namespace declares
WHOLE = ("call", "memory", "supports", "declares", "transport")
# checks of every function, besides "raises …", the expectations' checks and the laws
CHECKS = ("error", "input", "memory", "missing", "ranks", "shape", "dtype", "signature", "tensor")
JUDGED = ("exact", "code", "random", "bound", "ratio", "choice", "ring")  # `check` of the expectations


def arguments_of(contract: Contract[Any]) -> set[str]:
    """The arguments of its calls, and those that its illegal calls are about."""
    scope, cls = Scope(contract, Space()), contract.case_type
    illegal = [cls(function=contract.function, illegal=name, **scope.illegal) for name in contract.illegal]
    signature = contract.signature
    inputs = {name for x in signature.every_input for name in (x.name, x.argument)}
    return inputs | {*signature.settings, *signature.required} | {contract.problem(case).blame for case in illegal}


def omissible_of(contract: Contract[Any]) -> set[str]:
    """The outputs that an implementation may declare not to return."""
    return {out.name for out in contract.signature.outputs} - {contract.primary}


def judged_of(contract: Contract[Any]) -> set[str]:
    """The outputs of a finding."""
    outputs = {out.name for out in contract.signature.outputs}
    default = _default(contract)
    cases = [expected for _, expected in contract.golden.values()]
    cases.append(contract.expected(default, contract.problem(default), {}))
    arguments = arguments_of(contract)
    gradients = {f"d_{name}" for name in arguments}
    return outputs | {name for expected in cases for name in expected} | arguments | gradients | {*WHOLE}


def makes_several_calls(contract: Contract[Any]) -> bool:
    """Whether its cases make several calls, whose outputs have dotted names."""
    golden = [problem for problem, _ in contract.golden.values()]
    return any(call.script or call.read for call in [*golden, contract.problem(_default(contract))])


def _default(contract: Contract[Any]) -> Case:
    return contract.case_type(function=contract.function)


def checks_of(contract: Contract[Any]) -> set[str]:
    """The names of the checks that a finding of the function may have, except for "raises …"."""
    return {*CHECKS, *JUDGED, *contract.laws}
