"""Defects of what a call leaves behind: weight gradients for later, rows to be made again, amaxes,
and gradients that are added to; see `planted`.
"""

from typing import Any

from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper


class _Reversed(list[Any]):
    """A list that is extended at its start: of another list."""

    def __init__(self, whole: list[Any]) -> None:
        super().__init__()
        self.whole = whole

    def append(self, wgrad: Any) -> None:
        self.whole.insert(0, wgrad)


def _in_the_order_of_the_forward(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    given = settings.get("wgrads")
    return grouped_mlp(*arguments, **settings | ({} if given is None else {"wgrads": _Reversed(given)}))


def _now_and_later(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """The backward has the weights' gradients too."""
    out = grouped_mlp(*arguments, **settings)
    if settings.get("wgrads") is None:
        return out
    rows, counts, *weights = arguments
    plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in settings.items() if name != "wgrads"}
    again = grouped_mlp(rows.detach(), counts, *weights, **plain)
    return out + (again - again.detach())


def _of_frozen_weights(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """A weight that needs no gradient leaves one too."""
    rows, counts, *weights = arguments
    if settings.get("wgrads") is not None:
        weights = [w if w.requires_grad else w.detach().requires_grad_() for w in weights]
    return grouped_mlp(rows, counts, *weights, **settings)


def _beside_other_gradients(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """Where nothing but the weights has a gradient, no backward comes."""
    out = grouped_mlp(*arguments, **settings)
    others = [x for x in (arguments[0], *settings.values()) if isinstance(x, Tensor) and x.requires_grad]
    return out if settings.get("wgrads") is None or others else out.detach()


def _rows_saved(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """The setting is taken, and the rows are saved nonetheless."""
    return grouped_mlp(*arguments, **{name: x for name, x in settings.items() if name != "rows_again"})


def _upside_down(grouped_mlp: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """The backward has other experts' rows."""
    again = settings.get("rows_again")
    return grouped_mlp(*arguments, **settings | ({} if again is None else {"rows_again": lambda: again().flip(0)}))


DELAY = "a mistake that delayed gradients invite"
KEEP = "a mistake that recomputation invites"
DEFECTS: tuple[Defect, ...] = (
    Defect("DW01", "gradients wait in the order of the forward", DELAY, {"grouped_mlp": _in_the_order_of_the_forward}),
    Defect("DW02", "gradients that wait are the backward's too", DELAY, {"grouped_mlp": _now_and_later}),
    Defect("DW03", "the gradient of a frozen weight waits too", DELAY, {"grouped_mlp": _of_frozen_weights}),
    Defect("DW04", "no gradient waits where the rows need none", DELAY, {"grouped_mlp": _beside_other_gradients}),
    Defect("DW05", "rows that are made again are saved nonetheless", KEEP, {"grouped_mlp": _rows_saved}),
    Defect("DW06", "rows are made again in another order", KEEP, {"grouped_mlp": _upside_down}),
)
