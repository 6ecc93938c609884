"""The check of a data directory, and the rebuild of its projection from the log.

* Every flipped byte is found: in records, both copies of control frames, heads, footers, the projection, assets.
* Nothing is written, and a live service never waits for a check.
* Only the damaged record is named: file, offset, type, its trajectory or batch if known, and the cost of the damage.
* Records that were cut off are named by the projection; a gap before the next file is found without it.
* A rebuilt projection equals the original one, row by row.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.errors import HeadraceError
from headrace.store import log_files, log_format
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.log_files import LogFile
from headrace.store.log_format import Damage, FooterBuilder, Frame, FrameType
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.assets.check import check_assets, stored_bytes
from headrace_orchestrator.buffer.data_directory import is_owned, lock_directory, require_log
from headrace_orchestrator.buffer.durable_files import sync_directory
from headrace_orchestrator.buffer.log.location import Location, start_of
from headrace_orchestrator.buffer.progress import OnProgress
from headrace_orchestrator.buffer.projection.diff import ProjectionCopy, copy_projection, differences
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, entries_of
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection, delete_database
from headrace_orchestrator.service.fsck.findings import COST_OF, FindingKind, FsckFinding, FsckReport
from headrace_orchestrator.service.storage.frames import events_of

PROJECTION = "projection.sqlite"
_ENTRIES_PER_WRITE = 5000

_UNREADABLE = (HeadraceError, msgspec.MsgspecError, ValueError)
"""Errors of a payload that does not match its type although its checksum is correct."""


def check(data: Path, *, on_progress: OnProgress = lambda done, total: None) -> FsckReport:
    """Read everything; blocking. Raises UnknownLogFormat, and SetupError if this is not a data directory or its files
    belong to different logs."""
    require_log(data)
    live = is_owned(data)
    with TemporaryDirectory(prefix="headrace-fsck-") as folder:
        # First the projection, then the log, which then has everything that the projection has.
        projection = copy_projection(data / PROJECTION, Path(folder) / "copy.sqlite", live=live)
        log_check = LogCheck(data, projection, on_progress)
        rebuilt = SqliteProjection(Path(folder) / "rebuilt.sqlite", log_check.log)
        try:
            log_check.run(rebuilt)
        finally:
            rebuilt.close()
        if projection is not None:
            log_check.compare(projection, Path(folder) / "rebuilt.sqlite")
            projection.close()
    log_check.check_assets()
    return log_check.report(live)


def rebuild(data: Path, *, on_progress: OnProgress = lambda done, total: None) -> int:
    """Replace the projection by one that is rebuilt from the log alone; blocking. Returns its number of trajectories.
    Raises DataDirectoryInUse while an orchestrator owns the directory, and what ``check`` raises."""
    require_log(data)
    with lock_directory(data):
        new = data / f"{PROJECTION}.new"
        log_check = LogCheck(data, None, on_progress)
        delete_database(new)
        rebuilt = SqliteProjection(new, log_check.log)
        try:
            log_check.run(rebuilt)
        finally:
            rebuilt.close()
        delete_database(data / PROJECTION)
        os.replace(new, data / PROJECTION)
        sync_directory(data)
    return log_check.frames[FrameType.TRAJECTORY]


class LogCheck:
    """A pass over a log from its start to its end."""

    def __init__(self, data: Path, projection: ProjectionCopy | None, on_progress: OnProgress) -> None:
        directory = data / "log"
        self._files: list[LogFile] = []
        with suppress(FileNotFoundError):  # a live service deletes its oldest files, whole
            for file in log_files.newest_first(directory, log_files.numbers_in(directory)):
                self._files.insert(0, file.without_state())
        self._projection = projection
        self._on_progress = on_progress
        self._assets = data / FOLDER
        self._referenced: dict[str, Path] = {}
        log_bytes = sum(file.size_bytes for file in self._files)
        self._total = log_bytes + stored_bytes(self._assets)
        self._done = 0
        self._entries: list[LocatedEntry] = []
        # A service deletes its oldest files, and their entries in the projection a little later.
        oldest = self._files[0].number if self._files else 0
        self._damaged: list[tuple[int, int]] = [(0, start_of(oldest))]
        self._events_lost = False
        self.unfinished_bytes = 0
        self._end = 0
        self._unprojected_bytes = 0
        self.log = next((file.head.log for file in reversed(self._files) if file.head is not None), "")
        self.frames: Counter[FrameType] = Counter()
        self.assets = 0
        self.findings: list[FsckFinding] = []

    # The log --------------------------------------------------------------------------------------------------

    def run(self, rebuilt: SqliteProjection | None = None) -> None:
        """Read all files; their entries go to ``rebuilt``, up to the cursor of the service's projection if any."""
        for number, file in enumerate(self._files):
            following = self._files[number + 1] if number + 1 < len(self._files) else None
            self._check_length(file, following)
            try:
                self._read(file, rebuilt, last=following is None)
            except FileNotFoundError:  # deleted whole meanwhile
                self._damaged.append((start_of(file.number), start_of(file.number + 1)))
            self._done += file.size_bytes
        self._write(rebuilt)

    def _check_length(self, file: LogFile, following: LogFile | None) -> None:
        missing = log_files.gap_after(file, following) if following is not None else None
        if following is None or missing is None:
            return
        start = Location(file.number, missing.offset, 0).position
        end = start_of(following.number)
        self._damaged.append((start, end))
        self._report(
            "file", file, lost=True, offset=missing.offset, size=missing.size_bytes,
            names=self._names(start, end), problem=missing.problem,
            cost="The records in the missing part are lost.",
        )  # fmt: skip

    def _read(self, file: LogFile, rebuilt: SqliteProjection | None, *, last: bool) -> None:
        tally, sealed = FooterBuilder(0), False
        for item in file.scan():
            self._on_progress(self._done + item.offset, self._total)
            if isinstance(item, Damage):
                if item.torn and last:
                    self.unfinished_bytes = item.size
                    continue
                self._report_unreadable(file, item.offset, item.size, item.type, item.problem)
            else:
                self._check_copies(file, item)
                if sealed:
                    self._report_unreadable(
                        file, item.offset, item.size, item.type, "it is behind the footer of a sealed file"
                    )
                elif item.type is FrameType.FOOTER:
                    sealed = True
                    self._check_footer(file, item, tally)
                else:
                    tally.add_read(item)
                    self._add_frame(file, item)
                self._end = Location(file.number, item.offset + item.size, 0).position
            if len(self._entries) >= _ENTRIES_PER_WRITE:
                self._write(rebuilt)

    def _check_copies(self, file: LogFile, frame: Frame) -> None:
        """Report damage of a frame that can still be read."""
        if frame.recovered:
            problem, cost = "one of its two copies is damaged", "Nothing yet: the other copy is intact."
        elif not log_format.is_padded_with_zeros(file.path, frame):
            problem, cost = "a padding byte was changed", "Nothing: padding holds no data."
        else:
            return
        self._report(
            "copy", file, offset=frame.offset, size=frame.size, type=frame.type, lost=False, problem=problem, cost=cost
        )

    def _check_footer(self, file: LogFile, frame: Frame, tally: FooterBuilder) -> None:
        self.frames[frame.type] += 1
        try:
            matches = tally.matches(log_format.parse_footer(frame.payload))
        except msgspec.MsgspecError:
            matches = False
        if not matches:
            self._report(
                "footer", file, offset=frame.offset, size=frame.size, type=frame.type, lost=False,
                problem="its digest does not match the frames before it",
                cost="Frames of this file were damaged, changed or lost; other findings name those that are known.",
            )  # fmt: skip

    def _add_frame(self, file: LogFile, frame: Frame) -> None:
        self.frames[frame.type] += 1
        if frame.type is FrameType.FILE_HEAD:
            return
        location = Location(file.number, frame.offset, len(frame.payload))
        try:
            events, source = events_of(frame)
            if isinstance(source, TrajectoryHead):
                self._referenced |= {asset.name: file.path for asset in source.assets}
            if self._projection is not None and location.position >= self._projection.cursor:
                self._unprojected_bytes += frame.size
            else:
                self._entries += [LocatedEntry(entry, location) for entry in entries_of(events, source)]
        except _UNREADABLE as error:
            self._report_unreadable(file, frame.offset, frame.size, frame.type, f"it does not decode: {error}")

    def _write(self, rebuilt: SqliteProjection | None) -> None:
        if rebuilt is not None:
            rebuilt.write(self._entries, self._end)
        self._entries = []

    # Findings -------------------------------------------------------------------------------------------------

    def _report_unreadable(self, file: LogFile, offset: int, size: int, type: FrameType | None, problem: str) -> None:
        """Report a frame that cannot be read."""
        start = Location(file.number, offset, 0).position
        self._damaged.append((start, start + size))
        self._events_lost |= type in (FrameType.CONTROL, None)
        names = self._names(start, start + size)
        kind: FindingKind = "record"
        lost = True
        # An unreadable part at the beginning of a file may be a head and more.
        head_only = type is None and not offset and not names and size < file.size_bytes
        if type is FrameType.FILE_HEAD or head_only:
            kind, cost = "head", "No record is lost; a start reads from the head of the file before it."
            lost = file.number == self._files[0].number
            if lost:
                cost = "If this is the oldest file, the decisions before it are lost; its records are intact."
        elif type is FrameType.FOOTER:
            kind, lost, cost = "footer", False, "Nothing: every record has a checksum of its own."
        else:
            cost = COST_OF.get(type, "All data stored here is lost.")
        self._report(
            kind, file, offset=offset, size=size, type=type, names=names, lost=lost, problem=problem, cost=cost
        )  # fmt: skip

    def _report(
        self,
        kind: FindingKind,
        file: LogFile,
        *,
        lost: bool,
        problem: str,
        cost: str,
        offset: int = 0,
        size: int = 0,
        type: FrameType | None = None,
        names: list[str] | None = None,
    ) -> None:
        self.findings.append(
            FsckFinding(
                kind=kind,
                lost=lost,
                file=f"log/{file.path.name}",
                offset=offset,
                size_bytes=size,
                type=type.name.lower() if type is not None else "",
                names=names or [],
                problem=problem,
                cost=cost,
            )
        )

    def _names(self, start: int, end: int) -> list[str]:
        """Ids of the trajectories and batches that the projection has in a range of positions."""
        return [] if self._projection is None else self._projection.names(start, end)

    # The projection -------------------------------------------------------------------------------------------

    def compare(self, projection: ProjectionCopy, rebuilt: Path) -> None:
        """Report differences between the projection and the log."""
        for problem in projection.problems(self.log):
            self._report_projection([], problem)
        if projection.unreadable:
            return
        if projection.cursor > self._end and self._files:
            names = projection.names(self._end, projection.cursor)
            last = self._files[-1]
            self._report(
                "file", last, lost=True, offset=last.size_bytes - self.unfinished_bytes, names=names,
                problem="its end is missing: the projection has later records",
                cost="The records in the missing part are lost.",
            )  # fmt: skip
        lost = [*self._damaged, (self._end, max(projection.cursor, self._end) + 1)]
        for names, problem in differences(projection, rebuilt, lost, events_lost=self._events_lost):
            self._report_projection(names, problem)

    def _report_projection(self, names: list[str], problem: str) -> None:
        self.findings.append(
            FsckFinding(
                kind="projection",
                lost=False,
                file=PROJECTION,
                names=names,
                problem=problem,
                cost="Listings are wrong until it is rebuilt: stop the service and run `headrace fsck --rebuild`.",
            )
        )

    # Assets ---------------------------------------------------------------------------------------------------

    def check_assets(self) -> None:
        """Report damaged assets, and missing assets that stored records refer to."""
        assets = check_assets(self._assets, self._referenced.keys(), self._add_progress)
        self.assets = assets.assets
        for name, problem in assets.damaged.items():
            self._report_asset(name, problem)
        for name in assets.missing:
            if self._referenced[name].exists():  # otherwise it was deleted with the last file that referred to it
                self._report_asset(name, "it is missing, and stored records refer to it")

    def _add_progress(self, size: int) -> None:
        self._done += size
        self._on_progress(min(self._done, self._total), self._total)

    def _report_asset(self, name: str, problem: str) -> None:
        self.findings.append(
            FsckFinding(
                kind="asset", lost=True, file=str(asset_path(Path(FOLDER), name)), names=[name], problem=problem,
                cost="This asset is lost; the tokens of the records that refer to it are intact.",
            )
        )  # fmt: skip

    def report(self, live: bool) -> FsckReport:
        return FsckReport(
            live=live,
            files=len(self._files),
            size_bytes=self._total,
            frames={type.name.lower(): self.frames[type] for type in FrameType},
            assets=self.assets,
            unfinished_bytes=self.unfinished_bytes,
            unprojected_bytes=self._unprojected_bytes,
            findings=self.findings,
        )
