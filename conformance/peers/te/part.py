"""A part of the interface through Transformer Engine: the functions of one family."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.peers.te import padding
from conformance.peers.te.features import Features
from conformance.peers.te.probes import Probes
from conformance.peers.te.trace import Trace

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # Transformer Engine's documented ones of plain tensors


def named(x: torch.Tensor) -> str:
    """The name of the dtype."""
    return str(x.dtype).removeprefix("torch.")


class Part:
    """Functions of one family. Each call leaves its steps in the trace.

    With `complete`, a call that Transformer Engine cannot do or does wrongly raises `Unavailable`,
    and a fallback mends what a release lacks; otherwise its results and errors pass unchanged.
    """

    needs: ClassVar[dict[str, tuple[str, ...]]]  # features without which a function has no path, by function

    def __init__(self, features: Features, probes: Probes, trace: Trace, complete: bool) -> None:
        self.features, self.probes, self.trace, self.complete = features, probes, trace, complete

    def missing(self, function: str) -> str | None:
        """Why the function has no path through this Transformer Engine, or None."""
        lacking = [name for name in self.needs[function] if not self.features[name]]
        return f"Transformer Engine lacks {', '.join(lacking)}" if lacking else None

    def supports(self, function: str, payload: Any, settings: dict[str, Any]) -> str | None:
        """Why Transformer Engine has no kernel for these dtypes, shapes and settings, or None.

        Args:
            payload: the call's first argument.
        """
        if isinstance(payload, torch.Tensor) and payload.dtype not in DTYPES:
            return f"{function} of {named(payload)}"
        return None

    def declares(self, function: str) -> dict[str, Any]:
        """In terms of the conformance suite's vocabulary."""
        return {}

    def pad_rows(self, rows: Tensor, cut: padding.Segments) -> Tensor:
        """[R,…] to [P,…]: zeros after each expert's rows."""
        if self.features["padding"]:
            self.trace.step("Fp8Padding")
            pad = self.features.get("padding")(len(cut.host_counts), align_size=cut.align)
            padded, _ = pad(self._in_order(rows), cut.host_counts)
            assert isinstance(padded, Tensor)
            return padded
        self.trace.step("pad by an index")
        return padding.pad(rows, cut)

    def unpad_rows(self, rows: Tensor, cut: padding.Segments) -> Tensor:
        """[P,…] to [R,…]."""
        if self.features["unpadding"]:
            self.trace.step("Fp8Unpadding")
            unpad = self.features.get("unpadding")(len(cut.host_counts), align_size=cut.align)
            out: Tensor = unpad(self._in_order(rows), cut.host_counts)
            return out
        self.trace.step("unpad by an index")
        return padding.unpad(rows, cut)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows that its padding kernels read right: they take strided ones for contiguous."""
        return rows.contiguous() if self.complete else rows
