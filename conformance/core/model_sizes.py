"""Cases at the sizes of released models, for an implementation whose kernels are compiled.

A compiler can be wrong for one configuration alone: a tile, its warps, its options. Small cases
choose other tiles than real ones. So each pair of option values, and each recipe in each direction,
has a case at a model's length. A third of them are at an odd neighbour of the length: kernels have
a version for whole lines, and one for other sizes. Few rows are enough: they make several tiles,
and the reference takes milliseconds.
"""

import itertools
import math
from collections.abc import Collection, Iterator
from random import Random
from typing import Any

from conformance.core.axes import Changes, Dtype, Size
from conformance.core.case import axes_of
from conformance.core.ranks import ranks_of
from conformance.core.scope import Scope

# In elements. Each row of options takes the next length of a list. Rows beyond the end of the list
# take one of its first USUAL lengths: a tile does not depend on how many more columns there are.
MODEL_WIDTHS = (1024, 512, 768, 2048, 7168, 2880, 256, 4096, 1536, 5120, 16384, 3072, 6144, 8192)
WEIGHT_WIDTHS = (512, 1024, 768, 256, 384, 2880, 2048, 4096, 7168)  # of a weight, beside a narrow width
MEDIUM_WIDTHS = (512, 256, 768, 256, 256, 1024)  # lengths of a layer, which has several matrices
NARROW_WIDTHS = (256, 512, 288)  # lengths of the other side of a matrix
EXPERTS = (64, 128, 256, 8, 32, 16, 60, 160, 384, 512)
FEW_EXPERTS = (128, 8, 32)  # of rows that are padded to blocks of a recipe
SPLITS = (0, 128, 8)  # groups of rows that a recipe scales separately; 0: no splits
EXPERTS_WITH_WEIGHTS = (4, 8, 2, 128, 32)  # many experts beside small weights
FEW_ROWS, ROWS = (5, 40, 140), (5, 40, 140, 300)
FEW_TOKENS = (9, 5, 140)  # tokens, each of which has several rows
USUAL = 3
ODD = 1 / 3
LINE, TRIED = 16, 4  # kernels know whether a size is a multiple; sizes that are tried in turn
ANOTHER_DTYPE = 5  # one case in so many has another dtype than models have
RECIPE = ("scaling", "variant")  # fields that name a recipe
ALIKE = ("layout", "unused", "groups")  # axes with values that no model's call has
EXACT = ("experts",)  # fields whose lengths have no odd neighbours in any case
WIDTHS, ROWS_OF = ("hidden", "width"), ("experts", "tokens")
ORDER = (*WIDTHS, *ROWS_OF)  # the order of choosing lengths: rows last, as many as the reference can afford
MOST = {"experts": 2**20, "tokens": 2**17}  # elements of all weights, and of rows


def at_model_sizes(scope: Scope) -> list[Any]:
    """Cases without a law; none of a function that has no such lengths, nor of several ranks."""
    shapes = scope.contract.shapes
    if not shapes.models:
        return []
    base = shapes.covered | shapes.of_models
    together = {name: values for name, values in shapes.together(scope).items() if name not in ALIKE}
    options = [axis.name for axis in scope.axes if not isinstance(axis, Size | Dtype) and axis.name not in ALIKE]
    pairs = scope.array(base, together, {*options, *together}).cases
    rows = [*pairs, *_of_recipes(scope)] or [scope.fullest(base)]
    count = max(len(rows), *map(len, shapes.models.values()))  # each length has a case
    dtyped = [_dtyped(scope, rows[index % len(rows)], index) for index in range(count)]
    cases = [_resized(scope, row, index, Random(index).random() < ODD) for index, row in enumerate(dtyped)]
    lines = (False, True) if "direction" in scope.live else (False,)  # a quantiser's rows: whole lines, and others
    for (index, fields), odd in itertools.product(enumerate(shapes.model_rows), lines):
        case = _fullest(scope, shapes.of_models | fields)
        cases.append(_resized(scope, case, index, odd, fields) if case.has(fields) else None)
    return list({case.text: case for case in cases if case is not None}.values())


def _of_recipes(scope: Scope) -> Iterator[Any]:
    """A case of each recipe of the family in each direction; roles in turn."""
    axes = axes_of(scope.contract.case_type)
    recipes = getattr(scope.contract.case_type, "recipes", {}) if {*RECIPE} <= scope.live else {}
    kinds: list[Changes] = [
        {"scaling": scaling, "variant": variant}
        for scaling, group in recipes.items()
        for variant in range(len(group))
        if not axes["variant"].wrong(variant)
    ]
    recipes_of_directions: list[list[Changes]] = [
        axes[name].covered(scope.signature) if name in scope.live else [{}] for name in ("direction", "role")
    ]
    directions, roles = recipes_of_directions
    for index, (kind, direction) in enumerate(itertools.product(kinds, directions)):
        kind |= direction | roles[(index + index // len(directions)) % len(roles)]
        case = _fullest(scope, scope.contract.shapes.of_models | kind)
        if case.has(kind):
            yield case


def _fullest(scope: Scope, fields: Changes) -> Any:
    """A case as `Scope.fullest` makes it.

    A value that is a function is called with the case of the other fields.
    """
    row = scope.row(fields, {})
    return scope.fullest({name: getattr(row, name) for name in fields if name in scope.live})


def _dtyped(scope: Scope, case: Any, index: int) -> Any:
    """The case. One in `ANOTHER_DTYPE` cases gets the next of its other dtypes, if that fits."""
    axis = axes_of(type(case)).get("dtype")
    if not isinstance(axis, Dtype) or index % ANOTHER_DTYPE != ANOTHER_DTYPE - 1:
        return case
    values = [changes for changes in axis.covered(scope.signature) if not case.has(changes)]
    changed_case = case.changed(**values[index // ANOTHER_DTYPE % len(values)]) if values else case
    return changed_case if scope.fits(changed_case) else case


def _resized(scope: Scope, case: Any, index: int, odd: bool, fixed: Collection[str] = ()) -> Any:
    """The case with the lengths that are next in turn, and the same options; fields in `fixed` keep
    their lengths. None if no length fits.
    """
    if ranks_of(scope.contract, case):
        return None
    resized, source = case, Random(index)
    models = scope.contract.shapes.models
    for name in sorted(models.keys() & scope.live - {*fixed}, key=ORDER.index):
        lengths = models[name]
        length = lengths[index] if index < len(lengths) else source.choice(lengths[:USUAL])
        if index >= len(lengths) and name in ROWS_OF:
            length = _affordable(resized, name, max(lengths) if name == "tokens" else length, lengths)
        unit = 1 if name in EXACT else case.row_unit if name == "tokens" else case.unit
        sizes = [length] if name in EXACT else _sizes(-(-length // unit), odd)
        candidates = (scope.mended(resized.changed(**{name: size}, law="")) for size in sizes)
        fitting = (
            x for x, size in zip(candidates, sizes, strict=False) if getattr(x, name) == size and same_options(case, x)
        )
        resized = next(fitting, resized)
    return resized if resized.has({"law": ""}) and (fixed or resized != case) else None


def _affordable(case: Any, name: str, length: int, lengths: Collection[int]) -> int:
    """The largest of these lengths, up to `length`, for which the reference takes at most a second,
    or the smallest one if it always takes longer. The cost is the number of weights and of rows,
    including the rows that fill up the blocks of experts.
    """
    widths = [getattr(case, width) * case.unit for width in WIDTHS if hasattr(case, width)]
    weights = math.prod(widths) if len(widths) > 1 else case.row_unit * sum(widths)
    length_of_others = weights if name == "experts" else sum(widths)
    most = MOST[name] // max(length_of_others, 1)
    return max((shorter for shorter in lengths if shorter <= min(length, most)), default=min(lengths))


def _sizes(size: int, odd: bool) -> list[int]:
    """The size or its neighbour, then larger sizes, one of which an interleave must divide."""
    step = LINE if size % LINE == 0 and not odd else 1
    return [size + odd + step * i for i in range(TRIED)]


def same_options(case: Any, second_case: Any) -> bool:
    """Whether all fields but sizes, data and the law are equal."""
    free_fields = {name for name, axis in axes_of(type(case)).items() if isinstance(axis, Size) or axis.data} | {"law"}
    return all(value == getattr(second_case, name) for name, value in case.__dict__.items() if name not in free_fields)
