"""Encoding of a trajectory as a record: a small head, then aligned little-endian arrays.

* A record decodes to the encoded trajectory; its arrays are read-only views of the buffer, without a copy.
* Every array starts at a multiple of 64 bytes from the start of the record, and a record is a multiple of 64 bytes
  long, so that records can be concatenated.
* Arrays of a wrong dtype or shape are refused, never converted.
* Damaged bytes raise ``UnreadableRecord`` or decode to a trajectory, without another error or a large allocation. The
  checksums that detect damage are in the log's frames.

Layout, little-endian::

    "HRTJ" | schema u16 | 0 u16 | head length u64 | record length u64
    head: a msgpack map, the fields of Trajectory; a segment has its length in place of arrays
    padding to 64
    per segment: token_ids i32[n], logprobs f32[n], sampled u8[n], each padded to 64
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.common.formats import SCHEMA
from headrace.errors import InvalidTrajectory, UnreadableRecord, WrongDtype, WrongShape
from headrace.trajectory import (
    Asset,
    Failure,
    Message,
    Placeholder,
    PolicyRef,
    Provenance,
    Sampling,
    Segment,
    Status,
    StopReason,
    Task,
    Timing,
    Tokenizer,
    Trajectory,
    Turn,
    Version,
    VersionRun,
)
from headrace.wire.alignment import ALIGNMENT, padded

Buffer = bytes | bytearray | memoryview
"""The input of the readers below: bytes, or a contiguous view of bytes."""

_MAGIC = b"HRTJ"
_MAGIC_NUMBER = int.from_bytes(_MAGIC, "little")
_PREFIX = struct.Struct("<4sHHQQ")
_U8 = np.dtype("<u8")
_ZEROS = bytes(ALIGNMENT)
_COLUMNS = (("token_ids", np.dtype("<i4")), ("logprobs", np.dtype("<f4")), ("sampled", np.dtype("u1")))
_I4, _F4, _U1 = (dtype for _, dtype in _COLUMNS)


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A segment without its arrays; ``length`` is the length of each."""

    agent: str
    policy: PolicyRef
    sampling: Sampling
    train: bool
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    versions: list[VersionRun]
    turns: list[Turn]
    placeholders: list[Placeholder] = []
    arrays: dict[str, str] = {}


class TrajectoryHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trajectory without arrays, messages and infos, for listings and for forming batches."""

    id: str
    run: str
    group: str
    member: int
    episode: str
    attempt: int
    task: Task
    status: Status
    stop_reason: StopReason
    failure: Failure | None = None
    segments: list[SegmentHead]
    tokenizer: Tokenizer | None = None
    assets: list[Asset] = []
    timing: Timing = Timing()
    provenance: Provenance = Provenance()

    def rows(self) -> Iterator[SegmentHead]:
        """The rows: segments with ``train = true`` and at least one turn."""
        return (segment for segment in self.segments if segment.train and segment.turns)

    def version_range(self) -> tuple[Version, Version] | None:
        """The lowest and the highest version of all rows, or None without rows."""
        versions = [run.version for segment in self.rows() for run in segment.versions]
        return (min(versions), max(versions)) if versions else None


class _FullHead(TrajectoryHead, frozen=True, kw_only=True, omit_defaults=True):
    messages: list[Message] = []
    infos: list[dict[str, Any]] = []
    control_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0


_encoder = msgspec.msgpack.Encoder()
_full_decoder = msgspec.msgpack.Decoder(_FullHead)
_head_decoder = msgspec.msgpack.Decoder(TrajectoryHead)
_Head = TypeVar("_Head", bound=TrajectoryHead)


def encode(trajectory: Trajectory) -> bytes:
    """Encode a trajectory as a record.

    Raises WrongDtype or WrongShape for its arrays, InvalidTrajectory if a value of its head (kwargs, infos, tool
    arguments) cannot be encoded as msgpack.
    """
    fields = _full_head(trajectory)
    head = _encode_head(fields)
    size = padded(_PREFIX.size + len(head))
    parts: list[Any] = [b"", head, _ZEROS[: size - _PREFIX.size - len(head)]]
    for segment, item in zip(trajectory.segments, fields.segments, strict=True):
        n = item.length
        for array in (segment.token_ids, segment.logprobs, segment.sampled):
            parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
            parts.append(_ZEROS[: -(n * array.itemsize) % ALIGNMENT])
        size += 2 * padded(4 * n) + padded(n)
    parts[0] = _PREFIX.pack(_MAGIC, SCHEMA, 0, len(head), size)
    return b"".join(parts)


def decode(buffer: Buffer) -> Trajectory:
    """Decode a record that fills the buffer. Raises UnreadableRecord.

    Arrays are read-only views of the buffer, which must not change while they are in use.
    """
    view = memoryview(buffer).toreadonly()
    head_end, size = _read_prefix(view)
    if size != len(view):
        raise _unreadable(f"its stated size is {size} bytes, the buffer has {len(view)}")
    head = _decode_head(_full_decoder, view[_PREFIX.size : head_end])
    offset = padded(head_end)
    segments: list[Segment] = []
    for item in head.segments:
        n = item.length
        wide = padded(4 * n)
        end = offset + 2 * wide + padded(n)
        if end > size:
            raise _unreadable(f"segment {len(segments)} of {n} tokens exceeds the record")
        segments.append(
            Segment(
                agent=item.agent,
                policy=item.policy,
                sampling=item.sampling,
                train=item.train,
                token_ids=np.ndarray(n, _I4, view, offset),
                sampled=np.ndarray(n, _U1, view, offset + 2 * wide),
                logprobs=np.ndarray(n, _F4, view, offset + wide),
                versions=item.versions,
                turns=item.turns,
                placeholders=item.placeholders,
                arrays=item.arrays,
            )
        )
        offset = end
    if offset != size:
        raise _unreadable(f"{size - offset} bytes are left over after the last segment")
    return Trajectory(
        id=head.id,
        run=head.run,
        group=head.group,
        member=head.member,
        episode=head.episode,
        attempt=head.attempt,
        task=head.task,
        status=head.status,
        stop_reason=head.stop_reason,
        failure=head.failure,
        segments=segments,
        messages=head.messages,
        tokenizer=head.tokenizer,
        assets=head.assets,
        timing=head.timing,
        provenance=head.provenance,
        infos=head.infos,
        control_tokens=head.control_tokens,
    )


def decode_head(buffer: Buffer) -> TrajectoryHead:
    """Decode the head of a record. The buffer may end after the head. Raises UnreadableRecord."""
    view = memoryview(buffer)
    head_end, _ = _read_prefix(view)
    return _decode_head(_head_decoder, view[_PREFIX.size : head_end])


def record_sizes(records: memoryview, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sizes i64[n] in bytes stated by the records at offsets ``starts`` i64[n]; -1 where no record starts."""
    if len(records) < _PREFIX.size:
        return np.full(len(starts), -1)
    words = np.frombuffer(records, _U8, len(records) // 8)
    # As an unsigned integer a negative number is a large one: one comparison finds both.
    whole = (starts % ALIGNMENT == 0) & (starts.view(_U8) <= len(records) - _PREFIX.size)
    first = starts // 8 * whole
    is_record = whole & (words[first] & 0xFFFFFFFF == _MAGIC_NUMBER)
    return np.where(is_record, words[first + 2].view(np.int64), -1)


def _full_head(trajectory: Trajectory) -> _FullHead:
    return _FullHead(
        id=trajectory.id,
        run=trajectory.run,
        group=trajectory.group,
        member=trajectory.member,
        episode=trajectory.episode,
        attempt=trajectory.attempt,
        task=trajectory.task,
        status=trajectory.status,
        stop_reason=trajectory.stop_reason,
        failure=trajectory.failure,
        segments=[
            SegmentHead(
                agent=segment.agent,
                policy=segment.policy,
                sampling=segment.sampling,
                train=segment.train,
                length=_checked_length(position, segment),
                versions=segment.versions,
                turns=segment.turns,
                placeholders=segment.placeholders,
                arrays=segment.arrays,
            )
            for position, segment in enumerate(trajectory.segments)
        ],
        tokenizer=trajectory.tokenizer,
        assets=trajectory.assets,
        timing=trajectory.timing,
        provenance=trajectory.provenance,
        messages=trajectory.messages,
        infos=trajectory.infos,
        control_tokens=trajectory.control_tokens,
    )


def _encode_head(head: _FullHead) -> bytes:
    try:
        return _encoder.encode(head)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidTrajectory(
            f"The head of trajectory {head.id} cannot be encoded: {error}",
            hint="Task kwargs, tool arguments and infos must be plain JSON values.",
        ) from error


def _decode_head(decoder: msgspec.msgpack.Decoder[_Head], head: memoryview) -> _Head:
    try:
        return decoder.decode(head)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(f"its head does not decode: {error}") from error


def _read_prefix(view: memoryview) -> tuple[int, int]:
    """The end of the head and the size of the record, both checked."""
    if len(view) < _PREFIX.size:
        raise _unreadable(f"{len(view)} bytes are too few")
    magic, schema, reserved, head_length, size = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise _unreadable(f"it starts with {bytes(magic)!r}, not {_MAGIC!r}")
    if schema != SCHEMA:
        raise _unreadable(f"its wire schema is {schema}, this version reads {SCHEMA}")
    head_end = _PREFIX.size + head_length
    if reserved or size % ALIGNMENT or padded(head_end) > size or head_end > len(view):
        raise _unreadable(f"its sizes disagree: head {head_length}, record {size}, buffer {len(view)} bytes")
    return head_end, size


def _checked_length(position: int, segment: Segment) -> int:
    """Check that a segment's arrays have the right dtypes and equal lengths; returns that length."""
    n = -1
    for name, dtype in _COLUMNS:
        array = getattr(segment, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise WrongDtype(
                f"Segment {position}: {name} is {kind}, not {dtype.name}.",
                hint="Build the array with that dtype; values are never converted silently.",
            )
        if array.ndim != 1 or n not in (-1, len(array)):
            expected = "(n,)" if n == -1 else f"({n},) like token_ids"
            raise WrongShape(
                f"Segment {position}: {name} has shape {array.shape}, not {expected}.",
                hint="Give every token one id, one sampled flag and one logprob.",
            )
        n = len(array)
    return n


def _unreadable(problem: str) -> UnreadableRecord:
    return UnreadableRecord(
        f"The bytes are not a trajectory record: {problem}.",
        hint="They are damaged, truncated, or written by another version of Headrace.",
    )
