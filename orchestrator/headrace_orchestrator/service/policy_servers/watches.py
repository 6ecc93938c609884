"""The policy servers of all runs: a watch for each active run, and long polls for changes.

* A run's servers are watched from its creation to its end, and again after a restart.
* A long poll that names the revision it knows is answered at the next one.
* A failed watch is logged with its traceback and started again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from headrace.server import logs
from headrace.wire import messages
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.policy_servers.calls import PolicyServerCalls
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    BatchAcked,
    EvaluationEnded,
    GroupAdmitted,
    RunClosed,
    RunCreated,
    ServerAdded,
    ServerDrained,
    ServerRemoved,
    VersionAnnounced,
)
from headrace_orchestrator.service.policy_servers.dns_lookups import Resolve, resolve
from headrace_orchestrator.service.policy_servers.watch import PolicyServerWatch
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.waiters import Disconnected

log = logs.logger(__name__)

WAKING_EVENTS = (
    RunCreated,
    RunClosed,
    ServerAdded,
    ServerDrained,
    ServerRemoved,
    VersionAnnounced,
    BatchAcked,
    EvaluationEnded,
)
"""Events that wake the watch of their run."""

RESTART_PAUSE_S = 1.0
"""Pause before a failed watch is started again, in seconds."""

REVISIONS_PER_EPOCH = 1 << 32
"""Distance between the first revisions of two epochs, so that revisions grow across restarts too."""


class PolicyServers:
    """The watches of all active runs' policy servers."""

    def __init__(self, shell: Shell, metrics: Metrics, epoch: int, *, resolver: Resolve = resolve) -> None:
        self._shell = shell
        self._metrics = metrics
        self._resolver = resolver
        self._epoch = epoch
        self._calls = PolicyServerCalls()
        self._watches: dict[str, PolicyServerWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        shell.listeners.append(self._on_events)
        for name in shell.core.state.runs:
            self._start(name)

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._calls.close()

    async def servers(
        self, run: str, revision: int, wait_s: float, disconnected: Disconnected
    ) -> messages.PolicyServersReply:
        """The policy servers of a run; waits while ``revision`` is still theirs. Raises UnknownRun."""
        shell = self._shell
        state = shell.run(run).policy_servers

        async def attempt() -> PolicyServerWatch | None:
            return self._watches.get(run)

        watch = await shell.long_poll(
            attempt,
            complete=lambda watch: watch is None or watch.revision != revision,
            queue=shell.queues.for_policy_servers(run),
            deadline=shell.now() + wait_s,
            disconnected=disconnected,
        )
        if watch is None:  # the run is closed
            return messages.PolicyServersReply(epoch=self._epoch, revision=0)
        return messages.PolicyServersReply(
            epoch=self._epoch,
            revision=watch.revision,
            servers=watch.statuses(shell.now()),
            sync=watch.sync,
            skipped=[str(version) for version in state.skipped],
            digests={str(version): digest for digest, version in state.digests.items()},
        )

    def summary(self, run: str) -> tuple[dict[str, int], str]:
        """The number of a run's servers in each state, and the progress of the weight sync."""
        watch = self._watches.get(run)
        if watch is None:
            return {}, ""
        return dict(Counter(server.state for server in watch.controller.servers.values())), watch.sync

    def _on_events(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, GroupAdmitted):
                if event.adapters and event.run in self._watches:
                    self._watches[event.run].wake()
            elif isinstance(event, WAKING_EVENTS):
                if isinstance(event, RunCreated):
                    self._start(event.run)
                elif isinstance(event, VersionAnnounced):
                    for watch in self._watches.values():  # another run may drive the servers now
                        watch.wake()
                elif event.run in self._watches:
                    self._watches[event.run].wake()

    def _start(self, name: str) -> None:
        if not self._shell.run(name).closed:
            self._watches[name] = self._new_watch(name)
            self._tasks[name] = asyncio.create_task(self._run_watch(name))

    def _new_watch(self, name: str, revision: int = 0) -> PolicyServerWatch:
        first = revision or self._epoch * REVISIONS_PER_EPOCH
        return PolicyServerWatch(name, self._shell, self._calls, self._metrics, self._resolver, self._driver, first)

    def _driver(self, address: str) -> str:
        """The run that loads its weights into a server: the newest candidate. Empty if there is none."""
        driving = [name for name, watch in self._watches.items() if watch.drives(address)]
        return driving[-1] if driving else ""

    async def _run_watch(self, name: str) -> None:
        while True:
            watch = self._watches[name]
            try:
                await watch.run()
            except Exception:
                log.exception("the watch of policy servers failed", run=name)
                await asyncio.sleep(RESTART_PAUSE_S)
                self._watches[name] = self._new_watch(name, watch.revision + 1)
            else:
                del self._watches[name], self._tasks[name]
                self._shell.queues.for_policy_servers(name).wake_all()
                return
