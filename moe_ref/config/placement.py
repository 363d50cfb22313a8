"""Where the tensors of a layer are: cut, replicated, or partial sums over the ranks; as data.

A layer is a list of steps, which name the letters of their operands. A product sums over the
letters that its result lacks. Over ranks that cut such a letter each has a part of the sum, and
until the parts are added nothing but another linear step may read it. So where every tensor is, and
which sums nobody adds, follows from the steps before any number is computed.

The axes of ranks: `ep` share the experts, `tp` cut each expert's width, `dp` repeat the experts.
Letters as in `moe_ref`; a row is of a token and an expert, TE, and S is the width of the shared
experts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moe_ref.config.layer import DISPATCHERS

PARTIAL, WHOLE = "Σ", ""  # over an axis; else the letter that it cuts
Placement = Mapping[str, str]  # of a tensor: by axis


class PlacementError(ValueError):
    """A step reads what its ranks do not have; the message names the tensor."""


@dataclass(frozen=True)
class Step:
    """`out` of its operands.

    rule: product   by `letters`, "TH,EH->TE"
          apply     not linear, element by element; or a choice
          add       operands that are placed alike
          move      by `letters`, "T->E": where `axes` cut T they then cut E; "T->" gathers
          reduce    the partial sums over `axes` are added; then the letter cuts the result
    """

    out: str
    operands: tuple[str, ...]
    rule: str
    letters: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A dispatcher with axes of ranks: inputs, steps, and the sums that are left to the caller."""

    dispatcher: str
    axes: tuple[str, ...]
    inputs: Mapping[str, Placement]
    steps: tuple[Step, ...]
    open_sums: tuple[str, ...]

    def places(self) -> dict[str, Placement]:
        """The placement of every tensor, in the order of the steps.

        Raises:
            PlacementError: a step reads a partial sum, or operands that do not fit; or at the end
                other partial sums are left than those for the caller.
        """
        places = dict(self.inputs)
        for step in self.steps:
            operands = [places[name] for name in step.operands]
            places[step.out] = {axis: RULES[step.rule](step, axis, [x[axis] for x in operands]) for axis in self.axes}
        read = {name for step in self.steps for name in step.operands}
        for name, placement in places.items():
            summed_axes = [axis for axis, at in placement.items() if at == PARTIAL]
            if summed_axes and name not in read and name not in self.open_sums:
                raise PlacementError(f"{name} is a partial sum over {', '.join(summed_axes)} that no rank adds")
            if not summed_axes and name in self.open_sums:
                raise PlacementError(f"{name} is left to the caller to add, and is no partial sum")
        return places


def _product(step: Step, axis: str, at: list[str]) -> str:
    factors, result = step.letters.split("->")
    letters = factors.split(",")
    cut = {placement for placement in at if placement not in (PARTIAL, WHOLE)}
    for name, operand_letters, placement in zip(step.operands, letters, at, strict=True):
        if placement == PARTIAL and (cut or at.count(PARTIAL) > 1):
            raise PlacementError(f"{step.out} multiplies {name}, a partial sum over {axis} that no rank has added")
        if any(letter in operand_letters and placement != letter for letter in cut):
            raise PlacementError(f"{step.out} needs {name} as the other operands are: cut over {axis}, by {cut.pop()}")
    if PARTIAL in at:
        return PARTIAL
    return next((letter if letter in result else PARTIAL for letter in cut), WHOLE)


def _apply(step: Step, axis: str, at: list[str]) -> str:
    for name, placement in zip(step.operands, at, strict=True):
        if placement == PARTIAL:
            raise PlacementError(f"{step.out} reads {name}, a partial sum over {axis} that no rank has added")
    return _add(step, axis, at)


def _add(step: Step, axis: str, at: list[str]) -> str:
    if len(set(at)) > 1:
        raise PlacementError(f"{step.out} is of tensors that are placed differently over {axis}: {', '.join(at)}")
    return at[0]


def _move(step: Step, axis: str, at: list[str]) -> str:
    source, target = step.letters.split("->")
    return target if axis in step.axes and at[0] == source else at[0]


def _reduce(step: Step, axis: str, at: list[str]) -> str:
    if axis in step.axes and at[0] != PARTIAL:
        raise PlacementError(f"{step.out} adds {step.operands[0]} over {axis}, which is no partial sum there")
    return step.letters if axis in step.axes else at[0]


RULES: dict[str, Callable[[Step, str, list[str]], str]] = {
    "product": _product,
    "apply": _apply,
    "add": _add,
    "move": _move,
    "reduce": _reduce,
}


# ---- the layer


def plan_of(dispatcher: str, axes: tuple[str, ...]) -> Plan:
    """The layer with latent projections and shared experts.

    Raises:
        ValueError: an unknown dispatcher, or one without expert tensor parallelism over `tp`.
    """
    if dispatcher not in DISPATCHERS or ("tp" in axes and dispatcher not in ("allgather", "alltoall")):
        raise ValueError(f"dispatcher is {dispatcher!r} over {axes}; tp needs allgather or alltoall")
    tokens, copies = dict.fromkeys(axes, "T"), dict.fromkeys(axes, WHOLE)
    experts = copies | {axis: letter for axis, letter in (("ep", "E"), ("tp", "F")) if axis in axes}
    inputs = {"x": tokens, "d_output": tokens} | dict.fromkeys(REPLICATED, copies) | dict.fromkeys(OF_RANKS, experts)
    steps = (*_forward(dispatcher, axes), *_backward(dispatcher, axes))
    summed = (*(REPLICATED if axes else ()), *(OF_RANKS if "dp" in axes else ()))
    open_sums = tuple(f"d_{name}" for name in summed)
    return Plan(dispatcher, axes, inputs, steps, open_sums)


REPLICATED = ("router_weight", "latent_down", "latent_up", "shared_fc1_weight", "shared_fc2_weight")
OF_RANKS = ("fc1_weight", "fc2_weight")


def _product_of(out: str, operands: str, letters: str) -> Step:
    return Step(out, tuple(operands.split()), "product", letters)


def _among(axes: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis == name)


def _there(out: str, of: str, dispatcher: str, axes: tuple[str, ...]) -> Iterable[Step]:
    """Rows of tokens to the ranks of their experts; every rank of `tp` has all of an expert's."""
    expert_axes, tensor = _among(axes, "ep"), _among(axes, "tp")
    if dispatcher == "allgather":
        yield Step(f"{out}_of_all", (of,), "move", "T->", expert_axes + tensor)
        yield Step(out, (f"{out}_of_all",), "move", "->E", expert_axes)
        return
    yield Step(f"{out}_of_shards", (of,), "move", "T->", tensor)
    yield Step(out, (f"{out}_of_shards",), "move", "T->E", expert_axes)


def _home(out: str, of: str, axes: tuple[str, ...]) -> Iterable[Step]:
    """Rows of experts to the ranks of their tokens; partial sums over `tp` are added there."""
    yield Step(f"{out}_rows", (of,), "move", "E->T", _among(axes, "ep"))
    yield Step(out, (f"{out}_rows",), "reduce", "T", _among(axes, "tp"))


def _back(out: str, of: str, dispatcher: str, axes: tuple[str, ...]) -> Iterable[Step]:
    """The sum of each token's rows, which are partial sums over `tp`."""
    if dispatcher == "alltoall":
        yield from _home(f"{out}_at_home", of, axes)
        yield _product_of(out, f"{out}_at_home", "TEN->TN")
        return
    yield _product_of(f"{out}_parts", of, "TEN->TN")
    yield Step(out, (f"{out}_parts",), "reduce", "T", _among(axes, "ep") + _among(axes, "tp"))


def _forward(dispatcher: str, axes: tuple[str, ...]) -> Iterable[Step]:
    yield _product_of("logits", "x router_weight", "TH,EH->TE")
    yield Step("probs", ("logits",), "apply")
    yield _product_of("own_counts", "probs", "TE->E")
    yield Step("counts", ("own_counts",), "reduce", WHOLE, axes)
    yield Step("next_expert_bias", ("counts",), "apply")
    yield _product_of("tokens", "x latent_down", "TH,NH->TN")
    yield from _there("rows", "tokens", dispatcher, axes)
    yield from _there("row_probs", "probs", dispatcher, axes)
    yield _product_of("h", "rows fc1_weight", "TEN,EFN->TEF")
    yield Step("act", ("h",), "apply")
    yield _product_of("a", "act row_probs", "TEF,TE->TEF")
    yield _product_of("expert_rows", "a fc2_weight", "TEF,ENF->TEN")
    yield from _back("combined", "expert_rows", dispatcher, axes)
    yield _product_of("routed", "combined latent_up", "TN,HN->TH")
    yield _product_of("shared_h", "x shared_fc1_weight", "TH,SH->TS")
    yield Step("shared_a", ("shared_h",), "apply")
    yield _product_of("shared", "shared_a shared_fc2_weight", "TS,HS->TH")
    yield Step("output", ("routed", "shared"), "add")


def _backward(dispatcher: str, axes: tuple[str, ...]) -> Iterable[Step]:
    yield _product_of("d_latent_up", "d_output combined", "TH,TN->HN")
    yield _product_of("d_combined", "d_output latent_up", "TH,HN->TN")
    yield from _there("d_expert_rows", "d_combined", dispatcher, axes)
    yield _product_of("d_fc2_weight", "d_expert_rows a", "TEN,TEF->ENF")
    yield _product_of("d_a", "d_expert_rows fc2_weight", "TEN,ENF->TEF")
    yield _product_of("d_row_probs", "d_a act", "TEF,TEF->TE")
    yield Step("d_h", ("d_a", "h"), "apply")
    yield _product_of("d_fc1_weight", "d_h rows", "TEF,TEN->EFN")
    yield _product_of("d_rows", "d_h fc1_weight", "TEF,EFN->TEN")
    yield from _back("d_tokens", "d_rows", dispatcher, axes)
    yield from _home("d_probs", "d_row_probs", axes)
    yield Step("d_logits", ("d_probs", "logits"), "apply")
    yield _product_of("d_router_weight", "d_logits x", "TE,TH->EH")
    yield _product_of("d_x_of_router", "d_logits router_weight", "TE,EH->TH")
    yield _product_of("d_latent_down", "d_tokens x", "TN,TH->NH")
    yield _product_of("d_x_of_experts", "d_tokens latent_down", "TN,NH->TH")
    yield _product_of("d_shared_fc2_weight", "d_output shared_a", "TH,TS->HS")
    yield _product_of("d_shared_a", "d_output shared_fc2_weight", "TH,HS->TS")
    yield Step("d_shared_h", ("d_shared_a", "shared_h"), "apply")
    yield _product_of("d_shared_fc1_weight", "d_shared_h x", "TS,TH->SH")
    yield _product_of("d_x_of_shared", "d_shared_h shared_fc1_weight", "TS,SH->TH")
    yield Step("d_x", ("d_x_of_router", "d_x_of_experts", "d_x_of_shared"), "add")


AXES = ((), ("ep",), ("ep", "dp"), ("ep", "tp"), ("ep", "tp", "dp"))
PLANS = {
    (dispatcher, axes): plan_of(dispatcher, axes)
    for dispatcher in DISPATCHERS
    for axes in AXES
    if "tp" not in axes or dispatcher in ("allgather", "alltoall")
}
