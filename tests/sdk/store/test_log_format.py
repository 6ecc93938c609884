from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorruptRecord, MissingExtra
from headrace.store import log_format
from headrace.store.log_format import Damage, Frame, FrameType, is_padded_with_zeros, pack_frame, read_payload, scan

TWICE = (FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.FOOTER)
FRAMES = [
    (FrameType.FILE_HEAD, b"head"),
    (FrameType.CONTROL, b"c" * 70),
    (FrameType.TRAJECTORY, bytes(range(192))),
    (FrameType.CONTROL, b""),
    (FrameType.BATCH, b"b" * 128),
    (FrameType.TRAJECTORY, b"t" * 65),
    (FrameType.CONTROL, b"{}"),
]


def pack(frames: list[tuple[FrameType, bytes]]) -> bytes:
    return b"".join(buffer for kind, payload in frames for buffer in pack_frame(kind, payload))


def read(log: bytes) -> list[Frame | Damage]:
    found = list(scan(io.BytesIO(log)))
    assert sum(item.size for item in found) == len(log)
    return found


LOG = pack(FRAMES)
WHOLE = [item for item in read(LOG) if isinstance(item, Frame)]


def frames_in(found: list[Frame | Damage]) -> list[Frame]:
    return [item._replace(recovered=False) for item in found if isinstance(item, Frame)]


def test_a_frame_is_read_as_it_was_packed() -> None:
    assert [(frame.type, frame.payload) for frame in WHOLE] == FRAMES
    assert not any(frame.recovered for frame in WHOLE)
    assert [frame.offset + frame.size for frame in WHOLE[:-1]] == [frame.offset for frame in WHOLE[1:]]


def test_payloads_start_at_a_multiple_of_64_bytes_in_the_file() -> None:
    for frame in WHOLE:
        assert frame.offset % 64 == 0
        start = frame.offset + log_format.HEADER_BYTES
        assert LOG[start : start + len(frame.payload)] == frame.payload


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(list(FrameType)), st.binary(max_size=300)), max_size=8))
def test_any_frames_are_read_as_they_were_packed(frames: list[tuple[FrameType, bytes]]) -> None:
    assert [(frame.type, frame.payload) for frame in frames_in(read(pack(frames)))] == frames


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_affects_at_most_the_frame_that_it_is_in(mask: int) -> None:
    for position in range(len(LOG)):
        damaged = bytearray(LOG)
        damaged[position] ^= mask
        (hit,) = [frame for frame in WHOLE if frame.offset <= position < frame.offset + frame.size]
        found = read(bytes(damaged))
        lost = [frame for frame in WHOLE if frame not in frames_in(found)]
        reported = [item for item in found if isinstance(item, Damage)]
        assert lost in ([], [hit])
        assert [(item.offset, item.size, item.torn) for item in reported] == [(f.offset, f.size, False) for f in lost]


def test_a_control_frame_survives_damage_to_either_copy() -> None:
    for frame in WHOLE:
        if frame.type not in TWICE:
            continue
        half = frame.size // 2
        for start in (frame.offset, frame.offset + half):
            damaged = LOG[:start] + b"\xaa" * half + LOG[start + half :]
            (found,) = [item for item in read(damaged) if item.offset == frame.offset]
            assert found == frame._replace(recovered=True)


def test_a_control_frame_with_both_copies_damaged_is_reported() -> None:
    frame = WHOLE[1]
    damaged = bytearray(LOG)
    for copy in range(2):
        damaged[frame.offset + copy * frame.size // 2 + 64] ^= 1
    found = read(bytes(damaged))
    assert frames_in(found) == [other for other in WHOLE if other != frame]
    (damage,) = [item for item in found if isinstance(item, Damage)]
    assert (damage.offset, damage.size, damage.type, damage.torn) == (frame.offset, frame.size, frame.type, False)


def test_a_torn_tail_is_distinguished_from_damage() -> None:
    for length in range(len(LOG)):
        found = read(LOG[:length])
        whole = [frame for frame in WHOLE if frame.offset + frame.size <= length]
        assert frames_in(found) == whole
        end = whole[-1].offset + whole[-1].size if whole else 0
        rest = found[len(whole) :]
        assert [(item.offset, item.size, item.torn) for item in rest if isinstance(item, Damage)] == (
            [(end, length - end, True)] if length > end else []
        )


def test_a_tail_of_zeros_is_torn() -> None:
    found = read(LOG + bytes(640))
    assert frames_in(found) == WHOLE
    assert found[-1] == Damage(len(LOG), 640, "the file ends inside a frame", torn=True)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(FRAMES)), st.binary(min_size=64, max_size=640))
def test_foreign_bytes_between_frames_do_not_affect_the_frames(position: int, foreign: bytes) -> None:
    foreign = foreign[: len(foreign) // 64 * 64]
    at = WHOLE[position].offset if position < len(WHOLE) else len(LOG)
    found = read(LOG[:at] + foreign + LOG[at:])
    assert [(frame.type, frame.payload) for frame in frames_in(found)] == FRAMES


def test_the_search_for_the_next_frame_crosses_its_read_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_format, "_SEARCH_BYTES", 64)
    found = read(LOG[: WHOLE[2].offset] + b"\xaa" * 4096 + LOG[WHOLE[2].offset :])
    assert [(frame.type, frame.payload) for frame in frames_in(found)] == FRAMES


@pytest.fixture
def descriptor(tmp_path: Path):
    (tmp_path / "1.log").write_bytes(LOG)
    opened = os.open(tmp_path / "1.log", os.O_RDWR)
    yield opened
    os.close(opened)


def test_a_read_is_checked_against_its_checksum(descriptor: int) -> None:
    frame = WHOLE[2]
    assert read_payload(descriptor, frame.offset, len(frame.payload), name="1.log") == frame.payload
    os.pwrite(descriptor, b"\xff", frame.offset + 70)
    with pytest.raises(CorruptRecord, match=rf"offset {frame.offset} of 1.log is damaged: its checksum") as caught:
        read_payload(descriptor, frame.offset, len(frame.payload), name="1.log")
    assert caught.value.extra == {"file": "1.log", "offset": frame.offset}


@pytest.mark.parametrize(
    ("offset", "length", "problem"),
    [(64, 10, "header is missing"), (WHOLE[2].offset, 191, "192|191"), (len(LOG), 1, "header is missing")],
)
def test_a_read_at_a_wrong_offset_or_length_is_refused(descriptor: int, offset: int, length: int, problem: str) -> None:
    with pytest.raises(CorruptRecord, match=problem):
        read_payload(descriptor, offset, length, name="1.log")


def test_without_the_checksum_package_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    log_format._checksum.cache_clear()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtra, match=r"pip install headrace\[offline\]"):
        pack_frame(FrameType.CONTROL, b"")


def test_changed_padding_of_a_frame_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "1.log"
    file.write_bytes(LOG)
    assert all(is_padded_with_zeros(file, frame) for frame in WHOLE)
    frame = WHOLE[1]
    half = frame.size // 2
    for position in (28, 63, 64 + len(frame.payload), half - 1, half + 28, half + 63, frame.size - 1):
        damaged = bytearray(LOG)
        damaged[frame.offset + position] ^= 1
        file.write_bytes(damaged)
        assert [is_padded_with_zeros(file, each) for each in WHOLE] == [each != frame for each in WHOLE]
