from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.assets import make_asset
from headrace.errors import InvalidTrajectory, UnreadableRecord, WrongDtype, WrongShape
from headrace.trajectory import Placeholder, ToolCall, Trajectory
from headrace.wire import codec
from tests.builders import (
    make_failed,
    make_multi_agent,
    make_multi_segment,
    make_segment,
    make_trajectory,
    make_truncated,
    replace_segment,
    replace_turn,
)

PICTURE = make_asset(b"pixels", "image/png").entry
RICH = replace_turn(
    replace_segment(
        make_trajectory(turns=3), placeholders=[Placeholder(1, 3, PICTURE.name)], arrays={"experts": PICTURE.name}
    ),
    1,
    reward_parts={"format": 0.25, "answer": 0.5},
    tool_calls=[ToolCall(name="search", arguments={"q": "wheel", "k": [1, None]}, result="water", duration_s=0.5)],
)
RICH = msgspec.structs.replace(
    RICH,
    assets=[PICTURE],
    infos=[{"seed": 1}, {"nested": {"deep": [1.5, "x"]}}],
)
ALL = {
    "single": make_trajectory(),
    "multi-turn": make_trajectory(turns=9, turn_tokens=33),
    "truncated": make_truncated(),
    "multi-segment": make_multi_segment(),
    "multi-agent": make_multi_agent(),
    "failed": make_failed(),
    "without segments": make_failed(segments=[], tokenizer=None),
    "rich": RICH,
}


def same(one: Trajectory, other: Trajectory) -> bool:
    def plain(trajectory: Trajectory) -> object:
        return msgspec.to_builtins(trajectory, enc_hook=lambda array: (array.dtype.str, array.tolist()))

    return plain(one) == plain(other)


@pytest.mark.parametrize("trajectory", ALL.values(), ids=ALL)
def test_a_record_decodes_to_the_encoded_trajectory(trajectory: Trajectory) -> None:
    record = codec.encode(trajectory)
    assert same(codec.decode(record), trajectory)
    assert codec.encode(codec.decode(record)) == record


@pytest.mark.parametrize("writable", [False, True])
def test_arrays_are_read_only_views_of_the_buffer(writable: bool) -> None:
    record = codec.encode(make_trajectory(turns=3))
    buffer = bytearray(record) if writable else record
    base = np.frombuffer(buffer, np.uint8)
    for segment in codec.decode(buffer).segments:
        for array in (segment.token_ids, segment.sampled, segment.logprobs):
            assert not array.flags.writeable
            assert np.shares_memory(array, base)


@pytest.mark.parametrize("trajectory", ALL.values(), ids=ALL)
def test_every_array_starts_at_a_multiple_of_64_bytes(trajectory: Trajectory) -> None:
    record = codec.encode(trajectory)
    assert len(record) % 64 == 0
    start = np.frombuffer(record, np.uint8).__array_interface__["data"][0]
    for segment in codec.decode(record).segments:
        for array in (segment.token_ids, segment.sampled, segment.logprobs):
            assert (array.__array_interface__["data"][0] - start) % 64 == 0


def test_records_can_be_concatenated() -> None:
    records = [codec.encode(trajectory) for trajectory in ALL.values()]
    body = memoryview(b"".join(records))
    ends = np.cumsum([len(record) for record in records])
    starts = ends - [len(record) for record in records]
    assert codec.record_sizes(body, starts).tolist() == [len(record) for record in records]
    decoded = [codec.decode(body[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert all(same(one, other) for one, other in zip(decoded, ALL.values(), strict=True))


def test_the_head_can_be_decoded_without_the_arrays() -> None:
    trajectory = make_multi_agent()
    record = codec.encode(trajectory)
    tail = (2 * 128 + 64) + (2 * 64 + 64)  # 17 tokens, 13 tokens
    head = codec.decode_head(record[:-tail])
    assert [segment.length for segment in head.segments] == [len(s.token_ids) for s in trajectory.segments]
    assert [segment.agent for segment in head.rows()] == ["player"]
    assert head.version_range() == trajectory.version_range()


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("token_ids", np.arange(10, dtype=np.int64), WrongDtype, "Segment 0: token_ids is int64, not int32"),
        ("token_ids", np.arange(10, dtype=">i4"), WrongDtype, "token_ids"),
        ("token_ids", list(range(10)), WrongDtype, "token_ids is list"),
        ("token_ids", None, WrongDtype, "token_ids is NoneType"),
        ("sampled", np.zeros(10, np.bool_), WrongDtype, "sampled is bool, not uint8"),
        ("logprobs", np.zeros(10, np.float64), WrongDtype, "logprobs is float64, not float32"),
        ("logprobs", np.array([None] * 10), WrongDtype, "logprobs is object"),
        ("logprobs", np.zeros(9, np.float32), WrongShape, r"logprobs has shape \(9,\)"),
        ("logprobs", np.zeros(11, np.float32), WrongShape, r"logprobs has shape \(11,\)"),
        ("sampled", np.zeros((10, 1), np.uint8), WrongShape, r"sampled has shape \(10, 1\)"),
    ],
)
def test_arrays_of_a_wrong_dtype_or_shape_are_refused(
    field: str, value: object, error: type[InvalidTrajectory], text: str
) -> None:
    with pytest.raises(error, match=text):
        codec.encode(replace_segment(make_trajectory(), **{field: value}))


def test_a_strided_array_is_encoded_by_its_values() -> None:
    trajectory = make_trajectory()
    every_other = np.repeat(trajectory.segments[0].token_ids, 2)[::2]
    assert codec.encode(replace_segment(trajectory, token_ids=every_other)) == codec.encode(trajectory)


@pytest.mark.parametrize("value", [object(), {1, 2, object()}, 1 << 70, "\ud800"])
def test_a_head_value_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidTrajectory, match="cannot be encoded"):
        codec.encode(make_trajectory(infos=[{"value": value}]))


def test_a_number_that_is_not_finite_survives_so_that_validate_can_name_it() -> None:
    trajectory = replace_turn(make_trajectory(), 0, reward=math.nan)
    assert math.isnan(codec.decode(codec.encode(trajectory)).segments[0].turns[0].reward)


def try_to_read(record: bytes) -> None:
    for read in (codec.decode, codec.decode_head):
        try:
            read(record)
        except UnreadableRecord:
            continue


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_damaged_bytes_raise_unreadable_record_or_decode_to_a_trajectory(
    name: str, flips: list[tuple[int, int]]
) -> None:
    record = bytearray(codec.encode(ALL[name]))
    for position, mask in flips:
        record[position % len(record)] ^= mask
    try_to_read(bytes(record))


def test_a_flipped_byte_in_the_head_raises_no_other_error() -> None:
    record = codec.encode(RICH)
    for position in range(min(len(record), 1200)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(record)
            damaged[position] ^= mask
            try_to_read(bytes(damaged))


def test_a_truncated_record_is_unreadable() -> None:
    record = codec.encode(make_trajectory(turns=2))
    for length in range(len(record)):
        with pytest.raises(UnreadableRecord):
            codec.decode(record[:length])
    with pytest.raises(UnreadableRecord):
        codec.decode(record + bytes(64))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_unreadable(garbage: bytes, with_magic: bool) -> None:
    with pytest.raises(UnreadableRecord):
        codec.decode(b"HRTJ\1\0\0\0" + garbage if with_magic else garbage)


def test_a_false_length_causes_no_large_allocation() -> None:
    record = bytearray(codec.encode(make_trajectory()))
    at = record.index(b"\xa6length") + 7
    record[at : at + 1] = b"\x7f"
    with pytest.raises(UnreadableRecord, match="exceeds the record"):
        codec.decode(bytes(record))


def test_the_error_names_another_schema() -> None:
    record = bytearray(codec.encode(make_trajectory()))
    record[4] = 2
    with pytest.raises(UnreadableRecord, match="wire schema is 2, this version reads 1"):
        codec.decode(record)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_trajectories_of_any_lengths_survive_encoding(gaps: list[int], rng: random.Random) -> None:
    spans, position = [], 0
    for gap in gaps:
        start = position + gap
        position = start + rng.randint(1, 90)
        spans.append((start, position))
    trajectory = make_trajectory(segments=[make_segment(spans=spans)])
    assert same(codec.decode(codec.encode(trajectory)), trajectory)
