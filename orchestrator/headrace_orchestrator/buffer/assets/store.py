"""Assets on disk: images and large arrays, stored once under the hash of their bytes.

* An asset is stored once under its name, durably before its upload is answered; bytes that do not match are refused.
* A promise, the reply "already stored", keeps an asset until its deadline, even without references.
* A referenced asset stays until it is a candidate without references or promise; then it is deleted.
* An asset that is being written, being deleted or known to be damaged does not count as stored.
* Unreferenced assets of an earlier service are found after the next start, when their promises have expired.

All methods but ``open`` and ``read`` belong to the event loop. Between the check for references to an asset and its
deletion the event loop runs nothing else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.assets import check_asset, is_asset_name
from headrace.errors import CorruptAsset, HeadraceError, InvalidAsset, StoreError, UnknownAsset
from headrace.server import logs
from headrace.store.asset_files import read_asset
from headrace_orchestrator.buffer.assets.files import AssetFiles, subfolders

log = logs.logger(__name__)

COLLECT_EVERY_S = 5.0
"""Seconds between two rounds of collecting unreferenced assets."""

COLLECT_BATCH = 500
"""Assets that are looked up at a time: some milliseconds of the event loop."""

ReferenceLookup = Callable[[Sequence[str]], Set[str]]
"""Returns those of the given assets that a record refers to, either a stored one or one on its way to the disk."""


class AssetStore:
    """The assets of one data directory. ``clock`` returns monotonic seconds; a promise holds for ``promise_s``."""

    def __init__(
        self, folder: Path, referenced: ReferenceLookup, *, clock: Callable[[], float], promise_s: float
    ) -> None:
        self.folder = folder
        self.promise_s = promise_s
        self._files = AssetFiles(folder)
        self._referenced = referenced
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="assets")  # one: writes and deletions stay in order
        self._promised: dict[str, float] = {}
        """Time until which an asset is kept."""
        self._candidates: dict[str, None] = {}
        """Assets that may be unreferenced, oldest candidate first."""
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._deleting: set[str] = set()
        self._damaged: set[str] = set()
        self._queue: list[tuple[str, bytes]] = []
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Make the folder if it is missing, and remove half-written files of a crash. Blocking. Raises StoreError."""
        try:
            self._files.open()
        except OSError as error:
            raise _store_error(error) from error

    @property
    def count(self) -> int:
        """Number of stored assets, referenced or not, that ``measure`` has counted so far."""
        return self._files.count

    @property
    def size_bytes(self) -> int:
        """Bytes of these assets."""
        return self._files.size_bytes

    async def measure(self) -> None:
        """Count the assets that existed at the start, one subfolder at a time."""
        loop = asyncio.get_running_loop()
        for subfolder in await asyncio.to_thread(subfolders, self.folder):
            await loop.run_in_executor(self._thread, self._files.count_subfolder, subfolder)

    # Promises -------------------------------------------------------------------------------------------------

    def is_stored(self, name: str) -> bool:
        """True if a record that refers to this asset may be stored now."""
        if not is_asset_name(name) or name in self._pending or name in self._deleting or name in self._damaged:
            return False
        return name in self._promised or self._files.exists(name)

    def claim(self, names: Iterable[str]) -> list[str]:
        """Keep these assets for ``promise_s``; returns the missing ones, which the caller has to send."""
        missing = []
        for name in names:
            if self.is_stored(name):
                self._promise(name)
            else:
                missing.append(name)
        return missing

    def _promise(self, name: str) -> None:
        self._promised[name] = self._clock() + self.promise_s
        self._candidates[name] = None

    async def add(self, name: str, data: bytes) -> None:
        """Store an asset; returns when it is on disk, and keeps it for ``promise_s``. Raises InvalidAsset,
        StoreError."""
        if not is_asset_name(name) or not data:
            raise InvalidAsset(
                f"{name[:80]!r} with {len(data)} bytes is not a valid asset.",
                hint="Name it by the SHA-256 of its bytes, in lower-case hexadecimal.",
            )
        try:
            await asyncio.to_thread(check_asset, name, data)
        except CorruptAsset as error:
            raise InvalidAsset(error.detail, hint="It was changed on the way: send it again.", asset=name) from error
        if not self.is_stored(name):
            await asyncio.shield(self._enqueue(name, data))
        self._promise(name)

    def _enqueue(self, name: str, data: bytes) -> asyncio.Future[None]:
        """Queue an asset; the future is done when it is on disk. Concurrent uploads of one asset share the future."""
        stored = self._pending.get(name)
        if stored is None:
            stored = self._pending[name] = asyncio.get_running_loop().create_future()
            self._queue.append((name, data))
            if self._writing is None:
                self._writing = asyncio.create_task(self._write_queue())
        return stored

    async def _write_queue(self) -> None:
        """Write the queue; assets that arrive meanwhile share the next round of syncs."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch, self._queue = self._queue, []
            try:
                await loop.run_in_executor(self._thread, self._files.write, batch)
            except OSError as error:
                log.error("assets could not be stored", assets=len(batch), problem=error.strerror)
                self._on_write_failed(batch, error)
            else:
                self._on_written(batch)
        self._writing = None

    def _on_written(self, batch: Sequence[tuple[str, bytes]]) -> None:
        for name, _ in batch:
            self._damaged.discard(name)
            self._promise(name)
            self._pending.pop(name).set_result(None)

    def _on_write_failed(self, batch: Sequence[tuple[str, bytes]], error: OSError) -> None:
        for name, _ in batch:
            self._damaged.add(name)  # its file may still exist, and must not be trusted
            stored = self._pending.pop(name)
            stored.set_exception(_store_error(error))
            stored.exception()  # mark as retrieved: the sender may have disconnected

    # Collecting -----------------------------------------------------------------------------------------------

    def add_candidates(self, names: Iterable[str]) -> None:
        """Have ``collect`` check these assets, which may have lost their last reference."""
        self._candidates.update(dict.fromkeys(names))

    async def collect_all(self) -> None:
        """Check all assets on disk, one subfolder at a time: this finds those whose record was never stored."""
        for subfolder in await asyncio.to_thread(subfolders, self.folder):
            names = list(filter(is_asset_name, await asyncio.to_thread(os.listdir, subfolder)))
            self.add_candidates(names)
            await self._collect(names)

    async def collect(self) -> int:
        """Delete the unreferenced candidates; returns their number. Promised ones stay candidates."""
        return await self._collect(list(self._candidates))

    async def _collect(self, names: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(names), COLLECT_BATCH):
            unreferenced = self._take_unreferenced(names[start : start + COLLECT_BATCH])
            if unreferenced:
                deleted += await self._delete(unreferenced)
            else:
                await asyncio.sleep(0)
        return deleted

    def _take_unreferenced(self, names: Sequence[str]) -> list[str]:
        """The assets among these that are to be deleted; from now on they do not count as stored."""
        now = self._clock()
        expired = [
            name
            for name in names
            if self._promised.get(name, now) <= now and name not in self._pending and name not in self._deleting
        ]
        referenced = self._referenced(expired) if expired else frozenset()
        for name in expired:
            self._promised.pop(name, None)
            self._candidates.pop(name, None)
        unreferenced = [name for name in expired if name not in referenced]
        self._deleting.update(unreferenced)
        return unreferenced

    async def _delete(self, names: Sequence[str]) -> int:
        loop = asyncio.get_running_loop()
        deleted = await loop.run_in_executor(self._thread, self._files.delete, names)
        self._deleting.difference_update(names)
        self._damaged.difference_update(deleted)
        self.add_candidates(set(names).difference(deleted))
        return len(deleted)

    # Reading --------------------------------------------------------------------------------------------------

    async def read(self, name: str) -> bytes:
        """An asset, checked against its name. Raises UnknownAsset, CorruptAsset."""
        try:
            return await asyncio.to_thread(read_asset, self.folder, name)
        except CorruptAsset as error:
            log.error("asset damaged", asset=name, problem=error.detail)
            self._damaged.add(name)  # the next worker that has it must send it again
            raise

    async def read_many(self, names: Sequence[str], max_bytes: int) -> list[bytes | HeadraceError]:
        """The first of these assets, at least one and more while they fit into ``max_bytes``; an error in place of an
        asset that is missing or damaged."""
        results: list[bytes | HeadraceError] = []
        size_bytes = 0
        for name in names:
            try:
                data = await self.read(name)
            except (UnknownAsset, CorruptAsset) as error:
                results.append(error)
                continue
            size_bytes += len(data)
            if results and size_bytes > max_bytes:
                break
            results.append(data)
        return results

    async def close(self) -> None:
        """Write the queue, and end the threads."""
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._files.close()


def _store_error(error: OSError) -> StoreError:
    return StoreError(
        f"An asset cannot be stored: {error.strerror or error}.",
        hint="Free disk space or fix the cause; the sender tries again.",
    )
