"""Defects of weight gradients that the backward leaves for later; see `planted`."""

from typing import Any

from torch import Tensor

from conformance.core.defect import Defect, Wrapper


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


DELAY = "a mistake that delayed gradients invite"
DEFECTS: tuple[Defect, ...] = (
    Defect("DW01", "gradients wait in the order of the forward", DELAY, {"grouped_mlp": _in_the_order_of_the_forward}),
    Defect("DW02", "gradients that wait are the backward's too", DELAY, {"grouped_mlp": _now_and_later}),
)
