"""The invariants of the trajectory schema, one prefix of the test name each."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.assets import make_asset
from headrace.errors import (
    FailureHasReward,
    InvalidTrajectory,
    NonFiniteValue,
    NotAppendOnly,
    PlaceholdersDoNotMatch,
    SpansDoNotCover,
    TokenOutOfRange,
    VersionRunsDoNotCover,
    WrongDtype,
    WrongShape,
)
from headrace.trajectory import ContentPart, Failure, Message, Placeholder, Trajectory, Version, VersionRun
from headrace.validation import SHORT_TOKENS, validate
from tests.builders import (
    VOCAB_SIZE,
    make_failed,
    make_multi_agent,
    make_multi_segment,
    make_segment,
    make_trajectory,
    make_truncated,
    replace_segment,
    replace_turn,
)

FAILURE = Failure(layer="policy", kind="no-token-ids", message="The engine sent none.")


def with_value(trajectory: Trajectory, field: str, position: int, value: Any) -> Trajectory:
    array = getattr(trajectory.segments[0], field).copy()
    with np.errstate(over="ignore"):
        array[position] = value
    return replace_segment(trajectory, **{field: array})


def refused(trajectory: Trajectory, error: type[InvalidTrajectory], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        validate(trajectory)
    assert type(caught.value) is error
    assert caught.value.hint


@pytest.mark.parametrize(
    "trajectory",
    [
        make_trajectory(),
        make_trajectory(turns=20, turn_tokens=300),
        make_truncated(turns=3),
        make_truncated(segments=[], stop_reason="max_tokens", tokenizer=None),
        make_multi_segment(),
        make_multi_agent(),
        make_multi_agent(opponent_trains=True),
        make_failed(),
        make_failed(segments=[], tokenizer=None),
        make_failed(segments=[make_segment(spans=[])]),
        make_trajectory(status="cancelled", stop_reason="cancelled", segments=[]),
        make_trajectory(status="cancelled", stop_reason="cancelled", failure=FAILURE, segments=[]),
    ],
)
def test_valid_records_pass(trajectory: Trajectory) -> None:
    validate(trajectory)


# 1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1, -(2**31)])
def test_engine_tokens_only_ids_are_inside_the_vocabulary(token: int) -> None:
    refused(
        with_value(make_trajectory(turns=3), "token_ids", 15, token),
        TokenOutOfRange,
        rf"Segment 0 \(agent\), turn 1, position 15: token id {token} is outside \[0, {VOCAB_SIZE}\)",
    )


def test_engine_tokens_only_ids_belong_to_a_tokenizer() -> None:
    refused(make_trajectory(tokenizer=None), TokenOutOfRange, "names no tokenizer")


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 0.3, 1e-45, -1e308])
@pytest.mark.parametrize("turns", [3, 40])
def test_engine_tokens_only_a_logprob_is_finite_and_at_most_0(value: float, turns: int) -> None:
    refused(
        with_value(make_trajectory(turns=turns), "logprobs", 15, value),
        NonFiniteValue,
        r"Segment 0 \(agent\), turn 1, position 15: the logprob is .*, not a finite number of at most 0",
    )


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-45, -3.4e38])
def test_engine_tokens_only_a_forced_token_has_logprob_0(value: float) -> None:
    validate(with_value(make_trajectory(turns=3), "logprobs", 15, value))


@pytest.mark.parametrize("value", [-0.5, -1e-45, math.nan, 0.5])
@pytest.mark.parametrize("turns", [3, 40])
def test_engine_tokens_only_a_logprob_is_0_where_nothing_was_sampled(value: float, turns: int) -> None:
    trajectory = make_trajectory(turns=turns)
    validate(with_value(trajectory, "logprobs", 11, -0.0))
    refused(with_value(trajectory, "logprobs", 11, value), NonFiniteValue, "position 11: .* not 0")


@pytest.mark.parametrize("turns", [3, 40])
def test_engine_tokens_only_a_zero_inside_does_not_hide_a_logprob_outside(turns: int) -> None:
    trajectory = with_value(with_value(make_trajectory(turns=turns), "logprobs", 15, 0.0), "logprobs", 11, -0.5)
    refused(trajectory, NonFiniteValue, "position 11")


@pytest.mark.parametrize("length", [9, 11])
def test_engine_tokens_only_every_token_has_one_logprob(length: int) -> None:
    refused(replace_segment(make_trajectory(), logprobs=np.zeros(length, np.float32)), WrongShape, "equal length")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", np.arange(10)),
        ("token_ids", None),
        ("sampled", np.zeros(10, np.int8)),
        ("logprobs", np.zeros(10)),
        ("logprobs", [None] * 10),
        ("logprobs", np.array([None] * 10)),
    ],
)
def test_engine_tokens_only_arrays_are_never_converted(field: str, value: object) -> None:
    refused(replace_segment(make_trajectory(), **{field: value}), WrongDtype, field)


# 2 --------------------------------------------------------------------------------------------------------------


def test_append_only_a_turn_extends_a_prompt() -> None:
    refused(make_trajectory(segments=[make_segment(spans=[(0, 4)])]), NotAppendOnly, "without a prompt before it")


@pytest.mark.parametrize("indices", [(1, 0), (1, 1)])
def test_append_only_turns_of_a_segment_are_in_the_order_of_the_episode(indices: tuple[int, int]) -> None:
    segment = make_segment(spans=[(2, 4), (6, 8)], indices=indices)
    refused(make_trajectory(segments=[segment]), NotAppendOnly, f"turn {indices[1]} follows turn 1")


def test_append_only_a_turn_index_is_used_once_in_an_episode() -> None:
    trajectory = replace_turn(make_multi_segment(), 0, segment=1, index=1)
    refused(trajectory, NotAppendOnly, "another turn has that index")


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_append_only_nothing_is_sampled_after_the_end(flag: str) -> None:
    refused(
        replace_turn(make_trajectory(turns=3), 1, **{flag: True}),
        NotAppendOnly,
        "Turn 1 of agent ended its episode, but turn 2 follows",
    )
    refused(replace_turn(make_multi_segment(), 1, **{flag: True}), NotAppendOnly, "turn 2 follows")


# 3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "fields"),
    [
        (0, {"end": 6}),
        (0, {"start": -1}),
        (1, {"start": 9}),
        (2, {"end": 25}),
        (0, {"start": 20, "end": 24}),
    ],
)
def test_spans_cover_turns_are_ordered_disjoint_and_not_empty(turn: int, fields: dict[str, int]) -> None:
    refused(replace_turn(make_trajectory(turns=3), turn, **fields), SpansDoNotCover, r"its span \[")


@pytest.mark.parametrize(("position", "value"), [(15, 0), (11, 1), (15, 2), (0, 1)])
def test_spans_cover_exactly_what_was_sampled(position: int, value: int) -> None:
    refused(
        with_value(make_trajectory(turns=3), "sampled", position, value),
        SpansDoNotCover,
        f"position {position}: sampled is {value}, but (a|no) turn covers it",
    )


@pytest.mark.parametrize("continued", [[6], [10], [7, 14]])
def test_spans_cover_the_positions_where_a_turn_continued(continued: list[int]) -> None:
    validate(replace_turn(make_trajectory(turns=3), 0, continued=[7, 9]))
    refused(replace_turn(make_trajectory(turns=3), 0, continued=continued), SpansDoNotCover, "sampling continued at")


def test_spans_cover_so_that_a_missing_turn_is_found() -> None:
    trajectory = make_trajectory(turns=3)
    turns = [trajectory.segments[0].turns[0], trajectory.segments[0].turns[2]]
    refused(replace_segment(trajectory, turns=turns), SpansDoNotCover, "position 13: sampled is 1, but no turn")


PICTURE = make_asset(b"pixels", "image/png").entry


def test_assets_are_listed_once_each() -> None:
    shown = [Message(role="user", content=[ContentPart(type="image", asset=PICTURE.name)])] * 2
    trajectory = make_trajectory(messages=shown, assets=[PICTURE])
    validate(replace_segment(trajectory, arrays={"routed_experts": PICTURE.name}))
    for record, text in (
        (make_trajectory(messages=shown), "Message 0: an image names asset"),
        (replace_segment(make_trajectory(), arrays={"routed_experts": PICTURE.name}), "array 'routed_experts' names"),
        (make_trajectory(assets=[PICTURE, PICTURE]), "listed twice"),
        (
            make_trajectory(assets=[msgspec.structs.replace(PICTURE, name="picture")]),
            "'picture' of 6 bytes is not valid",
        ),
        (make_trajectory(assets=[msgspec.structs.replace(PICTURE, size_bytes=0)]), "of 0 bytes is not valid"),
    ):
        refused(record, InvalidTrajectory, text)


def test_spans_cover_no_placeholders() -> None:
    trajectory = make_trajectory(turns=2, assets=[PICTURE])
    name = PICTURE.name
    validate(replace_segment(trajectory, placeholders=[Placeholder(1, 3, name), Placeholder(3, 6, name)]))
    for placeholder, error, text in (
        (Placeholder(5, 7, name), PlaceholdersDoNotMatch, "covers sampled positions"),
        (Placeholder(3, 3, name), PlaceholdersDoNotMatch, "must hold a token"),
        (Placeholder(12, 99, name), PlaceholdersDoNotMatch, "end by 17"),
        (Placeholder(1, 3, "sound"), InvalidTrajectory, "names asset 'sound'"),
    ):
        refused(replace_segment(trajectory, placeholders=[placeholder]), error, text)


def test_spans_cover_a_segment_without_tokens_is_refused() -> None:
    refused(make_failed(segments=[make_segment(spans=[], length=0, versions=[])]), WrongShape, "has no tokens")


# 4 --------------------------------------------------------------------------------------------------------------


def test_a_failure_is_not_a_zero_a_failed_record_has_a_failure() -> None:
    refused(make_trajectory(status="failed", stop_reason="failure"), FailureHasReward, "failure is None")


@pytest.mark.parametrize("record", [make_trajectory(failure=FAILURE), make_truncated(failure=FAILURE)])
def test_a_failure_is_not_a_zero_a_result_has_no_failure(record: Trajectory) -> None:
    refused(record, FailureHasReward, r"failure is set \(policy: no-token-ids\)")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1"])
def test_a_failure_is_not_a_zero_a_reward_is_a_finite_number(value: object) -> None:
    refused(
        replace_turn(make_trajectory(turns=3), 1, reward=value),
        NonFiniteValue,
        r"Segment 0 \(agent\), turn 1: the reward is .*, not a finite number",
    )
    refused(replace_turn(make_trajectory(), 0, reward_parts={"style": value}), NonFiniteValue, "part 'style'")


# 5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "stop_reason"),
    [
        ("finished", "max_turns"),
        ("truncated", "terminated"),
        ("failed", "terminated"),
        ("cancelled", "failure"),
        ("x", "y"),
    ],
)
def test_one_terminal_record_status_and_stop_reason_agree(status: str, stop_reason: str) -> None:
    refused(make_trajectory(status=status, stop_reason=stop_reason), FailureHasReward, "does not match stop reason")


def test_one_terminal_record_finished_means_that_the_last_turn_terminated() -> None:
    refused(replace_turn(make_trajectory(turns=2), 1, terminated=False), FailureHasReward, "is not terminated")
    refused(make_trajectory(segments=[]), FailureHasReward, "is not terminated")


def test_one_terminal_record_terminated_wins_over_truncated() -> None:
    refused(replace_turn(make_truncated(turns=2), 1, terminated=True), FailureHasReward, "the last turn is terminated")
    refused(replace_turn(make_trajectory(), 0, truncated=True), FailureHasReward, "both terminated and truncated")


def test_one_terminal_record_the_environments_truncation_is_on_the_last_turn() -> None:
    trajectory = make_truncated(stop_reason="environment_truncated")
    refused(trajectory, FailureHasReward, "the last turn is not truncated")
    validate(replace_turn(trajectory, 0, truncated=True))


# 6 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [(9, 0, 0)],
        [(11, 0, 0)],
        [(4, 0, 0), (4, 0, 1), (10, 0, 2)],
        [(6, 0, 0), (4, 0, 1)],
        [(10, 0, -1)],
        [(10, -1, 0)],
    ],
)
def test_versions_are_known_for_every_position(runs: list[tuple[int, int, int]]) -> None:
    refused(
        replace_segment(make_trajectory(), versions=[VersionRun(*run) for run in runs]),
        VersionRunsDoNotCover,
        r"Segment 0 \(agent\)",
    )


def test_versions_are_known_that_change_inside_a_segment() -> None:
    runs = [VersionRun(7, 0, 3), VersionRun(8, 0, 4), VersionRun(10, 1, 2)]
    validate(replace_segment(make_trajectory(), versions=runs))


def test_a_message_names_the_segment() -> None:
    trajectory = make_multi_agent()
    second = msgspec.structs.replace(trajectory.segments[1], versions=[])
    broken = msgspec.structs.replace(trajectory, segments=[trajectory.segments[0], second])
    refused(broken, VersionRunsDoNotCover, r"Segment 1 \(opponent\)")


def test_a_failure_is_not_a_zero_a_reward_is_at_most_1e12_in_magnitude():
    validate(make_trajectory(rewards=[1e12, -1e12]))
    for reward in (1.1e12, -1.1e12, 1e60, 1e308, 10**400, math.inf, math.nan):
        trajectory = make_trajectory()
        turn = msgspec.structs.replace(trajectory.segments[0].turns[0], reward=reward)
        segment = msgspec.structs.replace(trajectory.segments[0], turns=[turn])
        with pytest.raises(NonFiniteValue, match="finite number up to 1e\\+12"):
            validate(msgspec.structs.replace(trajectory, segments=[segment]))


def test_the_numbers_of_a_version_are_bounded():
    assert Version.parse("2147483647.2147483647") == Version(2**31 - 1, 2**31 - 1)
    for text in ("0.2147483648", "2147483648.0", f"0.{2**64}", "0." + "9" * 10_000):
        with pytest.raises(ValueError, match="at most"):
            Version.parse(text)
    with pytest.raises(VersionRunsDoNotCover):
        validate(make_trajectory(version=Version(0, 2**31)))


@pytest.mark.parametrize("tokens", [SHORT_TOKENS, SHORT_TOKENS + 1])
@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 0.5])
def test_short_and_long_segments_are_checked_alike(tokens: int, wrong: float) -> None:
    trajectory = make_trajectory(segments=[make_segment(spans=[(1, tokens)])])
    validate(trajectory)
    for position, value in ((1, wrong), (tokens - 1, wrong), (0, -1.0)):
        refused(with_value(trajectory, "logprobs", position, value), NonFiniteValue, f"position {position}:")
    for position in (0, tokens - 1):
        for value in (-1, VOCAB_SIZE):
            refused(with_value(trajectory, "token_ids", position, value), TokenOutOfRange, f"position {position}:")
