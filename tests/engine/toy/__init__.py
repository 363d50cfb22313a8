"""A family of one function, `reverse`, unknown to the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conformance.core import universal_laws
from conformance.core.axes import dtypes, number, size
from conformance.core.case import Case
from conformance.core.contract import Contract, Problem
from conformance.core.family import Family
from conformance.core.illegal import setting
from conformance.core.shapes import Shapes
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import payload
from conformance.judge import Exact, Expectation
from tests.engine.toy.kernels import reverse


@dataclass(frozen=True, kw_only=True)
class ReverseCase(Case):
    """Rows, and the number of leading rows that stay."""

    rows: int = size("R")
    columns: int = size("C")
    kept: int = number(0, 1, 2, 5, pairs=(2,), argument="kept")
    dtype: str = dtypes("float32", "bfloat16", also=("float16",))


class Reverse(Contract[ReverseCase]):
    """`reverse`: the rows in reverse order, after the first `kept`."""

    function = "reverse"
    case_type = ReverseCase
    signature = Signature(
        [Input("x", "RC", gradient=True)], [Output("y", "RC", of="x")], settings=("kept",), linear=("x", "y")
    )

    def legal(self, case: ReverseCase) -> Problem:
        x = payload(case.seed, "x", (case.rows, case.columns), case.dtype)
        return self.call(case, {"x": x}, {"kept": case.kept} if case.kept else {})

    def expected(self, case: ReverseCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        right: dict[str, Expectation] = {"y": Exact(reverse(problem.required["x"], **problem.settings)[0])}
        if problem.wanted:
            right["d_x"] = Exact(reverse(problem.cotangents["y"], **problem.settings)[0], "values")
        return right


X, Y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [3.0], [2.0]])
FAMILY = Family(
    contracts=(Reverse(),),
    golden={"reverse": {"one_kept": (Problem("reverse", {"x": X}, {"kept": 1}), {"y": Exact(Y)})}},
    illegal={"reverse": {"kept_negative": setting("kept", -1)}},
    laws={"reverse": (*universal_laws.EVERYWHERE, universal_laws.SCALING)},
    space={"reverse": Shapes(covered={"rows": 5, "columns": 3}, illegal={"rows": 2})},
    defects="tests.engine.toy.defects",
)
