"""Axes that every function has, with values from its signature: gradients, cotangents, layouts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Axis, Changes, subsets
from conformance.core.signature import LAYOUTS, Signature
from conformance.core.space import some_of

WRITTEN_OUT = ("contiguous", "negated")  # layouts that kernels read as contiguous


@dataclass(kw_only=True)
class Gradients(Axis):
    """Inputs whose gradients are computed, joined by +: any subset of the differentiable inputs."""

    def live(self, signature: Signature) -> bool:
        return bool(signature.gradients)

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return self.changes_to(some_of(tuple(signature.gradients)))

    def covered(self, signature: Signature) -> list[Changes]:
        """Of up to two inputs every subset; of more inputs none, each one, and all."""
        names = signature.gradients
        if len(names) < 3:
            return [{self.name: value} for value in subsets(names)]
        return [*({self.name: value} for value in ("", *names)), {self.name: signature.all_gradients}]

    def wrong(self, value: Any) -> str:
        return "" if isinstance(value, str) else "names of inputs, joined by +"

    def smaller(self, case: Any) -> Iterator[Changes]:
        names = getattr(case, self.name).split("+")
        yield from ({self.name: name} for name in names if len(names) > 1)

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        """The same names, then fewer and fewer of them."""
        yield {self.name: getattr(case, self.name)}  # mostly it fits, and the others are many
        name_subsets = subsets(getattr(case, self.name).split("+"))
        yield from ({self.name: value} for value in sorted(name_subsets, key=lambda s: -s.count("+") - bool(s))[1:])


@dataclass(kw_only=True)
class Unused(Axis):
    """The differentiable output without a cotangent."""

    def live(self, signature: Signature) -> bool:
        return len(signature.differentiable) > 1

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return self.changes_to(st.sampled_from(["", "", "", *signature.differentiable]))

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: name} for name in ("", *signature.differentiable)]

    def wrong(self, value: Any) -> str:
        return "" if isinstance(value, str) else "the name of an output"


@dataclass(kw_only=True)
class Layout(Axis):
    """The memory layout (`layout`) of one input or cotangent (`layout_of`)."""

    def placed(self, layout: str = "contiguous", of: str = "") -> Changes:
        return {self.name: layout, f"{self.name}_of": of}

    def live(self, signature: Signature) -> bool:
        return bool(signature.placed)

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        """Contiguous with probability above ½."""
        near, far = ([self.placed(x, of) for of, x in signature.layouts(far)] for far in (False, True))
        near += [self.placed("negated", of) for of in signature.placed]
        return st.sampled_from([self.placed()] * (2 * len(near) + 3) + near + far)

    def covered(self, signature: Signature) -> list[Changes]:
        return [self.placed(), *(self.placed(x, of) for of, x in signature.layouts(far=False))]

    def each(self, signature: Signature) -> list[list[Changes]]:
        """Each layout with near addresses, for any tensor."""
        whole = [(of, x) for x in ("negated", "sliced") for of in signature.placed]
        by_layout: dict[str, list[Changes]] = {}
        for of, layout in [*signature.layouts(far=False), *whole]:
            by_layout.setdefault(layout, []).append(self.placed(layout, of))
        return [*by_layout.values()]

    def wrong(self, value: Any) -> str:
        return "" if value in LAYOUTS else f"one of {', '.join(LAYOUTS)}"

    def plainer(self, case: Any) -> Iterator[Changes]:
        if getattr(case, self.name) != self.default:
            yield self.placed()

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        yield self.placed(getattr(case, self.name), getattr(case, f"{self.name}_of"))
        yield self.placed()

    def other(self, case: Any) -> Changes:
        return self.placed()

    def alike(self, value: Any, second_value: Any) -> bool:
        """A lazily negated view runs the same kernels as a contiguous tensor, because it is written
        out before a kernel reads it.
        """
        return bool(value == second_value) or {value, second_value} == {*WRITTEN_OUT}

    def alternatives(self, signature: Signature, case: Any) -> list[Changes]:
        if getattr(case, self.name) not in WRITTEN_OUT:
            return []
        return [self.placed(), *(self.placed("negated", of) for of in signature.negatable(case))]
