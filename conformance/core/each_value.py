"""Each value of each axis in some case: what a covering array cut short, or a draw, has left out.

Pairs of values cost structures, which a compiler takes seconds for, so a gate on a GPU has part of
them. Single values are few: each that no case has yet gets one. Those that need kernels of their
own share a case; those of data have one each, because empty or zero data may hide what else is new.

Each tensor has strides of its own in some case, and each matrix rows of whole lines, which kernels
load at once if they begin where lines do, in each layout that looks like it. A gate on a GPU draws
few sizes, too: there sizes of 0, and of 1, for which kernels are specialised, each tensor as a
lazily negated view, and each law with gradients have a case. Each input that has a gradient is
once the only one that is frozen.
"""

from collections.abc import Iterator
from typing import Any

from conformance.core.axes import Changes, Size
from conformance.core.case import axes_of
from conformance.core.scope import Scope
from conformance.core.signature import FAR

WHOLE = "recipe"  # its fields are numbers in a table
# of matrices whose columns are adjacent: rows apart by whole lines or not, the first aligned or not
LINED = ("sliced", "uneven", "shifted")
LINES = ({"hidden": 32, "width": 48}, {"experts": 32})  # lengths of rows: of numbers, or else of a map
MATRIX = {"tokens": 5, "dtype": "bfloat16"}  # several rows, and a dtype that tensor descriptors are made for
IN_UNITS = ("scaling", "recipe")  # fields by whose values sizes may count blocks
OF_THE_CASE = ("dtype", "map_dtype")  # fields of dtypes that every case has, unlike noise and states
SHORT = "TKC"  # dimensions that are no line: tokens, slots, chunks


def left_out(scope: Scope, cases: list[Any], bases: list[Any]) -> list[Any]:
    """Cases with the values of axes, and the laws, that none of these has.

    Each is one of the bases with some of its fields changed, mended; laws in turn. A value that no
    base takes is left out.

    Args:
        bases: some of the cases, as one of each structure.
    """
    drawn = [case for case in cases if not (case.golden or case.illegal or case.before)]
    wanted = [each for each in values(scope) if not any(case.has(one) for case in drawn for one in each)]
    plain = {case.text for case in drawn if case.layout not in FAR and not case.is_large}
    bases = [case for case in bases if case.text in plain]
    found: list[Any] = []
    while wanted:
        first, *wanted = wanted
        # another base each time; for few kernels the first one that will do
        turn = 0 if scope.space.few_kernels else len(found) % max(len(bases), 1)
        case, kept = next(_placed(scope, bases[turn:] + bases[:turn], {}, first), (None, {}))
        if case is None:
            continue
        for each in [each for each in wanted if not (_of_data(scope, first) or _of_data(scope, each))]:
            more = next(_placed(scope, [case], kept, each), None)
            if more:
                case, kept = more
                wanted = [left for left in wanted if left is not each]
        found.append(case.changed(seed=case.seed + 1 + len(found)))
    found = scope.lawful(found)
    tested = {case.law for case in drawn + found}
    every = drawn + found
    every += [scope.mended(case.changed(grads="", layout="contiguous", layout_of="")) for case in every]
    for law in scope.contract.laws.values():
        if law.name not in tested:
            found += [case.changed(law=law.name) for case in every if law.holds(case, scope.space.device)][:1]
    found += _with_gradients(scope, drawn + found) if scope.space.few_kernels else []
    return found + _frozen(scope, drawn + found)


def _frozen(scope: Scope, cases: list[Any]) -> list[Any]:
    """A case for each input that alone of those with a gradient is frozen, where there is none."""

    def others(case: Any, name: str) -> str:
        return "+".join(each for each in scope.signature.wanted(case.changed(grads=whole[case.text])) if each != name)

    whole = {case.text: scope.signature.all_gradients(case) for case in cases}
    found = []
    for name in scope.signature.gradients:
        given = [case for case in cases if name in whole[case.text].split("+") and "+" in whole[case.text]]
        if not any(case.grads == others(case, name) for case in given):
            made = (
                case.changed(grads=others(case, name), law="") for case in given if not case.is_large and case.grads
            )
            found += [case for case in made if scope.fits(case)][:1]
    return found


def _with_gradients(scope: Scope, cases: list[Any]) -> list[Any]:
    """A case with all gradients for each law that none of these is a case of.

    It has the kernels of one of them, if one will do; else it is in float64, which some laws need.
    """
    seen = {case.law for case in cases if case.grads and case.grads == scope.signature.all_gradients(case)}
    bases = [scope.mended(case.changed(layout="contiguous", layout_of="")) for case in cases if not case.is_large]
    fullest = [case.changed(grads=scope.signature.all_gradients(case)) for case in [*bases, *map(scope.doubled, bases)]]
    fitting = [case for case in fullest if case.grads and scope.fits(case)]
    found = []
    for law in scope.contract.laws.values():
        if law.name not in seen and not law.recompiles:
            found += [case.changed(law=law.name) for case in fitting if law.holds(case, scope.space.device)][:1]
    return found


def values(scope: Scope) -> Iterator[list[Changes]]:
    """The values that are to occur, each with its equals: of axes, and of axes that go together.

    A field that is covered by itself in another way has only those values; one that is covered with
    others also its own, unless it means nothing without them.
    """
    joint = scope.contract.shapes.together(scope)
    fixed = {name for key, group in joint.items() for name in _fields(group) if key == WHOLE or len(_fields(group)) < 2}
    single = [each for axis in scope.axes if axis.name not in fixed for each in axis.each(scope.signature)]
    single += [*_strided(scope), *_lined(scope)]
    single += [*_empty(scope), *_single(scope), *_negated(scope)] if scope.space.few_kernels else []
    for each in [*([changes] for group in joint.values() for changes in group if changes), *single]:
        if not any(map(callable, each[0].values())):
            yield each


def _empty(scope: Scope) -> Iterator[list[Changes]]:
    """Sizes of 0, in turn with gradients and without, where the function has some."""
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
    """Each tensor by strides of its own, in any layout that has some."""
    every = [*scope.signature.layouts(far=False), *scope.signature.layouts(far=True)]
    strided = [(of, layout) for of, layout in every if layout != "shifted"]
    for name in dict.fromkeys(of for of, _ in strided):
        yield [{"layout": layout, "layout_of": of} for of, layout in strided if of == name]


def _lined(scope: Scope) -> Iterator[list[Changes]]:
    """Each matrix with rows of whole lines, in the layouts LINED; an input once more, in a call
    without gradients. If possible like MATRIX.
    """
    known = {axis.name: axis for axis in scope.axes}
    plain = {name: known[name].default for name in IN_UNITS if name in known}
    line = next(filter(None, ({name: n for name, n in each.items() if name in known} for each in LINES)), {})
    more = {name: value for name, value in MATRIX.items() if name in known}
    short = SHORT if "experts" in line else f"{SHORT}E"
    inputs = (x for x in scope.signature.every_input if not x.part_of and (x.gradient or x.field in OF_THE_CASE))
    every = {x.name for x in inputs} | {*scope.signature.placed} - {x.name for x in scope.signature.every_input}
    for name, dims in scope.signature.placed.items() if line and scope.contract.shapes.kernels else ():
        if name in every and len(dims) > 1 and dims[-1] not in short:
            alone = [("uneven", {"grads": ""})] if name in scope.signature.names and scope.signature.gradients else []
            for layout, forward in [*((layout, {}) for layout in LINED), *alone]:
                wanted = {"layout": layout, "layout_of": name} | line | plain | forward
                yield [wanted | more, *(wanted | {field: value} for field, value in more.items()), wanted]


def _negated(scope: Scope) -> Iterator[list[Changes]]:
    """Each tensor as a lazily negated view; integers are none."""
    yield from ([{"layout": "negated", "layout_of": name}] for name in scope.signature.placed)


def _fields(group: list[Changes]) -> set[str]:
    return {name for changes in group for name in changes}


def _of_data(scope: Scope, each: list[Changes]) -> bool:
    """Whether the values change the contents of tensors alone, or empty them."""
    named = [axis for axis in scope.axes if axis.name in each[0]]
    return all(axis.data for axis in named) or any(isinstance(axis, Size) for axis in named)


def _placed(scope: Scope, cases: list[Any], kept: Changes, each: list[Changes]) -> Iterator[tuple[Any, Changes]]:
    """Cases changed to have one of the values and all that is kept, and what is to be kept then."""
    for case in cases:
        for changes in each:
            if any(name in kept for name in changes):
                continue
            wanted = kept | changes
            try:
                changed = case.changed(**wanted)
            except ValueError:
                continue
            other = scope.mended(scope.contract.shapes.affordable(changed, scope))
            if other.has(wanted) and scope.fits(other):
                yield other, wanted
