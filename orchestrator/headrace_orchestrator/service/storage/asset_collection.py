"""Collection of unreferenced assets in a running service.

* An asset that existed at the start is deleted only after its promise, which an earlier service may have given.
* Nothing is collected unless the projection is intact: a reference lost to damage must not cost an asset.
* After an error, the collection starts again from the beginning.
"""

from __future__ import annotations

import asyncio

from headrace.errors import HeadraceError
from headrace.server import logs
from headrace_orchestrator.buffer.assets.store import COLLECT_EVERY_S, AssetStore
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)


class AssetCollection:
    """Collection of the assets of one store."""

    def __init__(self, store: Store, assets: AssetStore) -> None:
        self._store = store
        self._assets = assets

    async def run(self) -> None:
        """Collect until cancelled."""
        while True:
            try:
                await self._collect()
            except (HeadraceError, OSError) as error:
                problem = error.detail if isinstance(error, HeadraceError) else str(error)
                log.error("assets could not be collected; tried again", problem=problem)
                await asyncio.sleep(COLLECT_EVERY_S)

    async def _collect(self) -> None:
        await self._assets.measure()
        await self._forget_deleted_files()
        await asyncio.sleep(self._assets.promise_s)
        await asyncio.to_thread(self._store.projection.check)
        await self._assets.collect_all()
        while True:
            await self._assets.collect()
            await asyncio.sleep(min(COLLECT_EVERY_S, self._assets.promise_s))

    async def _forget_deleted_files(self) -> None:
        """Remove entries of deleted files, which a crash may have left in the projection."""
        projected = await asyncio.to_thread(self._store.projection.files)
        existing = await asyncio.to_thread(self._store.log.files.sizes)
        await self._store.forget_files([number for number in projected if number not in existing])
