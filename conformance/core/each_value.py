"""Cases for the values of single axes that neither the covering array nor a draw has used.

Covering all pairs of values takes many structures, and a compiler takes seconds for each of them,
so a gate on a GPU covers only a part of the pairs. Single values are few. Each value that no case
has yet is therefore given a case. Values that need compiled kernels of their own share a case. Each
value of the data has its own case, because empty or zero data may hide other errors. Every tensor
has unusual strides in some case. Every matrix has a case with rows of whole memory lines, in each
layout that looks aligned, because kernels load a line at once if it begins on a boundary. A gate on
a GPU draws few sizes, so there are also cases with sizes of 0 and of 1 (for which kernels are
specialised), with each tensor as a lazily negated view, and with gradients for each law. Each input
that has a gradient is the only frozen one in some case.
"""

from collections.abc import Iterator
from typing import Any

from conformance.core.axes import Changes, Size
from conformance.core.case import axes_of
from conformance.core.scope import Scope
from conformance.core.signature import FAR

WHOLE = "recipe"  # its fields are numbers in a table
# layouts of matrices with adjacent columns: with and without row strides of whole lines, aligned or
# not
LINED = ("sliced", "uneven", "shifted")
LINES = ({"hidden": 32, "width": 48}, {"experts": 32})  # lengths of rows: of numbers, or else of a map
MATRIX = {"tokens": 5, "dtype": "bfloat16"}  # several rows, and a dtype that tensor descriptors are made for
IN_UNITS = ("scaling", "recipe")  # fields by whose values sizes may count blocks
OF_THE_CASE = ("dtype", "map_dtype")  # fields of dtypes that every case has, unlike noise and states
SHORT = "TKC"  # dimensions that no kernel loads as a line: tokens, slots, chunks


def left_out(scope: Scope, cases: list[Any], bases: list[Any]) -> list[Any]:
    """Cases with the values of axes, and with the laws, that no given case has.

    Each is one of the bases with some of its fields changed and mended; the laws are taken in turn.
    A value that fits no base is left out.

    Args:
        bases: some of the cases, as one of each structure.
    """
    drawn = [case for case in cases if not (case.golden or case.illegal or case.before)]
    wanted = [equals for equals in values(scope) if not any(case.has(one) for case in drawn for one in equals)]
    plain_texts = {case.text for case in drawn if case.layout not in FAR and not case.is_large}
    bases = [case for case in bases if case.text in plain_texts]
    new_cases: list[Any] = []
    while wanted:
        first, *wanted = wanted
        # start at another base each time; for few kernels, take the first base that fits
        turn = 0 if scope.space.few_kernels else len(new_cases) % max(len(bases), 1)
        case, fixed = next(_placements(scope, bases[turn:] + bases[:turn], {}, first), (None, {}))
        if case is None:
            continue
        for equals in [equals for equals in wanted if not (_of_data(scope, first) or _of_data(scope, equals))]:
            placement = next(_placements(scope, [case], fixed, equals), None)
            if placement:
                case, fixed = placement
                wanted = [remaining for remaining in wanted if remaining is not equals]
        new_cases.append(case.changed(seed=case.seed + 1 + len(new_cases)))
    new_cases = scope.lawful(new_cases)
    tested = {case.law for case in drawn + new_cases}
    all_cases = drawn + new_cases
    all_cases += [scope.mended(case.changed(grads="", layout="contiguous", layout_of="")) for case in all_cases]
    for law in scope.contract.laws.values():
        if law.name not in tested:
            new_cases += [case.changed(law=law.name) for case in all_cases if law.holds(case, scope.space.device)][:1]
    new_cases += _with_gradients(scope, drawn + new_cases) if scope.space.few_kernels else []
    return new_cases + _frozen(scope, drawn + new_cases)


def _frozen(scope: Scope, cases: list[Any]) -> list[Any]:
    """For each input with a gradient a case in which it alone is frozen, if there is none."""
    graded = [(case, scope.signature.all_gradients(case).split("+")) for case in cases]
    new_cases = []
    for name in scope.signature.gradients:
        pairs = [(case, "+".join(x for x in names if x != name)) for case, names in graded if name in names]
        pairs = [(case, grads) for case, grads in pairs if grads]
        if not any(case.grads == grads for case, grads in pairs):
            affordable = [(case, grads) for case, grads in pairs if not case.is_large and case.grads]
            candidates = (case.changed(grads=grads, law="") for case, grads in affordable)
            new_cases += [case for case in candidates if scope.fits(case)][:1]
    return new_cases


def _with_gradients(scope: Scope, cases: list[Any]) -> list[Any]:
    """A case with all gradients for each law that has none.

    It reuses the kernels of a given case if one fits; otherwise it is in float64, which some laws
    need.
    """
    tested_laws = {case.law for case in cases if case.grads and case.grads == scope.signature.all_gradients(case)}
    bases = [scope.mended(case.changed(layout="contiguous", layout_of="")) for case in cases if not case.is_large]
    fullest = [case.changed(grads=scope.signature.all_gradients(case)) for case in [*bases, *map(scope.doubled, bases)]]
    fitting = [case for case in fullest if case.grads and scope.fits(case)]
    new_cases = []
    for law in scope.contract.laws.values():
        if law.name not in tested_laws and not law.recompiles:
            new_cases += [case.changed(law=law.name) for case in fitting if law.holds(case, scope.space.device)][:1]
    return new_cases


def values(scope: Scope) -> Iterator[list[Changes]]:
    """The values that cases must have, each with its equivalents: values of single axes, and of
    axes that change together. A field that is covered by itself in another way has only those
    values. A field that is covered together with others also has its own values, unless it means
    nothing without the others.
    """
    joint = scope.contract.shapes.together(scope)
    fixed = {name for key, group in joint.items() for name in _fields(group) if key == WHOLE or len(_fields(group)) < 2}
    single = [equals for axis in scope.axes if axis.name not in fixed for equals in axis.each(scope.signature)]
    single += [*_strided(scope), *_lined(scope)]
    single += [*_empty(scope), *_single(scope), *_negated(scope)] if scope.space.few_kernels else []
    for equals in [*([changes] for group in joint.values() for changes in group if changes), *single]:
        if not any(map(callable, equals[0].values())):
            yield equals


def _empty(scope: Scope) -> Iterator[list[Changes]]:
    """Sizes of 0, in turn with gradients and without them, if the function has any gradients."""
    sizes = [axis for axis in scope.axes if isinstance(axis, Size) and axis.letter and not axis.at_least]
    for turn, axis in enumerate(sizes):
        covered = axes_of(scope.contract.case_type)["grads"].covered(scope.signature)
        some = [changes["grads"] for changes in covered if not callable(changes["grads"])]
        wanted = [grads for grads in some if bool(grads) == (turn % 2 == 0)]
        yield [{axis.name: 0, "grads": grads} for grads in wanted[::-1]] if any(some) else [{axis.name: 0}]


def _single(scope: Scope) -> Iterator[list[Changes]]:
    """Sizes of 1."""
    yield from ([{axis.name: 1}] for axis in scope.axes if isinstance(axis, Size) and axis.letter)


def _strided(scope: Scope) -> Iterator[list[Changes]]:
    """Each tensor with unusual strides, in any layout that has them."""
    layouts = [*scope.signature.layouts(far=False), *scope.signature.layouts(far=True)]
    strided = [(of, layout) for of, layout in layouts if layout != "shifted"]
    for name in dict.fromkeys(of for of, _ in strided):
        yield [{"layout": layout, "layout_of": of} for of, layout in strided if of == name]


def _lined(scope: Scope) -> Iterator[list[Changes]]:
    """Each matrix with rows of whole memory lines, in the layouts LINED.

    Inputs also have a case without gradients. Other fields are like MATRIX if possible.
    """
    axes_by_name = {axis.name: axis for axis in scope.axes}
    units = {name: axes_by_name[name].default for name in IN_UNITS if name in axes_by_name}
    line = next(
        filter(None, ({name: n for name, n in line_lengths.items() if name in axes_by_name} for line_lengths in LINES)),
        {},
    )
    matrix_fields = {name: value for name, value in MATRIX.items() if name in axes_by_name}
    short = SHORT if "experts" in line else f"{SHORT}E"
    inputs = (x for x in scope.signature.every_input if not x.part_of and (x.gradient or x.field in OF_THE_CASE))
    tensors_given = {x.name for x in inputs} | {*scope.signature.placed} - {x.name for x in scope.signature.every_input}
    for name, dims in scope.signature.placed.items() if line and scope.contract.shapes.kernels else ():
        if name in tensors_given and len(dims) > 1 and dims[-1] not in short:
            forward_case = (
                [("uneven", {"grads": ""})] if name in scope.signature.names and scope.signature.gradients else []
            )
            for layout, forward in [*((layout, {}) for layout in LINED), *forward_case]:
                wanted = {"layout": layout, "layout_of": name} | line | units | forward
                yield [
                    wanted | matrix_fields,
                    *(wanted | {field: value} for field, value in matrix_fields.items()),
                    wanted,
                ]


def _negated(scope: Scope) -> Iterator[list[Changes]]:
    """Each tensor as a lazily negated view, except for integers."""
    yield from ([{"layout": "negated", "layout_of": name}] for name in scope.signature.placed)


def _fields(group: list[Changes]) -> set[str]:
    return {name for changes in group for name in changes}


def _of_data(scope: Scope, equals: list[Changes]) -> bool:
    """Whether the values only change the contents of tensors, or make them empty."""
    named = [axis for axis in scope.axes if axis.name in equals[0]]
    return all(axis.data for axis in named) or any(isinstance(axis, Size) for axis in named)


def _placements(scope: Scope, cases: list[Any], fixed: Changes, equals: list[Changes]) -> Iterator[tuple[Any, Changes]]:
    """Candidates with one of the values and all fixed ones, each with what is fixed then."""
    for case in cases:
        for changes in equals:
            if any(name in fixed for name in changes):
                continue
            wanted = fixed | changes
            try:
                changed = case.changed(**wanted)
            except ValueError:
                continue
            candidate = scope.mended(scope.contract.shapes.affordable(changed, scope))
            if candidate.has(wanted) and scope.fits(candidate):
                yield candidate, wanted
