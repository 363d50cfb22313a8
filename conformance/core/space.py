"""What cases may be drawn for an implementation on a device: its sizes, its settings and its laws."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import sizes as sizes

DTYPES = ("float32", "bfloat16", "float16")
LOGIT_DTYPES = (*DTYPES, "float64")
MOVED_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "uint8")
POISONS = ("nan", "max", "zero")
LAYOUTS = ("contiguous", "transposed", "strided", "shifted")
ALIGNMENTS = (1, 2, 3, 4, 8, 16, 32, 128)
MAP_DTYPES = ("bool", "uint8", "int32", "int64")


@dataclass(frozen=True)
class Space:
    """What is drawn from."""

    device: str = "cpu"
    without: dict[str, frozenset[str]] = field(
        default_factory=dict
    )  # by function: optional arguments that are not accepted
    not_differentiable: frozenset[str] = frozenset()  # functions that are declared so
    contiguous_only: frozenset[str] = frozenset()  # likewise
    ranks: int = 4  # that a world has room for

    @property
    def many(self) -> int:
        """Tokens that are more than one block, or one program's share, of any kernel; in an
        interpreter, which pays by the step, fewer.
        """
        return 2100 if self.device == "cuda" else 260

    def accepts(self, function: str, setting: str) -> bool:
        return setting not in self.without.get(function, frozenset())

    @classmethod
    def of(cls, description: dict[str, Any]) -> "Space":
        """The space of an implementation, from what its child says of it."""
        functions = description["functions"]
        denied = {
            key: frozenset(f for f, known in functions.items() if known["declares"].get(key) is False)
            for key in ("differentiable", "noncontiguous")
        }
        without = {name: frozenset(known["without"]) for name, known in functions.items()}
        return cls(
            description["device"], without, denied["differentiable"], denied["noncontiguous"], description["ranks"]
        )


def mostly(plain: str, others: tuple[str, ...]) -> st.SearchStrategy[str]:
    """`plain` half of the time."""
    return st.sampled_from((plain,) * max(len(others), 1) + others)


def some_of(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Any subset, joined by +, the whole set half of the time."""
    subsets = ["+".join(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(2 ** len(names))]
    return st.sampled_from(subsets + [subsets[-1]] * len(subsets))
