"""``validate``: the invariants of the trajectory schema that a single record can show.

* Engine tokens only: ids are inside the vocabulary; logprobs are finite, at most 0, and exactly 0 where not sampled.
  Tokens encoded from text are never in a row; only evaluations have them.
* Append-only: every turn follows earlier tokens, and nothing is sampled after the end.
* Spans cover: turns are ordered, disjoint and not empty, and cover exactly the positions with ``sampled == 1``.
* A failure is not a zero: a record is failed if and only if it has a failure; every reward is a finite number of at
  most 1e12 in magnitude.
* One terminal record: status, stop reason and the last turn's flags agree.
* Versions are known: version runs cover every segment completely.
* Every value can be written by every exporter: the id fits a URL, numbers are finite and fit their columns, data is
  plain JSON.
* Assets are listed: every asset to which a message, a placeholder or a segment refers, once each.

A message names the segment, the turn and the position. The check takes a few microseconds for a short record, and one
pass of vector instructions per array for a long one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.assets import is_asset_name
from headrace.bounds import MAX_COUNT, MAX_EXACT, MAX_RECORD_NESTING, require_plain
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
from headrace.trajectory import MAX_VERSION_PART, Message, Segment, Trajectory, Turn

_I4, _U4, _F4, _U1 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f4"), np.dtype("u1")
_BOOL = np.dtype(bool)

MAX_REWARD = 1e12
"""Largest magnitude of a reward: in float32, sums of rewards and of their squares over 10^14 turns stay finite."""

SHORT_TOKENS = 32
"""Number of tokens up to which a Python loop is faster than a NumPy call."""

MANY_TURNS = 4
"""Number of turns from which one pass over all tokens is faster than a NumPy call for each gap between turns."""

_is_id = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z").match

_STOP_REASONS = {
    "finished": ("terminated",),
    "truncated": ("environment_truncated", "max_turns", "max_tokens", "working_time"),
    "failed": ("failure",),
    "cancelled": ("cancelled",),
}


def validate(trajectory: Trajectory) -> None:
    """Check a trajectory. Raises the subclass of InvalidTrajectory for the first broken invariant."""
    _check_status(trajectory)
    _check_values(trajectory)
    assets = _check_assets(trajectory)
    indices: set[int] = set()
    vocab_size = trajectory.tokenizer.vocab_size if trajectory.tokenizer is not None else None
    placed = False
    for position, segment in enumerate(trajectory.segments):
        where = f"Segment {position} ({segment.agent})"
        n = _check_arrays(where, segment)
        _check_sampling(where, segment)
        _check_spans(where, segment, n, indices)
        _check_tokens(where, segment, n, vocab_size)
        _check_logprobs(where, segment, n)
        _check_versions(where, segment, n)
        if segment.train and segment.sampling.logprobs == "none" and not trajectory.provenance.evaluation:
            raise NonFiniteValue(
                f"{where} has train = true, but the server gave no token ids: they were encoded from its text.",
                hint="Text is never encoded into training data. Set train to false, or use a server that returns ids.",
            )
        if segment.placeholders:
            placed = True
            _check_placeholders(where, segment, n, assets)
        for kind, name in segment.arrays.items():
            _require_listed(f"{where}: array {kind!r}", name, assets)
    _check_last_turns(trajectory)
    if placed:
        _check_shown_images(trajectory)


def _check_status(trajectory: Trajectory) -> None:
    """Status, stop reason and failure agree."""
    status, failure = trajectory.status, trajectory.failure
    reasons = _STOP_REASONS.get(status)
    if reasons is None or trajectory.stop_reason not in reasons:
        raise FailureHasReward(
            f"Status {status!r} does not match stop reason {trajectory.stop_reason!r}.",
            hint=f"Its stop reason is {' or '.join(reasons)}." if reasons else f"Known: {', '.join(_STOP_REASONS)}.",
        )
    if status == "failed" and failure is None:
        raise FailureHasReward("Status is 'failed' but failure is None.", hint="Set failure to what failed.")
    if failure is not None and status not in ("failed", "cancelled"):
        raise FailureHasReward(
            f"Status is {status!r} but failure is set ({failure.layer}: {failure.kind}).",
            hint="An episode that failed has no result: set status 'failed' and stop reason 'failure'.",
        )


def _check_values(trajectory: Trajectory) -> None:
    """Check the values outside of segments that an exporter, a listing or a URL could not hold."""
    if _is_id(trajectory.id) is None:
        raise InvalidTrajectory(
            f"The trajectory id {trajectory.id[:80]!r} is not valid.",
            hint="An id has 1 to 200 letters, digits, dots, hyphens and underscores; the first is a letter or a digit.",
        )
    if not (0 <= trajectory.member <= MAX_COUNT and 0 <= trajectory.attempt <= MAX_COUNT):
        raise InvalidTrajectory(f"Member {trajectory.member} or attempt {trajectory.attempt} is not a count.")
    tokenizer = trajectory.tokenizer
    if tokenizer is not None and not 0 <= tokenizer.vocab_size <= MAX_COUNT:
        raise InvalidTrajectory(f"A vocabulary of {tokenizer.vocab_size} tokens is not possible.")
    timing = trajectory.timing
    total_s = timing.wall_s + timing.working_s + timing.policy_s + timing.environment_s + timing.waiting_s
    if not abs(total_s) < math.inf:
        raise NonFiniteValue("A duration of the timing is not a finite number.")
    if any(trajectory.infos):
        _check_plain("The infos", trajectory.infos)


def _check_plain(what: str, value: Any) -> None:
    try:
        require_plain(value, MAX_RECORD_NESTING)
    except ValueError as error:
        raise InvalidTrajectory(
            f"{what} cannot be stored as JSON: {error}.", hint="Store plain JSON values."
        ) from error


def _check_assets(trajectory: Trajectory) -> set[str]:
    """The names of all assets, after checking that they are valid and include every image."""
    names = {asset.name for asset in trajectory.assets}
    for asset in trajectory.assets:
        if not is_asset_name(asset.name) or not 0 < asset.size_bytes <= MAX_EXACT:
            raise InvalidTrajectory(
                f"The asset {asset.name[:80]!r} of {asset.size_bytes} bytes is not valid.",
                hint="An asset is not empty, and its name is the SHA-256 of its bytes in lower-case hexadecimal.",
            )
    if len(names) < len(trajectory.assets):
        raise InvalidTrajectory(
            "An asset is listed twice.", hint="List each asset once, even if it is shown several times."
        )
    for number, message in enumerate(trajectory.messages):
        if not -1 <= message.turn <= MAX_COUNT:
            raise InvalidTrajectory(f"Message {number} is of turn {message.turn}, which is not a turn's index.")
        if isinstance(message.content, str):
            continue
        for part in message.content:
            if part.type == "image":
                _require_listed(f"Message {number}: an image", part.asset, names)
    return names


def _require_listed(referrer: str, name: str, assets: set[str]) -> None:
    if name not in assets:
        raise InvalidTrajectory(
            f"{referrer} names asset {name[:80]!r}, which the record does not list.",
            hint="List every asset of the trajectory under assets.",
        )


def _check_arrays(where: str, segment: Segment) -> int:
    token_ids, sampled, logprobs = segment.token_ids, segment.sampled, segment.logprobs
    _check_dtype(where, "token_ids", token_ids, _I4)
    _check_dtype(where, "sampled", sampled, _U1)
    _check_dtype(where, "logprobs", logprobs, _F4)
    shape = token_ids.shape
    if len(shape) != 1 or sampled.shape != shape or logprobs.shape != shape:
        raise WrongShape(
            f"{where}: token_ids has shape {shape}, sampled {sampled.shape}, logprobs {logprobs.shape}; they must be "
            "one-dimensional and of equal length.",
            hint="Give every token one id, one sampled flag and one logprob (0 where not sampled).",
        )
    if not shape[0]:
        raise WrongShape(f"{where} has no tokens.", hint="Omit a segment without tokens.")
    return int(shape[0])


def _check_sampling(where: str, segment: Segment) -> None:
    sampling = segment.sampling
    if not (0 <= sampling.temperature < math.inf and 0 <= sampling.top_p <= 1):
        raise NonFiniteValue(
            f"{where}: temperature {sampling.temperature} and top_p {sampling.top_p} are not sampling parameters."
        )


def _check_dtype(where: str, name: str, array: Any, dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise WrongDtype(f"{where}: {name} is {kind}, not {dtype.name}.", hint="Create it with that dtype.")


def _check_spans(where: str, segment: Segment, n: int, indices: set[int]) -> None:
    """Check that turns are numbered, ordered and within bounds, and that ``sampled`` is exactly their union."""
    expected = bytearray(n)
    last_index, last_end = -1, 0
    for turn in segment.turns:
        index, start, end = turn.index, turn.start, turn.end
        if start >= end or end > n or start < last_end:
            raise SpansDoNotCover(
                f"{where}, turn {index}: its span [{start}, {end}) must hold a token, start at {last_end} or later, "
                f"and end by {n}.",
                hint="Turns of a segment are ordered and do not overlap; a turn samples at least one token.",
            )
        if start == 0:
            raise NotAppendOnly(
                f"{where}, turn {index} starts at position 0, without a prompt before it.",
                hint="Keep the prompt's tokens in the segment, before the turn.",
            )
        if index <= last_index or index in indices:
            raise NotAppendOnly(
                f"{where}, turn {index} follows turn {last_index}"
                + (", and another turn has that index." if index in indices else "."),
                hint="Turns are numbered over the whole episode, upwards within a segment.",
            )
        if turn.continued and not (
            start < turn.continued[0] and turn.continued[-1] < end and turn.continued == sorted(turn.continued)
        ):
            raise SpansDoNotCover(
                f"{where}, turn {index}: sampling continued at {turn.continued}, outside its span [{start}, {end}).",
                hint="A turn continues after its first token and before its end.",
            )
        indices.add(index)
        expected[start:end] = b"\1" * (end - start)
        if turn.reward_parts or not (turn.reward.__class__ is float and abs(turn.reward) <= MAX_REWARD):
            _check_rewards(where, turn)
        if turn.tool_calls:
            _check_tool_calls(where, turn)
        if not abs(turn.policy_s + turn.environment_s) < math.inf:
            raise NonFiniteValue(f"{where}, turn {index}: a duration is not a finite number.")
        last_index, last_end = index, end
    if last_index > MAX_COUNT:
        raise NotAppendOnly(f"{where}: the turn index {last_index} is not a count.")
    if segment.sampled.tobytes() != expected:
        wrong = int(np.flatnonzero(segment.sampled != np.frombuffer(expected, np.uint8))[0])
        raise SpansDoNotCover(
            f"{where}, position {wrong}: sampled is {segment.sampled[wrong]}, but "
            + ("a turn covers it." if expected[wrong] else "no turn covers it."),
            hint="sampled is 1 inside the turns' spans and 0 elsewhere.",
        )


def _check_tool_calls(where: str, turn: Turn) -> None:
    for call in turn.tool_calls:
        what = f"{where}, turn {turn.index}: a call of {call.name[:80]!r}"
        if not math.isfinite(call.duration_s):
            raise NonFiniteValue(f"{what}: the duration is not a finite number.")
        _check_plain(what, call.arguments)


def _check_rewards(where: str, turn: Turn) -> None:
    if not _is_reward(turn.reward):
        raise NonFiniteValue(
            f"{where}, turn {turn.index}: the reward is {turn.reward!r}, not a finite number up to {MAX_REWARD:g}.",
            hint="If a reward cannot be computed, fail the episode.",
        )
    for name, value in turn.reward_parts.items():
        if not _is_reward(value):
            raise NonFiniteValue(
                f"{where}, turn {turn.index}: the reward part {name!r} is {value!r}, not a finite number up to "
                f"{MAX_REWARD:g}.",
                hint="Omit a part that cannot be computed, or fail the episode.",
            )


def _is_reward(value: object) -> bool:
    return isinstance(value, (float, int)) and abs(value) <= MAX_REWARD  # false for NaN


def _check_tokens(where: str, segment: Segment, n: int, vocab_size: int | None) -> None:
    if vocab_size is None:
        raise TokenOutOfRange(
            f"{where} has token ids, but the record names no tokenizer.",
            hint="Set tokenizer to the one that the ids belong to, with the size of its vocabulary.",
        )
    if n <= SHORT_TOKENS:
        few: list[int] = segment.token_ids.tolist()
        if min(few) >= 0 and max(few) < vocab_size:
            return
    # As an unsigned integer a negative id is a very large one: one pass finds both.
    ids = segment.token_ids.view(_U4)
    if _maximum(ids) >= vocab_size:
        wrong = int(np.flatnonzero(ids >= vocab_size)[0])
        raise TokenOutOfRange(
            f"{where}{_turn_at(segment, wrong)}, position {wrong}: token id {segment.token_ids[wrong]} is outside "
            f"[0, {vocab_size}).",
            hint="Is this the tokenizer of the model that sampled the token?",
        )


def _check_logprobs(where: str, segment: Segment, n: int) -> None:
    logprobs = segment.logprobs
    if n <= SHORT_TOKENS:
        few: list[float] = logprobs.tolist()
        # A NaN or an infinity would propagate to the sum; SHORT_TOKENS numbers of 32 bits cannot overflow it.
        if max(few) <= 0 and math.isfinite(sum(few)) and _is_zero_between_turns(segment, few, any):
            return
    # NaN is returned as both minimum and maximum, and fails both comparisons.
    elif _minimum(logprobs) > -math.inf and _maximum(logprobs) <= 0 and _is_zero_outside_turns(segment):
        return
    sampled = segment.sampled == 1
    good = np.where(sampled, np.isfinite(logprobs) & (logprobs <= 0), logprobs == 0)
    wrong = int(np.flatnonzero(~good)[0])
    allowed = "a finite number of at most 0" if sampled[wrong] else "0 as at every position that was not sampled"
    raise NonFiniteValue(
        f"{where}{_turn_at(segment, wrong)}, position {wrong}: the logprob is {logprobs[wrong]}, not {allowed}.",
        hint="Record the engine's logprob; if it reported none, fail the turn as a policy failure.",
    )


def _is_zero_outside_turns(segment: Segment) -> bool:
    """True if all logprobs outside the turns are 0, for a segment of any length."""
    if len(segment.turns) < MANY_TURNS:
        return _is_zero_between_turns(segment, segment.logprobs, _minimum)
    return b"\1" not in (segment.logprobs.astype(_BOOL) > segment.sampled.view(_BOOL)).tobytes()


def _is_zero_between_turns(segment: Segment, logprobs: Any, is_nonzero: Callable[[Any], object]) -> bool:
    """True if all logprobs outside the turns are 0, checked gap by gap.

    The logprobs are known to be at most 0. ``is_nonzero`` is false for a slice of zeros.
    """
    end = 0
    for turn in segment.turns:
        if turn.start > end and is_nonzero(logprobs[end : turn.start]):
            return False
        end = turn.end
    return end == len(logprobs) or not is_nonzero(logprobs[end:])


def _minimum(array: NDArray[Any]) -> float:
    """The minimum, or NaN; several times faster than ``min`` for a short array."""
    smallest: float = array.item(array.argmin())
    return smallest


def _maximum(array: NDArray[Any]) -> float:
    """The maximum, or NaN."""
    greatest: float = array.item(array.argmax())
    return greatest


def _check_versions(where: str, segment: Segment, n: int) -> None:
    end = 0
    for run in segment.versions:
        if run.end <= end or not (0 <= run.lineage <= MAX_VERSION_PART and 0 <= run.n <= MAX_VERSION_PART):
            raise VersionRunsDoNotCover(
                f"{where}: the version run of {run.version} ends at {run.end}, the previous one at {end}.",
                hint=f"The ends of version runs increase, and the numbers of a version are 0 to {MAX_VERSION_PART}.",
            )
        end = run.end
    if end != n:
        raise VersionRunsDoNotCover(
            f"{where}: its version runs end at {end}, but it has {n} tokens.",
            hint="Positions that were not sampled belong to the run of the turn before them, or to the first run.",
        )


def _check_placeholders(where: str, segment: Segment, n: int, assets: set[str]) -> None:
    last_end = 0
    for item in segment.placeholders:
        if not last_end <= item.start < item.end <= n:
            raise PlaceholdersDoNotMatch(
                f"{where}: the placeholder [{item.start}, {item.end}) of {item.asset!r} must hold a token, start at "
                f"{last_end} or later, and end by {n}.",
                hint="Placeholders are ordered and do not overlap.",
            )
        if segment.sampled[item.start : item.end].any():
            raise PlaceholdersDoNotMatch(
                f"{where}: the placeholder [{item.start}, {item.end}) of {item.asset!r} covers sampled positions.",
                hint="An asset is part of a prompt or an observation, never of a policy's action.",
            )
        _require_listed(f"{where}: the placeholder [{item.start}, {item.end})", item.asset, assets)
        last_end = item.end
    _check_placeholder_ends(where, segment, n)


def _check_placeholder_ends(where: str, segment: Segment, n: int) -> None:
    """Check that no placeholder token outside the ranges continues one of them."""
    tokens, sampled = segment.token_ids, segment.sampled
    starts = {item.start for item in segment.placeholders}
    ends = {item.end for item in segment.placeholders}
    for item in segment.placeholders:
        before, after = item.start - 1, item.end
        is_cut_before = before >= 0 and item.start not in ends and _same_unsampled(tokens, sampled, before, item.start)
        is_cut_after = after < n and after not in starts and _same_unsampled(tokens, sampled, after, item.end - 1)
        if is_cut_before or is_cut_after:
            raise PlaceholdersDoNotMatch(
                f"{where}: the placeholder [{item.start}, {item.end}) of {item.asset!r} does not hold all tokens "
                f"of its image: position {before if is_cut_before else after} has the same token.",
                hint="A range holds every placeholder token of its image, as the engine placed them.",
            )


def _same_unsampled(tokens: NDArray[Any], sampled: NDArray[Any], outside: int, inside: int) -> bool:
    return bool(tokens[outside] == tokens[inside] and not sampled[outside])


def _check_shown_images(trajectory: Trajectory) -> None:
    """Check that each image shown to an agent before its last turn has a range, for agents with one segment."""
    segments = Counter(segment.agent for segment in trajectory.segments)
    for segment in trajectory.segments:
        if segments[segment.agent] > 1 or not segment.placeholders:
            continue  # a history edit may remove an image, or show it again
        ranges = Counter(item.asset for item in segment.placeholders)
        shown = Counter(_images_before_last_turn(trajectory.messages, segment.agent))
        for asset, count in shown.items():
            if ranges[asset] < count:
                raise PlaceholdersDoNotMatch(
                    f"{segment.agent} was shown asset {asset!r} {count} times, and its segment has {ranges[asset]} "
                    "placeholders of it.",
                    hint="Each image shown to a policy has its own range of placeholder tokens.",
                )


def _images_before_last_turn(messages: Sequence[Message], agent: str) -> list[str]:
    own = [message for message in messages if message.agent == agent]
    last = max((number for number, message in enumerate(own) if message.role == "assistant"), default=0)
    contents = [message.content for message in own[:last] if not isinstance(message.content, str)]
    return [part.asset for content in contents for part in content if part.type == "image"]


def _check_last_turns(trajectory: Trajectory) -> None:
    """Check that only an agent's last turn ends it, and that the last turns of all agents agree with the status."""
    last: Turn | None = None
    ended: list[tuple[str, Turn]] = []
    last_of: dict[str, int] = {}
    for segment in trajectory.segments:
        for turn in segment.turns:
            if last is None or turn.index > last.index:
                last = turn
            if turn.terminated or turn.truncated:
                ended.append((segment.agent, turn))
            if turn.index > last_of.get(segment.agent, -1):
                last_of[segment.agent] = turn.index
    for agent, turn in ended:
        if turn.index != last_of[agent]:
            raise NotAppendOnly(
                f"Turn {turn.index} of {agent} ended its episode, but turn {last_of[agent]} follows.",
                hint="A turn that is terminated or truncated is the last one.",
            )
        if turn.terminated and turn.truncated:
            raise FailureHasReward(
                f"Turn {turn.index} of {agent} is both terminated and truncated.", hint="Set only terminated."
            )
    terminated, truncated = (last.terminated, last.truncated) if last is not None else (False, False)
    if trajectory.status == "finished" and not (
        terminated or (truncated and any(turn.terminated for _, turn in ended))
    ):
        raise FailureHasReward(
            "Status is 'finished' but the last turn is not terminated.",
            hint="'finished': the environment ended the episode. The end of a budget is 'truncated'.",
        )
    if trajectory.status != "truncated":
        return
    all_terminated = bool(last_of) and last_of.keys() == {agent for agent, turn in ended if turn.terminated}
    if all_terminated or (trajectory.stop_reason == "environment_truncated" and not truncated):
        flag = "terminated" if all_terminated else "not truncated"
        raise FailureHasReward(
            f"Status is 'truncated' ({trajectory.stop_reason}) but the last turn is {flag}.",
            hint="If an environment reports both, the turn is terminated and the status is 'finished'.",
        )


def _turn_at(segment: Segment, position: int) -> str:
    """The text ``", turn 3"`` if the position is inside a turn, else an empty text."""
    for turn in segment.turns:
        if turn.start <= position < turn.end:
            return f", turn {turn.index}"
    return ""
