"""Level 4: random results are right if their distribution is; no single draw is compared.

Stochastic rounding takes x to high with probability p = (x - low) / (high - low), else to low: the
mean is x, the variance p (1 - p) (high - low)². Over R repeats and N elements, with k_n the number
of draws of n that are high and s_r = Σ_n (up_rn - p_n) / √Σ_n p_n (1 - p_n), of mean 0, variance 1:

    neighbours    every draw is low or high
    mean of all   z = Σ_r s_r / √R, by Bernstein's inequality, valid for few and skewed events
    mean of one   R · KL(k_n / R ‖ p_n) ≤ ln(2N / α), by Chernoff's bound
    variance      Σ_r (s_r - s̄)² within the range of χ² with R - 1 degrees of freedom: above if
                  elements share random numbers, below if repeats do

All checks of a run together reject an honest generator with probability 1e-6 (Bonferroni).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

ALPHA = 1e-6  # probability that a whole run rejects an honest result
LEAST_REPEATS = 256
LEAST_EVENTS = 64.0  # variance of a repeat's count above which it is treated as normal


def bonferroni(alpha: float, checks: int) -> float:
    """The level of each of `checks` tests for a joint error probability of at most `alpha`."""
    return alpha / max(checks, 1)


def bernstein_z(alpha: float, variance: float) -> float:
    """The z that a sum of events exceeds with probability at most `alpha`: √(2 ln(2/α)) for many
    events, more for few.
    """
    log = math.log(2 / alpha)
    return (log / 3 + math.sqrt(log**2 / 9 + 2 * log * variance)) / math.sqrt(variance)


def binomial_quantile(trials: int, p: float, level: float) -> int:
    """The least k with P(X ≤ k) ≥ level, for X of `trials` independent events of probability p."""
    if trials == 0 or p <= 0:
        return 0
    if p >= 1:
        return trials
    k = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_chance = (
        log_factorial[-1] - log_factorial[k] - log_factorial[::-1][k] + k * math.log(p) + (trials - k) * math.log1p(-p)
    )
    return int(np.searchsorted(np.cumsum(np.exp(log_chance)), level).clip(max=trials))


def chi_square_range(degrees: int, alpha: float) -> tuple[float, float]:
    """The range that χ² leaves with probability `alpha`, for many degrees of freedom.

    Wilson and Hilferty 1931: its cube root is nearly normal.
    """
    share, z = 2 / (9 * degrees), -NormalDist().inv_cdf(alpha / 2)
    least, most = (degrees * max(1 - share + side * z * math.sqrt(share), 0.0) ** 3 for side in (-1, 1))
    return least, most


@dataclass(frozen=True)
class Stochastic:
    """Values rounded stochastically, and the two neighbours of each (one where it is exact)."""

    value_N: Tensor  # float64
    low_N: Tensor  # float64, ≤ value
    high_N: Tensor  # float64, ≥ value
    alpha: float = ALPHA
    checks: int = 1  # of this kind in the whole run

    @property
    def p_N(self) -> Tensor:
        """The probability of high, per element."""
        step = self.high_N - self.low_N
        return torch.where(step > 0, (self.value_N - self.low_N) / torch.where(step > 0, step, 1.0), 0.0)


def improbable(expected: Stochastic, draws_RN: Tensor) -> str | None:
    """The improbable statistic of the repeats of one rounding, or None.

    Args:
        draws_RN: decoded results of at least 256 repeats with different random numbers.

    Raises:
        ValueError: fewer than LEAST_REPEATS repeats.
    """
    if len(draws_RN) < LEAST_REPEATS:
        raise ValueError(f"draws_RN has {len(draws_RN)} repeats; at least {LEAST_REPEATS} are needed")
    draws = draws_RN.double()
    fair = (draws == expected.low_N) | (draws == expected.high_N)
    if not bool(fair.all()):
        r, n = (~fair).nonzero()[0].tolist()
        neighbours = f"{expected.low_N[n]:.9g} and {expected.high_N[n]:.9g}"
        return f"repeat {r} of element {n} is {draws[r, n]:.9g}, none of the neighbours {neighbours}"
    random = (expected.p_N > 0) & (expected.p_N < 1)
    up_RN, p_N = (draws == expected.high_N)[:, random].double(), expected.p_N[random]
    if not bool(random.any()):
        return None
    level = bonferroni(expected.alpha, 3 * expected.checks)
    tests: list[Callable[[Tensor, Tensor, float], str | None]] = [_mean_of_all, _variance, _mean_of_one]
    return "; ".join(message for test in tests if (message := test(up_RN, p_N, level))) or None


def _standardised(up_RN: Tensor, p_N: Tensor) -> Tensor:
    """s_r above."""
    return (up_RN - p_N).sum(1) / (p_N * (1 - p_N)).sum().sqrt()


def _mean_of_all(up_RN: Tensor, p_N: Tensor, level: float) -> str | None:
    z = float(_standardised(up_RN, p_N).sum()) / math.sqrt(len(up_RN))
    limit = bernstein_z(level, len(up_RN) * float((p_N * (1 - p_N)).sum()))
    side = "high" if z > 0 else "low"
    message = f"the mean of all is {abs(z):.3g} standard errors too {side}, {limit:.3g} are allowed"
    return None if abs(z) <= limit else message


def _variance(up_RN: Tensor, p_N: Tensor, level: float) -> str | None:
    """Too large if elements share random numbers, too small if repeats do; needs many events."""
    repeats = len(up_RN)
    if float((p_N * (1 - p_N)).sum()) < LEAST_EVENTS:
        return None
    total = float(_standardised(up_RN, p_N).var(unbiased=False)) * repeats
    least, most = chi_square_range(repeats - 1, level)
    if least <= total <= most:
        return None
    return f"the variance over repeats is {total / repeats:.3g} × that of independent rounding"


def _mean_of_one(up_RN: Tensor, p_N: Tensor, level: float) -> str | None:
    repeats = len(up_RN)
    share = up_RN.mean(0)
    divergence = torch.special.xlogy(share, share / p_N) + torch.special.xlogy(1 - share, (1 - share) / (1 - p_N))
    limit = math.log(2 * len(p_N) / level) / repeats
    worst = int(divergence.argmax())
    if float(divergence[worst]) <= limit:
        return None
    num_improbable = int((divergence > limit).sum())
    improbable_note = f"({num_improbable} of {len(p_N)} are as improbable)"
    observed = f"one element goes up in {share[worst]:.3g} of {repeats} repeats"
    return f"{observed} and should in {p_N[worst]:.3g} {improbable_note}"
