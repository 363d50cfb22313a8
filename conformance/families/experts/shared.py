"""shared_experts: values and every gradient by running error analysis through the stages, the gate's among them.

    z = xgᵀ      s = σ(z)      out = y·s          d_y = d_out·s      d_s = Σ d_out·y      d_z = d_s σ(1 - σ)      d_x = … + d_z g

each rounded to the dtype of x, and σ on the way back not. The gate is in high precision, whatever the recipe.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.analysis.curves import sigmoid
from conformance.analysis.mlp_stages import Call, backward, forward
from conformance.analysis.running import Running, contracted
from conformance.core.case import Case, shorter
from conformance.core.contract import Contract, Problem, computed_in
from conformance.core.shared_out import check_counts
from conformance.core.tensors import payload
from conformance.families.experts.activations import activation_settings
from conformance.families.experts.cases import LAYOUTS
from conformance.families.experts.mlp import (
    VALUES,
    Judged,
    fc1_columns,
    in_reference,
    narrower,
    plainer,
    rows_of,
    weight_of,
)
from conformance.families.experts.precision import other_override, unit_of
from conformance.families.experts.precision_mlp import beside_recipe, called, check_low, fits_low, layers_of
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.judge import Bounded, Expectation
from moe_ref.config import GATED, PLAIN
from moe_ref.config.quantization import OVERRIDES
from moe_ref.experts.shared import shared_experts

SHARED_INPUTS = ("x", "fc1_weight", "fc2_weight", "gate_weight")  # that have a gradient


@dataclass(frozen=True, kw_only=True)
class SharedCase(Case):
    """A case of tokens that all go through the shared experts."""

    tokens: int = 1
    experts: int = 1  # not looked at: they are one
    hidden: int = 1  # H
    width: int = 1  # F
    dtype: str = "float32"
    kind: str = ""
    gate: bool = False
    values: str = "dyadic"
    offset: int = 0  # in eighths
    clamp: int = 0  # likewise
    alpha: int = 0  # in thousandths
    interleave: int = 0
    stored: bool = False  # fp8_input_store
    again: bool = False  # recompute
    scaling: str = ""  # of the recipe; empty: high precision
    variant: int = 0  # of the scaling, in RECIPES
    override: str = ""  # the recipe's backward_override; empty: none
    counts: tuple[int, ...] = ()  # tokens of each of several ranks, with the same weights; empty: one process
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    early: ClassVar[bool] = False  # there are no probs to round before
    tail: ClassVar[int] = 0  # nor rows that are not read, nor padding
    align: ClassVar[int] = 0

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "values": VALUES,
        "kind": GATED + PLAIN,
        "layout": LAYOUTS,
        "scaling": tuple(RECIPES),
        "override": OVERRIDES,
    }

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden, self.width, self.clamp, self.alpha, self.interleave) < 0 or self.experts < 1:
            sizes = f"{self.tokens}, {self.hidden}, {self.width}, {self.clamp}, {self.alpha}, {self.interleave}, {self.experts}"
            raise ValueError(
                f"tokens, hidden, width, clamp, alpha, interleave ≥ 0 and experts ≥ 1 are needed; they are {sizes}"
            )
        check_counts(self.counts, self.tokens)
        check_low(self)


SharedCase.serves("shared_experts")


class SharedExperts(Contract[SharedCase]):
    """`shared_experts`: the output, and the gradients of x, both weights and the gate."""

    function = "shared_experts"
    outputs = ("out",)
    primary = "out"
    optional = (
        "gate_weight",
        "kind",
        "offset",
        "clamp",
        "alpha",
        "interleave",
        "fp8_input_store",
        "recompute",
        "recipe",
        "state",
        "noise",
    )

    def legal(self, case: SharedCase) -> Problem:
        one = replace(case, experts=1)
        rows, hidden, width = (size * unit_of(case) for size in (case.tokens, case.hidden, case.width))
        required = {
            "x": rows_of(case, "x"),
            "fc1_weight": weight_of(one, "fc1_weight", fc1_columns(case), hidden)[0],
            "fc2_weight": weight_of(one, "fc2_weight", hidden, width)[0],
        }
        settings = {"gate_weight": weight_of(one, "gate_weight", 1, hidden)[0]} if case.gate else {}
        settings |= activation_settings(case) | ({"recompute": True} if case.again else {})
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"out": payload(case.seed, "d_out", (rows, hidden), case.dtype)} if wanted else {}
        tensors, beside = beside_recipe(one, (rows,), (fc1_columns(case), hidden))
        how: dict[str, Any] = {"layouts": {case.layout_of: case.layout}, "wanted": wanted, "cotangents": cotangents}
        return called(self.function, self.outputs, required, settings | beside, tensors, **how)

    def expected(self, case: SharedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x, fc1_weight, fc2_weight, *_ = problem.required.values()
        gate, dtype = problem.settings.get("gate_weight"), computed_in(declared, x)
        lost = ~x.isfinite().all(1)
        clean, count = torch.where(lost[:, None], 0, x), torch.tensor([len(x)])
        low = layers_of(problem, declared, x, count)
        call = Call(
            clean,
            count,
            fc1_weight[None],
            fc2_weight[None],
            None,
            None,
            None,
            problem.settings,
            dtype,
            dtype,
            dtype,
            low,
        )
        judged = Judged(
            call, len(x), count, lost, in_reference(shared_experts, problem), len(x) + sum(fc1_weight.shape)
        )
        ahead = forward(call)
        if gate is None:
            right = {"out": judged.by_row("out", ahead.out, x.dtype, ahead.y)}
        else:
            score, y = self.score(call, gate), call.kept(ahead.out, dtype)
            seen = call.kept(score, dtype)
            product = replace(ahead.y, magnitude=ahead.y.magnitude * score.value)
            right = {"out": judged.by_row("out", y * seen, x.dtype, product)}
        if not problem.wanted:
            return right
        g = Running.of(problem.cotangents["out"], dtype)
        back = backward(ahead, g if gate is None else call.kept(g * seen, dtype))
        d_x = back.rows
        if gate is not None:
            d_score = call.kept((g * y).sum(1), dtype)
            d_z = call.kept(d_score * score * (score.constant(1.0) - score), dtype)
            d_x = call.kept(d_x, dtype) + call.kept(d_z * Running.of(gate, dtype), dtype)
            d_gate = contracted(_turned(d_z), _turned(ahead.x), call.accumulator)
        gradients: dict[str, Callable[[], Expectation]] = {
            "x": lambda: judged.by_row("d_x", d_x, x.dtype, back.row_product),
            "fc1_weight": lambda: _of_one(judged.by_expert("d_fc1_weight", back.fc1_weight()[0], x.dtype)),
            "fc2_weight": lambda: _of_one(judged.by_expert("d_fc2_weight", back.fc2_weight()[0], x.dtype)),
            "gate_weight": lambda: judged.by_expert("d_gate_weight", d_gate, x.dtype),
        }
        return right | {f"d_{name}": gradients[name]() for name in problem.wanted}

    @staticmethod
    def score(call: Call, gate: Tensor) -> Running:
        """σ, not rounded, of a z that is."""
        z = contracted(Running.of(call.rows_PH, call.sums), Running.of(gate, call.sums), call.accumulator)
        return sigmoid(call.kept(z, call.sums))

    def neighbour(self, case: SharedCase) -> SharedCase:
        plain: dict[str, Any] = {
            "golden": "",
            "law": "",
            "layout": "contiguous",
            "layout_of": "",
            "interleave": 0,
            "alpha": 0,
        }
        clamp = case.clamp + 4 if case.clamp else 0
        grown: dict[str, Any] = (
            {"hidden": case.hidden + 3, "width": case.width + 1} if unit_of(case) == 1 else {"hidden": case.hidden + 1}
        )
        other = replace(case, **plain, **grown, clamp=clamp, seed=case.seed + 1, tokens=case.tokens + 1)
        later = (
            replace(other, variant=(case.variant + 1) % VARIANTS, override=other_override(case.override))
            if case.scaling
            else other
        )
        return later if fits_low(later) else other

    def simpler(self, case: SharedCase) -> Iterator[SharedCase]:
        yield from filter(fits_low, self._simpler(case))

    def _simpler(self, case: SharedCase) -> Iterator[SharedCase]:
        if case.scaling:
            yield replace(case, scaling="", variant=0, override="")
        if case.override:
            yield replace(case, override="")
        if case.variant:
            yield replace(case, variant=0)
        yield from plainer(case, ("again", "gate", "alpha", "kind", "interleave", "clamp", "offset", "stored"))
        yield from (replace(case, tokens=size) for size in shorter(case.tokens))
        yield from narrower(case, ("hidden", "width"))


def _of_one(right: Expectation) -> Expectation:
    """The only expert's."""
    assert isinstance(right, Bounded)
    return replace(right, value=right.value[0], bound=right.bound[0])


def _turned(x: Running) -> Running:
    return Running(x.value.mT, x.error.mT, x.dtype)
