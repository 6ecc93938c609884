"""The number of training episodes that a run's policy servers can take, learned from the servers' metrics. Pure.

* Each server has a window of episodes; the run's limit is the sum of its servers' windows.
* A window grows by slow start, then by additive increase, and only while the run fills its limit.
* A preemption cuts a window; a standing queue reduces it by the length of the queue.
* A cut takes effect before the next one: while the run is above its limit, there is no further cut.
* Growth stops while the KV cache is nearly full.
* A reading of zero while tokens are generated is ignored: vLLM's gauges often say 0 while it is busy.
* A server whose metrics do not answer keeps its window, which does not grow; one without metrics lifts the cap.
* While a server is paused for weights, and shortly after, its queue is ignored.
* An absent server counts nothing; a returning one grows by slow start up to near its last window.
* A run always has its floor, and never more than its ceiling.

Cutting needs no knowledge of how long an episode is at the engine: it goes by shares of what the server had.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

FILLED_SHARE = 0.8
"""Of what a run may have, at workers: from there on the bound is felt, and a window may grow. What is left lets a
fleet be scaled ahead of it."""

SLOW_START_SHARE = 1.0
"""Until its first cut a window grows by this much for each request that its server completes, so that growth keeps
the pace at which its effect shows, however long requests take."""

SLOW_START_MOST = 0.5
"""Of a window: most that slow start adds in a poll."""

ADDITIVE_SHARE = 1 / 8
"""Of the window after a cut: what it then grows by, at least 1, for each of its episodes' worth of requests."""

QUEUE_POLLS = 2
"""Polls in a row with a queue from which on it stands: a burst of arrivals is gone by the second."""

QUEUE_SHARE = 0.05
"""Of a window: a queue up to this, at least 1, keeps the engine busy and is left alone."""

QUEUE_CUT = 0.5
"""A standing queue takes at most this share off a window."""

PREEMPTION_CUTS = 0.1, 0.4
"""Least and most that preemptions take off a window: work was thrown away. Between them, the share of what ran that was
preempted."""

KV_SLOW = 0.5
"""Share of the KV cache in use from which on slow start ends: what runs still grows."""

KV_FULL = 0.9
"""Share of the KV cache in use from which on nothing grows."""

BLIND_POLLS = 4
"""Readings of nothing while tokens come that together count as one of no queue, if the one before them was of none."""

AFTER_PAUSE_POLLS = 3
"""Polls after a pause from which nothing is concluded: what gathered meanwhile is worked off."""

RETURN_SHARE = 0.75
"""Of its last window: how far the slow start of a server goes that comes back."""


@dataclass(frozen=True)
class Load:
    """One reading of a server's metrics, all its engines together. ``running``, ``waiting``: requests.
    ``kv_cache_used``: share, 0 to 1, of the fullest engine. Counters since its start: ``completed`` requests,
    ``preemptions``, ``tokens`` generated. ``max_adapters`` that run at a time; 0 where it does not say."""

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

    state: Literal["serving", "paused", "away"]
    reading: Reading = "no answer"


@dataclass(frozen=True)
class Window:
    """The window of one server. ``size`` in episodes; it grows by slow start up to ``threshold``."""

    size: float
    threshold: float = math.inf
    #: The last reading; None where counters begin anew.
    load: Load | None = None
    unmetered: bool = False
    away: bool = False
    #: Requests completed since it could last have grown.
    completed: float = 0.0
    #: Polls in a row that found a queue, and those that found nothing while tokens came.
    queued: int = 0
    blind: int = 0
    #: Whether a cut has not taken effect yet.
    cut: bool = False
    #: Polls to come from which nothing is concluded.
    ignoring: int = 0

    @property
    def step(self) -> float:
        """The growth for each of its episodes' worth of requests, after slow start."""
        return max(1.0, ADDITIVE_SHARE * min(self.size, self.threshold))


@dataclass(frozen=True)
class Admission:
    """State of the controller of one run: the windows of its servers by address. In episodes: ``start``, what a server
    gets before anything is known of it; ``floor`` and ``ceiling`` of the run."""

    start: float = 32.0
    floor: int = 1
    ceiling: float = math.inf
    windows: Mapping[str, Window] = field(default_factory=dict)

    @property
    def attainable(self) -> int | None:
        """Training episodes that the run may have at workers; None for no cap."""
        there = [window for window in self.windows.values() if not window.away]
        if not self.windows or any(window.unmetered for window in there):
            return None
        total = min(sum(window.size for window in there), self.ceiling)
        return max(self.floor, int(total))

    def only(self, servers: Container[str]) -> Admission:
        """Remove the windows of other servers."""
        return replace(self, windows={name: window for name, window in self.windows.items() if name in servers})


def poll(admission: Admission, seen: Mapping[str, ServerPoll], leased: int) -> Admission:
    """Take one poll of some of the run's servers. ``leased``: its training episodes at workers."""
    attainable = admission.attainable
    filled = attainable is None or leased >= FILLED_SHARE * attainable
    over = attainable is not None and leased > attainable
    windows = dict(admission.windows)
    for name, one in seen.items():
        window = windows.get(name) or Window(admission.start)
        windows[name] = _window(window, one, admission, filled=filled, over=over)
    return replace(admission, windows=windows)


def _window(window: Window, seen: ServerPoll, admission: Admission, *, filled: bool, over: bool) -> Window:
    if seen.state == "away":
        return replace(window, away=True)
    if window.away:
        window = _returned(window, admission.start)
    if not isinstance(seen.reading, Load):
        return replace(window, unmetered=seen.reading == "none" or window.unmetered, queued=0)
    before, now = window.load, seen.reading
    window = replace(window, load=now, unmetered=False)
    if seen.state == "paused":
        return replace(window, queued=0, ignoring=AFTER_PAUSE_POLLS)
    if window.ignoring:
        return replace(window, queued=0, ignoring=window.ignoring - 1)
    if before is None or now.preemptions < before.preemptions or now.tokens < before.tokens:
        return window  # the first reading, or the first of another process: counters begin anew
    if window.cut:
        return replace(window, cut=over, queued=0)
    if preempted := now.preemptions - before.preemptions:
        least, most = PREEMPTION_CUTS
        return _cut(window, max(least, min(most, preempted / (now.running or window.size))))
    return _by_queue(window, before, now, filled, admission.ceiling)


def _by_queue(window: Window, before: Load, now: Load, filled: bool, ceiling: float) -> Window:
    """Cut by a queue that stands; grow where there is none."""
    completed = window.completed + now.completed - before.completed
    blind = now.running + now.waiting == 0 and now.tokens > before.tokens
    if blind:
        if window.queued or window.blind + 1 < BLIND_POLLS:
            return replace(window, blind=window.blind + 1, completed=completed)
    elif now.waiting > max(1.0, QUEUE_SHARE * window.size):
        queued = window.queued + 1
        if queued < QUEUE_POLLS:
            return replace(window, queued=queued, blind=0)
        return _cut(window, min(QUEUE_CUT, now.waiting / (now.running + now.waiting)))
    window = replace(window, queued=0, blind=0, completed=0.0)
    if not filled or now.waiting > 1 or now.kv_cache_used >= KV_FULL:
        return window
    if window.size < window.threshold and now.kv_cache_used < KV_SLOW and not blind:
        more = min(SLOW_START_SHARE * completed, SLOW_START_MOST * window.size, window.threshold - window.size)
    else:
        more = window.step * min(1.0, completed / window.size)
    return replace(window, size=min(window.size + more, ceiling))


def _cut(window: Window, share: float) -> Window:
    size = max(1.0, window.size * (1 - share))
    return replace(window, size=size, threshold=size, queued=0, blind=0, cut=True)


def _returned(window: Window, start: float) -> Window:
    """A server that was away: another process, most likely, of the same capacity."""
    return Window(size=min(start, window.size), threshold=max(start, RETURN_SHARE * window.size))
