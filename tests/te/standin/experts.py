"""Transformer Engine's grouped linear layer and scaled activations, computed by the reference."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import moe_ref
from moe_ref.config import LinearState, QuantizerState
from tests.te.standin.recipes import Recipes, ours

SIDES = {"mxfp8": 32}  # of both operands' sides; of other FP8 and FP4 GEMMs 16


def signature_from(text: str) -> inspect.Signature:
    """The signature with these parameters, written as in Python; annotations stay text."""
    named: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef function({text}): ...", named)
    return inspect.signature(named["function"])


def _read_again(module: nn.Module, out: Tensor) -> Tensor:
    """The output, whose backward reads the module's parameters again."""

    def check(gradient: Tensor) -> None:
        if any(x.is_meta for x in module.parameters()):
            raise RuntimeError("a parameter has no memory in the backward")

    if out.requires_grad:
        out.register_hook(check)
    return out


class _Grouped(nn.Module):
    """The parameters `weight0`, `bias0`, … of a layer, one per expert."""

    def __init__(self, shape: tuple[int, int, int], bias: bool, **placed: Any) -> None:
        super().__init__()
        self.num_gemms, hidden, width = shape
        self.has_bias = bias
        for e in range(self.num_gemms):
            self.register_parameter(f"weight{e}", nn.Parameter(torch.empty((width, hidden), **placed)))
            if bias:
                self.register_parameter(f"bias{e}", nn.Parameter(torch.empty(width, **placed)))

    def _stacked(self, name: str) -> Tensor:
        return torch.stack([getattr(self, f"{name}{e}") for e in range(self.num_gemms)])


class GroupedLinear(_Grouped):
    """y_i = x_i W_eᵀ + b_e, of splits that sum to the rows."""

    fp8_meta: dict[str, SimpleNamespace]

    def __init__(
        self, behaviour: SimpleNamespace, parameters: str, recipes: Recipes, shape: tuple[int, int, int], bias: bool,
        **placed: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, bias, **placed)
        self.recipes, self.fp8_meta = recipes, {}
        self.behaviour, self.parameters_of_forward = behaviour, signature_from(parameters)

    def forward(self, *args: Any, **settings: Any) -> Tensor:
        """[rows, out] in the dtype of the rows."""
        return _read_again(self, self._product(*args, **settings))

    def _product(self, *args: Any, **settings: Any) -> Tensor:
        arguments = self.parameters_of_forward.bind(*args, **settings).arguments
        inp, splits = arguments["inp"], arguments["m_splits"]
        if not isinstance(splits, list) and not self.behaviour.tensor_splits:
            raise TypeError(f"m_splits is a {type(splits).__name__}; it must be a list")
        counts = torch.as_tensor(splits, device=inp.device)
        if int(counts.sum()) != len(inp):
            raise ValueError(f"m_splits sum to {int(counts.sum())}; inp has {len(inp)} rows")
        weight = self._stacked("weight")
        quantised = self._quantised(inp, weight, counts)
        if not self.has_bias:
            return moe_ref.grouped_linear(inp, weight, counts, **quantised)
        bias = self._stacked("bias")
        if quantised and inp.dtype == torch.float32:
            bias = bias.bfloat16().float()
        if weight.requires_grad or self.behaviour.bias_gradient_alone:
            return moe_ref.grouped_linear(inp, weight, counts, bias=bias, **quantised)
        return moe_ref.grouped_linear(inp, weight, counts, bias=bias.detach(), **quantised) + 0 * bias.sum()

    def _quantised(self, inp: Tensor, weight: Tensor, counts: Tensor) -> dict[str, Any]:
        """The recipe that is entered, and delayed scaling's state."""
        if self.recipes.entered is None:
            return {}
        recipe = ours(self.recipes.entered)
        side = SIDES.get(recipe.scaling, 16)
        if any(n % side for n in (*weight.shape[1:], *counts.tolist())):
            raise RuntimeError(f"{tuple(weight.shape)} and {counts.tolist()} are no multiples of {side}")
        if recipe.scaling != "delayed":
            return {"recipe": recipe}
        self.init_fp8_metadata(self.num_gemms)
        fwd, bwd = (self.fp8_meta[key].scale.view(self.num_gemms, -1) for key in ("scaling_fwd", "scaling_bwd"))
        if not self.behaviour.scale_alone and not all(
            torch.equal(meta.scale_inv, 1 / meta.scale) for meta in self.fp8_meta.values()
        ):
            raise RuntimeError("scale_inv is not the inverse of scale")
        history = torch.zeros(self.num_gemms, recipe.amax_history_len or 1, device=inp.device)
        states = [QuantizerState(history, scale.clone()) for scale in (fwd[:, 0], fwd[:, 1], bwd[:, 0])]
        return {"recipe": recipe, "state": LinearState(*states)}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Three scales per expert for the forward, two for the backward; once."""
        for key, scales_per_expert in {"scaling_fwd": 3, "scaling_bwd": 2}.items():
            if key not in self.fp8_meta:
                self.fp8_meta[key] = SimpleNamespace(scale=torch.ones(num_gemms * scales_per_expert))
                if not self.behaviour.scale_alone:
                    self.fp8_meta[key].scale_inv = torch.ones(num_gemms * scales_per_expert)


class _Operation(_Grouped):
    """A grouped linear layer of the operation fuser. Splits, and the bias' scales, are inputs."""

    def __init__(self, shape: tuple[int, int, int], bias: bool, scale_bias: bool, **placed: Any) -> None:
        super().__init__(shape, bias, **placed)
        self.scaled = bias and scale_bias
        self.num_extra_inputs = 2 if self.scaled else 1

    def forward(self, x: Tensor, splits: Tensor, scales: Tensor | None = None) -> Tensor:
        """The product and the bias; bias times scale is rounded before it is added."""
        if int(splits.sum()) != len(x):
            raise ValueError(f"splits sum to {int(splits.sum())}; the input has {len(x)} rows")
        bias = self._stacked("bias") if self.has_bias else None
        if not self.scaled:
            return _read_again(self, moe_ref.grouped_linear(x, self._stacked("weight"), splits, bias=bias))
        assert bias is not None and scales is not None
        out = _read_again(self, moe_ref.grouped_linear(x, self._stacked("weight"), splits))
        return out + bias.repeat_interleave(splits, 0) * scales[:, None]


class _Sequential(nn.Module):
    """Operations one after another, each with its extra inputs."""

    def __init__(self, *operations: nn.Module) -> None:
        super().__init__()
        for index, operation in enumerate(operations):
            self.add_module(str(index), operation)

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        """The last operation's output."""
        for operation in self.children():
            count = int(getattr(operation, "num_extra_inputs", 0))
            x, extra = operation(x, *extra[:count]), extra[count:]
        return x


class _Activation(nn.Module):
    """An operation of a tensor, or of that and a scale per row, which is rounded to its dtype."""

    def __init__(self, function: Callable[..., Tensor], settings: dict[str, Any], is_scaled: bool) -> None:
        super().__init__()
        self.function, self.settings, self.num_extra_inputs = function, settings, int(is_scaled)

    def forward(self, x: Tensor, *scales: Tensor) -> Tensor:
        """In the dtype of x."""
        probs = {"probs": scales[0].to(x.dtype)} if scales else {}
        return self.function(x, **self.settings, **probs)


ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {  # the reference's function of each operation
    "SwiGLU": (moe_ref.glu, {}),
    "ClampedSwiGLU": (moe_ref.glu, {"kind": "quick_geglu", "offset": 1.0}),
    "GEGLU": (moe_ref.glu, {"kind": "geglu"}),
    "QGEGLU": (moe_ref.glu, {"kind": "quick_geglu"}),
    "ReGLU": (moe_ref.glu, {"kind": "reglu"}),
    "SiLU": (moe_ref.activation, {"kind": "silu"}),
    "GELU": (moe_ref.activation, {"kind": "gelu_tanh"}),
    "QGELU": (moe_ref.activation, {"kind": "quick_gelu"}),
    "ReLU": (moe_ref.activation, {"kind": "relu"}),
    "SReLU": (moe_ref.activation, {"kind": "squared_relu"}),
    "ScaledSwiGLU": (moe_ref.glu, {}),
    "ScaledClampedQGeGLU": (moe_ref.glu, {"kind": "quick_geglu", "offset": 1.0}),
    "ScaledSReLU": (moe_ref.activation, {"kind": "squared_relu"}),
}


def activations(behaviour: SimpleNamespace) -> SimpleNamespace:
    """The operations of one release by name, with the newest names of their options."""

    def constructor(name: str) -> Callable[..., _Activation]:
        function, settings = ACTIVATIONS[name]
        is_scaled = name.startswith("Scaled")
        rounding = {"round_before_probs": not behaviour.rounds_once} if is_scaled else {}

        def operation(glu_interleave_size=None, limit=None, alpha=None, glu_linear_offset=None):
            options = {"interleave": glu_interleave_size, "clamp": limit, "alpha": alpha, "offset": glu_linear_offset}
            passed = {option: value for option, value in options.items() if value is not None}
            return _Activation(function, settings | rounding | passed, is_scaled)

        return operation

    return SimpleNamespace(**{name: constructor(name) for name in ACTIVATIONS})


class Experts:
    """The modules of one release, with the newest names of their arguments."""

    def __init__(self, behaviour: SimpleNamespace, forward: str, recipes: Recipes) -> None:
        self.behaviour, self.forward_parameters, self.recipes = behaviour, forward, recipes

    def GroupedLinear(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool, params_dtype: Any, device: Any
    ) -> GroupedLinear:
        """The module."""
        shape = (num_gemms, in_features, out_features)
        placed = {"dtype": params_dtype, "device": device}
        return GroupedLinear(self.behaviour, self.forward_parameters, self.recipes, shape, bias, **placed)

    def forward(self) -> None:
        """Shows the parameters of `GroupedLinear.forward`; modules have their own."""

    def init_fp8_metadata(self) -> None:
        """The same of `GroupedLinear.init_fp8_metadata`."""

    def ops_GroupedLinear(
        self, num_groups: int, in_features: int, out_features: int, bias: bool, device: Any, dtype: Any,
        scale_bias: bool = False,
    ) -> _Operation:  # fmt: skip
        """The operation."""
        return _Operation((num_groups, in_features, out_features), bias, scale_bias, device=device, dtype=dtype)

    def ops_Sequential(self, *args: nn.Module) -> _Sequential:
        """The container."""
        return _Sequential(*args)
