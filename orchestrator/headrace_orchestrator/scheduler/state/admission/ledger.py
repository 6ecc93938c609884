"""The credit ledger: the number of groups and of bytes that may be in flight.

* Admission continues while groups in flight are fewer than the credit; it is ``(max_staleness + 1) · ⌈batch / G⌉``.
* For a token budget the groups of a batch are estimated from recent groups; at least one.
* Bytes are reserved from admission on; the true size of a record replaces the estimate.
* Submitted groups draw no credit, only bytes; evaluations draw neither.

Reserving at admission, not at dispatch, keeps a burst of admissions from overshooting the bound.
"""

from __future__ import annotations

import math
from collections import deque

from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds

MIN_EPISODE_BYTES = 4096
"""Minimum estimate of a record in bytes: every record has at least its head and one aligned array."""

RECENT = 32
"""Number of latest records and groups in an estimate: enough to be steady, few enough to follow a change."""


class Ledger:
    """Counts of one run."""

    __slots__ = (
        "batch_groups",
        "bounds",
        "estimate",
        "held_bytes",
        "in_flight",
        "sizes",
        "spec",
        "tokens",
        "unfinished",
    )

    def __init__(self, spec: RunSpec, bounds: SharedBounds) -> None:
        self.spec = spec
        self.bounds = bounds
        self.in_flight = 0
        #: Episodes of groups in flight, submitted ones included, that are not over.
        self.unfinished = 0
        self.held_bytes = 0
        self.sizes: deque[int] = deque(maxlen=RECENT)
        self.tokens: deque[int] = deque(maxlen=RECENT)
        #: Estimated bytes of an unfinished episode.
        self.estimate = MIN_EPISODE_BYTES
        #: Estimated groups of a batch.
        self.batch_groups = spec.batch_groups

    @property
    def capacity(self) -> int:
        """Groups that may be in flight."""
        return (self.spec.max_staleness + 1) * self.batch_groups

    @property
    def free(self) -> int:
        """Groups that may still be admitted."""
        return max(0, self.capacity - self.in_flight)

    @property
    def reserved_bytes(self) -> int:
        """Estimated bytes of unfinished episodes."""
        return self.unfinished * self.estimate

    @property
    def own_full(self) -> bool:
        """True if the run's byte bound stops admission."""
        return self.held_bytes + self.unfinished * self.estimate >= self.spec.max_bytes

    @property
    def full(self) -> bool:
        """True if a byte bound stops admission, the run's or a shared one."""
        return self.own_full or self.bounds.full

    def learn_size(self, size_bytes: int) -> None:
        """Update the estimate with the size of a record."""
        sizes = self.sizes
        if len(sizes) == RECENT and sizes[0] == self.estimate:
            sizes.append(size_bytes)
            self.estimate = max(MIN_EPISODE_BYTES, *sizes)
        else:
            sizes.append(size_bytes)
            if size_bytes > self.estimate:
                self.estimate = size_bytes

    def learn_tokens(self, row_tokens: int) -> None:
        """Update the groups that a batch needs with the tokens of a complete group."""
        self.tokens.append(max(1, row_tokens))
        if self.spec.batch_tokens is not None:
            mean = sum(self.tokens) / len(self.tokens)
            self.batch_groups = max(1, math.ceil(self.spec.batch_tokens / mean))
