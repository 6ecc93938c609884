"""Orchestrators with a fault, made by changing a running one: what the checker must find.

* ``answers-before-sync``: says that a thing is done before it is on disk.
* ``acks-before-sync``: the same for acks of batches only.
* ``names-not-synced``: never syncs a directory, so that a new file of the log may be gone with all that is in it.
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
        """It will be, some time."""

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


MUTANTS = {
    "answers-before-sync": _answers_before_sync,
    "acks-before-sync": _acks_before_sync,
    "names-not-synced": _names_not_synced,
}
