"""Reading a data directory without a service: ``headrace.open(path)``.

* Only the log is read. Nothing is written, locked or kept open, so that a running service is not affected.
* A live directory is read up to the append that was running when the reading began.
* A damaged record is listed and skipped; a strict reader raises ``CorruptRecord``.
* Arrays are read-only views of the record that was read, without a copy.
* A file that the service deletes during the reading is omitted.

Records that a live service has written but not yet synced, and so has not acknowledged, may be returned. Needs
``headrace[offline]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from headrace.batch.batch import Batch
from headrace.batch.body import RowAdvantages, read_advantages, read_manifest
from headrace.batch.manifest import Manifest
from headrace.common.arguments import require_known, sorted_names
from headrace.errors import CorruptRecord, HeadraceError, InvalidRequest, UnknownBatch, UnknownTrajectory
from headrace.store import log_files, log_format
from headrace.store.asset_files import FOLDER, read_asset
from headrace.store.catalog import BatchState, Catalog, CatalogBatch
from headrace.store.log_files import LogFile, require_own_log
from headrace.store.log_format import Frame, FrameType
from headrace.store.regular_files import open_descriptor, require_regular_entries
from headrace.trajectory import Status, Trajectory, Version
from headrace.wire.codec import TrajectoryHead, decode, decode_head

ReadProgress = Callable[[int, int], None]
"""Called now and then with the number of bytes read, and the total."""


def open(path: str | os.PathLike[str], *, strict: bool = False, on_progress: ReadProgress | None = None) -> Reader:
    """A reader of the data directory at ``path``, which may belong to a running service.

    ``strict``: damage raises CorruptRecord instead of being skipped. Raises SetupError if ``path`` is not a data
    directory, MissingExtra without ``headrace[offline]``.
    """
    log_format.crc32c(b"")
    return Reader(Path(path), strict=strict, on_progress=on_progress)


class LogDamage(NamedTuple):
    """A damaged part of the log: ``size_bytes`` bytes at ``offset`` of ``file``, and the problem."""

    file: str
    offset: int
    size_bytes: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class TrajectoryFilter:
    """A filter of trajectories; a field that is None matches any.

    ``low`` and ``high`` bound the versions: a trajectory matches if one of its rows has a version from ``low`` to
    ``high``, both included. ``evaluation``: the name of an evaluation; "" for training only. ``tags``: tags that the
    task must all have.
    """

    run: str | None = None
    environment: str | None = None
    status: Status | None = None
    evaluation: str | None = None
    tags: Collection[str] = ()
    low: Version | None = None
    high: Version | None = None

    def __post_init__(self) -> None:
        sorted_names("tags", self.tags)
        require_known("status", self.status, get_args(Status))

    def matches(self, head: TrajectoryHead) -> bool:
        """True if the trajectory matches."""
        for expected, value in (
            (self.run, head.run),
            (self.environment, head.task.environment),
            (self.status, head.status),
            (self.evaluation, head.provenance.evaluation),
        ):
            if expected is not None and expected != value:
                return False
        return set(self.tags) <= set(head.task.tags) and self._matches_versions(head)

    def _matches_versions(self, head: TrajectoryHead) -> bool:
        if self.low is None and self.high is None:
            return True
        versions = head.version_range()
        if versions is None:
            return False
        lowest, highest = versions
        return (self.high is None or lowest <= self.high) and (self.low is None or highest >= self.low)


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run in the log. ``spec`` as it was submitted; ``version`` is the last announced one. Each is None if the file
    with that event was deleted."""

    name: str
    spec: dict[str, Any] | None
    closed: bool
    version: Version | None
    trajectories: int
    batches: int


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """A frozen batch and its state. ``made`` is the version that its ack announced, if any."""

    manifest: Manifest
    state: BatchState
    made: Version | None
    _reader: Reader = field(repr=False)
    _head: bytes = field(repr=False)

    @property
    def id(self) -> str:
        return self.manifest.batch

    @property
    def run(self) -> str:
        return self.manifest.run

    def advantages(self, trajectory: str) -> list[RowAdvantages]:
        """Returns and advantages of a trajectory's rows; an empty list if the trajectory is not in the batch."""
        return read_advantages(self._head, trajectory)

    def load(self) -> Batch:
        """The batch as a learner pulled it.

        Raises CorruptRecord or UnknownTrajectory if one of its records is damaged or was deleted with its file.
        """
        records = [self._reader.record(trajectory) for trajectory in self.manifest.trajectories]
        return Batch.parse(b"".join([self._head, *records]))


def _version(argument: str, version: Version | str | None) -> Version | None:
    try:
        return Version.parse(version) if isinstance(version, str) else version
    except ValueError as error:
        raise InvalidRequest(f"{argument}: {error}.") from error


class Reader:
    """Trajectories, batches and runs of a data directory, each read when it is requested.

    ``damaged`` lists the damage found so far, each part once.
    """

    def __init__(self, path: Path, *, strict: bool, on_progress: ReadProgress | None) -> None:
        self.path = path
        self.damaged: list[LogDamage] = []
        self.strict = strict
        self._on_progress = on_progress
        require_own_log(path)
        require_regular_entries(path)

    def trajectories(
        self,
        *,
        run: str | None = None,
        environment: str | None = None,
        status: Status | None = None,
        evaluation: str | None = None,
        tags: Collection[str] = (),
        low: Version | str | None = None,
        high: Version | str | None = None,
    ) -> Iterator[Trajectory]:
        """All matching stored trajectories, in the order in which they were stored; see ``TrajectoryFilter``.

        A version may be text, as in ``"0.12"``. Raises InvalidRequest for a filter that nothing can match.
        """
        trajectory_filter = TrajectoryFilter(
            run=run,
            environment=environment,
            status=status,
            evaluation=evaluation,
            tags=tags,
            low=_version("low", low),
            high=_version("high", high),
        )
        return self.matching(trajectory_filter)

    def matching(self, trajectory_filter: TrajectoryFilter) -> Iterator[Trajectory]:
        """All matching stored trajectories, in the order in which they were stored."""
        for file, frame in self._frames():
            if frame.type is not FrameType.TRAJECTORY:
                continue
            try:
                if trajectory_filter.matches(decode_head(frame.payload)):
                    yield decode(frame.payload)
            except HeadraceError as error:
                self._report_damage(LogDamage(file.path.name, frame.offset, frame.size, error.detail))

    def trajectory(self, id: str) -> Trajectory:
        """A trajectory by id. Raises UnknownTrajectory or CorruptRecord."""
        return decode(self.record(id))

    def record(self, id: str) -> bytes:
        """The stored bytes of a trajectory. Raises UnknownTrajectory or CorruptRecord."""
        number = self._catalog.trajectories.get(id)
        if number is None:
            raise UnknownTrajectory(
                f"{self.path} has no readable trajectory {id}.", hint="`headrace fsck` lists all damage."
            )
        return self._payload(*self._catalog.places[3 * number : 3 * number + 3])

    def asset(self, name: str) -> bytes:
        """An image or a large array by name, checked against it. Raises UnknownAsset or CorruptAsset."""
        return read_asset(self.path / FOLDER, name)

    def batches(self, *, run: str | None = None, state: BatchState | None = None) -> Iterator[StoredBatch]:
        """All batches, in the order in which they were frozen. Raises InvalidRequest for an unknown state."""
        require_known("state", state, get_args(BatchState))
        return self._batches(run, state)

    def _batches(self, run: str | None, state: BatchState | None) -> Iterator[StoredBatch]:
        for entry in self._catalog.batches.values():
            if run in (None, entry.run) and state in (None, entry.state):
                yield self._stored_batch(entry)

    def batch(self, id: str) -> StoredBatch:
        """A batch by id. Raises UnknownBatch or CorruptRecord."""
        entry = self._catalog.batches.get(id)
        if entry is None:
            raise UnknownBatch(f"{self.path} has no readable batch {id}.", hint="`headrace fsck` lists all damage.")
        return self._stored_batch(entry)

    def runs(self) -> list[StoredRun]:
        """All runs, in the order of their first record."""
        return [
            StoredRun(
                name=name,
                spec=entry.spec,
                closed=entry.closed,
                version=entry.version,
                trajectories=entry.counts["trajectories"],
                batches=entry.counts["batches"],
            )
            for name, entry in self._catalog.runs.items()
        ]

    def _stored_batch(self, entry: CatalogBatch) -> StoredBatch:
        head = self._payload(*entry.place)
        return StoredBatch(manifest=read_manifest(head), state=entry.state, made=entry.made, _reader=self, _head=head)

    @cached_property
    def _catalog(self) -> Catalog:
        """The catalog, built in one pass over the whole log."""
        catalog = Catalog()
        for file, frame in self._frames():
            try:
                catalog.add(file.number, frame)
            except (HeadraceError, msgspec.MsgspecError, ValueError) as error:
                self._report_damage(LogDamage(file.path.name, frame.offset, frame.size, str(error)))
        return catalog

    # The log --------------------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[tuple[LogFile, Frame]]:
        """Every intact frame of the log, file by file."""
        files = self._files()
        total, bytes_read = sum(file.size_bytes for file in files), 0
        for file, following in zip(files, [*files[1:], None], strict=False):
            for item in self._scan(file, last=file is files[-1]):
                if self._on_progress is not None:
                    self._on_progress(min(bytes_read + item.offset, total), total)
                yield file, item
            bytes_read += file.size_bytes
            if following is not None and (missing := log_files.gap_after(file, following)) is not None:
                self._report_damage(LogDamage(file.path.name, missing.offset, missing.size_bytes, missing.problem))
        if self._on_progress is not None:
            self._on_progress(total, total)

    def _files(self) -> list[LogFile]:
        directory, files = self.path / "log", []
        # A service deletes its oldest files, whose records are then no longer stored.
        with suppress(FileNotFoundError):
            for file in log_files.newest_first(directory, log_files.numbers_in(directory)):
                files.append(file.without_state())
        return files[::-1]

    def _scan(self, file: LogFile, *, last: bool) -> Iterator[Frame]:
        with suppress(FileNotFoundError):
            for item in file.scan():
                if isinstance(item, Frame):
                    yield item
                elif not (item.torn and last):
                    self._report_damage(LogDamage(file.path.name, item.offset, item.size, item.problem))

    def _payload(self, number: int, offset: int, length: int) -> bytes:
        file = log_files.path_of(self.path / "log", number)
        try:
            descriptor = open_descriptor(file, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptRecord(
                f"The file {file.name} was deleted after it was listed.",
                hint="Open the directory again to read its current content.",
                file=file.name,
                offset=offset,
            ) from error
        try:
            return log_format.read_payload(descriptor, offset, length, name=file.name)
        finally:
            os.close(descriptor)

    def _report_damage(self, damage: LogDamage) -> None:
        if damage not in self.damaged:
            self.damaged.append(damage)
        if self.strict:
            raise CorruptRecord(
                f"The record at offset {damage.offset} of {damage.file} is damaged: {damage.problem}.",
                hint="Read without strict to skip it; `headrace fsck` lists all damage.",
                file=damage.file,
                offset=damage.offset,
            )
