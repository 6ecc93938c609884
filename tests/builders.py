"""Valid trajectories for tests: single-turn, multi-turn, multi-segment, multi-agent, failed.

Everything is deterministic: the same arguments give the same bytes. ``number`` tells records of one test apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.trajectory import (
    Failure,
    Message,
    PolicyRef,
    Provenance,
    Sampling,
    Segment,
    Task,
    Timing,
    Tokenizer,
    Trajectory,
    Turn,
    Version,
    VersionRun,
)

VOCAB_SIZE = 1024
TOKENIZER = Tokenizer(name="test", fingerprint="test-1024", vocab_size=VOCAB_SIZE)
POLICY = PolicyRef(base="policy")


def make_id(number: int) -> str:
    """A well-formed UUIDv7 that ends in this number."""
    return f"00000000-0000-7000-8000-{number:012x}"


def make_segment(
    *,
    spans: Sequence[tuple[int, int]] = ((6, 10),),
    length: int | None = None,
    rewards: Sequence[float] | None = None,
    indices: Sequence[int] | None = None,
    terminated: bool = True,
    truncated: bool = False,
    agent: str = "agent",
    train: bool = True,
    versions: Sequence[VersionRun] | None = None,
    version: Version = Version(0, 0),  # noqa: B008 - a NamedTuple is immutable
    salt: int = 0,
    temperature: float = 1.0,
) -> Segment:
    """A segment whose sampled spans are given; ``terminated`` and ``truncated`` go to its last turn.

    Default rewards are 0, and 1 for the last turn. ``length`` defaults to the end of the last span.
    """
    n = length if length is not None else (spans[-1][1] if spans else 8)
    positions = np.arange(n)
    sampled = np.zeros(n, np.uint8)
    for start, end in spans:
        sampled[start:end] = 1
    logprobs = np.where(sampled == 1, -0.25 - (positions % 7) / 8, 0.0).astype(np.float32)
    rewards = rewards if rewards is not None else [0.0] * (len(spans) - 1) + [1.0] * bool(spans)
    indices = indices if indices is not None else range(len(spans))
    last = len(spans) - 1
    turns = [
        Turn(
            index=index,
            start=start,
            end=end,
            reward=float(reward),
            terminated=terminated and k == last,
            truncated=truncated and k == last,
        )
        for k, ((start, end), reward, index) in enumerate(zip(spans, rewards, indices, strict=True))
    ]
    return Segment(
        agent=agent,
        policy=POLICY,
        sampling=Sampling(temperature=temperature),
        train=train,
        token_ids=((positions * 31 + salt * 7 + 3) % VOCAB_SIZE).astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        versions=list(versions) if versions is not None else [VersionRun(n, version.lineage, version.n)],
        turns=turns,
    )


def turn_spans(
    turns: int, *, prompt: int = 6, turn_tokens: int = 4, observation_tokens: int = 3
) -> list[tuple[int, int]]:
    """Sampled spans of so many turns: a prompt, then answers with observations between them."""
    step = turn_tokens + observation_tokens
    return [(prompt + k * step, prompt + k * step + turn_tokens) for k in range(turns)]


def make_trajectory(
    *,
    number: int = 1,
    turns: int = 1,
    rewards: Sequence[float] | None = None,
    turn_tokens: int = 4,
    version: Version = Version(0, 0),  # noqa: B008 - a NamedTuple is immutable
    truncated: bool = False,
    **overrides: Any,
) -> Trajectory:
    """A valid trajectory of one agent and one segment, finished (or truncated by the turn limit).

    ``rewards`` sets the turns' rewards and so their number. Any field of ``Trajectory`` can be given by name.
    """
    count = len(rewards) if rewards is not None else turns
    spans = turn_spans(count, turn_tokens=turn_tokens)
    segment = make_segment(
        spans=spans,
        length=spans[-1][1] + (3 if truncated else 0),
        rewards=rewards,
        terminated=not truncated,
        version=version,
        salt=number,
    )
    fields: dict[str, Any] = {
        "id": make_id(number),
        "run": "run",
        "group": "group-0",
        "member": number - 1,
        "episode": f"episode-{number}",
        "attempt": 1,
        "task": Task(environment="test:Echo", seed=number),
        "status": "truncated" if truncated else "finished",
        "stop_reason": "max_turns" if truncated else "terminated",
        "failure": None,
        "segments": [segment],
        "messages": [
            Message(role="user", content="Say hello."),
            Message(role="assistant", content="hello", agent="agent", turn=0),
        ],
        "tokenizer": TOKENIZER,
        "assets": [],
        "timing": Timing(wall_s=0.5, working_s=0.25, policy_s=0.2, environment_s=0.05),
        "provenance": Provenance(worker="worker-1", endpoints=["http://127.0.0.1:1"], sampling_seed=number),
    }
    return Trajectory(**{**fields, **overrides})


def make_truncated(**overrides: Any) -> Trajectory:
    """A trajectory that the turn limit ended; its last observation is appended unsampled."""
    return make_trajectory(truncated=True, **overrides)


def make_failed(
    *,
    number: int = 1,
    failure: Failure | None = None,
    segments: Sequence[Segment] | None = None,
    **overrides: Any,
) -> Trajectory:
    """A failed trajectory: one turn was played, then its environment broke."""
    fields: dict[str, Any] = {
        "status": "failed",
        "stop_reason": "failure",
        "failure": failure or Failure(layer="environment", kind="step-raised", message="The environment broke."),
        "segments": list(segments) if segments is not None else [make_segment(rewards=[0.0], terminated=False)],
    }
    return make_trajectory(number=number, **{**fields, **overrides})


def make_multi_segment(
    *, number: int = 1, rewards: Sequence[float] = (0.5, -0.25, 1.0), **overrides: Any
) -> Trajectory:
    """One agent whose history was edited after its second turn: two segments, both rows."""
    first = make_segment(
        spans=turn_spans(len(rewards) - 1),
        rewards=rewards[:-1],
        terminated=False,
        salt=number,
        version=Version(0, 1),
    )
    second = make_segment(
        spans=[(9, 12)], rewards=rewards[-1:], indices=[len(rewards) - 1], salt=number + 1, version=Version(0, 2)
    )
    return make_trajectory(number=number, **{"segments": [first, second], **overrides})


def make_multi_agent(
    *,
    number: int = 1,
    rewards: Sequence[float] = (0.0, 1.0),
    opponent_rewards: Sequence[float] = (0.0, -1.0),
    opponent_trains: bool = False,
    **overrides: Any,
) -> Trajectory:
    """Two agents in turn, ``player`` first; the ``opponent`` is frozen unless it trains."""
    player = make_segment(
        agent="player",
        spans=turn_spans(len(rewards)),
        rewards=rewards,
        indices=range(0, 2 * len(rewards), 2),
        salt=number,
    )
    opponent = make_segment(
        agent="opponent",
        spans=turn_spans(len(opponent_rewards), turn_tokens=2),
        rewards=opponent_rewards,
        indices=range(1, 2 * len(opponent_rewards), 2),
        train=opponent_trains,
        salt=number + 1,
    )
    return make_trajectory(number=number, **{"segments": [player, opponent], **overrides})


def replace_turn(trajectory: Trajectory, turn: int, *, segment: int = 0, **fields: Any) -> Trajectory:
    """The same trajectory with fields of one turn replaced."""
    turns = list(trajectory.segments[segment].turns)
    turns[turn] = msgspec.structs.replace(turns[turn], **fields)
    return replace_segment(trajectory, segment=segment, turns=turns)


def replace_segment(trajectory: Trajectory, *, segment: int = 0, **fields: Any) -> Trajectory:
    """The same trajectory with fields of one segment replaced."""
    segments = list(trajectory.segments)
    segments[segment] = msgspec.structs.replace(segments[segment], **fields)
    return msgspec.structs.replace(trajectory, segments=segments)
