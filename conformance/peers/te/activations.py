"""Activations through Transformer Engine's operations, by a scale per row or without one.

`ScaledSwiGLU`, `ScaledClampedQGeGLU` and `ScaledSReLU` of transformer_engine.pytorch.ops multiply
by a scale; `SwiGLU`, `ClampedSwiGLU`, `GEGLU`, `QGEGLU`, `ReGLU`, `SiLU`, `GELU`, `QGELU`, `ReLU`
and `SReLU` do not.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from conformance.peers.te.features import FEATURES
from conformance.peers.te.part import Part, named
from conformance.peers.te.trace import Unavailable
from moe_ref.config import check_activation, check_glu, require

OFFSET = 1.0  # of ScaledClampedQGeGLU, in every release; of ClampedSwiGLU before 2.17
SLOPE = {"swiglu": 1.0, "quick_geglu": 1.702}  # alpha of a kind
PLAIN = {  # by function and kind, the feature without a scale
    "glu": {"swiglu": "swiglu", "geglu": "geglu", "quick_geglu": "quick_geglu", "reglu": "reglu"},
    "activation": {
        "silu": "silu",
        "gelu_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "squared_relu": "squared_relu",
    },
}
DEFAULT = {"glu": "swiglu", "activation": "squared_relu"}
SCALED = {"glu": "scaled_swiglu", "activation": "scaled_srelu"}


class Operation(NamedTuple):
    """An operation by its feature, and its words."""

    feature: str
    words: dict[str, Any]


class Gate(NamedTuple):
    """The settings of an activation."""

    kind: str
    offset: float = 0.0
    clamp: float | None = None
    alpha: float | None = None
    interleave: int | None = None

    @classmethod
    def of(cls, settings: dict[str, Any], kind: str) -> "Gate":
        """What a call's keywords say; `kind` is the default."""
        return cls(**{"kind": kind} | {name: settings[name] for name in cls._fields if settings.get(name) is not None})

    def __str__(self) -> str:
        return f"kind {self.kind}, offset {self.offset}, clamp {self.clamp}, alpha {self.alpha}"

    @property
    def bare(self) -> bool:
        """Whether nothing but the kind is set."""
        return self.offset == 0 and self.clamp is None and self.alpha is None


def scaled(gate: Gate) -> Operation | None:
    """The operation that multiplies by a scale per row."""
    interleaved = {"glu_interleave_size": gate.interleave}
    if gate.kind == "squared_relu":
        return Operation("scaled_srelu", {})
    if gate.kind == "swiglu" and gate.bare:
        return Operation("scaled_swiglu", interleaved)
    if gate.kind == "quick_geglu" and gate.offset == OFFSET and gate.clamp is not None:
        slope = {} if gate.alpha is None else {"alpha": gate.alpha}
        return Operation("scaled_clamped_geglu", interleaved | {"limit": gate.clamp} | slope)
    return None


def plain(function: str, gate: Gate) -> Operation | None:
    """The operation without a scale."""
    if gate.bare and gate.kind in PLAIN[function] and gate.interleave is None:
        return Operation(PLAIN[function][gate.kind], {})
    if gate.bare and gate.kind == "swiglu":
        return Operation("interleaved_swiglu", {"glu_interleave_size": gate.interleave})
    if gate.kind not in SLOPE or gate.clamp is None:
        return None
    words = {"limit": gate.clamp, "alpha": SLOPE[gate.kind] if gate.alpha is None else gate.alpha}
    if gate.offset == OFFSET and gate.interleave is None:
        return Operation("clamped_swiglu", words)
    offset_words = {"glu_linear_offset": gate.offset, "glu_interleave_size": gate.interleave}
    return Operation("clamped_swiglu_offset", words | offset_words)


def made(family: Part, operation: Operation | None) -> Any:
    """The operation, as a step of the path.

    Raises:
        ValueError: there is none.
    """
    require(operation is not None, "kind", "of no operation of Transformer Engine", "what `supports` supports")
    assert operation is not None
    family.trace.step(FEATURES[operation.feature].symbol.rpartition(".")[2])
    return family.features.get(operation.feature)(**operation.words)


class Activations(Part):
    """`glu` and `activation` of moe_ref.experts."""

    needs: ClassVar = {function: (SCALED[function], *PLAIN[function].values()) for function in PLAIN}

    def missing(self, function: str) -> str | None:
        """Why the function has no path through this Transformer Engine, or None: one is enough."""
        there = any(self.features[name] for name in self.needs[function])
        return None if there else f"Transformer Engine lacks {', '.join(self.needs[function])}"

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """The documented dtypes, and the activations that exist."""
        reason = super().supports(function, payload, settings)
        if reason:
            return reason
        probs = settings.get("probs")
        if probs is not None and probs.dtype != payload.dtype:
            return f"{function} of {named(payload)} by probs of {named(probs)}: it rounds them to the former"
        scale = probs is not None and payload.dtype != torch.float32
        if scale and settings.get("round_before_probs", False) == self.probes.rounds_once:
            return f"{function} with round_before_probs {not self.probes.rounds_once}, otherwise"
        gate = Gate.of(settings, DEFAULT[function])
        operation = plain(function, gate) if probs is None else scaled(gate)
        if operation is not None and self.features[operation.feature]:
            return None
        return f"{function}{' without probs' if probs is None else ''} of {gate}"

    def glu(
        self, h: Tensor, *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
        clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
        round_before_probs: bool = False,
    ) -> Tensor:  # fmt: skip
        """`moe_ref.glu`, of the kinds and settings that an operation has."""
        check_glu(h, probs, kind, offset, clamp, alpha, interleave)
        return self._run("glu", h, probs, Gate(kind, offset, clamp, alpha, interleave))

    def activation(
        self, h: Tensor, *, probs: Tensor | None = None, kind: str = "squared_relu", round_before_probs: bool = False
    ) -> Tensor:
        """`moe_ref.activation`, of the kinds that an operation has."""
        check_activation(h, probs, kind)
        return self._run("activation", h, probs, Gate(kind))

    def _run(self, function: str, h: Tensor, probs: Tensor | None, gate: Gate) -> Tensor:
        if self.complete and h.numel() == 0:
            raise Unavailable("no row or no column")
        operation = made(self, plain(function, gate) if probs is None else scaled(gate))
        out: Tensor = operation(h) if probs is None else operation(h, probs)
        return out
