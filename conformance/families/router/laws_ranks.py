"""The law of tokens that are shared out over ranks: together they make what one process makes that has them all.

Every rank asks for the same sums in the same order, or all of them wait for each other.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.core.law import Law, Trial
from conformance.core.ranks import AtRank
from conformance.core.shared_out import SharedOut
from conformance.judge import Bounded, Exact, Expectation, Finding, judge


def _one_process(trial: Trial) -> Finding | None:
    """This rank alone, with everybody's tokens: the same for its own tokens, and for all of them the sum over the ranks.

    That sum is as far off as each rank's part may be, and the one process beside.
    """
    at: AtRank[Any] = trial.contract  # type: ignore[assignment]
    shared: SharedOut[Any] = at.whole  # type: ignore[assignment]
    problem, case = shared.together(trial.case)
    outputs = trial.run(problem)
    rows = slice(sum(case.counts[: at.place.rank]), sum(case.counts[: at.place.rank + 1]))
    found = []
    for name, expectation in shared.alone.expected(case, problem, trial.declared).items():
        mine, whole = (x.resolve(of) for x, of in ((trial.expected[name], trial.first), (expectation, outputs)))
        part, all_of = trial.first[name].double(), outputs[name].double()
        off, off_whole = _bound(mine), _bound(whole)
        named = name.removeprefix("d_").rpartition(".")[2]
        if named in shared.sums:
            both = torch.stack([part, off])
            dist.all_reduce(both, group=at.place.group)
            part, off = both
        elif named not in shared.same:
            all_of, off_whole = all_of[rows], off_whole[rows]
        found.append(judge(name, Bounded(all_of, off + off_whole, torch.float64, torch.float64), part))
    wrong = next(filter(None, found), None)
    return wrong and Finding(
        wrong.output, "one_process", f"{wrong.message} (of one process with the tokens of all ranks)", wrong.index
    )


def _bound(right: Expectation) -> Tensor:
    """How far an honest result may be from it."""
    if isinstance(right, Exact):
        return torch.zeros(right.value.shape, dtype=torch.float64)
    assert isinstance(right, Bounded)
    return right.bound


def _sums_up(case: Any) -> bool:
    """Whether the ranks' parts are those of one sum: nothing has to do with how many tokens a rank has, and no infinity is in the way."""
    if not case.counts or case.golden or case.illegal:
        return False
    if case.function != "route":
        return getattr(case, "values", "") != "special"
    means = "z" in case.losses.split("+") and (case.padding or len(set(case.counts)) > 1)  # of a rank's tokens each
    return case.ranks == len(case.counts) and not case.capacity and not means


ONE_PROCESS = Law("one_process", _one_process, _sums_up)
