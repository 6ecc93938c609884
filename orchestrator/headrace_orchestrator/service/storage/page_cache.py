"""Trimming of the kernel's page cache: drops files of the log that no group and no batch needs.

* A sealed file without a record in use is dropped once; a later read reads the disk.
* A file that an open batch or a group in flight needs stays.
* The longer a check takes, the less often it happens; the event loop only lists the groups for it.

Otherwise the kernel keeps everything that was ever written until memory runs out, and finds fresh memory for each
record: reusing the memory of a file that is not needed any more is several times cheaper.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Set
from itertools import chain

from headrace.errors import StoreError
from headrace.server import logs
from headrace_orchestrator.buffer.log.location import file_at
from headrace_orchestrator.service.storage.group_locations import GroupLocations
from headrace_orchestrator.service.storage.location_index import BatchLocations
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

CHECK_EVERY_S = 1.0
"""Minimum seconds between two checks."""

CHECK_SHARE = 0.02
"""Share of a processor's time that checks may take: with very many groups they happen less often."""


class PageCacheTrimmer:
    """Trims the page cache of one store's log. Files that were sealed before the process started are left alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._current = self._current_file()
        #: Files that were sealed since the start, and are still cached.
        self._cached: set[int] = set()

    async def run(self) -> None:
        """Repeat ``step`` until cancelled."""
        while True:
            started = time.perf_counter()
            try:
                await self.step()
            except Exception:
                log.exception("the page cache could not be trimmed")
            await asyncio.sleep(pause_s(time.perf_counter() - started))

    async def step(self) -> list[int]:
        """Drop the files that are not needed any more; returns their numbers."""
        current = self._current_file()
        if current > self._current:
            try:
                await self._store.log.synced()  # only files on disk are dropped
            except StoreError:
                return []
            self._cached.update(range(self._current, current))
            self._current = current
        if not self._cached:
            return []
        index = self._store.index
        batches, groups = list(index.batches.values()), [list(run.values()) for run in index.groups.values()]
        unneeded = await asyncio.to_thread(_unneeded, frozenset(self._cached), batches, chain.from_iterable(groups))
        for number in unneeded:
            await asyncio.to_thread(self._store.log.files.release_memory, number)
        self._cached.difference_update(unneeded)
        return unneeded

    def _current_file(self) -> int:
        return file_at(self._store.log.tail)


def pause_s(check_s: float) -> float:
    """Seconds until the next check, after one that took ``check_s``."""
    return max(CHECK_EVERY_S, check_s / CHECK_SHARE)


def _unneeded(files: Set[int], batches: Iterable[BatchLocations], groups: Iterable[GroupLocations]) -> list[int]:
    """The sealed files without a record of these batches and groups; no record is added to a sealed file."""
    unneeded = set(files)
    for batch in batches:
        unneeded.difference_update({batch.head.file, *(member.file for member in batch.members)})
    for group in groups:
        if not unneeded:
            break
        unneeded.difference_update(group.files())
    return sorted(unneeded)
