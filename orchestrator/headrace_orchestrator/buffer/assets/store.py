"""Assets on disk: images and large arrays, stored once under the hash of what is in them.

* An asset is durable before its upload is answered, and its bytes are those of its name.
* "Already there" is a promise: until its deadline the asset stays, whoever else goes.
* An asset that nobody refers to, and that nobody is promised, is deleted.
* What is on its way here, on its way out or known to be damaged is not there.
* What a stopped service left without a record is found after the next start, when its promises are over.

All of it but ``open``, ``read`` and ``check`` belongs to the event loop. Whether somebody refers to an asset is asked,
and the answer acted upon, without giving the event loop away in between.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from headrace.assets import check_asset, is_asset_name
from headrace.errors import CorruptAsset, HeadraceError, InvalidAsset, StoreError, UnknownAsset
from headrace.server import logs
from headrace.store.asset_files import asset_path, read_asset, verify_asset
from headrace_orchestrator.buffer.assets.files import AssetFiles, shelves, size_of

log = logs.logger(__name__)

COLLECT_EVERY_S = 5.0
"""How often assets are looked for that nobody needs any more."""

COLLECT_STEP = 500
"""Assets that are looked up at a time: some milliseconds of the event loop."""

ReferenceLookup = Callable[[Sequence[str]], Set[str]]
"""Which of these assets a stored record refers to, or one that is on its way to the disk."""


class AssetStore:
    """The assets of one data directory. ``clock`` gives monotonic seconds; a promise holds for ``promise_s``."""

    def __init__(
        self, folder: Path, referred: ReferenceLookup, *, clock: Callable[[], float], promise_s: float
    ) -> None:
        self.folder = folder
        self.promise_s = promise_s
        self._files = AssetFiles(folder)
        self._referred = referred
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="assets")  # one: a file is written after it was deleted
        self._promised: dict[str, float] = {}
        """Assets that are kept until this time."""
        self._doubtful: dict[str, None] = {}
        """Assets that may have lost whoever needed them, oldest doubt first."""
        self._arriving: dict[str, asyncio.Future[None]] = {}
        self._leaving: set[str] = set()
        self._damaged: set[str] = set()
        self._writes: list[tuple[str, bytes]] = []
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Make the folder if it is missing, and clear what a crash left half written. Blocking. Raises StoreError."""
        try:
            self._files.open()
        except OSError as error:
            raise _refused(error) from error

    @property
    def count(self) -> int:
        """How many are stored, whoever needs them: of those that ``measure`` has come to."""
        return self._files.count

    @property
    def size_bytes(self) -> int:
        """Their bytes."""
        return self._files.size_bytes

    async def measure(self) -> None:
        """Count what was there at the start, in small steps."""
        loop = asyncio.get_running_loop()
        for shelf in await asyncio.to_thread(shelves, self.folder):
            await loop.run_in_executor(self._thread, self._files.count_shelf, shelf)

    # Promises -------------------------------------------------------------------------------------------------

    def is_there(self, name: str) -> bool:
        """Whether a record that refers to it may be stored now."""
        if not is_asset_name(name) or name in self._arriving or name in self._leaving or name in self._damaged:
            return False
        return name in self._promised or self._files.is_there(name)

    def claim(self, names: Iterable[str]) -> list[str]:
        """Of these assets those that are to be sent; the others are kept for ``promise_s``."""
        missing = []
        for name in names:
            if self.is_there(name):
                self._promise(name)
            else:
                missing.append(name)
        return missing

    def _promise(self, name: str) -> None:
        self._promised[name] = self._clock() + self.promise_s
        self._doubtful[name] = None

    async def add(self, name: str, data: bytes) -> None:
        """Store an asset; returns when it is on disk, and keeps it for ``promise_s``. Raises InvalidAsset,
        StoreError."""
        if not is_asset_name(name) or not data:
            raise InvalidAsset(
                f"{name[:80]!r} with {len(data)} bytes is no asset.",
                hint="Name it by the SHA-256 of its bytes, in lower-case hexadecimal.",
            )
        try:
            await asyncio.to_thread(check_asset, name, data)
        except CorruptAsset as error:
            raise InvalidAsset(error.detail, hint="It was changed on the way: send it again.", asset=name) from error
        if not self.is_there(name):
            await asyncio.shield(self._arrival(name, data))
        self._promise(name)

    def _arrival(self, name: str, data: bytes) -> asyncio.Future[None]:
        """Done when it is on disk. Two that send the same wait for the same."""
        arrival = self._arriving.get(name)
        if arrival is None:
            arrival = self._arriving[name] = asyncio.get_running_loop().create_future()
            self._writes.append((name, data))
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())
        return arrival

    async def _write(self) -> None:
        """Write what waits; what comes meanwhile shares the next round of syncs."""
        loop = asyncio.get_running_loop()
        while self._writes:
            batch, self._writes = self._writes, []
            try:
                await loop.run_in_executor(self._thread, self._files.write, batch)
            except OSError as error:
                log.error("assets could not be stored", assets=len(batch), problem=error.strerror)
                self._failed(batch, error)
            else:
                self._arrived(batch)
        self._writing = None

    def _arrived(self, batch: Sequence[tuple[str, bytes]]) -> None:
        for name, _ in batch:
            self._damaged.discard(name)
            self._promise(name)
            self._arriving.pop(name).set_result(None)

    def _failed(self, batch: Sequence[tuple[str, bytes]], error: OSError) -> None:
        for name, _ in batch:
            self._damaged.add(name)  # where its file could not be taken back, it must not be trusted
            arrival = self._arriving.pop(name)
            arrival.set_exception(_refused(error))
            arrival.exception()  # whoever sent it may have left

    # Deleting -------------------------------------------------------------------------------------------------

    def doubt(self, names: Iterable[str]) -> None:
        """These may have lost whoever needed them: ``collect`` looks after them."""
        self._doubtful.update(dict.fromkeys(names))

    async def doubt_all(self) -> None:
        """Doubt all that is on disk, shelf by shelf: what was sent for a record that never came is found so."""
        for shelf in await asyncio.to_thread(shelves, self.folder):
            names = list(filter(is_asset_name, await asyncio.to_thread(os.listdir, shelf)))
            self.doubt(names)
            await self._collect(names)

    async def collect(self) -> int:
        """Delete the doubtful assets that nobody needs; gives how many. Those that are promised stay doubtful."""
        return await self._collect(list(self._doubtful))

    async def _collect(self, names: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(names), COLLECT_STEP):
            gone = self._unneeded(names[start : start + COLLECT_STEP])
            if gone:
                deleted += await self._delete(gone)
            else:
                await asyncio.sleep(0)
        return deleted

    def _unneeded(self, names: Sequence[str]) -> list[str]:
        """Of these those that go now: from here on they are not there any more."""
        now = self._clock()
        over = [
            name
            for name in names
            if self._promised.get(name, now) <= now and name not in self._arriving and name not in self._leaving
        ]
        kept = self._referred(over) if over else frozenset()
        for name in over:
            self._promised.pop(name, None)
            self._doubtful.pop(name, None)
        gone = [name for name in over if name not in kept]
        self._leaving.update(gone)
        return gone

    async def _delete(self, names: Sequence[str]) -> int:
        loop = asyncio.get_running_loop()
        gone = await loop.run_in_executor(self._thread, self._files.delete, names)
        self._leaving.difference_update(names)
        self._damaged.difference_update(gone)
        self.doubt(set(names).difference(gone))
        return len(gone)

    # Reading --------------------------------------------------------------------------------------------------

    async def read(self, name: str) -> bytes:
        """An asset, checked against its name. Raises UnknownAsset, CorruptAsset."""
        try:
            return await asyncio.to_thread(read_asset, self.folder, name)
        except CorruptAsset as error:
            log.error("asset damaged", asset=name, problem=error.detail)
            self._damaged.add(name)  # whoever has it is asked to send it again
            raise

    async def read_many(self, names: Sequence[str], max_bytes: int) -> list[bytes | HeadraceError]:
        """The first of these assets, one at least and others while they fit into ``max_bytes``, or what is wrong with
        them."""
        found: list[bytes | HeadraceError] = []
        size_bytes = 0
        for name in names:
            try:
                data = await self.read(name)
            except (UnknownAsset, CorruptAsset) as error:
                found.append(error)
                continue
            size_bytes += len(data)
            if found and size_bytes > max_bytes:
                break
            found.append(data)
        return found

    async def close(self) -> None:
        """Write what waits."""
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()
        self._files.close()


class AssetReport(NamedTuple):
    """What ``check`` found: so many assets of so many bytes; those that are damaged, with what is wrong; those that are
    missing; and those that nobody refers to, which is no damage: a promise may keep them."""

    assets: int
    size_bytes: int
    damaged: dict[str, str]
    missing: list[str]
    unreferenced: list[str]

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.missing


def check(folder: Path, referred: Set[str], progress: Callable[[int], None] = lambda size_bytes: None) -> AssetReport:
    """Verify all assets against their names, and against what stored records refer to. Blocking; writes nothing, and
    may run beside a service. ``progress`` is called with the bytes of each asset."""
    found: set[str] = set()
    damaged: dict[str, str] = {}
    size_bytes = 0
    for shelf in shelves(folder):
        for name in sorted(os.listdir(shelf)):
            try:
                size = verify_asset(folder, name)
            except UnknownAsset:
                continue  # deleted meanwhile
            except CorruptAsset as error:
                damaged[name] = error.detail
                size = size_of(asset_path(folder, name))
            found.add(name)
            size_bytes += size
            progress(size)
    return AssetReport(
        assets=len(found),
        size_bytes=size_bytes,
        damaged=damaged,
        missing=sorted(referred - found),
        unreferenced=sorted(found - referred),
    )


def stored_bytes(folder: Path) -> int:
    """Of all assets. Blocking; may run beside a service."""
    return sum(size_of(path) for shelf in shelves(folder) for path in shelf.iterdir())


def _refused(error: OSError) -> StoreError:
    return StoreError(
        f"An asset cannot be stored: {error.strerror or error}.",
        hint="Free disk space or mend what failed; it is sent again by itself.",
    )
