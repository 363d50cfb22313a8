"""Laws of the layer: those that every function has, and laws of ways to run it that change no
value. Without gradients a router is not trained, so results in inference mode differ. Under
autocast torch rounds the factors of a layer's products, except those in float64. Products by a
recipe are slow where they are emulated, and have all laws in their own families. Here they have few
laws, except for those for which a GPU may use other kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.core import universal_laws as universal
from conformance.core.autocast import AUTOCAST
from conformance.core.contract import Opaque
from conformance.core.law import Law, Trial, plain
from conformance.core.ranks import AtRank
from conformance.core.shared_out_laws import of_one_process
from conformance.core.tensors import DTYPES
from conformance.families.experts.laws_mlp import DELAYED_WEIGHTS, left_for_later
from conformance.families.layer.cases import LayerCase
from conformance.families.layer.layer import MoeLayer, script
from conformance.judge import Finding

# bytes that may be kept in their place: some integers per row, expert and tile
LESS = (("permute",), ("moe_act",), ("permute", "moe_act"))
BYTES_OF_A_ROW, ALLOWED = 16, {"cpu": 1024, "cuda": 16 * 512}
_ELSEWHERE = (universal.HISTORY, universal.DETERMINISM, universal.INFERENCE_MODE, universal.NO_GRAD, AUTOCAST)
_EVALUATED = replace(universal.NO_GRAD, applies=lambda case: case.evaluation and universal.NO_GRAD.applies(case))
_ALONE = (*(law for law in universal.EVERYWHERE if law not in _ELSEWHERE), _EVALUATED, universal.GRAPH_CAPTURE)


def _delayed(trial: Trial) -> Finding | None:
    """The gradients of the experts' weights are left for later, as in `grouped_mlp`: they have the
    same bits, and each comes once. Every second case also computes something again. Only for
    functions that name the settings.
    """
    both = trial.case.seed % 2 and trial.extras["names"](trial.problem.function, "recompute")
    less: dict[str, Any] = {"recompute": _saved_less(trial.case)} if both else {}
    return left_for_later(trial, lambda *arguments: script(*arguments[:2], wgrads=arguments[2], **less), "x")


def _saved_less(case: LayerCase) -> tuple[str, ...]:
    """What the backward pass computes again, chosen by the seed."""
    return LESS[case.seed // 2 % len(LESS)]


def _jittered(trial: Trial) -> Finding | None:
    """A layer that is given no noise draws its own: with another state of the generator it has
    other results.
    """
    settings = {name: x for name, x in trial.problem.settings.items() if name != "noise"}
    without = replace(trial.problem, settings=settings, wanted=(), cotangents={}, draws=True)
    probs_of_runs = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            probs_of_runs.append(trial.run(without)["probs"])
    if not torch.equal(*probs_of_runs):
        return None
    return Finding("probs", "jittered", "is the same with other random numbers, where jitter has no noise given")


def _again(trial: Trial) -> Finding | None:
    """The whole layer is run again in the backward pass.

    The results are the same, so no call is counted in the next state.
    """

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        def layer(tensors: dict[str, Tensor]) -> dict[str, Any]:
            return script(implementation, arguments | tensors)

        # settings are no arguments of it: it may map them to None, which their own check refuses
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        outputs: dict[str, Any] = checkpoint(layer, tensors, use_reentrant=False)
        return outputs

    return trial.repeats("recompute", trial.run(replace(trial.problem, script=run)))


def _kept(trial: Trial) -> Finding | None:
    """The layer saves less, by one name or two: the results are the same, and the memory is not
    kept. Only for functions that name the setting.
    """
    case, names = trial.case, trial.extras["names"]
    if not names(trial.problem.function, "recompute"):
        return None
    recomputed = LESS[case.seed % len(LESS)]

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        return script(implementation, arguments, recompute=recomputed if len(recomputed) > 1 else recomputed[0])

    settings = trial.problem.settings | {"recompute": Opaque("recompute")}
    less = replace(trial.problem, script=run, settings=settings)
    finding = trial.repeats("kept", trial.run(less))
    rows = int(trial.first["routing_map"].sum())
    wanted, allowed = saved_by(case, recomputed, rows), ALLOWED[trial.extras["device"]] + BYTES_OF_A_ROW * rows
    if finding or wanted < 2 * allowed:
        return finding
    bytes_before, bytes_after = (trial.extras["kept"](problem) for problem in (trial.problem, less))
    message = (
        f"with recompute {' and '.join(recomputed)} keeps {bytes_after} bytes for its backward, "
        f"and {bytes_before} without"
    )
    return (
        None
        if bytes_before - bytes_after >= wanted - allowed
        else Finding("call", "kept", f"{message}; it must drop {wanted}")
    )


def _sent_again(trial: Trial) -> Finding | None:
    """Over ranks, the rows of a rank's experts are made again in the backward pass: the results are
    the same, or the call raises an error. Only for functions that name the setting.
    """
    if not trial.extras["names"](trial.problem.function, "recompute"):
        return None

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        return script(implementation, arguments, recompute="permute")

    settings = trial.problem.settings | {"recompute": Opaque("recompute")}
    return trial.repeats("sent_again", trial.run(replace(trial.problem, script=run, settings=settings)))


def saved_by(case: LayerCase, recomputed: tuple[str, ...], rows: int) -> int:
    """The bytes that are not kept: rows, minus the projected tokens that are kept for them, and
    activations. With a recipe one byte for each code.
    """
    size = DTYPES[case.dtype].itemsize
    of_row, code = (case.latent or case.hidden) * case.unit, 1 if case.recipe else size
    tokens = case.tokens * of_row * size if case.latent else 0
    dropped = {"permute": rows * of_row * code - tokens, "moe_act": rows * case.width * case.unit * code}
    return sum(dropped[name] for name in recomputed)


def _overlap(trial: Trial) -> Finding | None:
    """The shared experts run during the dispatch. dx may be added in another order.

    Only for functions that name the setting.
    """
    if not trial.extras["names"](trial.problem.function, "overlap_shared"):
        return None

    def run(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        return script(implementation, arguments, overlap_shared=True)

    settings = trial.problem.settings | {"overlap_shared": Opaque("overlap_shared")}
    return trial.judged("overlap", trial.expected, trial.run(replace(trial.problem, script=run, settings=settings)))


def _rerun(trial: Trial) -> Finding | None:
    """Over ranks, a layer that has too little room and runs again has the results of a layer with
    room for all rows, bit by bit if runs repeat.
    """
    at: AtRank[Any] = trial.contract  # type: ignore[assignment]
    layer: MoeLayer = at.whole  # type: ignore[assignment]
    if not layer.drops(trial.case, at.calls(trial.case), trial.declared):
        return None
    unlimited_room = {"config": replace(trial.problem.required["config"], num_rows=None)}
    settings = {name: x for name, x in trial.problem.settings.items() if name != "rerun"}
    problem = replace(trial.problem, required=trial.problem.required | unlimited_room, settings=settings)
    return trial.repeats("rerun", trial.run(replace(problem, first=problem.first | unlimited_room)))


def _where(holds: Callable[[Any], bool], *laws: Law) -> tuple[Law, ...]:
    """The laws, restricted to cases for which `holds` is true."""
    return tuple(replace(law, applies=_both(holds, law.applies)) for law in laws)


def _both(first: Callable[[Any], bool], second: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda case: first(case) and second(case)


def _unquantised(case: Any) -> bool:
    return not case.recipe


def _or_in_lines(case: Any) -> bool:
    """Whether the case has no recipe, or FP8 by blocks in long whole lines, for which a GPU may
    have kernels that read tokens directly.
    """
    return not case.recipe or (case.recipe == "block" and case.hidden % 16 == 0 and case.hidden > 128)


def _whole(case: Any) -> bool:
    """Whether the layer is called, and not one stage."""
    return plain(case) and not case.stage


def _saves(case: Any) -> bool:
    """Whether all rows and activations are saved, as they are or as codes."""
    all_gradients = all(name in case.grads.split("+") for name in ("x", *DELAYED_WEIGHTS))
    fewer = case.budget or case.roomless  # rows for which there is no room are not saved
    return all_gradients and not (case.stored or case.on_input or case.align or case.override or fewer)


DELAYED = Law(
    "delayed",
    _delayed,
    lambda case: _whole(case) and any(name in case.grads for name in DELAYED_WEIGHTS),
    recompiles=True,
)
RECOMPUTE = Law("recompute", _again, lambda case: _whole(case) and bool(case.grads))
KEPT = Law("kept", _kept, lambda case: _whole(case) and _saves(case), recompiles=True)
JITTERED = Law("jittered", _jittered, lambda case: _whole(case) and case.jitter and case.topk > 1 and case.tokens > 2)
SENT_AGAIN = Law(
    "sent_again",
    _sent_again,
    lambda case: _whole(case) and bool(case.counts) and bool(case.grads) and not case.rerun,
    may_raise=True,
)
RERUN = Law("rerun", _rerun, lambda case: _whole(case) and case.rerun and bool(case.counts))
OVERLAP = Law("overlap", _overlap, lambda case: _whole(case) and bool(case.shared))
MOE_LAYER = (
    universal.DETERMINISM,
    universal.HOST_SYNC,
    *of_one_process(KEPT),
    *_where(_unquantised, universal.HISTORY, RERUN, SENT_AGAIN),
    *_where(_or_in_lines, *of_one_process(*_ALONE)),
    *_where(_unquantised, *of_one_process(DELAYED)),
    *_where(_or_in_lines, *of_one_process(RECOMPUTE)),
    *_where(_unquantised, *of_one_process(OVERLAP, JITTERED)),
)
