"""Decisions of the pool: which execution starts, who leases which sandbox, and what is made, reset and closed.

Pure: events in, instructions out; the clock and ids are given. The shell carries the instructions out and reports
the outcomes.

* Every request is answered once: started, handed a sandbox, or refused with the reason.
* Owners share fairly; each request has a deadline, and beyond a bound on waiting requests the answer is ``busy``.
* A sandbox has one lease at a time. One that was used is handed on only after it was reset; a suspicious one, and one
  whose lease ran out, is closed.
* Making and closing are bounded apart, and a sandbox that is being closed holds its memory until it is gone: neither
  can block the other for ever.
* The memory limits of all executions and sandboxes never add up to more than the pool's memory.
* A sandbox that cannot be closed is kept out of use, and its memory counts as taken.

States of a sandbox: ``making → idle → leased → cleaning → idle``; from each of them ``doomed → closing → gone``, or
``stuck`` where it could not be closed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_sandbox.pool.fair_queue import FairQueue, WaitingRequest
from headrace_sandbox.pool.messages import (
    Clean,
    Close,
    Counts,
    Hand,
    Instruction,
    Make,
    NotMade,
    PoolSettings,
    Refuse,
    Request,
    Revoke,
    SandboxKind,
    Start,
    WarmBounds,
)

State = Literal["making", "idle", "leased", "cleaning", "doomed", "closing", "stuck"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Pause before the next attempt after a sandbox of a kind could not be made; doubled each time."""

SHORTEST_AFTER_S, LONGEST_AFTER_S = 0.1, 30.0
"""Bounds of the time after which a refused client is advised to try again."""

FEW_DUE = 1024
"""Number of due times that are kept without a check; beyond it, the obsolete ones are removed."""

PACE_SHARE = 0.1
"""Weight of the newest gap between two served requests in their moving average."""

EXECUTIONS = ""
"""Name of the queue of executions that have a sandbox of their own."""


@dataclass(eq=False)
class PooledSandbox:
    """A sandbox of the pool. ``begun_at``: when it began to be made or reset; ``ready_at``: when that was done.
    ``ends_at``: when it ends by itself."""

    id: str
    kind: SandboxKind
    state: State
    begun_at: float
    ends_at: float
    ready_at: float = 0.0
    lease: Lease | None = None


@dataclass(eq=False)
class Lease:
    id: str
    owner: str
    sandbox: PooledSandbox
    until: float


@dataclass(eq=False)
class RetryPause:
    """The pause of a kind whose sandboxes could not be made: failures in a row, and the time of the next attempt."""

    failures: int
    until: float


class Core:
    """State of the pool. ``warm``: kinds of sandboxes that are kept ready, with bounds of their own."""

    def __init__(
        self,
        settings: PoolSettings,
        new_id: Callable[[], str],
        warm: Sequence[tuple[SandboxKind, WarmBounds]] = (),
    ) -> None:
        self._settings = settings
        self._new_id = new_id
        self._bounds = {kind.name: bounds for kind, bounds in warm}
        self._kinds = {kind.name: kind for kind, _ in warm}
        self._lines: dict[str, FairQueue] = {EXECUTIONS: FairQueue(EXECUTIONS)}
        self._waiting: dict[str, WaitingRequest] = {}
        self._running: dict[str, tuple[str, int]] = {}
        self._pooled: dict[str, PooledSandbox] = {}
        self._leases: dict[str, Lease] = {}
        self._pauses: dict[str, RetryPause] = {}
        self._due: list[tuple[float, str]] = []
        self._most_due = FEW_DUE
        self._memory_bytes = 0
        self._making = self._closing = 0
        self._asked = 0
        self._draining = False
        self._pace_s: float | None = None
        self._served_at = 0.0
        self._out: list[Instruction] = []

    # Events -----------------------------------------------------------------------------------------------------

    def ask(self, request: Request, now: float) -> list[Instruction]:
        """Accept a request, or refuse it."""
        refusal = self._refusal(request)
        if refusal is not None:
            return [refusal]
        if request.kind is not None:
            self._kinds[request.kind.name] = request.kind
        line = self._line(EXECUTIONS if request.kind is None else request.kind.name)
        waiting = WaitingRequest(
            id=request.id,
            number=self._asked,
            owner=request.owner,
            asked_at=now,
            until=now + request.wait_s,
            wait_s=request.wait_s,
            memory_bytes=request.memory_bytes,
            ttl_s=request.ttl_s,
            line=line,
        )
        self._asked += 1
        self._waiting[request.id] = waiting
        line.join(waiting)
        self._serve(now)
        if len(self._waiting) > self._settings.waiting:
            self._turn_away()
        if request.id in self._waiting:
            self._wake(waiting.until, request.id)
        return self._advance(now)

    def withdraw(self, request: str, now: float) -> list[Instruction]:
        """Remove a request whose client has gone; a sandbox it already got is returned by ``give_back``."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting.line.leave(waiting)
            self._forget(waiting.line.name)
        return self._advance(now)

    def done(self, request: str, now: float) -> list[Instruction]:
        """Record that an execution ended."""
        owner, memory_bytes = self._running.pop(request)
        self._lines[EXECUTIONS].done(owner)
        self._memory_bytes -= memory_bytes
        return self._advance(now)

    def made(self, sandbox: str, now: float) -> list[Instruction]:
        """Record that a sandbox was made."""
        it = self._in(sandbox, "making")
        self._making -= 1
        self._pauses.pop(it.kind.name, None)
        self._rest(it, now)
        return self._advance(now)

    def not_made(self, sandbox: str, why: NotMade, now: float) -> list[Instruction]:
        """Record that a sandbox could not be made, and left nothing. Retry after a pause, unless it is hopeless."""
        it = self._in(sandbox, "making")
        self._making -= 1
        name = it.kind.name
        failures = self._pauses[name].failures + 1 if name in self._pauses else 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10))
        self._pauses[name] = RetryPause(failures, now + pause_s)
        self._wake(now + pause_s, "")
        for waiting in list(self._line(name)):
            waiting.trouble = why.detail
            if not why.retryable:
                self._refuse(waiting, why.kind, why.detail, retryable=False)
        self._gone(it)
        return self._advance(now)

    def give_back(self, lease: str, reusable: bool, now: float) -> list[Instruction]:
        """End a lease. ``reusable``: nothing suspicious happened in the sandbox. An unknown lease has expired."""
        it = self._leases.get(lease)
        if it is not None:
            sandbox = self._end(it)
            if reusable and self._settings.reuse and not self._draining:
                sandbox.state, sandbox.begun_at = "cleaning", now
                self._out.append(Clean(sandbox.id))
            else:
                sandbox.state = "doomed"
        return self._advance(now)

    def renew(self, lease: str, ttl_s: float, now: float) -> float | None:
        """Extend a lease to this long from now, at most to the end of its sandbox; returns the time granted. None: the
        lease is unknown."""
        it = self._leases.get(lease)
        if it is None or it.until <= now:
            return None
        it.until = min(now + min(ttl_s, self._settings.ttl_s), it.sandbox.ends_at)
        self._wake(it.until, lease)
        return it.until - now

    def cleaned(self, sandbox: str, now: float) -> list[Instruction]:
        """Record that a sandbox was reset."""
        self._rest(self._in(sandbox, "cleaning"), now)
        return self._advance(now)

    def not_cleaned(self, sandbox: str, now: float) -> list[Instruction]:
        """Close a sandbox that could not be reset."""
        self._in(sandbox, "cleaning").state = "doomed"
        return self._advance(now)

    def closed(self, sandbox: str, now: float) -> list[Instruction]:
        """Record that a sandbox was closed, and nothing is left of it."""
        it = self._in(sandbox, "closing")
        self._closing -= 1
        self._gone(it)
        return self._advance(now)

    def not_closed(self, sandbox: str, now: float) -> list[Instruction]:
        """Record that a sandbox could not be closed: something in it may still run."""
        self._in(sandbox, "closing").state = "stuck"
        self._closing -= 1
        return self._advance(now)

    def drain(self, now: float) -> list[Instruction]:
        """Shut down: refuse waiting and new requests, and close idle sandboxes."""
        self._draining = True
        for waiting in list(self._waiting.values()):
            self._refuse(waiting, "draining", "The sandboxes of this host are being shut down.", retryable=True)
        return self._advance(now)

    def tick(self, now: float) -> list[Instruction]:
        """Act on the current time."""
        return self._advance(now)

    def next_due(self) -> float | None:
        """The time of the next ``tick``; None: no tick is needed before the next event."""
        return self._due[0][0] if self._due else None

    def counts(self) -> Counts:
        """Current counts of requests and sandboxes."""
        states: dict[str, int] = dict.fromkeys(("making", "idle", "leased", "cleaning", "closing", "stuck"), 0)
        for sandbox in self._pooled.values():
            states["closing" if sandbox.state == "doomed" else sandbox.state] += 1
        return Counts(
            waiting=len(self._waiting),
            running=len(self._running),
            leases=len(self._leases),
            memory_bytes=self._memory_bytes,
            sandboxes=states,
        )

    # Consequences of the state ---------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Instruction]:
        self._expire(now)
        if self._waiting:
            self._serve(now)
        if self._bounds and not self._draining:
            self._warm(now)
        if self._pooled:
            self._close()
        return self._taken_out()

    def _taken_out(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            name = heapq.heappop(self._due)[1]
            if (waiting := self._waiting.get(name)) is not None and waiting.until <= now:
                self._too_late(waiting)
            elif (lease := self._leases.get(name)) is not None and lease.until <= now:
                self._out.append(Revoke(lease.id, lease.sandbox.id))
                self._end(lease).state = "doomed"
            elif (sandbox := self._pooled.get(name)) is not None and sandbox.state == "idle":
                self._end_of_rest(sandbox, now)

    def _end_of_rest(self, sandbox: PooledSandbox, now: float) -> None:
        is_unasked = now >= sandbox.ready_at + self._settings.idle_s
        if now >= self._too_old_at(sandbox) or (is_unasked and self._beyond_warm(sandbox)):
            sandbox.state = "doomed"
        elif is_unasked:
            self._wake(self._too_old_at(sandbox), sandbox.id)

    def _too_old_at(self, sandbox: PooledSandbox) -> float:
        """The time from which the sandbox is too old for the longest lease."""
        return sandbox.ends_at - self._settings.ttl_s

    def _beyond_warm(self, sandbox: PooledSandbox) -> bool:
        bounds = self._bounds.get(sandbox.kind.name)
        idle = sum(other.state == "idle" for other in self._of(sandbox.kind.name))
        return bounds is None or idle > bounds.least

    def _serve(self, now: float) -> None:
        """Serve every queue as far as possible, the longest wait first. The memory that the first unserved request
        needs is kept for it, unless leases hold that memory: they may last."""
        lines = [line for line in self._lines.values() if len(line)]
        if len(lines) > 1:
            lines.sort(key=lambda line: line.head().number)
        kept_bytes = 0
        for line in lines:
            serve = self._serve_executions if line.name == EXECUTIONS else self._serve_leases
            lacking = serve(line, kept_bytes, now)
            if lacking and not kept_bytes and self._can_become_free(lacking):
                kept_bytes = lacking
                self._free_memory(lacking, line.name)

    def _serve_executions(self, line: FairQueue, kept_bytes: int, now: float) -> int:
        """Start executions; returns the memory that the next one lacks."""
        while len(line) and len(self._running) < self._settings.running:
            head = line.head()
            if not self._fits(head.memory_bytes + kept_bytes):
                return head.memory_bytes
            self._memory_bytes += head.memory_bytes
            self._running[head.id] = (head.owner, head.memory_bytes)
            self._leaves_served(head, now)
            self._out.append(Start(head.id, now - head.asked_at))
        return 0

    def _serve_leases(self, line: FairQueue, kept_bytes: int, now: float) -> int:
        """Lease idle sandboxes, and have more made; returns the memory that the next request lacks."""
        sandboxes = list(self._of(line.name))
        resting = sorted(
            (sandbox for sandbox in sandboxes if sandbox.state == "idle"), key=lambda sandbox: sandbox.ready_at
        )
        while len(line) and resting:
            self._hand(line.head(), resting.pop(0), now)
        coming = sum(sandbox.state in ("making", "cleaning") for sandbox in sandboxes)
        kind = self._kinds[line.name]
        wanted = min(len(line) - coming, self._most(line.name) - len(sandboxes), self._settings.making - self._making)
        for _ in range(0 if self._is_paused(line.name, now) else wanted):
            if not self._fits(kind.memory_bytes + kept_bytes):
                return kind.memory_bytes
            self._make(kind, now)
        return 0

    def _hand(self, waiting: WaitingRequest, sandbox: PooledSandbox, now: float) -> None:
        made_from = max(waiting.asked_at, sandbox.begun_at)
        start_s = max(0.0, sandbox.ready_at - made_from)
        lease = Lease(self._new_id(), waiting.owner, sandbox, min(now + waiting.ttl_s, sandbox.ends_at))
        sandbox.state, sandbox.lease = "leased", lease
        self._leases[lease.id] = lease
        self._wake(lease.until, lease.id)
        self._leaves_served(waiting, now)
        queue_s = max(0.0, now - waiting.asked_at - start_s)
        self._out.append(Hand(waiting.id, lease.id, sandbox.id, queue_s, start_s, lease.until - now))

    def _warm(self, now: float) -> None:
        """Have warm sandboxes made for later requests. They never take memory that a request waits for."""
        if self._waiting:
            return
        for name, bounds in self._bounds.items():
            sandboxes = list(self._of(name))
            ready = sum(sandbox.state in ("idle", "making", "cleaning") for sandbox in sandboxes)
            for _ in range(min(bounds.least - ready, bounds.most - len(sandboxes))):
                room = self._making < self._settings.making and self._fits(self._kinds[name].memory_bytes)
                if not room or self._is_paused(name, now):
                    break
                self._make(self._kinds[name], now)

    def _close(self) -> None:
        for sandbox in self._pooled.values():
            if self._draining and sandbox.state == "idle":
                sandbox.state = "doomed"
            if sandbox.state == "doomed" and self._closing < self._settings.closing:
                sandbox.state = "closing"
                self._closing += 1
                self._out.append(Close(sandbox.id))

    # Parts ------------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> Refuse | None:
        """The reason that a request can never be served, if any."""
        most = self._settings
        if self._draining:
            return Refuse(request.id, "draining", "The sandboxes of this host are being shut down.", True)
        if request.memory_bytes > most.memory_bytes:
            asked, there = request.memory_bytes >> 20, most.memory_bytes >> 20
            return Refuse(request.id, "too-large", f"It may use {asked} MiB, and the pool has {there} MiB.", False)
        if request.ttl_s > most.ttl_s:
            detail = f"A lease lasts {most.ttl_s:g} s at most, and this one should {request.ttl_s:g} s."
            return Refuse(request.id, "ttl-too-long", detail, False)
        return None

    def _turn_away(self) -> None:
        """Refuse one request when too many wait: the newest of the owner with the most waiting requests."""
        counts: dict[str, int] = {}
        for waiting in self._waiting.values():
            counts[waiting.owner] = counts.get(waiting.owner, 0) + 1
        most = max(counts.values())
        newest = next(waiting for waiting in reversed(self._waiting.values()) if counts[waiting.owner] == most)
        after_s = max(SHORTEST_AFTER_S, min(LONGEST_AFTER_S, len(self._waiting) * (self._pace_s or SHORTEST_AFTER_S)))
        detail = f"{self._settings.waiting} requests wait for a sandbox already."
        self._refuse(newest, "busy", detail, retryable=True, after_s=after_s)

    def _too_late(self, waiting: WaitingRequest) -> None:
        detail = f"no sandbox within {waiting.wait_s:g} s"
        if waiting.trouble:
            detail += f"; the last one could not be made: {waiting.trouble}"
        self._refuse(waiting, "no-sandbox-in-time", detail, retryable=True)

    def _refuse(
        self, waiting: WaitingRequest, kind: str, detail: str, *, retryable: bool, after_s: float | None = None
    ) -> None:
        del self._waiting[waiting.id]
        waiting.line.leave(waiting)
        self._forget(waiting.line.name)
        self._out.append(Refuse(waiting.id, kind, detail, retryable, after_s))

    def _leaves_served(self, waiting: WaitingRequest, now: float) -> None:
        del self._waiting[waiting.id]
        waiting.line.serve(waiting)
        gap_s, self._served_at = now - self._served_at, now
        self._pace_s = gap_s if self._pace_s is None else self._pace_s + PACE_SHARE * (gap_s - self._pace_s)

    def _make(self, kind: SandboxKind, now: float) -> None:
        sandbox = PooledSandbox(self._new_id(), kind, "making", now, now + 2 * self._settings.ttl_s)
        self._pooled[sandbox.id] = sandbox
        self._making += 1
        self._memory_bytes += kind.memory_bytes
        self._out.append(Make(sandbox.id, kind, 2 * self._settings.ttl_s))

    def _rest(self, sandbox: PooledSandbox, now: float) -> None:
        sandbox.state, sandbox.ready_at = "idle", now
        if now >= self._too_old_at(sandbox) or self._draining:
            sandbox.state = "doomed"
        self._wake(min(now + self._settings.idle_s, self._too_old_at(sandbox)), sandbox.id)

    def _end(self, lease: Lease) -> PooledSandbox:
        sandbox = lease.sandbox
        del self._leases[lease.id]
        self._lines[sandbox.kind.name].done(lease.owner)
        sandbox.lease = None
        return sandbox

    def _gone(self, sandbox: PooledSandbox) -> None:
        del self._pooled[sandbox.id]
        self._memory_bytes -= sandbox.kind.memory_bytes
        self._forget(sandbox.kind.name)

    def _forget(self, name: str) -> None:
        """Delete the state of a kind with neither waiting requests nor sandboxes: kinds come and go."""
        if name == EXECUTIONS or name in self._bounds or len(self._line(name)) or any(self._of(name)):
            return
        for table in (self._lines, self._kinds, self._pauses):
            table.pop(name, None)

    def _can_become_free(self, memory_bytes: int) -> bool:
        """True if this much memory becomes free without the end of a lease."""
        held = sum(
            sandbox.kind.memory_bytes for sandbox in self._pooled.values() if sandbox.state in ("leased", "stuck")
        )
        return held + memory_bytes <= self._settings.memory_bytes

    def _free_memory(self, lacking: int, name: str) -> None:
        """Doom idle sandboxes, the longest idle first, until this much memory becomes free."""
        coming = sum(
            sandbox.kind.memory_bytes for sandbox in self._pooled.values() if sandbox.state in ("doomed", "closing")
        )
        resting = (
            sandbox for sandbox in self._pooled.values() if sandbox.state == "idle" and sandbox.kind.name != name
        )
        for sandbox in sorted(resting, key=lambda sandbox: sandbox.ready_at):
            if self._fits(lacking - coming):
                return
            sandbox.state = "doomed"
            coming += sandbox.kind.memory_bytes

    def _fits(self, memory_bytes: int) -> bool:
        return self._memory_bytes + memory_bytes <= self._settings.memory_bytes

    def _of(self, name: str) -> Iterator[PooledSandbox]:
        return (sandbox for sandbox in self._pooled.values() if sandbox.kind.name == name)

    def _most(self, name: str) -> int:
        bounds = self._bounds.get(name)
        return self._settings.sandboxes if bounds is None else bounds.most

    def _is_paused(self, name: str, now: float) -> bool:
        pause = self._pauses.get(name)
        return pause is not None and now < pause.until

    def _line(self, name: str) -> FairQueue:
        return self._lines.setdefault(name, FairQueue(name))

    def _in(self, sandbox: str, state: State) -> PooledSandbox:
        it = self._pooled[sandbox]
        assert it.state == state, f"sandbox {sandbox} is {it.state}, not {state}"
        return it

    def _wake(self, at: float, name: str) -> None:
        heapq.heappush(self._due, (at, name))
        if len(self._due) > self._most_due:
            self._due = [due for due in set(self._due) if self._is_awaited(*due)]
            heapq.heapify(self._due)
            self._most_due = max(FEW_DUE, 2 * len(self._due))

    def _is_awaited(self, at: float, name: str) -> bool:
        """True if something may be due at this time: most requests are served, and leases renewed, long before."""
        lease = self._leases.get(name)
        return at == lease.until if lease is not None else not name or name in self._waiting or name in self._pooled

    # Invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if the state breaks a guarantee of this module."""
        states = [sandbox.state for sandbox in self._pooled.values()]
        held = sum(sandbox.kind.memory_bytes for sandbox in self._pooled.values())
        held += sum(memory_bytes for _, memory_bytes in self._running.values())
        assert self._memory_bytes == held <= self._settings.memory_bytes
        assert self._making == states.count("making") <= self._settings.making
        assert self._closing == states.count("closing") <= self._settings.closing
        due = set(self._due)
        assert all((waiting.until, waiting.id) in due for waiting in self._waiting.values())
        assert all((lease.until, lease.id) in due for lease in self._leases.values())
        assert len(self._running) <= self._settings.running
        assert len(self._waiting) <= self._settings.waiting
        assert not ("doomed" in states and self._closing < self._settings.closing)
        for lease in self._leases.values():
            assert lease.sandbox.lease is lease
            assert self._pooled[lease.sandbox.id].state == "leased"
        assert len(self._leases) == states.count("leased")
        for name, line in self._lines.items():
            self._check_line(name, line)

    def _check_line(self, name: str, line: FairQueue) -> None:
        waiting = list(line)
        assert len(waiting) == len(line)
        assert all(self._waiting[one.id] is one for one in waiting)
        if name == EXECUTIONS:
            owners = [owner for owner, _ in self._running.values()]
        else:
            owners = [lease.owner for lease in self._leases.values() if lease.sandbox.kind.name == name]
            sandboxes = list(self._of(name))
            assert len(sandboxes) <= self._most(name)
            assert not (waiting and any(sandbox.state == "idle" for sandbox in sandboxes)), (
                "a sandbox is idle while a request waits for it"
            )
        assert line.held.total() == len(owners)
        assert all(line.held[owner] == owners.count(owner) for owner in owners)
