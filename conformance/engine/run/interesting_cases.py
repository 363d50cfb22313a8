"""The interesting cases of a search: those that reached something first, as files.

What a case reaches: lines of the implementation, kernels, and steps of its scores.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.engine.run import corpus

STEPS = 16  # steps of a score from 0 to 1


def features(outcome: Outcome) -> frozenset[str]:
    """What the case reached."""
    reached = {name: int(STEPS * min(score, 1.0)) for name, score in outcome.scores.items()}
    steps = (f"{name} {step}" for name, most in reached.items() for step in range(1, most + 1))
    return frozenset([*outcome.lines, *(f"kernel {name}" for name in outcome.kernels), *steps])


@dataclass
class InterestingCases:
    """The interesting cases of one function.

    A kernel is only reported by the first case that compiles it in a child, so a case keeps all
    that it has ever reached in this search.
    """

    folder: Path
    seeds: list[Case] = field(default_factory=list)  # the files of earlier searches
    reached: dict[Case, frozenset[str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    judged: set[str] = field(default_factory=set)  # ids of cases

    @classmethod
    def read(cls, folder: Path, function: str) -> "InterestingCases":
        """The cases of earlier searches.

        Raises:
            CaseError: a file is no case of the function.
        """
        return cls(folder, [case for case in corpus.read_folder(folder) if case.function == function])

    @property
    def lines(self) -> int:
        """The number of lines and kernels that were reached."""
        return sum(":" in name or name.startswith("kernel ") for name in self.seen)

    def add(self, case: Case, outcome: Outcome) -> int:
        """Keep the case if it reached something new; returns how much."""
        reached_features = features(outcome)
        new = len(reached_features - self.seen)
        self.judged.add(case.id)
        if new:
            self.seen |= reached_features
            self.reached[case] = reached_features
        return new

    def distilled(self) -> list[Case]:
        """A few cases that reach all that was reached; each adds as much as possible."""
        uncovered, out = set(self.seen), []
        while uncovered:
            best = max(self.reached, key=lambda case: (len(self.reached[case] & uncovered), -len(case.text), case.text))
            out.append(best)
            uncovered -= self.reached[best]
        return out

    def save(self, finding: dict[str, Any]) -> int:
        """Replace the files by the distilled cases; a file whose case did not run stays.

        Raises:
            OSError: the folder cannot be written.
        """
        chosen = self.distilled()
        for case in chosen:
            corpus.save(self.folder, case, finding)
        for case in self.seeds:  # files are removed only now: if the folder cannot be written, they stay
            if case.id in self.judged and case not in chosen:
                (self.folder / f"{case.id}.json").unlink(missing_ok=True)
        return len(chosen)
