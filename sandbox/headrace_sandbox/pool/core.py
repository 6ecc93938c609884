"""Decisions of the pool: which execution starts, who leases which sandbox, and what is made, reset and closed.

Pure: events in, instructions out; the clock and ids are passed in. The shell carries out the instructions and reports
the outcomes.

* Every request is answered once: started, given a sandbox, or refused with the reason.
* Owners share fairly; each request has a deadline, and beyond a bound on waiting requests the answer is ``busy``.
* A sandbox has one lease at a time. A used one is leased again only after a reset; a suspicious one, and one whose
  lease expired, is closed.
* Making and closing are bounded separately, and a sandbox holds its memory until it is closed: neither can block the
  other for ever.
* The memory limits of all executions and sandboxes never add up to more than the pool's memory.
* A sandbox that cannot be closed is kept out of use, and its memory counts as taken.

States of a sandbox: ``making → idle → leased → cleaning → idle``; from each of them ``doomed → closing → gone``, or
``stuck`` where it could not be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_sandbox.pool import instructions
from headrace_sandbox.pool.due_times import DueTimes
from headrace_sandbox.pool.fair_queue import FairQueue, WaitingRequest
from headrace_sandbox.pool.instructions import Instruction
from headrace_sandbox.pool.messages import Counts, MakeFailure, PoolSettings, Request, SandboxKind, WarmBounds

State = Literal["making", "idle", "leased", "cleaning", "doomed", "closing", "stuck"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Pause before the next attempt after a sandbox of a kind could not be made; doubled each time."""

SHORTEST_AFTER_S, LONGEST_AFTER_S = 0.1, 30.0
"""Bounds of the time after which a refused client is advised to try again."""

INTERVAL_WEIGHT = 0.1
"""Weight of the newest interval between two served requests in their moving average."""

EXECUTIONS = ""
"""Name of the queue of executions that have a sandbox of their own."""


@dataclass(eq=False)
class PooledSandbox:
    """A sandbox of the pool. ``prepared_from``: the time when making or resetting it began; ``ready_at``: when that
    ended. ``ends_at``: its own expiry."""

    id: str
    kind: SandboxKind
    state: State
    prepared_from: float
    ends_at: float
    ready_at: float = 0.0


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
        self._queues: dict[str, FairQueue] = {EXECUTIONS: FairQueue(EXECUTIONS)}
        self._waiting: dict[str, WaitingRequest] = {}
        self._running: dict[str, tuple[str, int]] = {}
        self._pooled: dict[str, PooledSandbox] = {}
        self._leases: dict[str, Lease] = {}
        self._pauses: dict[str, RetryPause] = {}
        self._due = DueTimes(self._is_awaited)
        self._memory_bytes = 0
        self._making = self._closing = 0
        self._request_count = 0
        self._draining = False
        self._serve_interval_s: float | None = None
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
        queue = self._queue(EXECUTIONS if request.kind is None else request.kind.name)
        waiting = WaitingRequest(
            id=request.id,
            number=self._request_count,
            owner=request.owner,
            arrived_at=now,
            deadline=now + request.wait_s,
            wait_s=request.wait_s,
            memory_bytes=request.memory_bytes,
            ttl_s=request.ttl_s,
            queue=queue,
        )
        self._request_count += 1
        self._waiting[request.id] = waiting
        queue.join(waiting)
        self._serve(now)
        if len(self._waiting) > self._settings.waiting:
            self._refuse_newest()
        if request.id in self._waiting:
            self._due.add(waiting.deadline, request.id)
        return self._advance(now)

    def withdraw(self, request: str, now: float) -> list[Instruction]:
        """Remove a request whose client has gone; a sandbox it already got is returned by ``give_back``."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting.queue.leave(waiting)
            self._forget(waiting.queue.name)
        return self._advance(now)

    def done(self, request: str, now: float) -> list[Instruction]:
        """Record that an execution ended."""
        owner, memory_bytes = self._running.pop(request)
        self._queues[EXECUTIONS].done(owner)
        self._memory_bytes -= memory_bytes
        return self._advance(now)

    def made(self, sandbox_id: str, now: float) -> list[Instruction]:
        """Record that a sandbox was made."""
        sandbox = self._require(sandbox_id, "making")
        self._making -= 1
        self._pauses.pop(sandbox.kind.name, None)
        self._make_idle(sandbox, now)
        return self._advance(now)

    def not_made(self, sandbox_id: str, failure: MakeFailure, now: float) -> list[Instruction]:
        """Record that a sandbox could not be made, and left nothing. Retry after a pause if the failure is
        retryable."""
        sandbox = self._require(sandbox_id, "making")
        self._making -= 1
        name = sandbox.kind.name
        failures = self._pauses[name].failures + 1 if name in self._pauses else 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10))
        self._pauses[name] = RetryPause(failures, now + pause_s)
        self._due.add(now + pause_s, "")
        for waiting in list(self._queue(name)):
            waiting.last_failure = failure.detail
            if not failure.retryable:
                self._refuse(waiting, failure.kind, failure.detail, retryable=False)
        self._remove(sandbox)
        return self._advance(now)

    def give_back(self, lease_id: str, reusable: bool, now: float) -> list[Instruction]:
        """End a lease. ``reusable``: nothing suspicious happened in the sandbox. An unknown lease has expired."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            sandbox = self._end(lease)
            if reusable and self._settings.reuse and not self._draining:
                sandbox.state, sandbox.prepared_from = "cleaning", now
                self._out.append(instructions.Reset(sandbox.id))
            else:
                sandbox.state = "doomed"
        return self._advance(now)

    def renew(self, lease_id: str, ttl_s: float, now: float) -> float | None:
        """Extend a lease to this long from now, at most to the end of its sandbox; returns the time granted. None: the
        lease is unknown."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.until <= now:
            return None
        lease.until = min(now + min(ttl_s, self._settings.ttl_s), lease.sandbox.ends_at)
        self._due.add(lease.until, lease_id)
        return lease.until - now

    def cleaned(self, sandbox_id: str, now: float) -> list[Instruction]:
        """Record that a sandbox was reset."""
        self._make_idle(self._require(sandbox_id, "cleaning"), now)
        return self._advance(now)

    def not_cleaned(self, sandbox_id: str, now: float) -> list[Instruction]:
        """Close a sandbox that could not be reset."""
        self._require(sandbox_id, "cleaning").state = "doomed"
        return self._advance(now)

    def closed(self, sandbox_id: str, now: float) -> list[Instruction]:
        """Record that a sandbox was closed, and nothing is left of it."""
        sandbox = self._require(sandbox_id, "closing")
        self._closing -= 1
        self._remove(sandbox)
        return self._advance(now)

    def not_closed(self, sandbox_id: str, now: float) -> list[Instruction]:
        """Record that a sandbox could not be closed: something in it may still run."""
        self._require(sandbox_id, "closing").state = "stuck"
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
        return self._due.next()

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
        out, self._out = self._out, []
        return out

    def _expire(self, now: float) -> None:
        for name in self._due.pop_until(now):
            if (waiting := self._waiting.get(name)) is not None and waiting.deadline <= now:
                self._refuse_late(waiting)
            elif (lease := self._leases.get(name)) is not None and lease.until <= now:
                self._out.append(instructions.Revoke(lease.id, lease.sandbox.id))
                self._end(lease).state = "doomed"
            elif (sandbox := self._pooled.get(name)) is not None and sandbox.state == "idle":
                self._expire_idle(sandbox, now)

    def _expire_idle(self, sandbox: PooledSandbox, now: float) -> None:
        is_unused = now >= sandbox.ready_at + self._settings.idle_s
        if now >= self._retire_at(sandbox) or (is_unused and self._is_beyond_warm(sandbox)):
            sandbox.state = "doomed"
        elif is_unused:
            self._due.add(self._retire_at(sandbox), sandbox.id)

    def _retire_at(self, sandbox: PooledSandbox) -> float:
        """The time from which the sandbox is too old for the longest lease."""
        return sandbox.ends_at - self._settings.ttl_s

    def _is_beyond_warm(self, sandbox: PooledSandbox) -> bool:
        bounds = self._bounds.get(sandbox.kind.name)
        idle = sum(other.state == "idle" for other in self._sandboxes_of(sandbox.kind.name))
        return bounds is None or idle > bounds.least

    def _serve(self, now: float) -> None:
        """Serve every queue as far as possible, the longest wait first. Memory is reserved for the first unserved
        request, unless leases hold that memory: they may last."""
        queues = [queue for queue in self._queues.values() if len(queue)]
        if len(queues) > 1:
            queues.sort(key=lambda queue: queue.head().number)
        reserved_bytes = 0
        for queue in queues:
            serve = self._serve_executions if queue.name == EXECUTIONS else self._serve_leases
            missing_bytes = serve(queue, reserved_bytes, now)
            if missing_bytes and not reserved_bytes and self._can_become_free(missing_bytes):
                reserved_bytes = missing_bytes
                self._free_memory(missing_bytes, queue.name)

    def _serve_executions(self, queue: FairQueue, reserved_bytes: int, now: float) -> int:
        """Start executions; returns the memory that the next one needs but does not get."""
        while len(queue) and len(self._running) < self._settings.running:
            head = queue.head()
            if not self._fits(head.memory_bytes + reserved_bytes):
                return head.memory_bytes
            self._memory_bytes += head.memory_bytes
            self._running[head.id] = (head.owner, head.memory_bytes)
            self._serve_waiting(head, now)
            self._out.append(instructions.Start(head.id, now - head.arrived_at))
        return 0

    def _serve_leases(self, queue: FairQueue, reserved_bytes: int, now: float) -> int:
        """Lease idle sandboxes and make more; returns the memory that the next sandbox needs but does not get."""
        sandboxes = list(self._sandboxes_of(queue.name))
        idle = sorted(
            (sandbox for sandbox in sandboxes if sandbox.state == "idle"), key=lambda sandbox: sandbox.ready_at
        )
        while len(queue) and idle:
            self._lease(queue.head(), idle.pop(0), now)
        pending = sum(sandbox.state in ("making", "cleaning") for sandbox in sandboxes)
        kind = self._kinds[queue.name]
        count = min(len(queue) - pending, self._most(queue.name) - len(sandboxes), self._settings.making - self._making)
        for _ in range(0 if self._is_paused(queue.name, now) else count):
            if not self._fits(kind.memory_bytes + reserved_bytes):
                return kind.memory_bytes
            self._make(kind, now)
        return 0

    def _lease(self, waiting: WaitingRequest, sandbox: PooledSandbox, now: float) -> None:
        made_from = max(waiting.arrived_at, sandbox.prepared_from)
        start_s = max(0.0, sandbox.ready_at - made_from)
        lease = Lease(self._new_id(), waiting.owner, sandbox, min(now + waiting.ttl_s, sandbox.ends_at))
        sandbox.state = "leased"
        self._leases[lease.id] = lease
        self._due.add(lease.until, lease.id)
        self._serve_waiting(waiting, now)
        queue_s = max(0.0, now - waiting.arrived_at - start_s)
        self._out.append(
            instructions.LeaseSandbox(waiting.id, lease.id, sandbox.id, queue_s, start_s, lease.until - now)
        )

    def _warm(self, now: float) -> None:
        """Make warm sandboxes for later requests. They never take memory that a request waits for."""
        if self._waiting:
            return
        for name, bounds in self._bounds.items():
            sandboxes = list(self._sandboxes_of(name))
            ready = sum(sandbox.state in ("idle", "making", "cleaning") for sandbox in sandboxes)
            for _ in range(min(bounds.least - ready, bounds.most - len(sandboxes))):
                fits = self._making < self._settings.making and self._fits(self._kinds[name].memory_bytes)
                if not fits or self._is_paused(name, now):
                    break
                self._make(self._kinds[name], now)

    def _close(self) -> None:
        for sandbox in self._pooled.values():
            if self._draining and sandbox.state == "idle":
                sandbox.state = "doomed"
            if sandbox.state == "doomed" and self._closing < self._settings.closing:
                sandbox.state = "closing"
                self._closing += 1
                self._out.append(instructions.Close(sandbox.id))

    # Helpers ------------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> instructions.Refuse | None:
        """The reason that a request can never be served, if any."""
        most = self._settings
        if self._draining:
            return instructions.Refuse(request.id, "draining", "The sandboxes of this host are being shut down.", True)
        if request.memory_bytes > most.memory_bytes:
            detail = f"It may use {request.memory_bytes >> 20} MiB; the pool has {most.memory_bytes >> 20} MiB."
            return instructions.Refuse(request.id, "too-large", detail, False)
        if request.ttl_s > most.ttl_s:
            detail = f"The lease should last {request.ttl_s:g} s; the longest lasts {most.ttl_s:g} s."
            return instructions.Refuse(request.id, "ttl-too-long", detail, False)
        return None

    def _refuse_newest(self) -> None:
        """Refuse one request when too many wait: the newest of the owner with the most waiting requests."""
        counts: dict[str, int] = {}
        for waiting in self._waiting.values():
            counts[waiting.owner] = counts.get(waiting.owner, 0) + 1
        most = max(counts.values())
        newest = next(waiting for waiting in reversed(self._waiting.values()) if counts[waiting.owner] == most)
        clear_s = len(self._waiting) * (self._serve_interval_s or SHORTEST_AFTER_S)
        after_s = max(SHORTEST_AFTER_S, min(LONGEST_AFTER_S, clear_s))
        detail = f"{self._settings.waiting} requests already wait for a sandbox."
        self._refuse(newest, "busy", detail, retryable=True, after_s=after_s)

    def _refuse_late(self, waiting: WaitingRequest) -> None:
        detail = f"no sandbox within {waiting.wait_s:g} s"
        if waiting.last_failure:
            detail += f"; the last one could not be made: {waiting.last_failure}"
        self._refuse(waiting, "no-sandbox-in-time", detail, retryable=True)

    def _refuse(
        self, waiting: WaitingRequest, kind: str, detail: str, *, retryable: bool, after_s: float | None = None
    ) -> None:
        del self._waiting[waiting.id]
        waiting.queue.leave(waiting)
        self._forget(waiting.queue.name)
        self._out.append(instructions.Refuse(waiting.id, kind, detail, retryable, after_s))

    def _serve_waiting(self, waiting: WaitingRequest, now: float) -> None:
        del self._waiting[waiting.id]
        waiting.queue.serve(waiting)
        interval_s, self._served_at = now - self._served_at, now
        average_s = interval_s if self._serve_interval_s is None else self._serve_interval_s
        self._serve_interval_s = average_s + INTERVAL_WEIGHT * (interval_s - average_s)

    def _make(self, kind: SandboxKind, now: float) -> None:
        sandbox = PooledSandbox(self._new_id(), kind, "making", now, now + 2 * self._settings.ttl_s)
        self._pooled[sandbox.id] = sandbox
        self._making += 1
        self._memory_bytes += kind.memory_bytes
        self._out.append(instructions.Make(sandbox.id, kind, 2 * self._settings.ttl_s))

    def _make_idle(self, sandbox: PooledSandbox, now: float) -> None:
        sandbox.state, sandbox.ready_at = "idle", now
        if now >= self._retire_at(sandbox) or self._draining:
            sandbox.state = "doomed"
        self._due.add(min(now + self._settings.idle_s, self._retire_at(sandbox)), sandbox.id)

    def _end(self, lease: Lease) -> PooledSandbox:
        del self._leases[lease.id]
        self._queues[lease.sandbox.kind.name].done(lease.owner)
        return lease.sandbox

    def _remove(self, sandbox: PooledSandbox) -> None:
        del self._pooled[sandbox.id]
        self._memory_bytes -= sandbox.kind.memory_bytes
        self._forget(sandbox.kind.name)

    def _forget(self, name: str) -> None:
        """Delete the state of a kind with neither waiting requests nor sandboxes: kinds come and go."""
        if name == EXECUTIONS or name in self._bounds or len(self._queue(name)) or any(self._sandboxes_of(name)):
            return
        for table in (self._queues, self._kinds, self._pauses):
            table.pop(name, None)

    def _can_become_free(self, memory_bytes: int) -> bool:
        """True if this much memory becomes free without the end of a lease."""
        leased_bytes = sum(
            sandbox.kind.memory_bytes for sandbox in self._pooled.values() if sandbox.state in ("leased", "stuck")
        )
        return leased_bytes + memory_bytes <= self._settings.memory_bytes

    def _free_memory(self, missing_bytes: int, name: str) -> None:
        """Doom idle sandboxes, the longest idle first, until this much memory becomes free."""
        pending = sum(
            sandbox.kind.memory_bytes for sandbox in self._pooled.values() if sandbox.state in ("doomed", "closing")
        )
        idle = (sandbox for sandbox in self._pooled.values() if sandbox.state == "idle" and sandbox.kind.name != name)
        for sandbox in sorted(idle, key=lambda sandbox: sandbox.ready_at):
            if self._fits(missing_bytes - pending):
                return
            sandbox.state = "doomed"
            pending += sandbox.kind.memory_bytes

    def _fits(self, memory_bytes: int) -> bool:
        return self._memory_bytes + memory_bytes <= self._settings.memory_bytes

    def _sandboxes_of(self, name: str) -> Iterator[PooledSandbox]:
        return (sandbox for sandbox in self._pooled.values() if sandbox.kind.name == name)

    def _most(self, name: str) -> int:
        bounds = self._bounds.get(name)
        return self._settings.sandboxes if bounds is None else bounds.most

    def _is_paused(self, name: str, now: float) -> bool:
        pause = self._pauses.get(name)
        return pause is not None and now < pause.until

    def _queue(self, name: str) -> FairQueue:
        return self._queues.setdefault(name, FairQueue(name))

    def _require(self, sandbox_id: str, state: State) -> PooledSandbox:
        sandbox = self._pooled[sandbox_id]
        assert sandbox.state == state, f"sandbox {sandbox_id} is {sandbox.state}, not {state}"
        return sandbox

    def _is_awaited(self, at: float, name: str) -> bool:
        """True if something may be due at this time."""
        lease = self._leases.get(name)
        return at == lease.until if lease is not None else not name or name in self._waiting or name in self._pooled
