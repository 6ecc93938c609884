"""The catalog of a log, built in one pass for ``headrace.open``: places of records, states of batches and runs.

* The first record of a trajectory counts, and the last event of a batch.
* The events that the catalog reads have the names of the scheduler's classes, which this package does not import.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.batch.body import read_manifest
from headrace.store.log_format import Frame, FrameType
from headrace.trajectory import Version
from headrace.wire.codec import decode_head

BatchState = Literal["open", "acked", "dissolved"]


class _StoredEvent(msgspec.Struct, frozen=True):
    """The fields of an event that the catalog reads; ``type`` is the name of its class."""

    type: str
    run: str = ""
    batch: str = ""
    spec: dict[str, Any] | None = None
    version: Any = None


_event_decoder = msgspec.msgpack.Decoder(list[_StoredEvent])


@dataclass
class CatalogRun:
    """The stored state of a run."""

    spec: dict[str, Any] | None = None
    closed: bool = False
    version: Version | None = None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class CatalogBatch:
    """The place of a batch's head, and the state of the batch."""

    run: str
    place: tuple[int, int, int]
    state: BatchState = "open"
    made: Version | None = None


class Catalog:
    """Places of records: file number, offset, length of the payload. A trajectory takes about 200 bytes of memory."""

    def __init__(self) -> None:
        self.runs: dict[str, CatalogRun] = {}
        self.batches: dict[str, CatalogBatch] = {}
        #: The number of a trajectory by its id; ``places`` has three integers for each number.
        self.trajectories: dict[str, int] = {}
        self.places = array("Q")

    def add(self, number: int, frame: Frame) -> None:
        """Add a frame of file ``number``. Raises a HeadraceError, MsgspecError or ValueError if it is invalid."""
        place = (number, frame.offset, len(frame.payload))
        if frame.type is FrameType.TRAJECTORY:
            head = decode_head(frame.payload)
            if head.id not in self.trajectories:
                self.trajectories[head.id] = len(self.trajectories)
                self.places.extend(place)
                self._run(head.run).counts["trajectories"] += 1
        elif frame.type is FrameType.BATCH:
            manifest = read_manifest(frame.payload)
            self.batches[manifest.batch] = CatalogBatch(manifest.run, place)
            self._run(manifest.run).counts["batches"] += 1
        elif frame.type is FrameType.CONTROL:
            for event in _event_decoder.decode(frame.payload):
                self._apply(event)

    def _apply(self, event: _StoredEvent) -> None:
        if event.type == "RunCreated":
            run = self._run(event.run)
            run.spec, run.version = event.spec, Version(0, 0)
        elif event.type == "RunClosed":
            self._run(event.run).closed = True
        elif event.type == "VersionAnnounced":
            self._run(event.run).version = Version(*event.version)
        elif event.type in ("BatchAcked", "BatchDissolved"):
            version = None if event.version is None else Version(*event.version)
            if version is not None:
                self._run(event.run).version = version
            if (entry := self.batches.get(event.batch)) is not None:
                entry.state = "acked" if event.type == "BatchAcked" else "dissolved"
                entry.made = version

    def _run(self, name: str) -> CatalogRun:
        return self.runs.setdefault(name, CatalogRun())
