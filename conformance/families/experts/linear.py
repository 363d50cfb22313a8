"""`grouped_linear`, `grouped_dgrad` and `grouped_wgrad`: one contraction per expert."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.factors import ProductPrecision
from conformance.analysis.products import Product, compared, expert_slices
from conformance.core.contract import Contract, Opaque, Problem, computed_in, narrowed
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import DTYPES, payload
from conformance.families.experts.cases import GroupedCase, counts_of, grouped_rows, weights_of
from conformance.families.experts.precision import (
    recipe_settings,
    script_of,
    state_from,
    state_tensors,
)
from conformance.judge import Bounded, Expectation
from conformance.judge.bound import HOPPER_FP8, ROUNDOFF, Accumulator, accumulating
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad

BY_FP8 = (
    "delayed",
    "current",
    "block",
)  # scalings on Hopper's FP8 tensor cores; MXFP8 and NVFP4 are emulated there
PRECISION = ("recipe", "state", "noise", "accumulator")  # arguments that set a product's precision


def precision_of(problem: Problem, declared: Mapping[str, Any], *tensors: Tensor) -> ProductPrecision:
    """The precision the call sets, else the declared one."""
    state = state_from(problem.required)
    settings = {name: x for name, x in problem.settings.items() if name in PRECISION} | (
        {"state": state} if state else {}
    )
    recipe = settings.get("recipe")
    if settings.get("accumulator") == "float64":
        sums = accumulating(torch.float64, tensors[0].dtype)
    elif recipe is not None and recipe.scaling in BY_FP8 and declared.get("accumulator") == "hopper_fp8":
        sums = HOPPER_FP8
    else:
        factors = tensors[0].dtype if recipe is None else torch.float8_e4m3fn
        sums = accumulating(computed_in(declared, *tensors), factors)
    rounded = 2 * narrowed(torch.float32, tensors[0]) if sums.unit == ROUNDOFF[torch.float32] else 0
    return ProductPrecision(sums, declared.get("scale_arithmetic") == "reciprocal", settings, narrowed=rounded)


def product_signature(inputs: list[Input], output: Output, *settings: str, linear: str) -> Signature:
    """A product with an optional recipe, and noise for the cotangent."""
    noise = Input("noise", f"2{inputs[0].dims[0]}M", ("float32",), field="", optional="noisy")
    return Signature([*inputs, noise], [output], settings=("recipe", "state", *settings), linear=(linear, output.name))


COUNTS = Input("tokens_per_expert", "L", field="index_dtype")


class _Grouped(Contract[GroupedCase]):
    case_type = GroupedCase

    @staticmethod
    def counts(case: GroupedCase) -> Tensor:
        return case.unit * torch.tensor(counts_of(case), dtype=DTYPES[case.index_dtype])

    def called(self, case: GroupedCase, required: dict[str, Any], settings: dict[str, Any]) -> Problem:
        """The call.

        If it has a state, whose tensors are no arguments, a script builds the state.
        """
        settings = settings | recipe_settings(case) | ({"accumulator": case.accumulator} if case.accumulator else {})
        state = state_tensors(case)
        script: dict[str, Any] = {}
        if state:
            settings |= {"state": Opaque("state")}
            script["script"] = script_of(self.function, tuple(required), tuple(settings), self.outputs)
            script["first"] = required
        rows = case.tokens * case.unit
        lengths = {"P": rows + case.tail, "T": rows, "M": case.width * case.unit}
        return self.call(case, required | state, settings, lengths=lengths, **script)

    def cotangent(self, case: GroupedCase, output: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        return grouped_rows(case, "d_out", shape[1])


class GroupedLinear(_Grouped):
    """`grouped_linear`: the output, and the gradients of the rows, the weights and the biases."""

    function = "grouped_linear"
    signature = product_signature(
        [
            Input("rows", "PN", gradient=True),
            Input("weight", "LMN", gradient=True),
            COUNTS,
            Input("bias", "LM", field="bias", optional="bias", gradient=True),
        ],
        Output("out", "PM", of="rows"),
        "accumulator",
        linear="rows",
    )

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "rows": grouped_rows(case, "rows", case.unit * case.hidden),
            "weight": weights_of(case, "weight", case.unit * case.width, case.unit * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        settings = (
            {"bias": payload(case.seed, "bias", (case.experts, case.unit * case.width), case.bias)} if case.bias else {}
        )
        return self.called(case, required, settings)

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, weight, counts = (problem.required[name] for name in ("rows", "weight", "tokens_per_expert"))
        bias, cotangent = problem.settings.get("bias"), problem.cotangents.get("out")
        precision = precision_of(problem, declared, rows)
        products = []
        for e, (expert_rows, matrix) in enumerate(
            zip(precision.rows(rows, counts, "input", "fprop"), precision.weights(weight, "fprop"), strict=True)
        ):
            product = Product.of(expert_rows, matrix)
            if bias is not None:
                product = replace(
                    product,
                    value=product.value + bias[e].double(),
                    magnitude=product.magnitude + bias[e].double().abs(),
                )
            products.append(product)
        product_of_all, terms = Product.joined(products).with_tail(len(rows)), rows.shape[1] + 2
        bounded = product_of_all.bounded(terms, rows.dtype, precision.accumulator, precision.roundings)
        expectations = {
            "out": compared(
                bounded,
                lambda: grouped_linear(rows, weight, counts, bias=bias, **precision.settings),
                product_of_all,
                terms,
                precision,
                counts,
            )
        }
        if cotangent is None:
            return expectations
        if "rows" in problem.wanted:
            expectations["d_rows"] = row_gradient(cotangent, weight, counts, precision)
        if "weight" in problem.wanted:
            expectations["d_weight"] = weight_gradient(cotangent, rows, counts, None, precision)
        if "bias" in problem.wanted:
            assert bias is not None
            ones = [
                Product.of(torch.ones(1, rows.stop - rows.start), cotangent[rows].T) for rows in expert_slices(counts)
            ]
            expectations["d_bias"] = Product.joined(ones).bounded(int(counts.max()) + 1, bias.dtype, precision.sums)
        return expectations


def row_gradient(d_out: Tensor, weight: Tensor, counts: Tensor, precision: ProductPrecision) -> Expectation:
    """The expectation of d_out W_e."""
    precision = precision.of("dgrad")
    pairs = zip(precision.rows(d_out, counts, "grad_output", "dgrad"), precision.weights(weight, "dgrad"), strict=True)
    products = [Product.of(expert_rows, matrix.transposed) for expert_rows, matrix in pairs]
    product_of_all, terms = Product.joined(products).with_tail(len(d_out)), weight.shape[1] + 1
    bounded = product_of_all.bounded(terms, d_out.dtype, precision.accumulator, precision.roundings)
    return compared(
        bounded,
        lambda: grouped_dgrad(d_out, weight, counts, **precision.settings),
        product_of_all,
        terms,
        precision,
        counts,
    )


def weight_gradient(
    d_out: Tensor, rows: Tensor, counts: Tensor, into: Tensor | None, precision: ProductPrecision
) -> Expectation:
    """The expectation of `into` + Σ d_outᵀ x, per expert."""
    precision = precision.of("wgrad")
    pairs = zip(
        precision.rows(d_out, counts, "grad_output", "wgrad"),
        precision.rows(rows, counts, "input", "wgrad"),
        strict=True,
    )
    product_of_all = Product.joined(
        [Product.of(d_out_operand.transposed, rows_operand.transposed) for d_out_operand, rows_operand in pairs],
        stack=True,
    )
    terms = int(counts.max()) + 1
    dtype = rows.dtype if into is None else into.dtype
    bounded = product_of_all.bounded(terms, dtype, precision.accumulator, precision.roundings)
    if into is not None:
        accumulation_error = (
            Accumulator(unit=max(ROUNDOFF[dtype], precision.sums.unit if dtype == torch.float32 else 0.0)).worst(terms)
            * into.double().abs()
        )
        bound = bounded.bound + accumulation_error + ROUNDOFF[dtype] * into.double().abs()
        empty = (counts == 0)[:, None, None]
        bounded = Bounded(bounded.value + into.double(), torch.where(empty, 0.0, bound), dtype, bounded.accumulator)
        product_of_all = replace(product_of_all, magnitude=product_of_all.magnitude + into.double().abs())
    return compared(
        bounded,
        lambda: grouped_wgrad(d_out, rows, counts, accumulate_into=into, **precision.settings),
        product_of_all,
        terms,
        precision,
        counts,
    )


class GroupedDgrad(_Grouped):
    """`grouped_dgrad`: the gradient of the rows."""

    function = "grouped_dgrad"
    signature = product_signature(
        [Input("d_out", "PM", expands=True), Input("weight", "LMN"), COUNTS],
        Output("d_rows", "PN"),
        "accumulator",
        linear="d_out",
    )

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", case.unit * case.width),
            "weight": weights_of(case, "weight", case.unit * case.width, case.unit * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        return self.called(case, required, {})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, weight, counts = (problem.required[name] for name in ("d_out", "weight", "tokens_per_expert"))
        return {"d_rows": row_gradient(d_out, weight, counts, precision_of(problem, declared, d_out))}


class GroupedWgrad(_Grouped):
    """`grouped_wgrad`: the gradient of the weights, alone or added to `accumulate_into`."""

    function = "grouped_wgrad"
    signature = product_signature(
        [
            Input("d_out", "PM", expands=True),
            Input("rows", "PN"),
            COUNTS,
            Input("accumulate_into", "LMN", field="into", optional="into"),
        ],
        Output("d_weight", "LMN"),
        "accumulator",
        linear="d_out",
    )

    def legal(self, case: GroupedCase) -> Problem:
        required = {
            "d_out": grouped_rows(case, "d_out", case.unit * case.width),
            "rows": grouped_rows(case, "rows", case.unit * case.hidden),
            "tokens_per_expert": self.counts(case),
        }
        shape = (case.experts, case.unit * case.width, case.unit * case.hidden)
        flat = payload(case.seed, "into", (shape[0] * shape[1], shape[2]), case.into or "float32").reshape(shape)
        return self.called(case, required, {"accumulate_into": flat} if case.into else {})

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        d_out, rows, counts = (problem.required[name] for name in ("d_out", "rows", "tokens_per_expert"))
        precision = precision_of(problem, declared, rows)
        return {"d_weight": weight_gradient(d_out, rows, counts, problem.settings.get("accumulate_into"), precision)}
