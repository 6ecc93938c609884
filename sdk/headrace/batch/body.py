"""The bytes of a batch: how its head and columns are laid out, and how they are read without a copy.

Little-endian; every part starts at a multiple of 64 bytes::

    "HRTB" | schema u16 | 0 u16 | head length u64 | start of the records u64
    head: msgpack {manifest, columns: [{name, dtype, length, offset}], shard}, offsets from the end of the padded head
    columns, each padded to 64
    records, as they are stored

Columns, per turn of rows (row by row): ``returns``, ``advantages`` (not with estimator ``none``), ``turn_weights``,
``rewards`` f64, ``turn_tokens`` i64. Per row: ``row_trajectory``, ``row_segment``, ``row_tokens``, ``row_group`` i64;
``row_reward`` f64, the undiscounted sum of its agent's rewards in its episode, and ``row_leads`` i64, 1 at the first
row of each (trajectory, agent), which is where that sum counts; ``row_bin`` i64, the bin that the row is packed into;
``row_turn_offsets`` i64[rows + 1].
``record_offsets`` i64[records + 1], from the start of the records.

A shard has the columns of its own rows, and numbers beside them: ``row_number`` i64[rows] and ``record_number``
i64[records] in the whole batch. ``row_trajectory``, ``row_group`` and ``row_bin`` count in the whole batch too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.batch.manifest import Manifest, Shard
from headrace.errors import InvalidRequest
from headrace.trajectory import SCHEMA
from headrace.wire.alignment import ALIGNMENT, padded
from headrace.wire.codec import Buffer

Columns = Mapping[str, npt.NDArray[Any]]

MAGIC = b"HRTB"
PREFIX = struct.Struct("<4sHHQQ")
PER_TURN = ("returns", "advantages", "turn_weights", "rewards", "turn_tokens")
PER_ROW = ("row_trajectory", "row_segment", "row_tokens", "row_group", "row_reward", "row_leads", "row_bin")


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Where a column is: ``length`` numbers, ``offset`` bytes from the end of the padded head."""

    name: str
    dtype: Literal["<f8", "<i8"]
    length: int
    offset: int


class BatchHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The msgpack head of a batch; ``shard`` says which part of it the body holds, None for the whole."""

    manifest: Manifest
    columns: list[Column]
    shard: Shard | None = None


class ParsedHead(NamedTuple):
    """A head that was read; ``columns`` are read-only views, ``records_start`` is where the records begin in bytes."""

    manifest: Manifest
    columns: dict[str, npt.NDArray[Any]]
    shard: Shard | None
    records_start: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BatchHead)


def pack_head(manifest: Manifest, columns: Columns, shard: Shard | None = None) -> bytes:
    """The body up to its records."""
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
    """Read a body, or the part of it that ``pack_head`` made. Raises InvalidRequest if it is none."""
    view = memoryview(buffer).toreadonly()
    if len(view) < PREFIX.size:
        raise _no_batch(f"{len(view)} bytes are too few")
    magic, schema, reserved, length, records_start = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise _no_batch(f"they start with {bytes(magic)!r}, not {MAGIC!r}")
    if schema != SCHEMA:
        raise _no_batch(f"they have wire schema {schema}, this reader knows {SCHEMA}")
    columns_start = padded(PREFIX.size + length)
    if reserved or records_start % ALIGNMENT or not columns_start <= records_start <= len(view):
        raise _no_batch(f"lengths do not fit: head {length}, records from {records_start}, body {len(view)} bytes")
    try:
        head = _decoder.decode(view[PREFIX.size : PREFIX.size + length])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _no_batch(f"the head does not decode: {error}") from error
    columns = {column.name: _view_column(view, column, columns_start, records_start) for column in head.columns}
    return ParsedHead(head.manifest, columns, head.shard, records_start)


def _view_column(view: memoryview, column: Column, start: int, end: int) -> npt.NDArray[Any]:
    begin = start + column.offset
    if column.offset < 0 or column.offset % ALIGNMENT or column.length < 0 or begin + 8 * column.length > end:
        raise _no_batch(f"column {column.name!r} lies outside its part of the body")
    return np.frombuffer(view, column.dtype, column.length, begin)


def _no_batch(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The bytes are no batch: {problem}.", hint="The body is damaged, cut short, or of another version of Headrace."
    )


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
