"""grouped_linear, grouped_dgrad and grouped_wgrad: contractions expert by expert, and rows that nobody may read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.factors import ProductPrecision
from conformance.analysis.products import Product, compared, expert_slices
from conformance.core.case import shorter, without
from conformance.core.contract import Contract, Opaque, Problem, computed_in
from conformance.core.tensors import DTYPES, payload
from conformance.families.experts.cases import GroupedCase, counts_of, grouped_rows, weights_of
from conformance.families.experts.precision import (
    LOW_VALUES,
    fits,
    other_override,
    recipe_settings,
    script_of,
    state_from,
    state_tensors,
    unit_of,
)
from conformance.families.quantization.cases import VARIANTS
from conformance.judge import Bounded, Expectation
from conformance.judge.bound import HOPPER_FP8, ROUNDOFF, Accumulator
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad

BY_FP8 = (
    "delayed",
    "current",
    "block",
)  # scalings whose products Hopper's matrix unit for FP8 takes: those of MXFP8 and NVFP4 are emulated there
PRECISION = ("recipe", "state", "noise", "accumulator")  # arguments that say what a product is taken in


def precision_of(problem: Problem, declared: Mapping[str, Any], *tensors: Tensor) -> ProductPrecision:
    """What the call asks for, or else what is declared."""
    state = state_from(problem.required)
    settings = {name: x for name, x in problem.settings.items() if name in PRECISION} | (
        {"state": state} if state else {}
    )
    recipe = settings.get("recipe")
    if settings.get("accumulator") == "float64":
        accumulator = Accumulator(unit=ROUNDOFF[torch.float64])
    elif recipe is not None and recipe.scaling in BY_FP8 and declared.get("accumulator") == "hopper_fp8":
        accumulator = HOPPER_FP8
    else:
        accumulator = Accumulator(unit=ROUNDOFF[computed_in(declared, *tensors)])
    return ProductPrecision(accumulator, declared.get("scale_arithmetic") == "reciprocal", settings)


class _Grouped(Contract[GroupedCase]):
    optional: tuple[str, ...] = PRECISION

    @staticmethod
    def counts(case: GroupedCase) -> Tensor:
        return unit_of(case) * torch.tensor(counts_of(case), dtype=DTYPES[case.index_dtype])

    def called(self, case: GroupedCase, required: dict[str, Any], settings: dict[str, Any], **how: Any) -> Problem:
        """The call; with a state, which is made of tensors that no argument is, by a script."""
        settings = settings | recipe_settings(case) | ({"accumulator": case.accumulator} if case.accumulator else {})
        state = state_tensors(case)
        if state:
            settings |= {"state": Opaque("state")}
            how |= {
                "script": script_of(self.function, tuple(required), tuple(settings), self.outputs),
                "first": required,
            }
        return Problem(self.function, required | state, settings, {case.layout_of: case.layout}, **how)

    def neighbour(self, case: GroupedCase) -> GroupedCase:
        plain: dict[str, Any] = {"golden": "", "law": "", "layout": "contiguous", "layout_of": ""}
        counts = (0, *counts_of(case)[::-1], 2)
        sized: dict[str, Any] = {"counts": counts, "tokens": case.tokens + 2, "experts": case.experts + 2}
        grown: dict[str, Any] = (
            {"hidden": case.hidden + 3, "width": case.width + 1} if unit_of(case) == 1 else {"hidden": case.hidden + 1}
        )
        other = replace(case, **plain, **sized, **grown, seed=case.seed + 1, tail=1 - min(case.tail, 1))
        if case.scaling:
            other = replace(other, variant=(case.variant + 1) % VARIANTS, override=other_override(case.override))
        return other if fits(other) else replace(other, dtype="bfloat16", values="dyadic")

    def simpler(self, case: GroupedCase) -> Iterator[GroupedCase]:
        yield from filter(fits, self._simpler(case))

    @staticmethod
    def in_simpler_precision(case: GroupedCase) -> Iterator[GroupedCase]:
        if case.scaling:
            made = case.values in LOW_VALUES
            yield replace(case, scaling="", variant=0, override="", values="dyadic" if made else case.values)
        if case.override:
            yield replace(case, override="")
        if case.variant:
            yield replace(case, variant=0)

    def _simpler(self, case: GroupedCase) -> Iterator[GroupedCase]:
        yield from self.in_simpler_precision(case)
        yield from plainer_grouped(case, ("bias", "into", "accumulator", "index_dtype"))
        yield from fewer_rows(case)
        for name in ("tail", "hidden", "width"):
            for size in shorter(getattr(case, name)):
                changed: dict[str, Any] = {name: size}
                yield replace(case, **changed)


def plainer_grouped(case: Any, more: tuple[str, ...]) -> Iterator[Any]:
    """Each setting at its default."""
    for name in ("law", "layout", "grads", "values", *more, "dtype", "poison", "seed"):
        default: Any = type(case).__dataclass_fields__[name].default
        if getattr(case, name) != default:
            changed = {"layout": {"layout_of": ""}, "bias": {"grads": without(case.grads, "bias")}}.get(name, {})
            yield replace(case, **{name: default} | changed)
    for grad in case.grads.split("+") if "+" in case.grads else ():
        yield replace(case, grads=grad)


def fewer_rows(case: Any) -> Iterator[Any]:
    """Fewer experts and fewer rows: as even as can be, or one expert, then one count, after the other."""
    for name, least in (("tokens", 0), ("experts", 1)):
        for size in shorter(getattr(case, name), least):
            changed: dict[str, Any] = {name: size, "counts": ()}
            yield replace(case, **changed)
    counts = counts_of(case)
    if not case.counts:
        return
    yield replace(case, counts=())
    for e in range(case.experts) if case.experts > 1 else ():
        kept = counts[:e] + counts[e + 1 :]
        yield replace(case, counts=kept, experts=len(kept), tokens=sum(kept))
    for e, count in enumerate(counts):
        for size in shorter(count):
            fewer = (*counts[:e], size, *counts[e + 1 :])
            yield replace(case, counts=fewer, tokens=sum(fewer))


class GroupedLinear(_Grouped):
    """`grouped_linear`: the output, and the gradients of the rows, the weights and the biases."""

    function = "grouped_linear"
    outputs = ("out",)
    primary = "out"
    optional: tuple[str, ...] = ("bias", *PRECISION)

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "rows": grouped_rows(case, "rows", unit_of(case) * case.hidden),
            "weight": weights_of(case, "weight", unit_of(case) * case.width, unit_of(case) * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        settings = (
            {"bias": payload(case.seed, "bias", (case.experts, unit_of(case) * case.width), case.bias)}
            if case.bias
            else {}
        )
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"out": grouped_rows(case, "d_out", unit_of(case) * case.width)} if wanted else {}
        return self.called(case, required, settings, wanted=wanted, cotangents=cotangents)

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, weight, counts = (problem.required[name] for name in ("rows", "weight", "tokens_per_expert"))
        bias, cotangent = problem.settings.get("bias"), problem.cotangents.get("out")
        how = precision_of(problem, declared, rows)
        products = []
        for e, (own, matrix) in enumerate(
            zip(how.rows(rows, counts, "input", "fprop"), how.weights(weight, "fprop"), strict=True)
        ):
            product = Product.of(own, matrix)
            if bias is not None:
                product = replace(
                    product,
                    value=product.value + bias[e].double(),
                    magnitude=product.magnitude + bias[e].double().abs(),
                )
            products.append(product)
        whole, terms = Product.joined(products).with_tail(len(rows)), rows.shape[1] + 2
        bounded = whole.bounded(terms, rows.dtype, how.accumulator, how.roundings)
        right = {
            "out": compared(
                bounded,
                lambda: grouped_linear(rows, weight, counts, bias=bias, **how.settings),
                whole,
                terms,
                how,
                counts,
            )
        }
        if cotangent is None:
            return right
        if "rows" in problem.wanted:
            right["d_rows"] = row_gradient(cotangent, weight, counts, how)
        if "weight" in problem.wanted:
            right["d_weight"] = weight_gradient(cotangent, rows, counts, None, how)
        if "bias" in problem.wanted:
            assert bias is not None
            ones = [
                Product.of(torch.ones(1, rows.stop - rows.start), cotangent[rows].T) for rows in expert_slices(counts)
            ]
            right["d_bias"] = Product.joined(ones).bounded(int(counts.max()) + 1, bias.dtype, how.sums)
        return right


def row_gradient(d_out: Tensor, weight: Tensor, counts: Tensor, how: ProductPrecision) -> Expectation:
    """What is right for d_out W_e."""
    how = how.of("dgrad")
    pairs = zip(how.rows(d_out, counts, "grad_output", "dgrad"), how.weights(weight, "dgrad"), strict=True)
    products = [Product.of(own, matrix.transposed) for own, matrix in pairs]
    whole, terms = Product.joined(products).with_tail(len(d_out)), weight.shape[1] + 1
    bounded = whole.bounded(terms, d_out.dtype, how.accumulator, how.roundings)
    return compared(bounded, lambda: grouped_dgrad(d_out, weight, counts, **how.settings), whole, terms, how, counts)


def weight_gradient(
    d_out: Tensor, rows: Tensor, counts: Tensor, into: Tensor | None, how: ProductPrecision
) -> Expectation:
    """What is right for Σ d_outᵀ x of each expert, beside what is there already."""
    how = how.of("wgrad")
    pairs = zip(how.rows(d_out, counts, "grad_output", "wgrad"), how.rows(rows, counts, "input", "wgrad"), strict=True)
    whole = Product.joined([Product.of(left.transposed, right.transposed) for left, right in pairs], stack=True)
    terms = int(counts.max()) + 1
    dtype = rows.dtype if into is None else into.dtype
    bounded = whole.bounded(terms, dtype, how.accumulator, how.roundings)
    if into is not None:
        kept = (
            Accumulator(unit=max(ROUNDOFF[dtype], how.sums.unit if dtype == torch.float32 else 0.0)).worst(terms)
            * into.double().abs()
        )
        bound = bounded.bound + kept + ROUNDOFF[dtype] * into.double().abs()
        empty = (counts == 0)[:, None, None]
        bounded = Bounded(bounded.value + into.double(), torch.where(empty, 0.0, bound), dtype, bounded.accumulator)
        whole = replace(whole, magnitude=whole.magnitude + into.double().abs())
    return compared(
        bounded,
        lambda: grouped_wgrad(d_out, rows, counts, accumulate_into=into, **how.settings),
        whole,
        terms,
        how,
        counts,
    )


class GroupedDgrad(_Grouped):
    """`grouped_dgrad`."""

    function = "grouped_dgrad"
    outputs = ("d_rows",)
    primary = "d_rows"

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", unit_of(case) * case.width),
            "weight": weights_of(case, "weight", unit_of(case) * case.width, unit_of(case) * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        return self.called(case, required, {})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, weight, counts = (problem.required[name] for name in ("d_out", "weight", "tokens_per_expert"))
        return {"d_rows": row_gradient(d_out, weight, counts, precision_of(problem, declared, d_out))}


class GroupedWgrad(_Grouped):
    """`grouped_wgrad`, alone or added to what is there already."""

    function = "grouped_wgrad"
    outputs = ("d_weight",)
    primary = "d_weight"
    optional = ("accumulate_into", *PRECISION)

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", unit_of(case) * case.width),
            "rows": grouped_rows(case, "rows", unit_of(case) * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        shape = (case.experts, unit_of(case) * case.width, unit_of(case) * case.hidden)
        flat = payload(case.seed, "into", (shape[0] * shape[1], shape[2]), case.into or "float32").reshape(shape)
        return self.called(case, required, {"accumulate_into": flat} if case.into else {})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, rows, counts = (problem.required[name] for name in ("d_out", "rows", "tokens_per_expert"))
        how = precision_of(problem, declared, rows)
        return {"d_weight": weight_gradient(d_out, rows, counts, problem.settings.get("accumulate_into"), how)}
