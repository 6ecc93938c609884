"""Heads and footers, and the files of a log."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.errors import SetupError, UnknownLogFormat
from headrace.store import log_format
from headrace.store.log_files import newest_first, numbers_in, path_of
from headrace.store.log_format import (
    FileHead,
    FooterBuilder,
    Frame,
    FrameType,
    pack_frame,
    parse_footer,
    read_head,
    scan,
    with_digest,
)

encode = msgspec.msgpack.encode


def pack(kind: FrameType, payload: bytes) -> bytes:
    return b"".join(pack_frame(kind, payload))


def head(number: int = 1, *, log: str = "log", before_bytes: int = 0, state: bytes | None = None) -> bytes:
    fields = FileHead(log=log, number=number, epoch=1, before_bytes=before_bytes, state=state)
    return pack(FrameType.FILE_HEAD, encode(fields))


def frames_of(data: bytes) -> list[Frame]:
    return [item for item in scan(io.BytesIO(data)) if isinstance(item, Frame)]


def footer_builder(data: bytes) -> FooterBuilder:
    tally = FooterBuilder(7)
    for frame in frames_of(data):
        tally.add_read(frame)
    return tally


RECORDS = [pack(FrameType.TRAJECTORY, b"one" * 50), pack(FrameType.CONTROL, b"two"), pack(FrameType.TRAJECTORY, b"3")]
BODY = head(state=b"state") + b"".join(RECORDS)


def test_a_file_begins_with_its_head() -> None:
    found = read_head(io.BytesIO(BODY))
    assert found == FileHead(log="log", number=1, epoch=1, before_bytes=0, state=b"state")
    assert read_head(io.BytesIO(BODY[len(head(state=b"state")) :])) is None
    assert read_head(io.BytesIO(b"")) is None


def test_a_sealed_file_ends_with_its_footer_whose_digest_covers_every_frame_before_it() -> None:
    footer = footer_builder(BODY).footer(9)
    assert (footer.opened_ms, footer.sealed_ms) == (7, 9)
    trajectories = [frame.offset for frame in frames_of(BODY) if frame.type is FrameType.TRAJECTORY]
    assert [64 * place for place in array("I", footer.places[FrameType.TRAJECTORY])] == trajectories
    assert set(footer.places) == {FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.TRAJECTORY}
    sealed = BODY + pack(FrameType.FOOTER, encode(footer))
    assert parse_footer(frames_of(sealed)[-1].payload) == footer
    written, placed = FooterBuilder(0), FooterBuilder(7)
    offset = 0
    for kind, payload in [(frame.type, frame.payload) for frame in frames_of(BODY)]:
        buffers = pack_frame(kind, payload)
        written.add(kind, offset, buffers[0])
        placed.place(kind, offset)
        offset += sum(map(len, buffers))
    assert written.matches(footer)
    assert with_digest(encode(placed.footer(9)), written.digest.digest()) == encode(footer)


@pytest.mark.parametrize(
    "change",
    [
        lambda records: records[:-1],
        lambda records: [*records, records[0]],
        lambda records: [records[2], records[1], records[0]],
        lambda records: [records[0], records[1], pack(FrameType.TRAJECTORY, b"4")],
    ],
    ids=["missing", "added", "swapped", "replaced"],
)
def test_a_footer_detects_a_frame_that_was_changed_after_sealing(change: Callable[[list[bytes]], list[bytes]]) -> None:
    footer = footer_builder(BODY).footer(9)
    changed = footer_builder(head(state=b"state") + b"".join(change(RECORDS)))
    assert footer_builder(BODY).matches(footer)
    assert not changed.matches(footer)


def test_a_file_of_an_unknown_format_is_refused_and_the_error_names_the_format() -> None:
    other = pack(FrameType.FILE_HEAD, encode({"format": 99, "what": "ever"}))
    with pytest.raises(UnknownLogFormat, match="format 99") as caught:
        read_head(io.BytesIO(other))
    assert caught.value.extra == {"format": 99}
    with pytest.raises(msgspec.MsgspecError):
        log_format.parse_head(b"\xff")


def write(directory: Path, number: int, content: bytes) -> None:
    path_of(directory, number).write_bytes(content)


def test_the_directory_listing_is_the_only_list_of_the_logs_files(tmp_path: Path) -> None:
    for number in (12, 3, 7):
        write(tmp_path, number, head(number))
    (tmp_path / "notes.txt").touch()
    assert numbers_in(tmp_path) == [3, 7, 12]
    assert [file.number for file in newest_first(tmp_path, [3, 7, 12])] == [12, 7, 3]


def test_the_head_of_the_next_file_states_how_much_of_a_file_is_valid(tmp_path: Path) -> None:
    write(tmp_path, 1, BODY)
    good = len(BODY) - len(RECORDS[-1])
    write(tmp_path, 2, head(2, before_bytes=good))
    second, first = newest_first(tmp_path, [1, 2])
    assert (first.size_bytes, second.size_bytes) == (good, len(head(2, before_bytes=good)))
    assert [item.offset + item.size for item in first.scan()][-1] == good
    # Without the next head the whole file counts.
    (first,) = newest_first(tmp_path, [1])
    assert first.size_bytes == len(BODY)


def test_a_file_can_be_read_from_any_frame(tmp_path: Path) -> None:
    write(tmp_path, 1, BODY)
    (file,) = newest_first(tmp_path, [1])
    frames = frames_of(BODY)
    assert list(file.scan(frames[2].offset)) == frames[2:]


def test_a_head_without_its_state_is_small(tmp_path: Path) -> None:
    write(tmp_path, 1, BODY)
    (file,) = newest_first(tmp_path, [1])
    small = file.without_state()
    assert small.head is not None
    assert small.head.state is None
    assert small.without_state() is small


@pytest.mark.parametrize("name", ["1.log", "0000000x.log", "000000001.log"])
def test_a_file_with_another_name_is_refused_and_the_error_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(SetupError, match=name):
        numbers_in(tmp_path)


@pytest.mark.parametrize("foreign", [head(2, log="other"), head(3)], ids=["of another log", "of another number"])
def test_a_file_of_another_log_is_refused_and_the_error_names_it(tmp_path: Path, foreign: bytes) -> None:
    write(tmp_path, 1, head(1))
    write(tmp_path, 2, foreign)
    write(tmp_path, 4, head(4))
    with pytest.raises(SetupError, match=r"00000002\.log"):
        list(newest_first(tmp_path, [1, 2, 4]))
