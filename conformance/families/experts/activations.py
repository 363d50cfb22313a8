"""glu and activation: values by running error analysis, both gradients, and what lies exactly on a bound."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.curves import CURVES, GATES, Curve, concluded, settled, sigmoid_gated
from conformance.analysis.input_store import beyond_e4m3, in_e4m3
from conformance.core.case import Case
from conformance.core.contract import Contract, Problem, accumulator_of, leaf
from conformance.core.tensors import DTYPES, hashed, payload, probabilities
from conformance.judge import Expectation
from conformance.judge.running import Running
from moe_ref.config import GATED, PLAIN
from moe_ref.experts.activations import activation, glu

VALUES = ("dyadic", "rows", "bounds", "saturated", "special")
WEIGHTS = ("plain", "zeros", "signed")
FAR = (
    17.0,
    30.0,
    88.0,
    89.0,
    104.0,
    200.0,
    5000.0,
)  # where σ is 1, exp(-x) is subnormal, overflows, and x³ is large in float32
SPREAD = 12  # rows lie so many powers of two above and below 1


@dataclass(frozen=True, kw_only=True)
class ActivationCase(Case):
    """A case of rows that an activation is applied to."""

    tokens: int = 1
    experts: int = 1  # not looked at: the rows of all experts are alike
    width: int = 1  # F, half of h's where it is gated
    kind: str = ""  # empty: the function's own
    dtype: str = "float32"
    probs: str = ""  # their dtype; empty: none are given
    weights: str = "plain"  # of the probs: in (0, 1], with zeros, or from -2 to 2 with zeros
    values: str = "dyadic"  # of h: see `hidden_of`
    offset: int = 0  # in eighths
    clamp: int = 0  # in eighths; 0: none
    alpha: int = 0  # in thousandths; 0: none
    interleave: int = 0  # 0: none
    early: bool = False  # round_before_probs
    stored: bool = False  # fp8_input_store
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {"values": VALUES, "weights": WEIGHTS, "kind": GATED + PLAIN}

    def __post_init__(self) -> None:
        if min(self.tokens, self.width, self.clamp, self.alpha, self.interleave) < 0 or self.experts < 1:
            sizes = f"{self.tokens}, {self.width}, {self.clamp}, {self.alpha}, {self.interleave}, {self.experts}"
            raise ValueError(
                f"tokens, width, clamp, alpha, interleave ≥ 0 and experts ≥ 1 are needed; they are {sizes}"
            )


ActivationCase.serves("glu", "activation")


def hidden_of(case: ActivationCase, columns: int) -> Tensor:
    """h: dyadic · rows, dyadic, each row times a power of two · bounds, on and around the clamp (or 1) and 0 · saturated, where curves
    are flat · special, dyadic with a NaN or an infinity in some rows."""
    shape, kind = (case.tokens, columns), DTYPES[case.dtype]
    plain = payload(case.seed, "h", shape, case.dtype)
    noise = hashed(case.seed, "h kinds", case.tokens * columns).reshape(shape)
    sign = torch.from_numpy(np.where(noise >> 30 & 1, -1.0, 1.0))
    if case.values == "rows":
        return (plain.double() * row_scales(case.seed, case.tokens)).to(kind)
    if case.values == "bounds":
        bound, step = case.clamp / 8 or 1.0, torch.finfo(kind).eps
        near = torch.tensor(
            [0.0, bound, bound * (1 + step), bound * (1 - step), bound / 2, torch.finfo(kind).tiny, bound, 2 * bound],
            dtype=torch.float64,
        )
        return (near[torch.from_numpy((noise >> 8).astype(np.int64) % len(near))] * sign).to(kind)
    if case.values == "saturated":
        far = torch.tensor(FAR, dtype=torch.float64)
        return torch.where(
            torch.from_numpy(noise % 2 == 0),
            far[torch.from_numpy((noise >> 8).astype(np.int64) % len(far))] * sign,
            plain.double(),
        ).to(kind)
    if case.values == "special":
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=kind)
        hit = torch.from_numpy((noise % 4 == 0) & (np.arange(case.tokens) % 2 == case.seed % 2)[:, None])
        return torch.where(hit, strange[torch.from_numpy((noise >> 8).astype(np.int64) % 3)], plain)
    return plain


def row_scales(seed: int, rows: int) -> Tensor:
    """[rows,1] float64, powers of two from 2⁻¹² to 2¹²."""
    return torch.from_numpy(np.exp2(hashed(seed, "row scales", rows) % (2 * SPREAD + 1) - float(SPREAD)))[:, None]


def probs_of(seed: int, rows: int, dtype: str, weights: str) -> Tensor:
    """[rows]: in (0, 1]; with a quarter of zeros; or from -2 to 2 with a quarter of zeros of both signs."""
    if weights != "signed":
        return probabilities(seed, "probs", (rows,), dtype, zeros=weights == "zeros")
    noise = hashed(seed, "zero probs", rows)
    signed = payload(seed, "probs", (rows,), dtype)
    return torch.where(
        torch.from_numpy(noise % 4 == 0), torch.from_numpy(np.where(noise >> 8 & 1, -0.0, 0.0)).to(signed.dtype), signed
    )


def computed_in(declared: Mapping[str, Any], *tensors: Tensor | None) -> torch.dtype:
    """float64 if an input is, else what is declared."""
    given = [x for x in tensors if x is not None]
    return torch.float64 if any(x.dtype == torch.float64 for x in given) else accumulator_of(declared, given[0].dtype)


class _Elementwise(Contract[ActivationCase]):
    """What glu and activation share: h, probs, and the way from an activation to the output and back."""

    outputs = ("out",)
    primary = "out"
    oracle: Callable[..., Tensor]

    def columns(self, case: ActivationCase) -> int:
        return case.width

    def legal(self, case: ActivationCase) -> Problem:
        settings: dict[str, Any] = (
            {"probs": probs_of(case.seed, case.tokens, case.probs, case.weights)} if case.probs else {}
        )
        settings |= activation_settings(case)
        wanted = tuple(name for name in case.grads.split("+") if name)
        cotangents = {"out": payload(case.seed, "d_out", (case.tokens, case.width), case.dtype)} if wanted else {}
        return Problem(
            self.function,
            {"h": hidden_of(case, self.columns(case))},
            settings,
            {case.layout_of: case.layout},
            wanted,
            cotangents,
        )

    def expected(self, case: ActivationCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        h, probs = problem.required["h"], problem.settings.get("probs")
        early = bool(problem.settings.get("round_before_probs")) and probs is not None
        dtype = computed_in(declared, h, probs)
        p = None if probs is None else Running.of(probs[:, None], dtype)
        held, oracle, value = self.held(h, probs, problem.settings, dtype, early)
        out = held if p is None else held * p
        hidden = self.hidden_nan(h, problem.settings)
        right: dict[str, Expectation] = {
            "out": concluded(out, h.dtype).bounded(h.dtype, None if early else value.detach(), hidden)
        }
        if not problem.wanted:
            return right
        lost = (~h.isfinite()).any(1, keepdim=True).expand(h.shape)
        if problem.settings.get("fp8_input_store"):
            beyond = torch.logical_or(*split(beyond_e4m3(h), problem.settings))
            lost, h = lost | joined(beyond, beyond, problem.settings), in_e4m3(h)
            held, oracle, value = self.held(h, probs, problem.settings, dtype, early)
        cotangent = problem.cotangents["out"]
        exact = dict(zip(oracle, torch.autograd.grad(value, list(oracle.values()), cotangent.double()), strict=True))
        g = Running.of(cotangent, dtype)
        if "probs" in problem.wanted:
            assert probs is not None
            total = (g * held).sum(1)
            flat = Running(total.value[:, 0], total.error[:, 0], dtype)
            right["d_probs"] = concluded(flat, probs.dtype).bounded(
                probs.dtype, None if early else exact["probs"], lost.any(1)
            )
        if "h" in problem.wanted:
            g = g if p is None else g * p
            slope = self.pulled(settled(g, h.dtype) if early else g, h, problem.settings)
            right["d_h"] = concluded(slope, h.dtype).bounded(h.dtype, None if early else exact["h"], lost)
        return right

    def held(
        self, h: Tensor, probs: Tensor | None, settings: Mapping[str, Any], dtype: torch.dtype, early: bool
    ) -> tuple[Running, dict[str, Tensor], Tensor]:
        """The activation as it meets the probs; what the oracle is asked for, and its output."""
        act = self.activated(h, settings, dtype)
        asked = {"h": leaf(h)} | ({} if probs is None else {"probs": leaf(probs)})
        plain = {name: x for name, x in settings.items() if name not in ("probs", "fp8_input_store")}
        value = type(self).oracle(asked["h"], probs=asked.get("probs"), **plain)
        return settled(act, h.dtype) if early else act, asked, value

    @abstractmethod
    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        """The activation before it is multiplied by the probs."""

    @abstractmethod
    def pulled(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        """d_h, of the cotangent of the activation."""

    @abstractmethod
    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """Where a NaN meets a minimum or a maximum, which may or may not pass it on."""

    def neighbour(self, case: ActivationCase) -> ActivationCase:
        plain: dict[str, Any] = {
            "golden": "",
            "law": "",
            "layout": "contiguous",
            "layout_of": "",
            "interleave": 0,
            "alpha": 0,
            "stored": False,
        }
        kinds = GATED if self.function == "glu" else PLAIN
        other = kinds[kinds.index(case.kind or kinds[0]) - 1]
        return replace(
            case,
            **plain,
            seed=case.seed + 1,
            kind=other,
            tokens=case.tokens + 1,
            width=case.width + 3,
            clamp=case.clamp + 4 if case.clamp else 0,
        )

    def simpler(self, case: ActivationCase) -> Iterator[ActivationCase]:
        settings = ("weights", "alpha", "kind", "interleave", "clamp", "offset", "early", "stored", "probs")
        for name in ("law", "layout", "grads", "values", *settings, "dtype", "poison", "seed"):
            default: Any = ActivationCase.__dataclass_fields__[name].default
            if getattr(case, name) != default:
                beside: dict[str, dict[str, Any]] = {"layout": {"layout_of": ""}, "kind": {"alpha": 0}}
                beside["probs"] = {"grads": without(case.grads, "probs"), "weights": "plain"}
                yield replace(case, **{name: default} | beside.get(name, {}))
        for grad in case.grads.split("+") if "+" in case.grads else ():
            yield replace(case, grads=grad)
        yield from (replace(case, tokens=size) for size in shorter(case.tokens))
        for size in shorter(case.width):
            yield replace(
                case, width=size, interleave=case.interleave if case.interleave and size % case.interleave == 0 else 0
            )


def activation_settings(case: Any) -> dict[str, Any]:
    """The keyword arguments that differ from their defaults."""
    settings: dict[str, Any] = {"kind": case.kind} if case.kind else {}
    settings |= {"offset": case.offset / 8} if case.offset else {}
    settings |= {"clamp": case.clamp / 8} if case.clamp else {}
    settings |= {"alpha": case.alpha / 1000} if case.alpha else {}
    settings |= {"interleave": case.interleave} if case.interleave else {}
    settings |= {"round_before_probs": True} if case.early else {}
    return settings | ({"fp8_input_store": True} if case.stored else {})


def shorter(size: int, least: int = 0) -> list[int]:
    """Smaller sizes, the smallest first."""
    return sorted({s for s in (least, 1, 2, 3, size // 2, size - 1) if least <= s < size})


def without(grads: str, name: str) -> str:
    return "+".join(grad for grad in grads.split("+") if grad != name)


class Glu(_Elementwise):
    """`glu`: the output, and the gradients of h and of the probs."""

    function = "glu"
    optional = ("probs", "kind", "offset", "clamp", "alpha", "interleave", "round_before_probs", "fp8_input_store")
    oracle = staticmethod(glu)

    def columns(self, case: ActivationCase) -> int:
        return 2 * case.width

    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        u, v = halves(h, settings, dtype)
        return gate_of(settings).value(u) * shifted(v, settings)

    def pulled(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        u, v = halves(h, settings, g.dtype)
        gate, (free_u, free_v) = gate_of(settings), split(h.double(), settings)
        du, dv = g * gate.slope(u) * shifted(v, settings), g * gate.value(u)
        clamp = settings.get("clamp")
        if clamp is not None:
            du, dv = du.masked(free_u <= clamp), dv.masked(free_v.abs() <= clamp)
        return Running(joined(du.value, dv.value, settings), joined(du.error, dv.error, settings), g.dtype)

    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        u, v = split(h, settings)
        clamped = settings.get("clamp") is not None
        return u.isnan() & (clamped or settings.get("kind") == "reglu") | v.isnan() & clamped


class Activation(_Elementwise):
    """`activation`: the output, and the gradients of h and of the probs."""

    function = "activation"
    optional = ("probs", "kind", "round_before_probs")
    oracle = staticmethod(activation)

    def activated(self, h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> Running:
        return self._curve(settings).value(Running.of(h, dtype))

    def pulled(self, g: Running, h: Tensor, settings: Mapping[str, Any]) -> Running:
        return g * self._curve(settings).slope(Running.of(h, g.dtype))

    def hidden_nan(self, h: Tensor, settings: Mapping[str, Any]) -> Tensor:
        return h.isnan() & ("relu" in settings.get("kind", "squared_relu"))

    @staticmethod
    def _curve(settings: Mapping[str, Any]) -> Curve:
        return CURVES[settings.get("kind", "squared_relu")]


def gate_of(settings: Mapping[str, Any]) -> Curve:
    """f."""
    alpha = settings.get("alpha")
    return GATES[settings.get("kind", "swiglu")] if alpha is None else sigmoid_gated(alpha)


def split(h: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """u and v, column by column."""
    width = h.shape[1] // 2
    size = settings.get("interleave") or max(width, 1)
    gates = torch.tensor([j // size * 2 * size + j % size for j in range(width)], dtype=torch.int64)
    return h[:, gates], h[:, gates + size]


def joined(u: Tensor, v: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The h whose `split` are u and v."""
    numbers = torch.arange(2 * u.shape[1])[None]
    places = torch.cat(split(numbers, settings), 1)[0]
    return torch.cat([u, v], 1)[:, places.argsort()]


def halves(h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[Running, Running]:
    """u and v within their bounds."""
    u, v = split(h, settings)
    clamp = settings.get("clamp")
    if clamp is not None:
        u, v = u.double().clamp(max=clamp).to(u.dtype), v.double().clamp(-clamp, clamp).to(v.dtype)
    return Running.of(u, dtype), Running.of(v, dtype)


def shifted(v: Running, settings: Mapping[str, Any]) -> Running:
    """v + offset."""
    return v + settings["offset"] if settings.get("offset") else v
