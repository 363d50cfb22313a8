"""The interface of `moe_ref` through a Transformer Engine: an implementation like any other."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from conformance.peers.te import padding
from conformance.peers.te.activations import Activations
from conformance.peers.te.experts import Experts
from conformance.peers.te.features import Features
from conformance.peers.te.mlp import Mlp
from conformance.peers.te.part import Part
from conformance.peers.te.permutation import Permutation, RowMap
from conformance.peers.te.probes import Probes
from conformance.peers.te.quantized import Quantized
from conformance.peers.te.router import Router
from conformance.peers.te.trace import Trace, Unavailable

PARTS: tuple[type[Part], ...] = (Permutation, Router, Experts, Activations, Mlp, Quantized)


class Adapter:
    """Functions of `moe_ref` through `te`; each call reports its path in `path`.

    Args:
        te: the module `transformer_engine`, or one with the same names.
        ours: an implementation for what `te` lacks: whole functions, settings, dtypes, and calls
            that it does wrongly. None: `te` alone, its results and errors unchanged.
    """

    def __init__(self, te: Any, ours: Any = None) -> None:
        self.features = Features(te)
        self.ours, self._trace = ours, Trace()
        self.probes = Probes(self.features)
        self._part: dict[str, Any] = {}
        for kind in PARTS:
            family = kind(self.features, self.probes, self._trace, complete=ours is not None)
            for function in family.needs:
                self._offer(family, function)

    def _offer(self, family: Any, function: str) -> None:
        missing = family.missing(function)
        if missing is None:
            self._part[function] = family
        if self.ours is not None:
            setattr(self, function, self._completed(family, function, missing))
        elif missing is None:
            setattr(self, function, self._traced(function, getattr(family, function)))

    @property
    def offered(self) -> list[str]:
        """The functions that this adapter offers."""
        return [function for kind in PARTS for function in kind.needs if hasattr(self, function)]

    @property
    def path(self) -> dict[str, str]:
        """The steps of each function's last call."""
        return self._trace.path

    def supports(self, function: str, **arguments: Any) -> str | None:
        """The answer of Transformer Engine alone, or of ours for what it cannot do."""
        payload = next(iter(arguments.values()), None)
        reason = self._part[function].supports(function, payload, arguments) if function in self._part else ""
        # a row map of Transformer Engine is nothing that ours reads
        if reason is None or self.ours is None or (reason and function == "unpermute"):
            return reason
        answer: str | None = self.ours.supports(function, **arguments) if hasattr(self.ours, "supports") else None
        return answer

    def declares(self, function: str) -> dict[str, Any]:
        """What Transformer Engine does in its own way; ours alone declares what ours alone does."""
        if function in self._part:
            return dict(self._part[function].declares(function))
        answer: dict[str, Any] = self.ours.declares(function) if hasattr(self.ours, "declares") else {}
        return answer

    def _traced(self, function: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **settings: Any) -> Any:
            self._trace.begin()
            try:
                return call(*args, **settings)
            finally:
                self._trace.end(function, self.features.gates)

        return _signed(traced, call)

    def _completed(self, family: Any, function: str, missing: str | None) -> Callable[..., Any]:
        """The function through `te` where it can, else ours; with the signature of ours."""
        fallback, through = getattr(self.ours, function), getattr(family, function)
        taken = inspect.signature(through).parameters

        def call(*args: Any, **settings: Any) -> Any:
            args, settings = tuple(map(_read, args)), {name: _read(x) for name, x in settings.items()}
            present_settings = {name: x for name, x in settings.items() if x is not None}
            try:
                if reason := missing or family.supports(function, args[0], present_settings):
                    raise Unavailable(reason)
                if lacking := sorted({*present_settings} - {*taken}):
                    raise Unavailable(f"it has no {', '.join(lacking)}")
                return through(*args, **present_settings)
            except Unavailable as reason:
                if any(isinstance(x, RowMap) for x in args):
                    refusal = f"row_map is Transformer Engine's, which cannot do this call ({reason})"
                    raise TypeError(f"{refusal}, and ours does not read it: permute with rows like these") from None
                self._trace.step(f"ours: {reason}")
                if "tokens_per_expert" in settings:
                    settings = settings | {"tokens_per_expert": _on_device(settings["tokens_per_expert"])}
                return self._as_declared(function, fallback(*map(_on_device, args), **settings), settings)

        return _signed(self._traced(function, call), fallback)

    def _as_declared(self, function: str, result: Any, settings: dict[str, Any]) -> Any:
        """Rows of probability 0 as Transformer Engine writes them."""
        if function != "permute" or settings.get("probs") is None or self.probes.zero_prob_rows == "copied":
            return result
        return result._replace(rows=padding.zero_rows(result.rows, result.probs))


def _read(x: Any) -> Any:
    """A tensor with its pending minus applied, which Transformer Engine does not read."""
    return x.resolve_neg() if isinstance(x, Tensor) else x


def _on_device(x: Any) -> Any:
    """The counts on the device of a pair (host, device), which ours does not take."""
    return x[1] if type(x) is tuple else x


def _signed(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    function.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return function
