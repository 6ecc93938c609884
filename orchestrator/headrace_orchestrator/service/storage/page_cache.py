"""The kernel's memory of the log: what no group and no batch needs any more is let go.

* A sealed file of which no group in flight and no open batch has a record is let go; whoever asks all the same reads it
  from the disk.
* What is needed stays: a group that may be served again keeps its files where they are read fast.
* The more groups there are, the less often it is looked at what they need; the event loop only lists them for that.

Else the kernel keeps all that was ever written until memory runs out, and finds fresh memory for each record: to use
the memory again of a file that nobody needs is several times cheaper.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Set
from itertools import chain

from headrace.errors import StoreError
from headrace.server import logs
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.service.storage.group_locations import GroupLocations
from headrace_orchestrator.service.storage.location_index import BatchLocations
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

LOOK_EVERY_S = 1.0
"""How often it is looked at what is needed."""

LOOK_SHARE = 0.02
"""Of a processor's time that looking may take: with very many groups it happens less often."""


class PageCacheTrimmer:
    """Of the log of one store. Files that were sealed before the process began are left to the kernel."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._current = self._file()
        #: Files that were sealed since, and are not let go.
        self._held: set[int] = set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            begun = time.perf_counter()
            try:
                await self.step()
            except Exception:
                log.exception("files that nobody needs stay in the page cache")
            await asyncio.sleep(pause_s(time.perf_counter() - begun))

    async def step(self) -> list[int]:
        """Let go of what may go now; gives the numbers of the files."""
        current = self._file()
        if current > self._current:
            try:
                await self._store.log.synced()  # nothing is let go that is not on the disk
            except StoreError:
                return []
            self._held.update(range(self._current, current))
            self._current = current
        if not self._held:
            return []
        index = self._store.index
        batches, groups = list(index.batches.values()), [list(run.values()) for run in index.groups.values()]
        gone = await asyncio.to_thread(_unneeded, frozenset(self._held), batches, chain.from_iterable(groups))
        for number in gone:
            await asyncio.to_thread(self._store.log.files.let_go, number)
        self._held.difference_update(gone)
        return gone

    def _file(self) -> int:
        """The one that is written."""
        return Location.at(self._store.log.tail, 0).file


def pause_s(looked_s: float) -> float:
    """Until it is looked again, after a look that took so long."""
    return max(LOOK_EVERY_S, looked_s / LOOK_SHARE)


def _unneeded(files: Set[int], batches: Iterable[BatchLocations], groups: Iterable[GroupLocations]) -> list[int]:
    """Of some sealed files those that none of these has a record in: no record is added to them."""
    left = set(files)
    for batch in batches:
        left.difference_update({batch.head.file, *(member.file for member in batch.members)})
    for group in groups:
        if not left:
            break
        left.difference_update(group.files())
    return sorted(left)
