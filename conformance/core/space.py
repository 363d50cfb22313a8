"""The cases an implementation supports on a device: sizes, settings, laws."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import mostly as mostly
from conformance.core.axes import sizes as sizes
from conformance.core.axes import subsets

LOGIT_DTYPES = ("float32", "bfloat16", "float16", "float64")
ALIGNMENTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
MAP_DTYPES = ("bool", "uint8", "int32", "int64")


@dataclass(frozen=True)
class Space:
    """The bounds of drawn cases."""

    device: str = "cpu"
    # by function: unsupported optional arguments
    without: dict[str, frozenset[str]] = field(default_factory=dict)
    not_differentiable: frozenset[str] = frozenset()  # functions
    contiguous_only: frozenset[str] = frozenset()  # functions
    ranks: int = 4  # the most ranks of a world in which each rank has its own GPU, if there are GPUs
    shared_ranks: int = 0  # the most ranks of a world whose ranks share GPUs, and therefore wait long; 0: no such world
    # covering arrays pair only the fields for which kernels are specialised, and have each layout
    # once
    few_kernels: bool = False

    @property
    def most_ranks(self) -> int:
        return max(self.ranks, self.shared_ranks)

    @property
    def many(self) -> int:
        """More tokens than one block or program of any kernel has; fewer in an interpreter."""
        return 2100 if self.device == "cuda" else 260

    @property
    def real_tokens(self) -> int:
        """Tokens of a call that is timed: as many as a GPU has in training."""
        return 4096 if self.device == "cuda" else 512

    def accepts(self, function: str, setting: str) -> bool:
        return setting not in self.without.get(function, frozenset())

    @classmethod
    def of(cls, description: dict[str, Any]) -> "Space":
        """The space from a child's description of the implementation."""
        functions = description["functions"]
        denied = {
            key: frozenset(f for f, answers in functions.items() if answers["declares"].get(key) is False)
            for key in ("differentiable", "noncontiguous")
        }
        without = {name: frozenset(answers["without"]) for name, answers in functions.items()}
        return cls(
            *(description["device"], without, denied["differentiable"], denied["noncontiguous"]),
            *(description["ranks"], description["shared_ranks"]),
        )


def some_of(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Any subset, joined by +.

    All names are drawn half of the time, and none in one case of five.
    """
    all_subsets = subsets(list(names))
    return st.sampled_from(
        all_subsets + all_subsets[-1:] * len(all_subsets) + all_subsets[:1] * (len(all_subsets) // 2 - 1)
    )
