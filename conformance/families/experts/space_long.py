"""Contractions that take several steps of a kernel's loop, in every dtype and by every recipe.

They run over columns, features and rows of an expert. Their lengths are a multiple of a step of 64,
one more than a step of 128, and between two steps. A dtype or a recipe may have a kernel of its
own, so cases of bfloat16, which other shapes cover, are not enough. On a GPU these cases compile
few kernels of their own: they have few optional inputs, and no size of 1, for which a kernel is
specialised.
"""

from typing import Any

from conformance.core.axes import Changes
from conformance.core.scope import Scope
from conformance.families.quantization.cases import RECIPES, UNIT

LENGTHS = {"float32": 192, "float16": 129, "float64": 130, "bfloat16": 191}  # by dtype
LENGTH = 130  # by a recipe, at least; rounded up to its unit
MORE = 256  # longer on a GPU, where a kernel has several whole steps under way at once
FEW = 3  # rows or columns of a size that is not long
BARE: Changes = {"probs": "", "bias1": "", "bias2": ""}
BOTH = "current"  # the recipe of the cases in which both layers are long
CONTRACTED = {
    "grouped_dgrad": ("width",),
    "grouped_wgrad": ("tokens",),
}  # other products have long sizes in all dimensions
HIGH = ("float32", "float16", "float64")
PRODUCTS = (*HIGH, "delayed", "current", "mxfp8", "nvfp4")  # other shapes have bfloat16 and blocks of 128
FORMS = {
    **dict.fromkeys(("grouped_linear", "grouped_dgrad", "grouped_wgrad"), PRODUCTS),
    **dict.fromkeys(("grouped_mlp", "shared_experts"), (*HIGH, *RECIPES)),
    # as `grouped_mlp` and `grouped_linear` of one expert
    "sequential_mlp": ("bfloat16", "float16", "current", "block"),
    "latent_projection": (*HIGH, "current", "mxfp8"),
}


def _form(name: str, extra_length: int) -> tuple[Changes, int]:
    """The fields of a dtype or a recipe, and its length in units."""
    if name in LENGTHS:
        return {"dtype": name}, LENGTHS[name] + extra_length
    unit = UNIT.get(name, 1)
    return {"dtype": "bfloat16", "scaling": name, "variant": 1}, -(-(LENGTH + extra_length) // unit)


def _forms(scope: Scope) -> list[tuple[Changes, int]]:
    """All forms that the implementation accepts."""
    extra_length = MORE if scope.space.device == "cuda" else 0
    forms = [_form(name, extra_length) for name in FORMS[scope.function]]
    return [(fields, length) for fields, length in forms if scope.fits(scope.case(fields))]


def _small_size(scope: Scope, fields: Changes) -> int:
    """A size that is not long, in units."""
    return 1 if "scaling" in fields and scope.space.device != "cuda" else FEW


def _options(scope: Scope, fields: Changes) -> Changes:
    """On a GPU, options whose kernels other cases have already: few, and none with a recipe."""
    if scope.space.device != "cuda":
        return {}
    return BARE | ({"bias": "", "gate": False} if "scaling" in fields else {})


def long_products(scope: Scope) -> list[Any]:
    """Long sizes for a product and its two gradients, without a law. With a recipe only the columns
    are long.
    """
    sides = CONTRACTED.get(scope.function, ("tokens", "hidden", "width"))
    cases: list[Any] = []
    for fields, length in _forms(scope):
        long = ("hidden", "width") if "scaling" in fields and len(sides) > 1 else sides
        small_size = _small_size(scope, fields)
        sizes = {name: length if name in long else small_size for name in ("tokens", "hidden", "width")}
        rows: Changes = {"tokens": length + 1, "experts": 2, "counts": (length, 1)} if "tokens" in long else {}
        cases.append(scope.fullest(sizes | rows | _options(scope, fields) | fields))
    return cases


def long_layers(scope: Scope) -> list[Any]:
    """Long sizes for both layers, with few rows, without a law.

    With most recipes only the first layer is long.
    """
    cases: list[Any] = []
    for fields, length in _forms(scope):
        low = "scaling" in fields
        both = not low or fields["scaling"] == BOTH
        small_size = _small_size(scope, fields)
        sizes = {"tokens": small_size, "hidden": length, "width": length if both else small_size}
        cases.append(scope.fullest(sizes | _options(scope, fields) | fields))
    return cases
