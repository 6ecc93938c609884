"""The format of a batch's body: writing head and columns, and reading them without a copy.

Little-endian; every part starts at a multiple of 64 bytes::

    "HRTB" | schema u16 | 0 u16 | head length u64 | start of the records u64
    head: msgpack {manifest, columns: [{name, dtype, length, offset}], shard}, offsets from the end of the padded head
    columns, each padded to 64
    records as they are stored

Columns, per turn of rows (row by row): ``returns``, ``advantages`` (not with estimator ``none``), ``turn_weights``,
``rewards`` f64, ``turn_tokens`` i64. Per row: ``row_trajectory``, ``row_segment``, ``row_tokens``, ``row_group`` i64;
``row_reward`` f64, the undiscounted sum of its agent's rewards in its episode, and ``row_leads`` i64, 1 for the first
row of each (trajectory, agent), where that sum is counted; ``row_bin`` i64, the bin of the row;
``row_turn_offsets`` i64[rows + 1].
``record_offsets`` i64[records + 1], from the start of the records.

A shard has the columns of its own rows, and their numbers in the whole batch: ``row_number`` i64[rows] and
``record_number`` i64[records]. ``row_trajectory``, ``row_group`` and ``row_bin`` are numbers in the whole batch too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.batch.manifest import Manifest, Shard
from headrace.common.formats import SCHEMA
from headrace.errors import InvalidRequest
from headrace.estimators import F64, I64
from headrace.wire.alignment import ALIGNMENT, padded
from headrace.wire.codec import Buffer

Columns = Mapping[str, npt.NDArray[Any]]

MAGIC = b"HRTB"
PREFIX = struct.Struct("<4sHHQQ")
PER_TURN = ("returns", "advantages", "turn_weights", "rewards", "turn_tokens")
PER_ROW = ("row_trajectory", "row_segment", "row_tokens", "row_group", "row_reward", "row_leads", "row_bin")


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a column: ``length`` numbers, at ``offset`` bytes from the end of the padded head."""

    name: str
    dtype: Literal["<f8", "<i8"]
    length: int
    offset: int


class BatchHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The msgpack head of a batch. ``shard``: the part of the batch in the body; None for the whole."""

    manifest: Manifest
    columns: list[Column]
    shard: Shard | None = None


class ParsedHead(NamedTuple):
    """A parsed head. ``columns`` are read-only views; ``records_start`` is the offset of the records in bytes."""

    manifest: Manifest
    columns: dict[str, npt.NDArray[Any]]
    shard: Shard | None
    records_start: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BatchHead)


def pack_head(manifest: Manifest, columns: Columns, shard: Shard | None = None) -> bytes:
    """Encode the body up to its records."""
    table, parts, offset = [], [], 0
    for name, column in columns.items():
        dtype: Literal["<f8", "<i8"] = "<f8" if column.dtype.kind == "f" else "<i8"
        data = np.ascontiguousarray(column, dtype).tobytes()
        table.append(Column(name=name, dtype=dtype, length=len(column), offset=offset))
        parts.append(_pad(data))
        offset += len(parts[-1])
    head = _encoder.encode(BatchHead(manifest=manifest, columns=table, shard=shard))
    columns_start = padded(PREFIX.size + len(head))
    prefix = PREFIX.pack(MAGIC, SCHEMA, 0, len(head), columns_start + offset)
    return b"".join([_pad(prefix + head), *parts])


def read_head(buffer: Buffer) -> ParsedHead:
    """Parse a body, or its part up to the records. Raises InvalidRequest."""
    view = memoryview(buffer).toreadonly()
    if len(view) < PREFIX.size:
        raise _not_a_batch(f"{len(view)} bytes are too few")
    magic, schema, reserved, length, records_start = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise _not_a_batch(f"it starts with {bytes(magic)!r}, not {MAGIC!r}")
    if schema != SCHEMA:
        raise _not_a_batch(f"its wire schema is {schema}, this version reads {SCHEMA}")
    columns_start = padded(PREFIX.size + length)
    if reserved or records_start % ALIGNMENT or not columns_start <= records_start <= len(view):
        raise _not_a_batch(f"its sizes disagree: head {length}, records from {records_start}, body {len(view)} bytes")
    try:
        head = _decoder.decode(view[PREFIX.size : PREFIX.size + length])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _not_a_batch(f"its head cannot be decoded: {error}") from error
    columns = {column.name: _view_column(view, column, columns_start, records_start) for column in head.columns}
    return ParsedHead(head.manifest, columns, head.shard, records_start)


def read_manifest(buffer: Buffer) -> Manifest:
    """The manifest of a body, or of its part up to the records. Raises InvalidRequest."""
    return read_head(buffer).manifest


class RowAdvantages(NamedTuple):
    """The values of one row: its segment in the trajectory, and ``returns`` and ``advantages`` f64[turns].
    ``advantages`` is None with estimator ``none``."""

    segment: int
    returns: F64
    advantages: F64 | None


def read_advantages(buffer: Buffer, trajectory: str) -> list[RowAdvantages]:
    """Returns and advantages of a trajectory's rows, from a body or its part up to the records.

    The list is empty if the trajectory is not in the batch. Raises InvalidRequest.
    """
    head = read_head(buffer)
    columns = head.columns
    if trajectory not in head.manifest.trajectories:
        return []
    offsets = columns["row_turn_offsets"]
    advantages = columns.get("advantages")
    rows = []
    for row in np.flatnonzero(columns["row_trajectory"] == head.manifest.trajectories.index(trajectory)):
        turns = slice(offsets[row], offsets[row + 1])
        rows.append(
            RowAdvantages(
                int(columns["row_segment"][row]),
                columns["returns"][turns],
                None if advantages is None else advantages[turns],
            )
        )
    return rows


def offsets_of(sizes: npt.ArrayLike) -> I64:
    """Offsets i64[n + 1] of n consecutive parts with these sizes."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64), dtype=np.int64)))


def _view_column(view: memoryview, column: Column, start: int, end: int) -> npt.NDArray[Any]:
    begin = start + column.offset
    if column.offset < 0 or column.offset % ALIGNMENT or column.length < 0 or begin + 8 * column.length > end:
        raise _not_a_batch(f"column {column.name!r} is outside the columns' part of the body")
    return np.frombuffer(view, column.dtype, column.length, begin)


def _not_a_batch(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The bytes are not a batch: {problem}.",
        hint="They are damaged, truncated, or written by another version of Headrace.",
    )


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
