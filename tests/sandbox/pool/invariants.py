"""The invariants of the pool's core."""

from __future__ import annotations

from headrace_sandbox.pool.core import EXECUTIONS, Core
from headrace_sandbox.pool.fair_queue import FairQueue


def check(core: Core) -> None:
    """Raise AssertionError if the state breaks a guarantee of the core."""
    states = [sandbox.state for sandbox in core._pooled.values()]
    held_bytes = sum(sandbox.kind.memory_bytes for sandbox in core._pooled.values())
    held_bytes += sum(memory_bytes for _, memory_bytes in core._running.values())
    assert core._memory_bytes == held_bytes <= core._settings.memory_bytes
    assert core._making == states.count("making") <= core._settings.making
    assert core._closing == states.count("closing") <= core._settings.closing
    due = set(core._due)
    assert all((waiting.deadline, waiting.id) in due for waiting in core._waiting.values())
    assert all((lease.until, lease.id) in due for lease in core._leases.values())
    assert len(core._running) <= core._settings.running
    assert len(core._waiting) <= core._settings.waiting
    assert not ("doomed" in states and core._closing < core._settings.closing)
    assert all(core._pooled[lease.sandbox.id] is lease.sandbox for lease in core._leases.values())
    assert [lease.sandbox.state for lease in core._leases.values()] == ["leased"] * states.count("leased")
    for queue in core._queues.values():
        _check_queue(core, queue)


def _check_queue(core: Core, queue: FairQueue) -> None:
    waiting = list(queue)
    assert len(waiting) == len(queue)
    assert all(core._waiting[request.id] is request for request in waiting)
    if queue.name == EXECUTIONS:
        owners = [owner for owner, _ in core._running.values()]
    else:
        owners = [lease.owner for lease in core._leases.values() if lease.sandbox.kind.name == queue.name]
        sandboxes = list(core._sandboxes_of(queue.name))
        assert len(sandboxes) <= core._most(queue.name)
        assert not (waiting and any(sandbox.state == "idle" for sandbox in sandboxes)), (
            "a sandbox is idle while a request waits for it"
        )
    assert queue.holdings.total() == len(owners)
    assert all(queue.holdings[owner] == owners.count(owner) for owner in owners)
