"""An implementation is any namespace that offers some of the reference's functions.

    moe-conformance run --impl my_kernels.moe          a module
    moe-conformance run --impl my_kernels.moe:Fused    a class, object or namespace in a module

The namespace may also say what it is for, and offer three functions:

    scope = "scaling=mxfp8"                            a predicate of `conformance.core.where`, or a
                                                       dict of them by function

    supports(function, **arguments) -> None | reason   gets meta tensors: shapes, dtypes, settings
    declares(function) -> dict                         the guarantees, in terms of VOCABULARY
    transport(function, group) -> str                  how ranks reach each other, if not by it

and the configurations of its own tuner, if it has one (`triton.autotune` needs neither):

    configurations(function) -> sequence of str        the names of all that the tuner chooses from
    configured(function, name) -> context manager      inside it, calls of the function and their
                                                       backward use this configuration

If one of them raises, takes too long or ends the process, the function that it was asked about has
failed, and the others are judged. So has a function whose `supports` or `transport` answers
anything but text or None. `declares` is asked once per process, at its start: an answer outside the
vocabulary is a UsageError, and nothing is judged.

Calls pass the required tensors by position, all other arguments by keyword, defaults omitted. A
call must leave the modes of its process as they were: see `conformance.modes`.
"""

import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.modes import Modes
from conformance.texts import described, one_line, shown
from conformance.usage import UsageError as UsageError
from conformance.usage import check_module, missing_module

ONE_RANK = {"moe_ref": "conformance.peers.reference_world", "moe_ref.layer": "conformance.peers.reference_layer"}
FLAG = (True, False)
NAMES, WORDS = "a tuple of str", "text"


@dataclass(frozen=True)
class Term:
    """One term of the vocabulary: its meaning, and its values, a few or all of a kind."""

    meaning: str
    values: tuple[Any, ...] | str

    @property
    def legal(self) -> str:
        return self.values if isinstance(self.values, str) else " or ".join(map(repr, self.values))

    def allows(self, value: Any) -> bool:
        if self.values == NAMES:
            return isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)
        if self.values == WORDS:
            return isinstance(value, str)
        return any(type(value) is type(allowed_value) and value == allowed_value for allowed_value in self.values)


VOCABULARY = {
    "accumulator": Term(
        "dtype of sums; float32: float64 for float64, unless float32_only; "
        "hopper_fp8: fp8 GEMMs with a scale per tensor or per 128 sum in 14 bits, promoted to float32",
        ("float32", "float32_only", "storage", "hopper_fp8"),
    ),
    "emulated": Term("scalings whose GEMMs run on a unit for wider numbers; printed, not tested", NAMES),
    "reduction_order": Term("printed, not tested", WORDS),
    "tie_rule": Term("which of equal keys is chosen; absent: any", ("lowest_index",)),
    "zero_prob_rows": Term("permuted rows whose probability is 0; their gradient is a copy's", ("copied", "zero")),
    "scale_arithmetic": Term(
        "of scales other than powers of two; reciprocal: rounded once more", ("division", "reciprocal")
    ),
    "deterministic": Term("bit-equal results on every run", FLAG),
    "differentiable": Term("gradients through autograd", FLAG),
    "noncontiguous": Term("accepts inputs of any strides", FLAG),
    "host_sync_free": Term("never waits for the device where a static size is given", FLAG),
    "graph_capturable": Term("may be captured in a CUDA graph where a static size is given", FLAG),
    "unchecked": Term("arguments whose illegal values are not detected", NAMES),
    "omits": Term("outputs that are not returned", NAMES),
}
DEFAULTS = {"accumulator": "float32", "differentiable": True, "noncontiguous": True}


class ModeChanged(Exception):
    """A call has changed a mode of the process; the message names it."""


class Undeclared(Exception):
    """`declares` raised; the message says what."""


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature; None if it cannot be read, as of a builtin.

    A wrapper has its own, which may lack settings of the function that it wraps. Only one that
    takes any keyword has the signature of that function. A module of torch has its forward's.
    """
    try:
        function = function.forward if isinstance(function, torch.nn.Module) else function
        signature = inspect.signature(function, follow_wrapped=False)
        passes_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        return inspect.signature(function) if passes_on else signature
    except Exception:
        return None


class Implementation:
    """A namespace, asked by function name."""

    def __init__(self, namespace: Any, name: str = "") -> None:
        self.namespace, self.name = namespace, name
        self._parameters: dict[str, frozenset[str] | None] = {}
        self._declared: dict[str, dict[str, Any] | Undeclared] = {}
        self._configurations: dict[str, tuple[str, ...]] = {}

    @property
    def notes(self) -> list[str]:
        """Sentences of the namespace for the head of each report."""
        return [one_line(text) for text in getattr(self.namespace, "notes", ())]

    def offers(self, function: str) -> bool:
        return callable(getattr(self.namespace, function, None))

    def lacks(self, function: str, settings: dict[str, Any]) -> list[str]:
        """The settings for which the function's signature has no parameter.

        `scales.layout` stands for the parameter `layout` of another function, which the call needs
        too.
        """
        return [name for name in settings if not self._accepts_parameter(name if "." in name else f"{function}.{name}")]

    def names(self, function: str, parameter: str) -> bool:
        """Whether the function's signature names the parameter.

        A signature that accepts any keyword need not.
        """
        signature = signature_of(getattr(self.namespace, function, None))
        return signature is not None and parameter in signature.parameters

    def with_default(self, function: str, names: Iterable[str]) -> set[str]:
        """Those of these parameters that the function's signature names, with a default."""
        signature = signature_of(getattr(self.namespace, function, None))
        parameters = signature.parameters if signature else {}
        return {x for x in names if x in parameters and parameters[x].default is not inspect.Parameter.empty}

    def _accepts_parameter(self, name: str) -> bool:
        """Whether the function is offered, and takes the parameter by keyword."""
        function, _, parameter = name.partition(".")
        if function not in self._parameters:
            self._parameters[function] = self._keywords(function)
        parameters = self._parameters[function]
        return parameters is None or parameter in parameters

    def _keywords(self, function: str) -> frozenset[str] | None:
        """The function's keyword arguments; None if it accepts any, or if they are unknown."""
        if not self.offers(function):
            return frozenset()
        signature = signature_of(getattr(self.namespace, function))
        parameters = signature.parameters.values() if signature else ()
        if not signature or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    def supports(self, function: str, arguments: dict[str, Any]) -> str | None:
        """The reason that this call is not supported, or None.

        Raises:
            TypeError: the namespace answers neither text nor None.
        """
        if not hasattr(self.namespace, "supports"):
            return None
        with torch.device("meta"):
            meta = {k: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
        reason = self.namespace.supports(function, **meta)
        return None if reason is None else _text(reason, "None or a reason")

    def declares(self, function: str) -> dict[str, Any]:
        """The namespace's declarations for `function`, merged over the defaults; asked once.

        Raises:
            UsageError: a key or a value that is not in VOCABULARY.
            Undeclared: the namespace raises.
        """
        if function not in self._declared:
            self._declared[function] = self._ask(function)
        declared = self._declared[function]
        if isinstance(declared, Undeclared):
            raise Undeclared(*declared.args)
        return declared

    def _ask(self, function: str) -> dict[str, Any] | Undeclared:
        if not hasattr(self.namespace, "declares"):
            return DEFAULTS
        try:
            declared = self.namespace.declares(function)
        except BaseException as error:
            return Undeclared(f"declares raised {described(error)}")
        if not isinstance(declared, dict):
            raise UsageError(f"{self.name} declares {shown(declared)} for {function}; it must be a dict")
        for key, value in declared.items():
            if key not in VOCABULARY:
                vocabulary = ", ".join(VOCABULARY)
                raise UsageError(f"{self.name} declares {shown(key)} for {function}; the vocabulary is {vocabulary}")
            if not VOCABULARY[key].allows(value):
                legal = VOCABULARY[key].legal
                raise UsageError(f"{self.name} declares {key} = {shown(value)} for {function}; it must be {legal}")
        return DEFAULTS | {key: _printable(value) for key, value in declared.items()}

    def configurations(self, function: str) -> tuple[str, ...]:
        """The names of the configurations that the namespace's tuner chooses from for the function;
        empty if it has no tuner: that takes both `configurations` and `configured`.

        Raises:
            TypeError: the namespace answers no sequence of names, each once.
        """
        hooks = (getattr(self.namespace, name, None) for name in ("configurations", "configured"))
        if function not in self._configurations:
            names = self.namespace.configurations(function) if all(map(callable, hooks)) else ()
            listed = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
            if not listed or len({*names}) < len(names):
                raise TypeError(f"it returned {shown(names)}; it must return a list of names, each once")
            self._configurations[function] = tuple(names)
        return self._configurations[function]

    def configured(self, function: str, name: str) -> AbstractContextManager[Any]:
        """The namespace's block in which calls of the function use this configuration."""
        block: AbstractContextManager[Any] = self.namespace.configured(function, name)
        return block

    def transport(self, function: str, group: Any) -> str:
        """The namespace's transport between the ranks of a group; "" if it is the group's.

        Raises:
            TypeError: the namespace answers no text.
        """
        named = getattr(self.namespace, "transport", None)
        return _text(named(function, group), "text") if callable(named) else ""

    @property
    def scopes(self) -> dict[str, str]:
        """The predicates of `scope` by function; a text for every function is under "".

        Raises:
            UsageError: it is neither text nor a dict of texts.
        """
        scope = getattr(self.namespace, "scope", "")
        by_function = scope if isinstance(scope, dict) else {"": scope}
        if not all(isinstance(text, str) for pair in by_function.items() for text in pair):
            hint = "it must be a predicate such as 'dtype=bfloat16', or a dict of them by function"
            raise UsageError(f"{self.name} has scope = {shown(scope)}; {hint}")
        return {function: one_line(text) for function, text in by_function.items() if text.strip()}

    def call(self, function: str, *args: Any, **settings: Any) -> Any:
        """The function's result, with None for outputs that it is declared to omit and lacks.

        Raises:
            ModeChanged: the call has changed a mode of the process, which is set back.
        """
        modes, changed = Modes(), ""
        try:
            result = getattr(self.namespace, function)(*args, **settings)
        finally:
            changed = modes.restore()
        if changed:
            raise ModeChanged(f"returned with another {changed} than before the call")
        return self.completed(function, result)

    def completed(self, function: str, result: Any) -> Any:
        """The result with None for outputs that the function is declared to omit and lacks."""
        declared = self._declared.get(function)
        return _completed(result, declared.get("omits", ())) if isinstance(declared, dict) else result


class _Completed:
    """A result with more fields."""

    def __init__(self, result: Any, extra_fields: dict[str, Any]) -> None:
        self._result, self._more = result, extra_fields

    def __getattr__(self, name: str) -> Any:
        return self._more[name] if name in self._more else getattr(self._result, name)


def _completed(result: Any, omitted: tuple[str, ...]) -> Any:
    """The result with None for omitted fields.

    A plain tuple, whose values have no names, stays as it is.
    """
    if isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and not hasattr(result, "_fields")):
        return result
    if isinstance(result, dict):
        return dict.fromkeys(omitted) | result
    lacking = {name: None for name in omitted if not hasattr(result, name)}
    return _Completed(result, lacking) if lacking else result


def _text(answer: Any, wanted: str) -> str:
    if not isinstance(answer, str):
        raise TypeError(f"it returned {shown(answer)}; it must return {wanted}")
    return one_line(answer)


def _printable(value: Any) -> Any:
    """A declared value with its texts on one line each."""
    if isinstance(value, str):
        return one_line(value)
    return tuple(map(one_line, value)) if isinstance(value, (tuple, list)) else value


def imported(module_name: str) -> Any:
    """The module of this name.

    For the reference's functions of all ranks, their one-rank adapter.
    """
    return importlib.import_module(ONE_RANK.get(module_name, module_name))


def load(name: str) -> Implementation:
    """Import the namespace `name`: a module, or module:attribute.

    Raises:
        UsageError: it cannot be imported, raises while it is, or has no such attribute.
    """
    module_name, _, attribute = name.partition(":")
    check_module(name)
    try:
        namespace: Any = imported(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UsageError(missing_module(name, missing)) from None
        problem = f"there is no module {missing!r}; something inside a module is written module:name"
        if missing.startswith(f"{module_name}.") or missing.rpartition(".")[0] == "":
            problem = f"it imports {missing!r}, which does not exist ({_raised_at(error)})"
        raise UsageError(f"--impl {name}: {problem}") from None
    except BaseException as error:
        problem = f"importing it raised {type(error).__name__}: {error} ({_raised_at(error)})"
        raise UsageError(f"--impl {name}: {problem}") from error
    for name_part in filter(None, attribute.split(".")):
        if not hasattr(namespace, name_part):
            raise UsageError(f"--impl {name}: {module_name} has no {attribute!r}")
        namespace = getattr(namespace, name_part)
    return Implementation(namespace, name)


def _raised_at(error: BaseException) -> str:
    """The file and line that raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}"


def named_outputs(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A call's outputs by name: a tensor, a plain tuple in order, a dict, or an object's fields.

    Raises:
        ValueError: the result has the wrong number of values, or lacks a field.
    """
    if isinstance(result, Tensor) and len(names) == 1:
        return {names[0]: result}
    if isinstance(result, (tuple, list)) and not hasattr(result, "_fields"):
        if len(result) != len(names):
            raise ValueError(f"returned {len(result)} values; it must return {len(names)}: {', '.join(names)}")
        return dict(zip(names, result, strict=True))
    fields = {} if isinstance(result, dict) else {x: getattr(result, x) for x in names if hasattr(result, x)}
    outputs_by_name = result if isinstance(result, dict) else fields
    missing = [name for name in names if name not in outputs_by_name]
    if missing:
        hint = f"it must have {', '.join(names)}, or be declared to omit some"
        raise ValueError(f"returned {type(result).__name__} without {', '.join(missing)}; {hint}")
    return {name: outputs_by_name[name] for name in names}


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """One autograd function out of two bare kernels.

        forward(*args, **settings) -> (outputs, saved)   outputs: a tensor or a tuple; saved: any
        backward(saved, *cotangents) -> gradients        one per positional argument, or None

    The cotangent of an unused output is None. A backward with `create_graph=True` raises
    `RuntimeError`: the gradients would not depend on what was saved.
    """

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, settings, *args):
            ctx.set_materialize_grads(False)
            outputs, ctx.kept = forward(*args, **settings)
            all_outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            integers = (x for x in all_outputs if isinstance(x, Tensor) and not x.is_floating_point())
            ctx.mark_non_differentiable(*integers)
            return outputs

        @staticmethod
        def backward(ctx, *cotangents):
            if torch.is_grad_enabled():
                raise RuntimeError("gradients of bare kernels have no derivative")
            gradients = backward(ctx.kept, *cotangents)
            return (None, *(gradients if isinstance(gradients, tuple) else (gradients,)))

    return lambda *args, **settings: Bare.apply(settings, *args)
