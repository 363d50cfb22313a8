"""The defect classes of automatic mutants: `OPERATORS`, each seen in real kernels.

An operator gets one syntax node and yields (node to replace, new code). Only function bodies are
changed, without annotations, validation, block sizes and cache modifiers: they affect no result.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import libcst as cst

PLAIN_FUNCTIONS = re.compile(r"declares|supports|_*(check|require|validate)\w*")
PLAIN_CALLS = re.compile(
    r"_*(check|require|validate)\w*|isinstance|(debug|static|device)_\w+|print|assume|multiple_of|max_contiguous"
)
PLAIN_NAMES = re.compile(
    r"(?i)block_\w+|num_(warps|stages|ctas)|sem|cache_modifier|eviction_policy|device|strict|non_blocking|bitcast"
)
PLAIN_NODES = (cst.Annotation, cst.Raise, cst.Assert, cst.Import, cst.ImportFrom, cst.BaseString)
LOOSE = (cst.BinaryOperation, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison, cst.IfExp)

Parents = Mapping[cst.CSTNode, cst.CSTNode]
Changes = Iterator[tuple[cst.CSTNode, str]]


@dataclass(frozen=True)
class Function:
    """The function around a node, as far as operators need it."""

    kernel: bool
    constants: frozenset[str]  # its tl.constexpr parameters
    sums: frozenset[str]  # names that are initialised with zeros of a floating dtype
    parents: Parents


def changes(
    node: cst.CSTNode, parents: Parents, function: Function | None = None
) -> Iterator[tuple[str, cst.CSTNode, str]]:
    """Every operator's changes in the bodies of functions: its name, the node, its new code."""
    if isinstance(node, cst.FunctionDef):
        if not PLAIN_FUNCTIONS.fullmatch(node.name.value):
            yield from changes(node.body, parents, _function(node, parents))
        return
    if _is_harmless(node):
        return
    if function:
        yield from ((operator.__name__, *change) for operator in OPERATORS for change in operator(node, function))
    for child in node.children:
        yield from changes(child, parents, function)


def _function(node: cst.FunctionDef, parents: Parents) -> Function:
    kernel = any("jit" in _code(decorator.decorator) for decorator in node.decorators)
    annotated = [
        (p.name.value, _code(p.annotation.annotation))
        for p in (*node.params.params, *node.params.kwonly_params)
        if p.annotation
    ]
    constants = frozenset(name for name, annotation in annotated if annotation.endswith("constexpr"))
    dtypes = "|".join(["tl.float32", "tl.float64", *constants])
    zeros = rf"^\s*(\w+) = tl\.(?:zeros|full)\(.*\b(?:{dtypes})\)"
    sums = re.findall(zeros, _code(node.body), re.MULTILINE) if kernel else []
    return Function(kernel, constants, frozenset(sums), parents)


def _is_harmless(node: cst.CSTNode) -> bool:
    """Whether the node cannot change a result, except for the error of an illegal call."""
    match node:
        case cst.Call():
            return bool(PLAIN_CALLS.fullmatch(_callee(node)))
        case (
            cst.Arg(keyword=cst.Name(value=name)) | cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])
        ):
            return bool(PLAIN_NAMES.fullmatch(name))
        case cst.If(body=cst.IndentedBlock(body=[cst.SimpleStatementLine(body=[cst.Raise()])]), orelse=None):
            return True
    return isinstance(node, PLAIN_NODES)


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _term(node: cst.BaseExpression) -> str:
    """Code that is valid next to any operator, parenthesised if necessary."""
    is_loose = isinstance(node, LOOSE) and not node.lpar
    return f"({_code(node)})" if is_loose else _code(node)


def _bare(node: cst.BaseExpression, **changed_fields: object) -> str:
    """The code of a node with other fields, without its outer parentheses, which stay."""
    return _code(node.with_changes(lpar=(), rpar=(), **changed_fields))


def _callee(call: cst.Call) -> str:
    """The last name of the called expression."""
    name = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    return name.value if isinstance(name, cst.Name) else ""


def _renamed(call: cst.Call, names: Mapping[str, str]) -> str:
    name = cst.Name(names[_callee(call)])
    return _bare(call, func=call.func.with_changes(attr=name) if isinstance(call.func, cst.Attribute) else name)


OTHER_BOUND = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OTHER_OPERATION = {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//"}
OTHER_NUMBER = {"0": "1", "1": "0", "-1": "-2"}
OTHER_FILL = {"0": "1", "0.0": "1.0", "-1": "0"}
OTHER_FUNCTION = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
UNWRITTEN = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty"}
LOWER_DTYPE = {
    "tl.float32": "tl.float16",
    "tl.float64": "tl.float32",
    "torch.float32": "torch.bfloat16",
    "torch.float64": "torch.float32",
}
OF_AXIS = ("program_id", "num_programs", "stride", "size")  # functions whose argument is an axis
SEQUENCES = (cst.BaseString, cst.Tuple, cst.List)
ROUNDED = ".to(tl.float32).to(tl.bfloat16)"  # through float32: no cast is direct from float64


def comparison(node: cst.CSTNode, function: Function) -> Changes:
    """Off by one element: a boundary on the wrong side."""
    if isinstance(node, cst.Comparison):
        operands = (x for target in node.comparisons for x in (target.operator, target.comparator))
        tokens = [_code(node.left), *map(_code, operands)]
        for i, token_text in enumerate(tokens):
            token = token_text.strip()
            if i % 2 and token in OTHER_BOUND:
                yield node, "".join([*tokens[:i], token_text.replace(token, OTHER_BOUND[token]), *tokens[i + 1 :]])


def off_by_one(node: cst.CSTNode, function: Function) -> Changes:
    """The last tile forgotten, a place shifted by one, a neighbour's index."""
    match node:
        case cst.BinaryOperation(operator=cst.Add() | cst.Subtract()):
            for side in ("left", "right"):
                if (number := _code(getattr(node, side))) in ("0", "1"):
                    yield node, _bare(node, **{side: cst.Integer(OTHER_NUMBER[number])})
        case cst.Call(args=[cst.Arg(value=above), cst.Arg(value=below)]) if _callee(node) == "cdiv":
            yield node, f"({_term(above)} // {_term(below)})"
        case cst.Call(args=args) if _callee(node) in ("range", "static_range") and len(args) < 4:
            end = args[min(len(args) - 1, 1)]
            yield end.value, f"{_term(end.value)} - 1"
        case cst.Call(args=[_, cst.Arg(value=fill), _]) if _callee(node) == "full" and _code(fill) in OTHER_NUMBER:
            yield fill, OTHER_NUMBER[_code(fill)]
        case cst.Subscript(value=value) if not _code(value).endswith(".shape"):
            for element in node.slice:
                bounds = (getattr(element.slice, name, None) for name in ("value", "lower", "upper"))
                for bound in filter(None, bounds):
                    if (number := _code(bound)) in OTHER_NUMBER:
                        yield bound, OTHER_NUMBER[number]


def dropped_mask(node: cst.CSTNode, function: Function) -> Changes:
    """Padding, dropped rows or a neighbour's memory accessed: a condition of a mask is missing."""
    match node:
        case cst.BinaryOperation(operator=cst.BitAnd() | cst.BitOr(), left=left, right=right) if not isinstance(
            right, cst.Integer
        ):
            yield from ((node, _code(side)) for side in (left, right))
        case cst.Call(args=args) if function.kernel and re.fullmatch(r"load|store|atomic_\w+", _callee(node)):
            masks = [arg.value for arg in args if arg.keyword and arg.keyword.value == "mask"]
            # a conjunction loses one condition at a time
            if masks and not isinstance(masks[0], cst.BinaryOperation):
                *first, last = [arg for arg in args if not (arg.keyword and arg.keyword.value in ("mask", "other"))]
                yield node, _bare(node, args=[*first, last.with_changes(comma=cst.MaybeSentinel.DEFAULT)])


def dropped_cast(node: cst.CSTNode, function: Function) -> Changes:
    """row × stride in 32 bits, which overflows beyond 2³¹ elements."""
    match node:
        case cst.Call(func=cst.Attribute(value=value), args=[cst.Arg(value=dtype)]) if _callee(node) == "to":
            if _code(dtype) in ("tl.int64", "torch.int64"):
                yield node, _term(value)
        case cst.Call(args=[cst.Arg(value=value), cst.Arg(value=dtype)]) if _callee(node) == "cast":
            if _code(dtype) == "tl.int64":
                yield node, _term(value)


def swapped_axes(node: cst.CSTNode, function: Function) -> Changes:
    """Rows taken for columns: right on square, symmetric or contiguous inputs."""
    match node:
        case cst.Arg(keyword=cst.Name(value="axis" | "dim" as keyword), value=cst.Integer(value="0" | "1" as axis)):
            yield node, f"{keyword}={OTHER_NUMBER[axis]}"
        case cst.Call(args=[cst.Arg(value=cst.Integer(value="0" | "1" as axis))]) if _callee(node) in OF_AXIS:
            yield node, f"{_code(node.func)}({OTHER_NUMBER[axis]})"
        case cst.Subscript(
            value=cst.Attribute(attr=cst.Name(value="shape")),
            slice=[cst.SubscriptElement(slice=cst.Index(value=place))],
        ):
            if _code(place) in ("0", "1"):
                yield node, f"{_code(node.value)}[{OTHER_NUMBER[_code(place)]}]"
        case cst.Subscript(slice=[first, second]) if {_code(first.slice), _code(second.slice)} == {":", "None"}:
            swapped = [first.with_changes(slice=second.slice), second.with_changes(slice=first.slice)]
            yield node, _bare(node, slice=swapped)
        case (
            cst.Arg(star="*", value=cst.Call(args=[]) as strides)
            | cst.StarredElement(value=cst.Call(args=[]) as strides)
        ) if _callee(strides) == "stride":
            yield strides, f"{_code(strides)}[::-1]"


def dropped_store(node: cst.CSTNode, function: Function) -> Changes:
    """A result, zero padding or a count that is never written: fresh memory is often zero."""
    match node:
        case cst.Expr(value=cst.Call() as call) if not _is_harmless(call) and (
            function.kernel or re.fullmatch(r"[a-z]\w*[a-z]_", _callee(call))
        ):
            yield node, "pass"


def accumulation_dtype(node: cst.CSTNode, function: Function) -> Changes:
    """Sums or factors rounded to a storage dtype on the way: every term costs accuracy."""
    floating = {"tl.float32", *function.constants}
    match node:
        case cst.AugAssign(target=cst.Name(value=name), operator=cst.AddAssign(), value=value) if name in function.sums:
            yield node, f"{name} = ({name} + {_term(value)}){ROUNDED}.to({name}.dtype)"
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value) if name in function.sums:
            if re.search(rf"\b{name}\b", _code(value)):
                yield node, f"{name} = ({_code(value)}){ROUNDED}.to({name}.dtype)"
        case cst.Call(func=cst.Attribute(value=value), args=[cst.Arg(value=dtype)]) if (
            function.kernel and _callee(node) == "to" and _code(dtype) in floating
        ):
            outer = function.parents[node]
            # a chain of casts counts as one cast
            if not (isinstance(outer, cst.Attribute) and outer.attr.value == "to"):
                yield node, f"{_code(value)}{ROUNDED}.to({_code(dtype)})"
        case cst.Attribute() if not function.kernel and _code(node) in LOWER_DTYPE and not _compared(node, function):
            yield node, LOWER_DTYPE[_code(node)]


def _compared(node: cst.CSTNode, function: Function) -> bool:
    while isinstance(node, cst.BaseExpression | cst.BaseElement | cst.ComparisonTarget):
        if isinstance(node, cst.ComparisonTarget | cst.Comparison):
            return True
        node = function.parents[node]
    return False


def arithmetic(node: cst.CSTNode, function: Function) -> Changes:
    """A wrong index, offset or bound, swapped branches, a sum that keeps only its last term."""
    match node:
        case cst.BinaryOperation(operator=operator, left=left, right=right) if (
            token := _code(operator).strip()
        ) in OTHER_OPERATION:
            # a minus there would only move the access out of the buffer
            pointer = token == "+" and (re.match(r"\(*\w*_ptr\b", _code(left)) or "arange(" in _code(right))
            if not pointer and not any(isinstance(side, SEQUENCES) for side in (left, right)):
                yield node, _code(left) + _code(operator).replace(token, OTHER_OPERATION[token]) + _code(right)
        case cst.AugAssign(operator=cst.AddAssign(), target=target, value=value):
            yield node, f"{_code(target)} = {_code(value)}"
        case cst.Call(args=[condition, yes, no]) if function.kernel and _callee(node) == "where":
            swapped = [condition, yes.with_changes(value=no.value), no.with_changes(value=yes.value)]
            yield node, _bare(node, args=swapped)
        case cst.Call(args=[_, _]) if _callee(node) in OTHER_FUNCTION and not any(arg.keyword for arg in node.args):
            yield node, _renamed(node, OTHER_FUNCTION)
        case cst.Arg(keyword=cst.Name(value="other"), value=other):
            yield node, f"other={OTHER_FILL.get(_code(other), _code(other))}"


def dropped_condition(node: cst.CSTNode, function: Function) -> Changes:
    """A case of the arguments forgotten: half a condition missing, a flag inverted."""
    match node:
        case cst.BooleanOperation(left=left, right=right):
            yield from ((node, _code(side)) for side in (left, right))
        case cst.UnaryOperation(operator=cst.Not(), expression=expression):
            yield node, _term(expression)
        case cst.Arg(keyword=cst.Name(value=keyword), value=cst.Name(value="True" | "False" as flag)) if (
            not function.kernel
        ):
            yield node, f"{keyword}={flag == 'False'}"


def uninitialised(node: cst.CSTNode, function: Function) -> Changes:
    """Counters and flags that a kernel accumulates into uninitialised memory."""
    if isinstance(node, cst.Call) and not function.kernel and _callee(node) in UNWRITTEN:
        yield node, _renamed(node, UNWRITTEN)


OPERATORS: tuple[Callable[[cst.CSTNode, Function], Changes], ...] = (
    comparison,
    off_by_one,
    dropped_mask,
    dropped_cast,
    swapped_axes,
    dropped_store,
    accumulation_dtype,
    arithmetic,
    dropped_condition,
    uninitialised,
)
