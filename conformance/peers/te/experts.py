"""The grouped linear layer through Transformer Engine: `GroupedLinear` of
transformer_engine.pytorch, in high precision or under a recipe.
"""

import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.peers.te import padding, recipes
from conformance.peers.te.counts import Counts
from conformance.peers.te.features import TRITON_GROUPED_GEMM, switched_on
from conformance.peers.te.part import Part, named
from conformance.peers.te.probes import grouped_module, with_parameters
from conformance.peers.te.trace import Unavailable
from moe_ref.config import (
    LinearState,
    Recipe,
    check_count_values,
    check_grouped_dgrad,
    check_grouped_linear,
    check_grouped_wgrad,
    check_precision,
    require,
)
from moe_ref.config.quantization import WHOLE_BLOCKS

Splits = Tensor | tuple[Tensor | None, Tensor]  # on the device, or a pair (host, device)
PRODUCTS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")


class Experts(Part):
    """The products of moe_ref.experts."""

    needs: ClassVar = dict.fromkeys(PRODUCTS, ("grouped_linear", "splits"))

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """The documented dtypes, and the recipes that the device runs."""
        reason = super().supports(function, payload, settings)
        return reason or self._bias(payload, settings.get("bias")) or self._recipe(payload, settings)

    @staticmethod
    def _bias(rows: Any, bias: Tensor | None) -> str | None:
        if bias is None or bias.dtype == rows.dtype:
            return None
        return f"grouped_linear of {named(rows)} with a bias of {named(bias)}"

    def _recipe(self, rows: Any, settings: dict[str, Any]) -> str | None:
        """Why the recipe cannot run as our interface says, or None."""
        recipe = settings.get("recipe")
        if not isinstance(recipe, Recipe):
            return None
        lacking = recipes.lacking(self.features, recipe)
        if lacking:
            return f"grouped_linear under {recipe.scaling}: Transformer Engine lacks {lacking}"
        return self.probes.refused.get(recipe.scaling) or recipes.differs(rows, settings)

    def declares(self, function: str) -> dict[str, Any]:
        """Alone, counts that do not sum to the rows are not checked here. Hopper adds FP8 products
        with 14 bits.
        """
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        sums = {"accumulator": "hopper_fp8"} if hopper else {}
        bare = {} if function == "grouped_linear" else {"differentiable": False}
        return sums | bare | ({} if self.complete else {"unchecked": ("tokens_per_expert",)})

    def grouped_linear(
        self, rows: Tensor, weight: Tensor, tokens_per_expert: Splits, *, bias: Tensor | None = None,
        recipe: Recipe | None = None, state: LinearState | None = None,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.grouped_linear` without noise: kernels draw their own. Each call makes a module.

        With a recipe rows are padded per expert, and columns of zeros are added, up to the sides
        that FP8 GEMMs take.
        """
        counts = Counts.of(tokens_per_expert)
        check_grouped_linear(rows, weight, counts.device, bias)
        check_precision(recipe, state, None, "float32")
        used = len(rows)
        if self.complete:
            host_counts = counts.tolist()
            check_count_values(host_counts, used)
            used = sum(host_counts)
            if 0 in (used, *weight.shape):
                raise Unavailable("no row or no column")
        weight = self._wanting_gradient(weight, bias)
        if recipe is None:
            out = self._product(rows[:used], weight, counts, bias)
        else:
            out = self._under(recipe, state, rows[:used], weight, counts, bias)
        return out if used == len(rows) else torch.cat([out, out.new_zeros((len(rows) - used, out.shape[1]))])

    def grouped_dgrad(
        self, d_out: Tensor, weight: Tensor, tokens_per_expert: Splits, *, recipe: Recipe | None = None,
        state: LinearState | None = None,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.grouped_dgrad`: the gradient of rows of zeros."""
        counts = Counts.of(tokens_per_expert)
        check_grouped_dgrad(d_out, weight, counts.device)
        return self._gradient((len(d_out), weight.shape[2]), (None, weight, counts), d_out, recipe, state)

    def grouped_wgrad(
        self, d_out: Tensor, rows: Tensor, tokens_per_expert: Splits, *, recipe: Recipe | None = None,
        state: LinearState | None = None,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.grouped_wgrad` without `accumulate_into`: the gradient of weights of zeros."""
        counts = Counts.of(tokens_per_expert)
        check_grouped_wgrad(d_out, rows, counts.device, None)
        shape = (len(counts.device), d_out.shape[1], rows.shape[1])
        return self._gradient(shape, (rows, None, counts), d_out, recipe, state)

    def _gradient(
        self, shape: tuple[int, ...], arguments: tuple[Tensor | None, Tensor | None, Counts], d_out: Tensor,
        recipe: Recipe | None, state: LinearState | None,
    ) -> Tensor:  # fmt: skip
        """The layer's gradient for an argument of zeros; its backward is the only way to it."""
        with torch.inference_mode(False), torch.enable_grad():
            wanted = torch.zeros(shape, dtype=d_out.dtype, device=d_out.device, requires_grad=True)
            *operands, counts = arguments
            rows, weight, device_counts = (
                wanted if x is None else x.clone() if x.is_inference() else x.detach()
                for x in (*operands, counts.device)
            )
            out = self.grouped_linear(rows, weight, (counts.host, device_counts), recipe=recipe, state=state)
            self.trace.step("the backward")
            cotangent = d_out.clone() if d_out.is_inference() else d_out.detach()
            (gradient,) = torch.autograd.grad(out, wanted, cotangent)
        return gradient

    def _under(
        self, recipe: Recipe, state: LinearState | None, rows: Tensor, weight: Tensor, counts: Counts,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The product under a recipe. A refused one is not entered: it may stay in force."""
        refused = self.probes.refused.get(recipe.scaling)
        require(refused is None, "recipe", recipe.scaling, f"one that the device runs: {refused}")
        recipes.check_states(recipe, state, len(weight))
        cut = padding.segments_of(counts, 1 if recipe.scaling in WHOLE_BLOCKS else recipes.SIDES)
        recipes.check_blocks(recipe, weight, cut.host_counts)
        te_recipe = recipes.theirs(self.features, self.trace, recipe)
        is_whole = cut.num_padded == cut.num_rows
        sides = recipes.in_sides(rows if is_whole else self.pad_rows(rows, cut), 1), recipes.in_sides(weight, 1, 2)
        padded_bias = None if bias is None else recipes.in_sides(bias, 1)
        padded_counts = Counts(torch.tensor(cut.host_padded), cut.padded.to(counts.device.dtype))
        out = self._product(*sides, padded_counts, padded_bias, te_recipe, state)
        return (out if is_whole else self.unpad_rows(out, cut))[:, : weight.shape[1]]

    def _product(
        self, rows: Tensor, weight: Tensor, counts: Counts, bias: Tensor | None, recipe: Any = None,
        state: LinearState | None = None,
    ) -> Tensor:  # fmt: skip
        """GroupedLinear with these weights."""
        num_experts, width, hidden = weight.shape
        named = {f"weight{e}": x for e, x in enumerate(weight.unbind(0))}
        named |= {} if bias is None else {f"bias{e}": x for e, x in enumerate(bias.unbind(0))}
        with nullcontext() if recipe is None else recipes.autocast(self.features, self.trace, recipe):
            module = grouped_module(self.features, num_experts, hidden, width, bias is not None, rows.dtype)
            if state is not None:
                recipes.set_scales(module, state)
            out: Tensor = with_parameters(module, named)(inp=rows, **self._splits(counts))
        return out

    def _wanting_gradient(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A weight that requires a gradient, where a release gives a bias none without."""
        only_bias = bias is not None and bias.requires_grad and not weight.requires_grad
        if self.complete and only_bias and torch.is_grad_enabled() and not self.probes.bias_gradient_alone:
            self.trace.step("weight made to require a gradient")
            return weight.detach().requires_grad_()
        return weight

    def _splits(self, counts: Counts) -> dict[str, Any]:
        """Rows by expert, on the device where the release takes them there and reads them."""
        triton_is_wanted = switched_on(TRITON_GROUPED_GEMM)
        if triton_is_wanted and not self.features["splits_on_device"]:
            _warn_of_no_triton_grouped_gemm()
        if self.features["tensor_splits"]:
            self.trace.step("GroupedLinear with a tensor of splits")
            return {"m_splits": counts.device}
        splits = counts.tolist()
        if triton_is_wanted and self.features["splits_on_device"]:
            self.trace.step("GroupedLinear with a list and a tensor of splits")
            return {"m_splits": splits, "m_splits_tensor": counts.device.int()}
        self.trace.step("GroupedLinear with a list of splits")
        return {"m_splits": splits}


@cache
def _warn_of_no_triton_grouped_gemm() -> None:
    """Warn once per process that the variable has no effect."""
    warnings.warn(
        f"{TRITON_GROUPED_GEMM} is set, but GroupedLinear.forward of this Transformer Engine takes no "
        "m_splits_tensor: the variable has no effect",
        stacklevel=2,
    )
