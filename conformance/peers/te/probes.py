"""Behaviour that no signature shows, found by calls on a few numbers."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conformance.peers.te.features import Features, found

CHECKS = {  # of FP8GlobalStateManager
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def grouped_module(
    features: Features, num_experts: int, hidden: int, width: int, bias: bool, dtype: torch.dtype
) -> torch.nn.Module:
    """A grouped linear layer whose parameters hold no memory: see `with_parameters`."""
    make = features.get("grouped_linear")
    module: torch.nn.Module = make(
        num_gemms=num_experts,
        in_features=hidden,
        out_features=width,
        bias=bias,
        params_dtype=dtype,
        device="meta",
    )
    return module


def with_parameters(module: torch.nn.Module, tensors: dict[str, Tensor]) -> torch.nn.Module:
    """The module, made for one call, with these tensors in place of its parameters. They stay: a
    backward reads the module's parameters again.
    """
    for name, x in tensors.items():
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = x  # type: ignore[assignment]
    return module


class Probes:
    """Answers of one Transformer Engine; each is asked once, when it is first needed."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def _permuted(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two tokens of one expert."""
        chosen = torch.ones((2, 1), dtype=torch.bool, device=tokens.device)
        permute = self.features.get("permute_with_probs")
        return permute(inp=tokens, probs=probs, routing_map=chosen, num_out_tokens=2)

    @cached_property
    def zero_prob_rows(self) -> str:
        """`"zero"` if a routed token of probability 0 becomes a row of zeros, else `"copied"`."""
        if not self.features["permute_with_probs"]:
            return "copied"
        probs = torch.tensor([[0.0], [1.0]], device=_device())
        rows, _, _ = self._permuted(torch.ones((2, 16), device=_device()), probs)
        return "copied" if bool(rows[0].any()) else "zero"

    @cached_property
    def probs_gradient_alone(self) -> bool:
        """Whether probs get a gradient where the tokens want none."""
        if not self.features["permute_with_probs"]:
            return not self.features["permute_indices"]  # whose unpermute has none
        probs = torch.ones((2, 1), device=_device(), requires_grad=True)
        with torch.enable_grad():
            _, row_probs, _ = self._permuted(torch.ones((2, 16), device=_device()), probs)
            if not row_probs.requires_grad:
                return False
            (d_probs,) = torch.autograd.grad(row_probs.sum(), probs, allow_unused=True)
        return d_probs is not None and bool(d_probs.all())

    @cached_property
    def rows_past_the_chunks(self) -> bool:
        """Whether `sort_chunks` keeps rows past the last chunk in their place."""
        if not self.features["sort_chunks"]:
            return False
        sizes, order = torch.tensor([[1, 1], [1, 0]], device=_device())
        preserved = []
        for last in (3.0, -5.25):  # what is never written holds one of them by chance, not both
            rows = torch.tensor([1.0, 2.0, last], device=_device())[:, None].repeat(1, 16)
            out = self.features.get("sort_chunks")(inp=rows, split_sizes=sizes, sorted_index=order)
            preserved.append(bool((out[2] == last).all()))
        return all(preserved)

    def _scores(self, score_function: str, topk: int, dtype: torch.dtype) -> Tensor:
        """The scores of two tokens and four experts."""
        logits = torch.tensor([[0.5, 1.0, 2.0, -1.0]] * 2, dtype=dtype, device=_device())
        scores = self.features.get("fused_scores")(logits=logits, topk=topk, score_function=score_function)[1]
        assert isinstance(scores, Tensor)
        return scores

    @cached_property
    def float32_scores(self) -> bool:
        """Whether the router computes 16-bit logits in float32; before, in the logits' dtype."""
        return self.features["fused_scores"] and self._scores("softmax", 2, torch.bfloat16).dtype == torch.float32

    @cached_property
    def sqrtsoftplus(self) -> bool:
        """Whether the router has this score function."""
        try:
            return self.features["fused_scores"] and bool(
                self._scores("sqrtsoftplus", 2, torch.float32).isfinite().all()
            )
        except Exception:
            return False  # it refuses the word in its own way

    @cached_property
    def normalises_one(self) -> bool:
        """Whether scores for the balancing loss sum to 1 also where topk is 1."""
        return (
            self.features["fused_scores"] and abs(float(self._scores("sigmoid", 1, torch.float32)[0].sum()) - 1) < 0.01
        )

    @cached_property
    def rounds_once(self) -> bool:
        """Whether a scaled activation rounds only after the product with its scale."""
        if not self.features["scaled_swiglu"]:
            return False
        h = torch.tensor([[1.0] * 16 + [1 + i / 64 for i in range(16)]], dtype=torch.bfloat16, device=_device())
        scale = torch.tensor([0.7109375], dtype=torch.bfloat16, device=_device())
        out = self.features.get("scaled_swiglu")(glu_interleave_size=None)(h, scale)
        gate, value = h.float().chunk(2, dim=1)
        act = torch.nn.functional.silu(gate) * value
        once, twice = (act * scale.float()).bfloat16(), (act.bfloat16().float() * scale.float()).bfloat16()
        return int((out == once).sum()) > int((out == twice).sum())

    @cached_property
    def bias_gradient_alone(self) -> bool:
        """Whether a grouped linear layer's bias gets a gradient where the weight wants none."""
        if not self.features["grouped_linear"]:
            return True
        ones = torch.ones((16, 16), dtype=torch.bfloat16, device=_device())
        bias = ones[0].clone().requires_grad_()
        module = grouped_module(self.features, 1, 16, 16, True, ones.dtype)
        with torch.enable_grad():
            named = {"weight0": ones, "bias0": bias}
            out = with_parameters(module, named)(inp=ones, m_splits=[16])
            (d_bias,) = torch.autograd.grad(out.sum(), bias, allow_unused=True)
        return d_bias is not None and bool(d_bias.all())

    @cached_property
    def refused(self) -> dict[str, str]:
        """Scalings that cannot run on this device, and Transformer Engine's reason."""
        reasons = {scaling: self._refusal(scaling) for scaling in CHECKS if self.features[scaling]}
        return {scaling: reason for scaling, reason in reasons.items() if reason}

    def _refusal(self, scaling: str) -> str:
        """The reason of the release's own check. Entering a refused recipe is no probe: NVFP4 of
        2.20.2 then stays in force outside the context.
        """
        managers = (found(self.features.te, f"pytorch.{x}.FP8GlobalStateManager") for x in ("quantization", "fp8"))
        check = next((found(x, CHECKS[scaling]) for x in managers if x is not None), None)
        available, reason = check() if check is not None else (True, "")
        return "" if available else f"{scaling} is refused: {reason or 'no reason given'}"

    @property
    def answers(self) -> dict[str, Any]:
        """All answers by name."""
        return {name: getattr(self, name) for name, x in vars(Probes).items() if isinstance(x, cached_property)}
