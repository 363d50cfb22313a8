"""grouped_mlp and sequential_mlp: values and every gradient by running error analysis through the stages, and large outputs by their
error beside that of the reference too; with a recipe by the analysis alone, which passes through the quantisers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import Call, backward, final_bound, forward
from conformance.analysis.products import Product, experts_of_rows
from conformance.analysis.running import Running
from conformance.core.case import Case, shorter, without
from conformance.core.contract import Contract, Problem, computed_in
from conformance.core.tensors import DTYPES, hashed, payload, row_scales
from conformance.families.experts.activations import activation_settings
from conformance.families.experts.cases import LAYOUTS, WEIGHTS, check_counts_of, counts_of, probs_of
from conformance.families.experts.linear import fewer_rows
from conformance.families.experts.precision import other_override, unit_of
from conformance.families.experts.precision_mlp import (
    beside_recipe,
    called,
    check_low,
    fits_low,
    layers_of,
    of_experts,
    rows_unit,
)
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.judge import Bounded, Expectation
from conformance.judge.ratios import LEAST_ELEMENTS, row_wise
from moe_ref.config import GATED, PLAIN, RECOMPUTED
from moe_ref.config.quantization import OVERRIDES
from moe_ref.experts.mlp import grouped_mlp

VALUES = ("dyadic", "rows", "special")
SPREAD = 4  # rows lie within its powers of two of 1, so that no stage overflows in float16
INPUTS = ("rows", "probs", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias")  # that have a gradient
BIASES = {"bias1": "fc1_bias", "bias2": "fc2_bias"}  # fields, and what they are called in a call


@dataclass(frozen=True, kw_only=True)
class MlpCase(Case):
    """A case of rows that go through an expert's two layers."""

    tokens: int = 1  # rows in the segments together
    experts: int = 1
    counts: tuple[
        int, ...
    ] = ()  # of each expert, together `tokens`; empty: as even as can be, the first experts having one more
    tail: int = 0  # rows behind the last segment
    hidden: int = 1  # H
    width: int = 1  # F
    dtype: str = "float32"
    kind: str = ""  # empty: the function's own
    probs: str = ""  # their dtype; empty: none are given
    weights: str = "plain"  # of the probs: in (0, 1], with zeros, or from -2 to 2 with zeros
    values: str = "dyadic"  # rows: each times a power of two; special: NaN and infinities in some rows
    offset: int = 0  # in eighths
    clamp: int = 0  # in eighths; 0: none
    alpha: int = 0  # in thousandths; 0: none
    interleave: int = 0  # 0: none
    early: bool = False  # round_before_probs
    stored: bool = False  # fp8_input_store
    on_input: bool = False  # probs_on_input
    bias1: str = ""  # its dtype; empty: none is given
    bias2: str = ""
    align: int = 0  # 0: none
    recompute: str = ""  # empty: none
    scaling: str = ""  # of the recipe; empty: high precision
    variant: int = 0  # of the scaling, in RECIPES
    override: str = ""  # the recipe's backward_override; empty: none
    index_dtype: str = "int64"
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "values": VALUES,
        "weights": WEIGHTS,
        "kind": GATED + PLAIN,
        "layout": LAYOUTS,
        "recompute": RECOMPUTED,
        "scaling": tuple(RECIPES),
        "override": OVERRIDES,
    }

    def __post_init__(self) -> None:
        if (
            min(self.tokens, self.tail, self.hidden, self.width, self.clamp, self.alpha, self.interleave, self.align)
            < 0
            or self.experts < 1
        ):
            sizes = f"{self.tokens}, {self.tail}, {self.hidden}, {self.width}, {self.clamp}, {self.alpha}, {self.interleave}, {self.align}, {self.experts}"
            raise ValueError(
                f"tokens, tail, hidden, width, clamp, alpha, interleave, align ≥ 0 and experts ≥ 1 are needed; they are {sizes}"
            )
        check_counts_of(self.counts, self.tokens, self.experts)
        check_low(self)


MlpCase.serves("grouped_mlp", "sequential_mlp")


def rows_of(case: Any, name: str, tail: int = 0) -> Tensor:
    """[P,H]: rows by `values`, and NaN behind them."""
    kind, own = DTYPES[case.dtype], case.tokens * rows_unit(case)
    x = payload(case.seed, name, (own + tail, case.hidden * unit_of(case)), case.dtype)
    if case.values == "rows":
        x = (x.double() * row_scales(case.seed, len(x)).log2().div(SPREAD).round().exp2()).to(kind)
    if case.values == "special" and case.hidden:
        noise = torch.from_numpy(hashed(case.seed, f"{name} kinds", len(x)).astype("int64"))
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=kind)
        hit = (noise % 4 == 0)[:, None] & (torch.arange(case.hidden)[None] == (noise >> 8)[:, None] % case.hidden)
        x = torch.where(hit, strange[(noise >> 20) % 3][:, None], x)
    x[own:] = torch.nan
    return x


def weight_of(case: Any, name: str, rows: int, columns: int) -> Tensor:
    """[L, rows, columns], a power of two smaller than a payload, so that what goes out is of the size of what goes in."""
    weight = payload(case.seed, name, (case.experts * rows, columns), case.dtype).reshape(case.experts, rows, columns)
    return of_experts(case, weight * 2.0 ** -(max(columns - 1, 1).bit_length() // 2))


def fc1_columns(case: Any) -> int:
    """Columns of fc1."""
    return (1 if case.kind in PLAIN else 2) * case.width * unit_of(case)


def plainer(case: Any, settings: tuple[str, ...]) -> Iterator[Any]:
    """Each setting at its default, and with it what goes with it; then fewer gradients."""
    beside: dict[str, dict[str, Any]] = {"layout": {"layout_of": ""}, "kind": {"alpha": 0}}
    beside["probs"] = {"grads": without(case.grads, "probs"), "weights": "plain", "on_input": False, "early": False}
    beside |= {field: {"grads": without(case.grads, name)} for field, name in BIASES.items()}
    beside["gate"] = {"grads": without(case.grads, "gate_weight")}
    for name in ("law", "layout", "grads", "values", *settings, "dtype", "poison", "seed"):
        default: Any = type(case).__dataclass_fields__[name].default
        if getattr(case, name) != default:
            yield replace(case, **{name: default} | beside.get(name, {}))
    for grad in case.grads.split("+") if "+" in case.grads else ():
        yield replace(case, grads=grad)


def narrower(case: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Smaller sizes; without blocks that would no longer fit."""
    for name in names:
        for size in shorter(getattr(case, name)):
            changed: dict[str, Any] = {name: size}
            if name == "width" and case.interleave and size * unit_of(case) % case.interleave:
                changed["interleave"] = 0
            yield replace(case, **changed)


@dataclass(frozen=True)
class Judged:
    """What is right for outputs, in the order of the rows."""

    call: Call
    rows: int  # with those behind the last segment
    counts_L: Tensor  # of each expert, without padding
    lost: Tensor  # rows that hold a NaN or an infinity: all that they reach is unspecified
    reference: Callable[[], Mapping[str, Tensor]]  # of the same precision
    terms: int  # of all stages together

    @property
    def lost_experts(self) -> Tensor:
        return torch.stack([lost.any() for lost in self.lost.split(self.counts_L.tolist())])

    def by_row(self, name: str, x: Running, dtype: torch.dtype, product: Product | None = None) -> Expectation:
        """With zeros behind the last segment."""
        right = final_bound(x, dtype, self.lost.reshape(-1, *[1] * (x.value.dim() - 1)))
        missing = torch.zeros((self.rows - len(self.lost), *x.value.shape[1:]), dtype=torch.float64)
        right = replace(right, value=torch.cat([right.value, missing]), bound=torch.cat([right.bound, missing]))
        if product is None or self.call.low is not None:
            return right
        return self.compared(name, right, torch.cat([product.magnitude, missing]), product.terms)

    def by_expert(
        self,
        name: str,
        x: Running,
        dtype: torch.dtype,
        product: Product | None = None,
        unspecified: Tensor | None = None,
    ) -> Expectation:
        """Of all of an expert's rows together."""
        lost = self.lost_experts if unspecified is None else unspecified
        right = final_bound(x, dtype, lost.reshape(-1, *[1] * (x.value.dim() - 1)))
        return (
            right
            if product is None or self.call.low is not None
            else self.compared(name, right, product.magnitude, product.terms)
        )

    def compared(self, name: str, right: Bounded, magnitude: Tensor, terms: int) -> Expectation:
        """By ratios too, where the output is large enough; the noise is that of all stages."""
        if right.value.numel() < LEAST_ELEMENTS or right.dtype == torch.float64:
            return right
        shape = right.value.shape[:-1]
        groups = (
            experts_of_rows(self.counts_L, shape[0])
            if len(shape) == 1
            else torch.arange(shape[0])[:, None].expand(shape)
        )
        every = max(terms, 1) + self.terms
        walk = magnitude * (every / max(terms, 1)) ** 0.5
        return row_wise(right, self.reference()[name], walk, every, accumulator=self.call.accumulator, groups=groups)


def in_reference(function: Callable[..., Tensor], problem: Problem) -> Callable[[], Mapping[str, Tensor]]:
    """The output and the gradients of the reference, once."""
    known: dict[str, Tensor] = {}

    def run() -> Mapping[str, Tensor]:
        if not known:
            inputs = {
                name: x.clone().requires_grad_() if name in problem.wanted else x
                for name, x in (problem.required | problem.settings).items()
            }
            out = function(
                *(inputs[name] for name in problem.required), **{name: inputs[name] for name in problem.settings}
            )
            known["out"] = out.detach()
            if problem.wanted:
                gradients = torch.autograd.grad(
                    out, [inputs[name] for name in problem.wanted], problem.cotangents["out"]
                )
                known.update({f"d_{name}": x for name, x in zip(problem.wanted, gradients, strict=True)})
        return known

    return run


class GroupedMlp(Contract[MlpCase]):
    """`grouped_mlp`: the output, and the gradients of the rows, the probs, both weights and both biases."""

    function = "grouped_mlp"
    outputs = ("out",)
    primary = "out"
    optional: tuple[str, ...] = (
        *("probs", "fc1_bias", "fc2_bias", "kind", "offset", "clamp", "alpha", "interleave"),
        *("round_before_probs", "fp8_input_store", "probs_on_input", "align", "recompute", "recipe", "state", "noise"),
    )

    def legal(self, case: MlpCase) -> Problem:
        hidden, width = (size * unit_of(case) for size in (case.hidden, case.width))
        counts = tuple(count * rows_unit(case) for count in counts_of(case))
        total = sum(counts)
        required = {
            "rows": rows_of(case, "rows", case.tail),
            "tokens_per_expert": torch.tensor(counts, dtype=DTYPES[case.index_dtype]),
            "fc1_weight": weight_of(case, "fc1_weight", fc1_columns(case), hidden),
            "fc2_weight": weight_of(case, "fc2_weight", hidden, width),
        }
        settings: dict[str, Any] = {}
        if case.probs:
            probs = probs_of(case.seed, total + case.tail, case.probs, case.weights)
            probs[total:] = torch.nan
            settings["probs"] = probs
        for field, columns in (("bias1", fc1_columns(case)), ("bias2", hidden)):
            dtype = getattr(case, field)
            settings |= (
                {BIASES[field]: payload(case.seed, BIASES[field], (case.experts, columns), dtype)} if dtype else {}
            )
        settings |= activation_settings(case) | ({"probs_on_input": True} if case.on_input else {})
        settings |= ({"align": case.align} if case.align else {}) | (
            {"recompute": case.recompute} if case.recompute else {}
        )
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"out": payload(case.seed, "d_out", (total + case.tail, hidden), case.dtype)} if wanted else {}
        for x in cotangents.values():
            x[total:] = torch.nan
        tensors, beside = beside_recipe(case, counts, (fc1_columns(case), hidden))
        how: dict[str, Any] = {"layouts": {case.layout_of: case.layout}, "wanted": wanted, "cotangents": cotangents}
        return called(self.function, self.outputs, required, settings | beside, tensors, **how)

    def expected(self, case: MlpCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, counts, fc1_weight, fc2_weight, *_ = problem.required.values()
        settings, total = problem.settings, int(counts.sum())
        probs, bias1, bias2 = (settings.get(name) for name in ("probs", "fc1_bias", "fc2_bias"))
        own, p = rows[:total], None if probs is None else probs[:total]
        lost = ~own.isfinite().all(1)
        lost = lost if p is None else lost | ~p.isfinite()
        padding = Padding.of(counts, settings["align"] if settings.get("recipe") and "align" in settings else 1)
        call = Call(
            padding.pad(torch.where(lost[:, None], 0, own)),
            padding.counts_L,
            fc1_weight,
            fc2_weight,
            p if p is None else padding.pad(torch.where(lost, 0, p)),
            bias1,
            bias2,
            settings,
            computed_in(declared, rows),
            computed_in(declared, rows, probs),
            computed_in(declared, rows, probs, bias2),
            layers_of(problem, declared, rows, padding.counts_L),
        )
        judged = Judged(
            call,
            len(rows),
            counts,
            lost,
            in_reference(grouped_mlp, problem),
            int(counts.max()) + sum(fc1_weight.shape[1:]),
        )
        ahead = forward(call)
        right = {"out": judged.by_row("out", padding.trim(ahead.out), rows.dtype, ahead.y)}
        if not problem.wanted:
            return right
        back = backward(ahead, Running.of(padding.pad(problem.cotangents["out"][:total]), call.sums))
        unspoilt = (
            torch.zeros(len(counts), dtype=torch.bool)
            if p is None or settings.get("probs_on_input")
            else judged.lost_experts
        )
        gradients: dict[str, Callable[[], Expectation]] = {
            "rows": lambda: judged.by_row("d_rows", padding.trim(back.rows), rows.dtype, back.row_product),
            "probs": lambda: judged.by_row("d_probs", padding.trim(_flat(back.probs)), settings["probs"].dtype),
            # no ratio: a row of d_h shares an error
            "fc1_weight": lambda: judged.by_expert("d_fc1_weight", back.fc1_weight()[0], rows.dtype),
            "fc2_weight": lambda: judged.by_expert(
                "d_fc2_weight", (second := back.fc2_weight())[0], rows.dtype, second[1]
            ),
            "fc1_bias": lambda: judged.by_expert("d_fc1_bias", back.fc1_bias, settings["fc1_bias"].dtype),
            "fc2_bias": lambda: judged.by_expert(
                "d_fc2_bias", back.fc2_bias, settings["fc2_bias"].dtype, None, unspoilt
            ),
        }
        return right | {f"d_{name}": gradients[name]() for name in problem.wanted}

    def neighbour(self, case: MlpCase) -> MlpCase:
        plain: dict[str, Any] = {
            "golden": "",
            "law": "",
            "layout": "contiguous",
            "layout_of": "",
            "interleave": 0,
            "alpha": 0,
        }
        sized: dict[str, Any] = {
            "counts": (0, *counts_of(case)[::-1], 2),
            "tokens": case.tokens + 2,
            "experts": case.experts + 2,
        }
        clamp = case.clamp + 4 if case.clamp else 0
        grown: dict[str, Any] = (
            {"hidden": case.hidden + 3, "width": case.width + 1} if unit_of(case) == 1 else {"hidden": case.hidden + 1}
        )
        other = replace(case, **plain, **sized, **grown, clamp=clamp, seed=case.seed + 1, tail=1 - min(case.tail, 1))
        later = (
            replace(other, variant=(case.variant + 1) % VARIANTS, override=other_override(case.override))
            if case.scaling
            else other
        )
        return later if fits_low(later) else other

    def simpler(self, case: MlpCase) -> Iterator[MlpCase]:
        yield from filter(fits_low, self._simpler(case))

    def _simpler(self, case: MlpCase) -> Iterator[MlpCase]:
        if case.scaling:
            yield replace(case, scaling="", variant=0, override="")
        if case.override:
            yield replace(case, override="")
        if case.variant:
            yield replace(case, variant=0)
        settings = (
            "recompute",
            "align",
            "weights",
            "alpha",
            "kind",
            "interleave",
            "clamp",
            "offset",
            "early",
            "stored",
            "on_input",
            "probs",
            "bias1",
            "bias2",
        )
        yield from plainer(case, (*settings, "index_dtype"))
        yield from fewer_rows(case)
        yield from narrower(case, ("tail", "hidden", "width"))


class SequentialMlp(GroupedMlp):
    """`sequential_mlp`, the same function."""

    function = "sequential_mlp"


@dataclass(frozen=True)
class Padding:
    """Rows of zeros behind each expert's."""

    counts_L: Tensor  # with them
    kept: Tensor  # bool: rows that are none of them

    @classmethod
    def of(cls, counts_L: Tensor, align: int) -> "Padding":
        padded = -(-counts_L // align) * align
        kept = [torch.arange(whole) < count for whole, count in zip(padded.tolist(), counts_L.tolist(), strict=True)]
        return cls(padded, torch.cat(kept))

    def pad(self, x_P: Tensor) -> Tensor:
        whole = x_P.new_zeros((len(self.kept), *x_P.shape[1:]))
        whole[self.kept] = x_P
        return whole

    def trim(self, x: Running) -> Running:
        return Running(x.value[self.kept], x.error[self.kept], x.dtype)


def _flat(x: Running | None) -> Running:
    assert x is not None
    return Running(x.value[:, 0], x.error[:, 0], x.dtype)
