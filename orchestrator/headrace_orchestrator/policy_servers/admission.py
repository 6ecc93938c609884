"""The number of training episodes that a run's policy servers can take, learned from the servers' metrics. Pure.

* Each server has a window of episodes; the run's limit is the sum of its servers' windows.
* A window grows by slow start, then by additive increase, and only while the run fills its limit.
* A preemption cuts a window; a standing queue reduces it by the length of the queue.
* A cut takes effect before the next one: no further cut is made while the run is above its limit.
* Growth stops while the KV cache is nearly full.
* A reading of zero while tokens are generated is ignored: vLLM's gauges often say 0 while it is busy.
* A server whose metrics do not answer keeps its window, which does not grow; one without metrics lifts the cap.
* While a server is paused for weights, and shortly after, its queue is ignored.
* An absent server counts nothing; a returning one grows by slow start up to near its last window.
* A run always has its floor, and never more than its ceiling.

A cut is a share of the server's window, so it does not depend on how long an episode keeps the engine busy.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

FILLED_SHARE = 0.8
"""Share of its limit that a run must have at workers before a window may grow. The remainder lets a fleet be scaled up
before it reaches the limit."""

SLOW_START_SHARE = 1.0
"""Growth during slow start, for each request that the server completes. Slow start lasts until the first cut. Tied to
completed requests, growth is as fast as its effect shows, however long requests take."""

SLOW_START_MAX_GROWTH = 0.5
"""Upper bound of the growth by slow start in one poll, as a share of the window."""

ADDITIVE_SHARE = 1 / 8
"""Growth after slow start for each window's worth of completed requests, as a share of the window after its last cut;
at least 1."""

QUEUE_POLLS = 2
"""Number of consecutive polls with a queue that make it a standing queue. A burst of arrivals is gone by the second."""

QUEUE_SHARE = 0.05
"""Queue length that is ignored, as a share of the window, at least 1: a short queue keeps the engine busy."""

QUEUE_CUT = 0.5
"""Upper bound of a cut for a standing queue, as a share of the window."""

PREEMPTION_CUTS = 0.1, 0.4
"""Lower and upper bound of a cut for preemptions, as shares of the window. Between them the cut is the share of running
requests that were preempted, because their work was thrown away."""

KV_SLOW_START_END = 0.5
"""Share of the KV cache in use that ends slow start: running requests still grow."""

KV_FULL = 0.9
"""Share of the KV cache in use that stops all growth."""

ZERO_READINGS = 4
"""Number of consecutive readings of zero, while tokens are generated, that count as one reading without a queue. They
do not if the reading before them had a queue."""

POLLS_IGNORED_AFTER_PAUSE = 3
"""Number of polls that are ignored after a pause, while the server works off the requests that gathered in it."""

RETURN_THRESHOLD_SHARE = 0.75
"""Limit of the slow start of a returning server, as a share of its last window."""


@dataclass(frozen=True)
class Load:
    """A reading of a server's metrics, summed over its engines. ``running``, ``waiting``: numbers of requests.
    ``kv_cache_used``: share, 0 to 1, of the fullest engine. Counters since the server's start: ``completed`` requests,
    ``preemptions``, ``tokens`` generated. ``max_adapters``: number of adapters that run at a time; 0 if unknown."""

    running: float = 0.0
    waiting: float = 0.0
    kv_cache_used: float = 0.0
    completed: float = 0.0
    preemptions: float = 0.0
    tokens: float = 0.0
    max_adapters: int = 0


Reading = Load | Literal["none", "no answer"]
"""A reading of a server's metrics; ``none`` for a server without vLLM's metrics."""


@dataclass(frozen=True)
class ServerPoll:
    """The result of one poll of a server."""

    state: Literal["serving", "paused", "absent"]
    reading: Reading = "no answer"


@dataclass(frozen=True)
class Window:
    """The window of one server. ``size`` in episodes; it grows by slow start up to ``threshold``."""

    size: float
    threshold: float = math.inf
    #: The last reading; None before the first one, and after the server was absent.
    load: Load | None = None
    unmetered: bool = False
    absent: bool = False
    #: Requests completed since the last poll that could make it grow.
    completed: float = 0.0
    #: Consecutive polls with a queue, and consecutive readings of zero while tokens are generated.
    queued_polls: int = 0
    zero_readings: int = 0
    #: True until the last cut has taken effect.
    cut_pending: bool = False
    #: Number of the next polls that are ignored.
    ignored_polls: int = 0


@dataclass(frozen=True)
class Admission:
    """The windows of one run's servers, by address. In episodes: ``start``, the window of a server that is not known
    yet; ``floor`` and ``ceiling`` of the run."""

    start: float = 32.0
    floor: int = 1
    ceiling: float = math.inf
    windows: Mapping[str, Window] = field(default_factory=dict)

    @property
    def attainable(self) -> int | None:
        """Number of training episodes that the run may have at workers; None for no cap."""
        present = [window for window in self.windows.values() if not window.absent]
        if not self.windows or any(window.unmetered for window in present):
            return None
        total = min(sum(window.size for window in present), self.ceiling)
        return max(self.floor, int(total))

    def keep_only(self, servers: Container[str]) -> Admission:
        """Remove the windows of other servers."""
        return replace(self, windows={name: window for name, window in self.windows.items() if name in servers})


def poll(admission: Admission, polls: Mapping[str, ServerPoll], leased: int) -> Admission:
    """Update the windows with one poll of some of the run's servers. ``leased``: its training episodes at workers."""
    attainable = admission.attainable
    filled = attainable is None or leased >= FILLED_SHARE * attainable
    over = attainable is not None and leased > attainable
    windows = dict(admission.windows)
    for name, server_poll in polls.items():
        window = windows.get(name) or Window(admission.start)
        windows[name] = _updated(window, server_poll, admission, filled=filled, over=over)
    return replace(admission, windows=windows)


def _updated(window: Window, server_poll: ServerPoll, admission: Admission, *, filled: bool, over: bool) -> Window:
    if server_poll.state == "absent":
        return replace(window, absent=True)
    if window.absent:
        window = _returning(window, admission.start)
    if not isinstance(server_poll.reading, Load):
        return replace(window, unmetered=server_poll.reading == "none" or window.unmetered, queued_polls=0)
    before, now = window.load, server_poll.reading
    window = replace(window, load=now, unmetered=False)
    if server_poll.state == "paused":
        return replace(window, queued_polls=0, ignored_polls=POLLS_IGNORED_AFTER_PAUSE)
    if window.ignored_polls:
        return replace(window, queued_polls=0, ignored_polls=window.ignored_polls - 1)
    if before is None or now.preemptions < before.preemptions or now.tokens < before.tokens:
        return window  # the first reading of this process: its counters start at 0
    if window.cut_pending:
        return replace(window, cut_pending=over, queued_polls=0)
    if preempted := now.preemptions - before.preemptions:
        least, most = PREEMPTION_CUTS
        return _cut(window, max(least, min(most, preempted / (now.running or window.size))))
    return _by_queue(window, before, now, filled, admission.ceiling)


def _by_queue(window: Window, before: Load, now: Load, filled: bool, ceiling: float) -> Window:
    """Cut the window for a standing queue, and let it grow without a queue."""
    completed = window.completed + now.completed - before.completed
    reads_zero = now.running + now.waiting == 0 and now.tokens > before.tokens
    if reads_zero:
        if window.queued_polls or window.zero_readings + 1 < ZERO_READINGS:
            return replace(window, zero_readings=window.zero_readings + 1, completed=completed)
    elif now.waiting > max(1.0, QUEUE_SHARE * window.size):
        queued_polls = window.queued_polls + 1
        if queued_polls < QUEUE_POLLS:
            return replace(window, queued_polls=queued_polls, zero_readings=0)
        return _cut(window, min(QUEUE_CUT, now.waiting / (now.running + now.waiting)))
    window = replace(window, queued_polls=0, zero_readings=0, completed=0.0)
    if not filled or now.waiting > 1 or now.kv_cache_used >= KV_FULL:
        return window
    if window.size < window.threshold and now.kv_cache_used < KV_SLOW_START_END and not reads_zero:
        growth = min(SLOW_START_SHARE * completed, SLOW_START_MAX_GROWTH * window.size, window.threshold - window.size)
    else:
        step = max(1.0, ADDITIVE_SHARE * min(window.size, window.threshold))
        growth = step * min(1.0, completed / window.size)
    return replace(window, size=min(window.size + growth, ceiling))


def _cut(window: Window, share: float) -> Window:
    size = max(1.0, window.size * (1 - share))
    return replace(window, size=size, threshold=size, queued_polls=0, zero_readings=0, cut_pending=True)


def _returning(window: Window, start: float) -> Window:
    """The first window of a server that was absent: most likely a new process with the same capacity."""
    return Window(size=min(start, window.size), threshold=max(start, RETURN_THRESHOLD_SHARE * window.size))
