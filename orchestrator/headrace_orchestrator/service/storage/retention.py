"""Retention in a running service: deletes old files of the log by the rules, and everything that depends on them.

* A file that a group in flight, an open batch or a start needs is not deleted; a start may need the last two control
  states.
* Old files are deleted; then their entries leave the projection, and assets that only they referred to are collected.
* The file that retention waits for is logged, once for each file.
* A deletion that a failing disk interrupts is completed once the disk works again; any other obstacle is logged.
* At the bound of the disk admission stops: the stored bytes are reported to the scheduler, appended data at once,
  assets and deletions at the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError
from headrace.server import logs
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.buffer.log.location import file_at
from headrace_orchestrator.buffer.retention_rules import FileUse, RetentionRules, removable_files
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.service.storage.location_index import FileInUse
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

RETAIN_EVERY_S = 1.0
"""Seconds between two steps: assets that arrive meanwhile may exceed a bound, and a second of them is little in
comparison with any bound worth setting."""


class RetentionLoop:
    """Retention of one store. ``rotate`` opens a new file of the log; ``on_deleted`` is called with the bytes of each
    deleted file; ``now_s`` returns Unix time."""

    def __init__(
        self,
        store: Store,
        assets: AssetStore,
        rules: RetentionRules,
        bounds: SharedBounds,
        *,
        rotate: Callable[[], None],
        on_deleted: Callable[[int], None],
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._assets = assets
        self._rules = rules
        self._bounds = bounds
        self._rotate = rotate
        self._on_deleted = on_deleted
        self._now_s = now_s
        #: Trajectories in sealed files, by number.
        self._counts: dict[int, int] = {}
        #: The file that retention waited for in the last step.
        self._waits_for: FileInUse | None = None
        #: Deleted files that the projection still has entries of.
        self._to_forget: list[int] = []

    async def run(self) -> None:
        """Repeat ``step`` until cancelled. An obstacle, such as a failing disk or a foreign file, is logged once, and
        the next step tries again."""
        last_problem = ""
        while True:
            problem = ""
            try:
                await self.step()
            except (HeadraceError, OSError) as error:
                problem = error.detail if isinstance(error, HeadraceError) else str(error)
            if problem and problem != last_problem:
                log.error("retention failed; tried again", problem=problem)
            last_problem = problem
            await asyncio.sleep(RETAIN_EVERY_S)

    async def step(self) -> list[int]:
        """Delete the files that may be deleted now; returns their numbers. Raises StoreError, SetupError, OSError."""
        self._report_bytes()
        chosen: list[int] = []
        if self._rules.deletes:
            files = await asyncio.to_thread(self._uses)
            if self._is_rotation_due(files):
                self._rotate()
            chosen = await self._choose(files)
        for number in chosen:
            size_bytes = await self._store.log.remove(number)
            self._to_forget.append(number)
            self._on_deleted(size_bytes)
            log.info("an old file of the log was deleted", number=number, bytes=size_bytes)
        if self._to_forget:
            candidates = await self._store.forget_files(self._to_forget)
            self._to_forget.clear()
            self._assets.add_candidates(candidates)
            self._report_bytes()
        return chosen

    def _report_bytes(self) -> None:
        self._bounds.disk_bytes = self._store.log.size_bytes + self._assets.size_bytes

    def _is_rotation_due(self, files: Sequence[FileUse]) -> bool:
        """True if the current file is to be sealed: its own records get old, or it keeps older files from being
        deleted, because a start needs all files from the last control state but one on. A new file does not help where
        a group or a batch keeps the older ones."""
        file_age_s = self._rules.file_age_s
        if file_age_s is None or self._now_s() - self._store.log.opened_at_s <= file_age_s:
            return False
        if self._store.has_events:
            return True
        in_use = self._store.index.oldest_in_use(files[0].number if files else 0)
        return any(file.trajectories for file in files[:-1] if in_use is None or file.number < in_use.file)

    async def _choose(self, files: Sequence[FileUse]) -> list[int]:
        if not self._removable(files, needed=None):
            return []
        for_restart = await asyncio.to_thread(self._store.log.oldest_for_restart)
        # No await from here to the choice, so that no chosen file can become needed.
        in_use = self._store.index.oldest_in_use(files[0].number)
        if in_use is None:
            return self._removable(files, needed=for_restart)
        chosen = self._removable(files, needed=min(for_restart, in_use.file))
        self._log_wait(in_use if len(chosen) < len(self._removable(files, needed=for_restart)) else None)
        return chosen

    def _log_wait(self, in_use: FileInUse | None) -> None:
        """Log the file that retention waits for: its run may be one that everybody forgot."""
        if in_use is not None and in_use != self._waits_for:
            log.warning(
                "retention waits: an old file of the log is in use; pull and ack, or close the run, to release it",
                number=in_use.file,
                run=in_use.run,
                needed_by=in_use.user,
            )
        self._waits_for = in_use

    def _removable(self, files: Sequence[FileUse], needed: int | None) -> list[int]:
        if not files:
            return []
        last = files[-1].number if needed is None else needed
        return removable_files(files, self._rules, now_s=self._now_s(), needed=last)

    def _uses(self) -> list[FileUse]:
        """All files, in order. Blocking. Raises StoreError."""
        sizes = self._store.log.files.sizes()
        self._counts = {number: count for number, count in self._counts.items() if number in sizes}
        newest = max(sizes, default=0)
        projected = file_at(self._store.projection.cursor)
        uses = []
        for number, (size_bytes, written_at) in sorted(sizes.items()):
            count = self._counts.get(number)
            if count is None:
                count = self._store.projection.count(number)
                # Only the counts of files behind the cursor are final; the newest file still grows.
                if number < newest and number < projected:
                    self._counts[number] = count
            uses.append(FileUse(number, size_bytes, count, written_at))
        return uses
