"""grouped_linear, grouped_dgrad and grouped_wgrad: contractions expert by expert, and rows that nobody may read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.case import Case
from conformance.contracts.activation import computed_in, row_scales, shorter, without
from conformance.contracts.base import Contract, Problem
from conformance.judge import Bounded, Expectation
from conformance.judge.bound import ROUNDOFF
from conformance.judge.rowwise import LEAST_ELEMENTS, Accumulator, contraction_bound, row_wise
from conformance.values import DTYPES, hashed, payload
from moe_ref.linear import grouped_dgrad, grouped_linear, grouped_wgrad

VALUES = ("dyadic", "rows", "special")
LAYOUTS = ("contiguous", "transposed", "strided", "shifted", "expanded", "wide_rows", "wide_columns", "wide_depth")


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    """A case of rows that stand grouped by expert, with a matrix for each expert."""

    tokens: int = 1  # rows in the segments together
    experts: int = 1
    counts: tuple[int, ...] = ()  # of each expert, together `tokens`; empty: as even as can be, the first experts having one more
    tail: int = 0  # rows behind the last segment
    hidden: int = 1  # N, what goes in
    width: int = 1  # M, what comes out
    dtype: str = "float32"
    bias: str = ""  # its dtype; empty: none is given
    into: str = ""  # dtype of accumulate_into; empty: none is given
    accumulator: str = ""
    values: str = "dyadic"  # rows: each times a power of two; special: NaN and infinities in some rows and in some experts' weights
    index_dtype: str = "int64"
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {"values": VALUES, "layout": LAYOUTS, "accumulator": ("float64",), "into": ("float32", "float64")}

    def __post_init__(self) -> None:
        if min(self.tokens, self.tail, self.hidden, self.width) < 0 or self.experts < 1:
            sizes = f"{self.tokens}, {self.tail}, {self.hidden}, {self.width}, {self.experts}"
            raise ValueError(f"tokens, tail, hidden, width ≥ 0 and experts ≥ 1 are needed; they are {sizes}")
        check_counts_of(self.counts, self.tokens, self.experts)


GroupedCase.serves("grouped_linear", "grouped_dgrad", "grouped_wgrad")


def check_counts_of(counts: tuple[int, ...], tokens: int, experts: int) -> None:
    if counts and (len(counts) != experts or min(counts) < 0 or sum(counts) != tokens):
        raise ValueError(f"counts is {counts}; it must have {experts} numbers ≥ 0 that sum to {tokens}")


def counts_of(case: Any) -> tuple[int, ...]:
    """Rows of each expert."""
    return case.counts or tuple(case.tokens // case.experts + (e < case.tokens % case.experts) for e in range(case.experts))


def own_rows(counts: Tensor) -> list[slice]:
    """Where each expert's rows stand."""
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def grouped_rows(case: Any, name: str, columns: int) -> Tensor:
    """[P, columns]: rows of the segments by `values`, and NaN behind them."""
    kind = DTYPES[case.dtype]
    x = payload(case.seed, name, (case.tokens + case.tail, columns), case.dtype)
    if case.values == "rows":
        x = (x.double() * row_scales(case.seed, len(x))).to(kind)
    if case.values == "special" and columns:
        noise = hashed(case.seed, f"{name} kinds", len(x)).astype(np.int64)
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=kind)
        hit = torch.from_numpy(noise % 4 == 0)[:, None] & (torch.arange(columns)[None] == torch.from_numpy((noise >> 8) % columns)[:, None])
        x = torch.where(hit, strange[torch.from_numpy((noise >> 20) % 3)][:, None], x)
    x[case.tokens :] = torch.nan
    return x


def weights_of(case: Any, name: str, rows: int, columns: int) -> Tensor:
    """[L, rows, columns]; where values are special, every third expert has a NaN or an infinity somewhere."""
    weight = payload(case.seed, name, (case.experts * rows, columns), case.dtype).reshape(case.experts, rows, columns)
    if case.values == "special" and rows * columns:
        for e in range(case.seed % 3, case.experts, 3):
            weight[e, e % rows, (e + case.seed) % columns] = (torch.nan, torch.inf)[e % 2]
    return weight


@dataclass(frozen=True)
class Product:
    """Σ_k left_ik right_jk with what it is judged by."""

    value: Tensor  # float64
    magnitude: Tensor  # Σ|terms|
    free: Tensor  # where an infinity went in, and no NaN: split products of it are NaN as well

    @classmethod
    def of(cls, left_IK: Tensor, right_JK: Tensor) -> "Product":
        left, right = left_IK.double(), right_JK.double()
        clean_left, clean_right = (torch.where(x.isfinite(), x, 0.0) for x in (left, right))
        spoilt = left.isnan().any(1)[:, None] | right.isnan().any(1)[None]
        infinite = left.isinf().any(1)[:, None] | right.isinf().any(1)[None]
        value = torch.where(spoilt, torch.nan, clean_left @ clean_right.T)
        return cls(value, clean_left.abs() @ clean_right.abs().T, infinite & ~spoilt)

    @classmethod
    def joined(cls, products: list["Product"], stack: bool = False) -> "Product":
        join = torch.stack if stack else torch.cat
        return cls(*(join([getattr(p, name) for p in products]) for name in ("value", "magnitude", "free")))

    def with_tail(self, rows: int) -> "Product":
        """Zeros below, to so many rows."""
        more = rows - len(self.value)
        return Product(*(torch.cat([x, x.new_zeros((more, *x.shape[1:]))]) for x in (self.value, self.magnitude, self.free)))

    def bounded(self, terms: int, dtype: torch.dtype, accumulator: Accumulator) -> Bounded:
        bounded = contraction_bound(self.value, self.magnitude, terms, dtype, accumulator)
        own = bounded.bound * (2 if accumulator.unit == ROUNDOFF[torch.float64] else 1)  # the oracle's roundings are of the same size
        bound = torch.where(self.free | (self.value.abs() + own > torch.finfo(dtype).max), torch.inf, own)
        return Bounded(torch.where(self.free, 0.0, self.value), torch.where(self.value.isnan(), 0.0, bound), dtype, bounded.accumulator)


def compared(bounded: Bounded, reference: Callable[[], Tensor], product: Product, terms: int, accumulator: Accumulator, counts: Tensor) -> Expectation:
    """By ratios too, where the output is large enough for them to say something; an expert's rows share a bias."""
    if bounded.value.numel() < LEAST_ELEMENTS:
        return bounded
    shape = bounded.value.shape[:-1]
    groups = experts_of_rows(counts, shape[0]) if len(shape) == 1 else torch.arange(shape[0])[:, None].expand(shape)
    return row_wise(bounded, reference(), product.magnitude, max(terms, 1), accumulator=accumulator, groups=groups)


def accumulator_for(settings: Mapping[str, Any], declared: Mapping[str, Any], *tensors: Tensor) -> Accumulator:
    """What the call asks for, or else what is declared."""
    dtype = torch.float64 if settings.get("accumulator") == "float64" else computed_in(declared, *tensors)
    return Accumulator(unit=ROUNDOFF[dtype])


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """[P] the expert of each row; behind the last segment, one more than the last."""
    sizes = [*counts.tolist(), rows - int(counts.sum())]
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


class _Grouped(Contract[GroupedCase]):
    optional: tuple[str, ...] = ("accumulator",)

    @staticmethod
    def counts(case: GroupedCase) -> Tensor:
        return torch.tensor(counts_of(case), dtype=DTYPES[case.index_dtype])

    @staticmethod
    def settings(case: GroupedCase) -> dict[str, Any]:
        return {"accumulator": case.accumulator} if case.accumulator else {}

    def neighbour(self, case: GroupedCase) -> GroupedCase:
        plain: dict[str, Any] = {"golden": "", "law": "", "layout": "contiguous", "layout_of": ""}
        counts = (0, *counts_of(case)[::-1], 2)
        sized: dict[str, Any] = {"counts": counts, "tokens": case.tokens + 2, "experts": case.experts + 2}
        return replace(case, **plain, **sized, seed=case.seed + 1, hidden=case.hidden + 3, width=case.width + 1, tail=1 - min(case.tail, 1))

    def simpler(self, case: GroupedCase) -> Iterator[GroupedCase]:
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
    optional = ("bias", "accumulator")

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "rows": grouped_rows(case, "rows", case.hidden),
            "weight": weights_of(case, "weight", case.width, case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        settings = {"bias": payload(case.seed, "bias", (case.experts, case.width), case.bias)} if case.bias else {}
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"out": grouped_rows(case, "d_out", case.width)} if wanted else {}
        return Problem(self.function, required, settings | self.settings(case), {case.layout_of: case.layout}, wanted, cotangents)

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, weight, counts = problem.required.values()
        bias, cotangent = problem.settings.get("bias"), problem.cotangents.get("out")
        accumulator = accumulator_for(problem.settings, declared, rows)
        how = {name: x for name, x in problem.settings.items() if name == "accumulator"}
        products = []
        for e, own in enumerate(own_rows(counts)):
            product = Product.of(rows[own], weight[e])
            if bias is not None:
                product = replace(product, value=product.value + bias[e].double(), magnitude=product.magnitude + bias[e].double().abs())
            products.append(product)
        whole, terms = Product.joined(products).with_tail(len(rows)), rows.shape[1] + 2
        bounded = whole.bounded(terms, rows.dtype, accumulator)
        right = {"out": compared(bounded, lambda: grouped_linear(rows, weight, counts, **problem.settings), whole, terms, accumulator, counts)}
        if cotangent is None:
            return right
        if "rows" in problem.wanted:
            right["d_rows"] = row_gradient(cotangent, weight, counts, accumulator, how)
        if "weight" in problem.wanted:
            right["d_weight"] = weight_gradient(cotangent, rows, counts, None, accumulator, how)
        if "bias" in problem.wanted:
            assert bias is not None
            ones = [Product.of(torch.ones(1, own.stop - own.start), cotangent[own].T) for own in own_rows(counts)]
            right["d_bias"] = Product.joined(ones).bounded(int(counts.max()) + 1, bias.dtype, accumulator)
        return right


def row_gradient(d_out: Tensor, weight: Tensor, counts: Tensor, accumulator: Accumulator, how: dict[str, Any]) -> Expectation:
    """What is right for d_out W_e."""
    products = [Product.of(d_out[own], weight[e].T) for e, own in enumerate(own_rows(counts))]
    whole, terms = Product.joined(products).with_tail(len(d_out)), weight.shape[1] + 1
    bounded = whole.bounded(terms, d_out.dtype, accumulator)
    return compared(bounded, lambda: grouped_dgrad(d_out, weight, counts, **how), whole, terms, accumulator, counts)


def weight_gradient(d_out: Tensor, rows: Tensor, counts: Tensor, into: Tensor | None, accumulator: Accumulator, how: dict[str, Any]) -> Expectation:
    """What is right for Σ d_outᵀ x of each expert, beside what is there already."""
    whole = Product.joined([Product.of(d_out[own].T, rows[own].T) for own in own_rows(counts)], stack=True)
    terms = int(counts.max()) + 1
    dtype = rows.dtype if into is None else into.dtype
    bounded = whole.bounded(terms, dtype, accumulator)
    if into is not None:
        kept = Accumulator(unit=max(ROUNDOFF[dtype], accumulator.unit if dtype == torch.float32 else 0.0)).worst(terms) * into.double().abs()
        bound = bounded.bound + kept + ROUNDOFF[dtype] * into.double().abs()
        empty = (counts == 0)[:, None, None]
        bounded = Bounded(bounded.value + into.double(), torch.where(empty, 0.0, bound), dtype, bounded.accumulator)
        whole = replace(whole, magnitude=whole.magnitude + into.double().abs())
    return compared(bounded, lambda: grouped_wgrad(d_out, rows, counts, accumulate_into=into, **how), whole, terms, accumulator, counts)


class GroupedDgrad(_Grouped):
    """`grouped_dgrad`."""

    function = "grouped_dgrad"
    outputs = ("d_rows",)
    primary = "d_rows"

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", case.width),
            "weight": weights_of(case, "weight", case.width, case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        return Problem(self.function, required, self.settings(case), {case.layout_of: case.layout})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, weight, counts = problem.required.values()
        accumulator = accumulator_for(problem.settings, declared, d_out)
        return {"d_rows": row_gradient(d_out, weight, counts, accumulator, problem.settings)}


class GroupedWgrad(_Grouped):
    """`grouped_wgrad`, alone or added to what is there already."""

    function = "grouped_wgrad"
    outputs = ("d_weight",)
    primary = "d_weight"
    optional = ("accumulate_into", "accumulator")

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", case.width),
            "rows": grouped_rows(case, "rows", case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        shape = (case.experts, case.width, case.hidden)
        flat = payload(case.seed, "into", (case.experts * case.width, case.hidden), case.into or "float32").reshape(shape)
        settings = {"accumulate_into": flat} if case.into else {}
        return Problem(self.function, required, settings | self.settings(case), {case.layout_of: case.layout})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, rows, counts = problem.required.values()
        into = problem.settings.get("accumulate_into")
        accumulator = accumulator_for(problem.settings, declared, rows)
        how = {name: x for name, x in problem.settings.items() if name == "accumulator"}
        return {"d_weight": weight_gradient(d_out, rows, counts, into, accumulator, how)}
