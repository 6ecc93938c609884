"""Packing of rows into bins. A learner computes the rows of a bin as one sequence.

* A bin never exceeds its bound; no row is cut, and a row longer than a bin is refused.
* First-fit decreasing: rows are placed from the longest to the shortest, each into the first bin with room for it.
* The same rows give the same bins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest
from headrace.estimators import I64


def pack_bins(row_tokens: npt.ArrayLike, bin_tokens: int) -> I64:
    """The bin of each row, i64[rows], numbered in the order in which bins are opened.

    ``row_tokens`` i64[rows]. ``bin_tokens`` 0: each row is its own bin. Raises InvalidRequest for a row longer than a
    bin.
    """
    tokens = np.asarray(row_tokens, np.int64)
    if not bin_tokens:
        return np.arange(len(tokens), dtype=np.int64)
    if tokens.size and tokens.max() > bin_tokens:
        raise InvalidRequest(
            f"A row of {tokens.max()} tokens does not fit into a bin of {bin_tokens}.",
            hint="Give the run larger bins, or a lower max_context_tokens.",
        )
    bins = np.zeros(len(tokens), np.int64)
    room = _FreeSpace(len(tokens), bin_tokens)
    for row in np.argsort(-tokens, kind="stable").tolist():
        bins[row] = room.take(int(tokens[row]))
    return bins


class _FreeSpace:
    """Free tokens of all bins, as a tree of maxima."""

    def __init__(self, bins: int, tokens: int) -> None:
        self._leaves = 1 << max(0, bins - 1).bit_length()
        self._free = [tokens] * (2 * self._leaves)

    def take(self, tokens: int) -> int:
        """Put a row into the first bin with room; returns the number of the bin."""
        free, node = self._free, 1
        while node < self._leaves:
            node *= 2
            if free[node] < tokens:
                node += 1
        bin = node - self._leaves
        free[node] -= tokens
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
        return bin
