"""Laws of the layer: those that every function has, and of the ways to run it that change no value.

Without gradients a router is not trained: results in inference mode differ. Products by a recipe
are slow where they are emulated, and have all laws in their own families: here they have one.
"""

from dataclasses import replace
from typing import Any

from torch.utils.checkpoint import checkpoint

from conformance.core import universal_laws as universal
from conformance.core.contract import Opaque
from conformance.core.law import Law, Trial, plain
from conformance.core.ranks import AtRank
from conformance.core.shared_out_laws import of_one_process
from conformance.families.experts.laws_mlp import DELAYED_WEIGHTS, left_for_later
from conformance.families.layer.layer import MoeLayer, script
from conformance.judge import Finding

_ELSEWHERE = (universal.HISTORY, universal.DETERMINISM, universal.INFERENCE_MODE)
_ALONE = (*(law for law in universal.EVERYWHERE if law not in _ELSEWHERE), universal.GRAPH_CAPTURE)


def _delayed(trial: Trial) -> Finding | None:
    """The experts' weights' gradients left for later, as in `grouped_mlp`: the same bits, each
    once. For functions that name the setting.
    """
    return left_for_later(trial, lambda *given: script(*given[:2], wgrads=given[2]), "x")


def _again(trial: Trial) -> Finding | None:
    """The whole layer again in the backward: the same results, so no call counts in the next."""

    def run(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = checkpoint(script, implementation, given, use_reentrant=False)
        return found

    return trial.repeats("recompute", trial.run(replace(trial.problem, script=run)))


def _overlap(trial: Trial) -> Finding | None:
    """The shared experts beside the dispatch; dx may add its parts in another order. For functions
    that name the setting.
    """
    if not trial.extras["names"](trial.problem.function, "overlap_shared"):
        return None

    def run(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
        return script(implementation, given, overlap_shared=True)

    settings = trial.problem.settings | {"overlap_shared": Opaque("overlap_shared")}
    return trial.judged("overlap", trial.expected, trial.run(replace(trial.problem, script=run, settings=settings)))


def _rerun(trial: Trial) -> Finding | None:
    """A layer that has too little room and runs again is the layer with room for all, bit by bit if
    runs repeat.
    """
    at: AtRank[Any] = trial.contract  # type: ignore[assignment]
    layer: MoeLayer = at.whole  # type: ignore[assignment]
    if not layer.drops(trial.case, at.calls(trial.case), trial.declared):
        return None
    free = {"config": replace(trial.problem.required["config"], num_rows=None)}
    settings = {name: x for name, x in trial.problem.settings.items() if name != "rerun"}
    problem = replace(trial.problem, required=trial.problem.required | free, settings=settings)
    return trial.repeats("rerun", trial.run(replace(problem, first=problem.first | free)))


def _unquantised(*laws: Law) -> tuple[Law, ...]:
    """The laws, for cases without a recipe."""
    return tuple(replace(law, applies=lambda case, law=law: not case.recipe and law.applies(case)) for law in laws)  # type: ignore[misc]


def _whole(case: Any) -> bool:
    """Whether the layer is called, and not one stage."""
    return plain(case) and not case.stage


DELAYED = Law(
    "delayed",
    _delayed,
    lambda case: _whole(case) and any(name in case.grads for name in DELAYED_WEIGHTS),
    recompiles=True,
)
RECOMPUTE = Law("recompute", _again, lambda case: _whole(case) and bool(case.grads))
RERUN = Law("rerun", _rerun, lambda case: _whole(case) and case.rerun)
OVERLAP = Law("overlap", _overlap, lambda case: _whole(case) and bool(case.shared))
MOE_LAYER = (
    universal.DETERMINISM,
    universal.HOST_SYNC,
    *_unquantised(universal.HISTORY, RERUN, *of_one_process(*_ALONE, DELAYED, RECOMPUTE, OVERLAP)),
)
