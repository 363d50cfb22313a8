"""The plain factor of a result that is wrong by nothing else: a mean for a sum, a sign, zeros."""

import numpy as np

FACTORS = {"0": 0.0, "−1": -1.0}
FACTORS |= {name: x for n in range(2, 65) for name, x in ((str(n), float(n)), (f"1/{n}", 1 / n), (f"−{n}", -float(n)))}
CLEAR = 8  # bounds that a value exceeds, if it counts


def plain_factor(expected: np.ndarray, got: np.ndarray, bound: np.ndarray) -> str:
    """The n of `got` = n · `expected` within the bound, for every clear value; "" if there is none.

    Args:
        expected, got, bound: float64, of one shape; `bound`: the largest error of an honest result.
    """
    with np.errstate(invalid="ignore"):
        clear = np.isfinite(expected) & np.isfinite(got) & np.isfinite(bound) & (np.abs(expected) > CLEAR * bound)
    if clear.sum() < 2:
        return ""
    expected, got, bound = expected[clear], got[clear], bound[clear]
    with np.errstate(divide="ignore"):
        surest = np.argmax(np.abs(expected) / bound)
    name, n = min(FACTORS.items(), key=lambda item: abs(item[1] - got[surest] / expected[surest]))
    honest = max(abs(n), 1) * bound + abs(n) * np.finfo(np.float64).eps * np.abs(expected)
    return name if (np.abs(got - n * expected) <= honest).all() else ""
