"""Faults that are injected into an orchestrator, which the checker must find.

* ``answers-before-sync``: every change is acknowledged before it is on disk.
* ``acks-before-sync``: acks of batches are answered before they are on disk.
* ``names-not-synced``: no directory is synced, so that a new file of the log may be lost with its content.
"""

from __future__ import annotations

import sys
from typing import Any

from headrace.wire import messages
from headrace_orchestrator.buffer import durable_files
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.service.shell import Command, Shell


def _answers_before_sync() -> None:
    async def synced(self: Log) -> None:
        """Return without waiting for the sync."""

    Log.synced = synced  # type: ignore[method-assign]


def _acks_before_sync() -> None:
    async def execute(self: Shell, command: Command[Any]) -> Any:
        reply = self.decide(command)
        if not isinstance(reply, messages.AckReply):
            await self.store.log.synced()
        return reply

    Shell.execute = execute  # type: ignore[method-assign]


def _names_not_synced() -> None:
    original = durable_files.sync_directory
    for module in list(sys.modules.values()):
        if getattr(module, "sync_directory", None) is original:
            module.sync_directory = lambda path: None  # type: ignore[attr-defined]


FAULTS = {
    "answers-before-sync": _answers_before_sync,
    "acks-before-sync": _acks_before_sync,
    "names-not-synced": _names_not_synced,
}
