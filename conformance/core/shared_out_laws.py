"""Law of sharded batches: the ranks' results together equal one process's.

Every rank takes the same sums in the same order; otherwise the ranks deadlock.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.core import universal_laws as universal
from conformance.core.law import Law, Trial
from conformance.core.ranks import AtRank
from conformance.core.shared_out import SharedOut
from conformance.judge import Bounded, Exact, Expectation, Finding, judge


def _one_process(trial: Trial) -> Finding | None:
    """One process with all tokens: equal rows for this rank's tokens, equal sums over ranks.

    The error bounds of the ranks and of the one process add up.
    """
    at: AtRank[Any] = trial.contract  # type: ignore[assignment]
    shared: SharedOut[Any] = at.whole  # type: ignore[assignment]
    problem, case = shared.together(trial.case)
    outputs = trial.run(problem)
    rows = slice(sum(case.counts[: at.place.rank]), sum(case.counts[: at.place.rank + 1]))
    findings = []
    for name, expectation in shared.alone.expected(case, problem, trial.declared).items():
        share, all_of = trial.first[name].double(), outputs[name].double()
        off, off_whole = _bound(trial.expected[name].resolve(trial.first)), _bound(expectation.resolve(outputs))
        named = name.removeprefix("d_").rpartition(".")[2]
        if named in shared.sums:
            both = torch.stack([share, off])
            dist.all_reduce(both, group=at.place.group)
            share, off = both
        elif named not in shared.same:
            all_of, off_whole = all_of[rows], off_whole[rows]
        findings.append(judge(name, Bounded(all_of, off + off_whole, torch.float64, torch.float64), share))
    first = next(filter(None, findings), None)
    text = f"{first.message} (of one process with the tokens of all ranks)" if first else ""
    return first and Finding(first.output, "one_process", text, first.index)


def _bound(expected: Expectation) -> Tensor:
    """The largest error of a correct result."""
    if isinstance(expected, Exact):
        return torch.zeros(expected.value.shape, dtype=torch.float64)
    assert isinstance(expected, Bounded)
    return expected.bound


def _sums_up(case: Any) -> bool:
    """Whether the ranks' results are partial sums without infinities, which can be added up."""
    is_plain = case.counts and not case.golden and not case.illegal and getattr(case, "values", "") != "special"
    return bool(is_plain and getattr(case, "one_sum", True))


def of_one_process(*laws: Law) -> tuple[Law, ...]:
    """The laws, for cases without ranks."""
    return tuple(replace(law, applies=lambda case, law=law: not case.counts and law.applies(case)) for law in laws)  # type: ignore[misc]


ONE_PROCESS = Law("one_process", _one_process, _sums_up)
SHARED_OUT = (universal.HISTORY, universal.DETERMINISM, ONE_PROCESS)  # of cases with ranks too
