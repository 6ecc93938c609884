"""Checking a data directory, and building its projection anew from the log.

* Everything is read: frames, both copies of events, heads, footers, the projection, assets.
* Nothing is written, and a live service never waits for a check.
* Each damaged record is named: file, offset, type, whose it is where that is known, and what it costs.
* A log that is shorter than it was is found, where its next file or its projection knows better.
* A rebuilt projection equals the lived one, row by row.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headrace.errors import HeadraceError, SetupError
from headrace.store import log_files, log_format
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.log_files import LogFile
from headrace.store.log_format import Damage, FooterBuilder, Frame, FrameType
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.assets import store as assets
from headrace_orchestrator.buffer.data_directory import is_owned, lock_directory, sync_directory
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.projection.diff import ProjectionCopy, copy_projection, differences
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, entries_of
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.service.fsck.findings import COST_OF, FindingKind, FsckFinding, FsckReport
from headrace_orchestrator.service.storage.store import events_of

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and how many there are."""

PROJECTION = "projection.sqlite"
_ROWS_AT_A_TIME = 5000

_UNREADABLE = (HeadraceError, msgspec.MsgspecError, ValueError)
"""What a payload raises that is not what its type says, though its checksum is right."""


def check(data: Path, *, on_progress: OnProgress = lambda done, total: None) -> FsckReport:
    """Read everything; blocking. Raises SetupError if this is no data directory or its log cannot be told from
    another's, UnknownLogFormat."""
    _require_log(data)
    live = is_owned(data)
    with TemporaryDirectory(prefix="headrace-fsck-") as folder:
        # First the projection, then the log: what the projection has, the log has had.
        lived = copy_projection(data / PROJECTION, Path(folder) / "lived.sqlite", live=live)
        reading = LogCheck(data, lived, on_progress)
        built = SqliteProjection(Path(folder) / "built.sqlite", reading.log)
        try:
            reading.run(built)
        finally:
            built.close()
        if lived is not None:
            reading.compare(lived, Path(folder) / "built.sqlite")
            lived.close()
    reading.check_assets()
    return reading.report(live)


def rebuild(data: Path, *, on_progress: OnProgress = lambda done, total: None) -> int:
    """Put a projection in place that is made from the log alone; blocking. Returns how many trajectories are in it.
    Raises DataDirectoryInUse while an orchestrator owns the directory, and what ``check`` raises."""
    _require_log(data)
    with lock_directory(data):
        new = data / f"{PROJECTION}.new"
        reading = LogCheck(data, None, on_progress)
        _unlink(new)
        built = SqliteProjection(new, reading.log)
        try:
            reading.run(built)
        finally:
            built.close()
        _unlink(data / PROJECTION)
        os.replace(new, data / PROJECTION)
        sync_directory(data)
    return reading.frames[FrameType.TRAJECTORY]


def _require_log(data: Path) -> None:
    if not (data / "log").is_dir():
        raise SetupError(
            f"{data} is no data directory: there is no folder named log in it.",
            hint="Give the directory that the orchestrator was started with (--data).",
        )


def _unlink(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


class LogCheck:
    """One reading of a log from its start to its end."""

    def __init__(self, data: Path, lived: ProjectionCopy | None, on_progress: OnProgress) -> None:
        directory = data / "log"
        self._files: list[LogFile] = []
        with suppress(FileNotFoundError):  # a live service deletes its oldest files, whole
            for file in log_files.newest_first(directory, log_files.numbers_in(directory)):
                self._files.insert(0, file.without_state())
        self._lived = lived
        self._on_progress = on_progress
        self._assets = data / FOLDER
        self._referred: dict[str, Path] = {}
        log_bytes = sum(file.size_bytes for file in self._files)
        self._total = log_bytes + assets.stored_bytes(self._assets)
        self._done = 0
        self._waiting: list[LocatedEntry] = []
        # A service deletes its oldest files, and has listings forget what was in them a little later.
        oldest = self._files[0].number if self._files else 0
        self._damaged: list[tuple[int, int]] = [(0, Location(oldest, 0, 0).position)]
        self._control_lost = False
        self.unfinished_bytes = 0
        self._end = 0
        self._unprojected_bytes = 0
        self.log = next((file.head.log for file in reversed(self._files) if file.head is not None), "")
        self.frames: Counter[FrameType] = Counter()
        self.assets = 0
        self.findings: list[FsckFinding] = []

    # The log --------------------------------------------------------------------------------------------------

    def run(self, built: SqliteProjection | None = None) -> None:
        """Read all files; their rows go into ``built``, those of the lived one's past only if there is one."""
        for number, file in enumerate(self._files):
            following = self._files[number + 1] if number + 1 < len(self._files) else None
            self._check_length(file, following)
            try:
                self._read(file, built, last=following is None)
            except FileNotFoundError:  # deleted whole meanwhile
                self._damaged.append((Location(file.number, 0, 0).position, Location(file.number + 1, 0, 0).position))
            self._done += file.size_bytes
        self._write(built)

    def _check_length(self, file: LogFile, following: LogFile | None) -> None:
        missing = log_files.gap_after(file, following) if following is not None else None
        if following is None or missing is None:
            return
        start = Location(file.number, missing.offset, 0).position
        end = Location(following.number, 0, 0).position
        self._damaged.append((start, end))
        self._find(
            "file", file, lost=True, offset=missing.offset, size=missing.size_bytes,
            names=self._lived.names(start, end) if self._lived is not None else [], problem=missing.problem,
            cost="The records in the part that is missing are lost.",
        )  # fmt: skip

    def _read(self, file: LogFile, built: SqliteProjection | None, *, last: bool) -> None:
        tally, sealed = FooterBuilder(0), False
        for item in file.scan():
            self._on_progress(self._done + item.offset, self._total)
            if isinstance(item, Damage):
                if item.torn and last:
                    self.unfinished_bytes = item.size
                    continue
                self._lose(file, item.offset, item.size, item.type, item.problem)
            else:
                self._check_copies(file, item)
                if sealed:
                    self._lose(file, item.offset, item.size, item.type, "it is behind the footer of a sealed file")
                elif item.type is FrameType.FOOTER:
                    sealed = True
                    self._check_footer(file, item, tally)
                else:
                    tally.add_read(item)
                    self._take_in(file, item)
                self._end = Location(file.number, item.offset + item.size, 0).position
            if len(self._waiting) >= _ROWS_AT_A_TIME:
                self._write(built)

    def _check_copies(self, file: LogFile, frame: Frame) -> None:
        """Find what is damaged of a frame that can be read all the same."""
        if frame.recovered:
            problem, cost = "one of its two copies is damaged", "Nothing yet: the other copy is intact."
        elif not log_format.is_padded_with_zeros(file.path, frame):
            problem, cost = "a byte that fills it up was changed", "Nothing: no data is there."
        else:
            return
        self._find(
            "copy", file, offset=frame.offset, size=frame.size, type=frame.type, lost=False, problem=problem, cost=cost
        )

    def _check_footer(self, file: LogFile, frame: Frame, tally: FooterBuilder) -> None:
        self.frames[frame.type] += 1
        try:
            matches = tally.matches(log_format.parse_footer(frame.payload))
        except msgspec.MsgspecError:
            matches = False
        if not matches:
            self._find(
                "footer", file, offset=frame.offset, size=frame.size, type=frame.type, lost=False,
                problem="its digest is not that of the frames before it",
                cost="Frames of this file were damaged, changed or lost; those that are found here are named.",
            )  # fmt: skip

    def _take_in(self, file: LogFile, frame: Frame) -> None:
        self.frames[frame.type] += 1
        if frame.type is FrameType.FILE_HEAD:
            return
        location = Location(file.number, frame.offset, len(frame.payload))
        try:
            events, source = events_of(frame)
            if isinstance(source, TrajectoryHead):
                self._referred |= {asset.name: file.path for asset in source.assets}
            if self._lived is not None and location.position >= self._lived.cursor:
                self._unprojected_bytes += frame.size
            else:
                self._waiting += [LocatedEntry(listed, location) for listed in entries_of(events, source)]
        except _UNREADABLE as error:
            self._lose(file, frame.offset, frame.size, frame.type, f"it does not decode: {error}")

    def _write(self, built: SqliteProjection | None) -> None:
        if built is not None:
            built.write(self._waiting, self._end)
        self._waiting = []

    # What is found --------------------------------------------------------------------------------------------

    def _lose(self, file: LogFile, offset: int, size: int, type: FrameType | None, problem: str) -> None:
        """A frame cannot be read."""
        start = Location(file.number, offset, 0).position
        self._damaged.append((start, start + size))
        self._control_lost |= type in (FrameType.CONTROL, None)
        names = self._names(file, offset, size)
        kind: FindingKind = "record"
        lost = True
        # Of what begins where a head does, and cannot be read, more may be gone than that.
        head_only = type is None and not offset and not names and size < file.size_bytes
        if type is FrameType.FILE_HEAD or head_only:
            kind, cost = "head", "No record is lost; a start reads from the head of the file before it."
            lost = file.number == self._files[0].number
            if lost:
                cost = "If this is the oldest file, what was decided before it is lost; its records are intact."
        elif type is FrameType.FOOTER:
            kind, lost, cost = "footer", False, "Nothing: every record is checked by itself."
        else:
            cost = COST_OF.get(type, "Whatever was stored here is lost.")
        self._find(
            kind, file, offset=offset, size=size, type=type, names=names, lost=lost, problem=problem, cost=cost
        )  # fmt: skip

    def _find(
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

    def _names(self, file: LogFile, offset: int, size: int) -> list[str]:
        """What the projection says was stored in a part of a file."""
        if self._lived is None:
            return []
        start = Location(file.number, offset, 0).position
        return self._lived.names(start, start + size)

    # The projection -------------------------------------------------------------------------------------------

    def compare(self, lived: ProjectionCopy, built: Path) -> None:
        """Find where the projection is not what the log gives."""
        for problem in lived.problems(self.log):
            self._find_in_projection([], problem)
        if lived.broken:
            return
        if lived.cursor > self._end and self._files:
            gone = lived.names(self._end, lived.cursor)
            last = self._files[-1]
            self._find(
                "file", last, lost=True, offset=last.size_bytes - self.unfinished_bytes, names=gone,
                problem="the log ends before its end: the projection has more than there is",
                cost="The records in the part that is missing are lost.",
            )  # fmt: skip
        passed_over = [*self._damaged, (self._end, max(lived.cursor, self._end) + 1)]
        for names, problem in differences(lived, built, passed_over, settled=not self._control_lost):
            self._find_in_projection(names, problem)

    def _find_in_projection(self, names: list[str], problem: str) -> None:
        self.findings.append(
            FsckFinding(
                kind="projection",
                lost=False,
                file=PROJECTION,
                names=names,
                problem=problem,
                cost="Listings are wrong until it is built anew: stop the service and run `headrace fsck --rebuild`.",
            )
        )

    # Assets ---------------------------------------------------------------------------------------------------

    def check_assets(self) -> None:
        """Find assets that are damaged, and those that stored records refer to and that are not there."""
        found = assets.check(self._assets, self._referred.keys(), self._move_on)
        self.assets = found.assets
        for name, problem in found.damaged.items():
            self._find_asset(name, problem)
        for name in found.missing:
            if self._referred[name].exists():  # else it went with the last file that referred to it
                self._find_asset(name, "it is missing, and stored records refer to it")

    def _move_on(self, size: int) -> None:
        self._done += size
        self._on_progress(min(self._done, self._total), self._total)

    def _find_asset(self, name: str, problem: str) -> None:
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
