"""``Moments``: count, mean and sum of squared deviations, in float64.

* The moments of a whole are the merged moments of its parts, in any order (Chan's rule).
* A merged part can be removed again.
* A spread that is small relative to the mean is preserved: no formula subtracts a squared mean from a mean of squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest

ROUNDING_LEVEL = 1e-12
"""Largest spread that counts as a rounding error, relative to the larger of 1 and the mean's magnitude."""

LAST_DIGITS = 1e-15
"""Relative error of a float64 mean: a few units in the last place."""


class Moments(msgspec.Struct, frozen=True, array_like=True):
    """Moments: ``n``, a count or a sum of weights; ``mean``; ``m2``, the weighted sum of squared deviations."""

    n: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Self:
        """The moments of ``values`` f64[k], each counted once or with its weight (f64[k], not negative)."""
        x = np.asarray(values, np.float64).ravel()
        if not x.size:
            return cls()
        w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64).ravel()
        n = float(w.sum())
        if n <= 0:
            return cls()
        # Deviations from the first value preserve the digits that a large common offset would lose.
        mean = float(x[0]) + float(w @ (x - x[0])) / n
        deviation = x - mean
        slip = float(w @ deviation) / n
        return cls(n, mean + slip, max(float(w @ (deviation * deviation)) - n * slip * slip, 0.0))

    def merge(self, other: Moments) -> Moments:
        """The moments of both together."""
        if not self.n or not other.n:
            return other if not self.n else self
        n = self.n + other.n
        delta = other.mean - self.mean
        return Moments(n, self.mean + delta * other.n / n, self.m2 + other.m2 + delta * delta * self.n * other.n / n)

    def without(self, part: Moments) -> Moments:
        """The moments without a merged part, exact up to rounding. Raises InvalidRequest if the part is larger."""
        n = self.n - part.n
        if n < 0:
            raise InvalidRequest(
                f"The moments of {part.n:g} values cannot be removed from those of {self.n:g}.",
                hint="Remove only merged parts.",
            )
        if n == 0:
            return Moments()
        delta = (part.mean - self.mean) * self.n / n
        mean = self.mean - delta * part.n / self.n
        return Moments(n, mean, max(self.m2 - part.m2 - delta * delta * n * part.n / self.n, 0.0))

    def agrees(self, other: Moments, tolerance: float = ROUNDING_LEVEL) -> bool:
        """True if both are equal up to rounding, relative to each number and to the magnitude of the mean."""
        n, spread = max(self.n, other.n), max(self.m2, other.m2)
        scale = max(1.0, abs(self.mean), abs(other.mean))
        # An error in the last digits of the mean shifts every deviation equally.
        of_means = 2 * math.sqrt(n * spread) * LAST_DIGITS * scale
        return (
            abs(self.n - other.n) <= tolerance * n
            and abs(self.mean - other.mean) <= tolerance * scale
            and abs(self.m2 - other.m2) <= tolerance * spread + of_means + n * (tolerance * scale) ** 2
        )

    def variance(self, ddof: int = 0) -> float:
        """``m2 / (n - ddof)``; 0 for at most ``ddof`` values."""
        return self.m2 / (self.n - ddof) if self.n > ddof else 0.0

    def std(self, ddof: int = 0) -> float:
        """The square root of the variance."""
        return math.sqrt(self.variance(ddof))

    def is_constant(self, error: float = 0.0) -> bool:
        """True if the spread is at most a rounding error of float64, or at most ``error``."""
        return self.std() <= max(error, ROUNDING_LEVEL * max(1.0, abs(self.mean)))


def merge_all(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    total = Moments()
    for part in parts:
        total = total.merge(part)
    return total
