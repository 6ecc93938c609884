"""The trajectory: the stored record of an episode (wire schema 1).

* Engine tokens only: sampled ids and logprobs are the engine's own.
* Append-only: within a segment the prompt of turn k+1 extends the tokens of turn k exactly.
* Spans cover: turns are ordered, disjoint, and cover exactly the positions with ``sampled == 1``.
* A failure is not a zero: a failed trajectory has a ``Failure`` and never enters a batch.
* One terminal record: every dispatched episode ends in exactly one (kept by the scheduler).
* Versions are known: version runs cover a segment whole.

``validate`` in :mod:`headrace.validation` checks them; :mod:`headrace.wire.codec` turns a trajectory into bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import EpisodeFailure, Layer

SCHEMA = 1
"""Version of the wire schema below."""

Status = Literal["finished", "truncated", "failed", "cancelled"]
"""How an episode ended. ``finished``: the environment ended it. ``truncated``: a budget of turns, tokens or
working time did. ``failed``: something broke. ``cancelled``: nobody wanted it any more."""

StopReason = Literal[
    "terminated",  # finished: the environment said so
    "environment_truncated",  # truncated: the environment's own limit
    "max_turns",  # truncated
    "max_tokens",  # truncated: the context is full
    "working_time",  # truncated: working time, waits not counted
    "failure",  # failed: see Trajectory.failure
    "cancelled",  # cancelled: see Trajectory.failure for the reason, if there is one
]


MAX_VERSION_PART = (1 << 31) - 1
"""Largest lineage, and largest ``n``: what every reader and the log can hold, and more steps than any run makes."""


class Version(NamedTuple):
    """One version of a run's policy: the ``n``-th of its lineage. Text form ``"lineage.n"``, as in ``"0.12"``.

    Ordered by (lineage, n): a lineage opened later is newer.
    """

    lineage: int
    n: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read ``"lineage.n"``, both numbers at most ``MAX_VERSION_PART``; raises ValueError on anything else."""
        lineage, dot, n = text.partition(".")
        if not dot or not (lineage.isascii() and lineage.isdigit() and n.isascii() and n.isdigit()):
            raise ValueError(f"{text!r} is not a version; a version reads 'lineage.n', as in '0.12'")
        if max(len(lineage), len(n)) > 10 or max(int(lineage), int(n)) > MAX_VERSION_PART:
            raise ValueError(f"{text[:40]!r} is not a version; its numbers are at most {MAX_VERSION_PART}")
        return cls(int(lineage), int(n))


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an episode has no result. ``kind`` is a short stable word, such as ``"no-token-ids"``."""

    layer: Layer
    kind: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: EpisodeFailure) -> Failure:
        """The stored form of an error."""
        return cls(layer=error.layer, kind=error.kind, message=str(error), retryable=error.retryable)


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One problem instance. The seed fixes the environment whole; sampling is seeded per episode.

    ``example`` is a dataset row that goes to the environment's constructor as ``example=``, if there is one.
    ``id`` is the submitter's own name for it (the position, for a list or a mixture). ``tags`` are words that a pull
    may ask for; like ``id`` they change nothing about the problem.
    """

    environment: str
    seed: int
    kwargs: dict[str, Any] = {}
    example: dict[str, Any] | None = None
    id: str = ""
    tags: list[str] = []


class PolicyRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Weights by name. All members of a group share one; their versions may differ."""

    base: str
    adapter: str | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens were drawn. ``logprobs`` names what the engine reported: before (``raw``) or after
    (``processed``) temperature and filters. ``none``: the server gave text alone; ids were encoded from it, and its
    logprobs are 0. Only an evaluation may have that."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: Literal["raw", "processed", "none"] = "raw"


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """What the token ids mean: a name, a fingerprint of vocabulary and template, and the vocabulary's size."""

    name: str
    fingerprint: str
    vocab_size: int


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """Positions from the end of the run before (or 0) up to ``end`` belong to this version."""

    end: int
    lineage: int
    n: int

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.n)


class Placeholder(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``[start, end)`` stand for the asset of that name, as a policy that sees images reads them."""

    start: int
    end: int
    asset: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call made in a turn. ``duration_s`` is its working time."""

    name: str
    arguments: dict[str, Any] = {}
    result: str = ""
    error: str = ""
    duration_s: float = 0.0


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One policy action and the environment's answer to it.

    ``index`` counts turns over the whole episode, all agents together. ``[start, end)`` is the sampled span in
    the segment, at least one token. A reward that arrives between an agent's turns belongs to its last turn.
    ``continued``: the positions in the span at which sampling went on after the engine had interrupted it; each part
    was drawn with a seed of its own. ``said``: all the text of the span, where the environment was given only the part
    of it before a stop string.
    """

    index: int
    start: int
    end: int
    reward: float
    reward_parts: dict[str, float] = {}
    terminated: bool = False
    truncated: bool = False
    finish_reason: str = ""
    continued: list[int] = []
    said: str = ""
    tool_calls: list[ToolCall] = []
    policy_s: float = 0.0
    environment_s: float = 0.0


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous token sequence of one agent; a history edit starts a new one.

    ``token_ids`` i32[n]; ``sampled`` u8[n], 1 where the policy chose the token; ``logprobs`` f32[n], of the token
    at the same position, 0 where not sampled. A row is a segment with ``train`` and at least one turn. ``arrays`` are
    large arrays about its tokens by what they are, such as ``routed_experts``: names of assets.
    """

    agent: str
    policy: PolicyRef
    sampling: Sampling
    train: bool
    token_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: list[VersionRun]
    turns: list[Turn]
    placeholders: list[Placeholder] = []
    arrays: dict[str, str] = {}


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a message: text, or an image by the name of its asset. An image's ``text`` is what stands for it where
    the policy reads text only."""

    type: Literal["text", "image"]
    text: str = ""
    asset: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message as people read it; tokens are in the segments. ``turn`` is the turn that wrote it, -1 if none did."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    agent: str = ""
    turn: int = -1


class Asset(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a large array beside the trajectory. ``name`` is the SHA-256 of its bytes, in lower-case hexadecimal;
    :mod:`headrace.assets` makes and reads them."""

    name: str
    media_type: str
    size_bytes: int


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Durations in seconds. ``working_s`` excludes every wait (queues, pauses, other agents)."""

    wall_s: float = 0.0
    working_s: float = 0.0
    policy_s: float = 0.0
    environment_s: float = 0.0
    waiting_s: float = 0.0


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made this record, with what. ``endpoints``: the policy servers that were asked. ``evaluation`` names the
    evaluation it belongs to; such a record is never in a batch. ``sampling_seed`` is the episode's own seed."""

    worker: str = ""
    endpoints: list[str] = []
    environment_version: str = ""
    headrace_version: str = ""
    evaluation: str = ""
    sampling_seed: int = 0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of an episode. ``id`` is a UUIDv7."""

    id: str
    run: str
    group: str
    member: int
    episode: str
    attempt: int
    task: Task
    status: Status
    stop_reason: StopReason
    failure: Failure | None
    segments: list[Segment]
    messages: list[Message]
    tokenizer: Tokenizer | None
    assets: list[Asset]
    timing: Timing
    provenance: Provenance
    infos: list[dict[str, Any]] = []
    """The environment's info after reset, then after each turn, as it was at that moment (JSON-able part)."""

    def rows(self) -> Iterator[Segment]:
        """The segments a learner trains on: those to be trained that have a turn."""
        return (segment for segment in self.segments if segment.train and segment.turns)

    def agent_turns(self, agent: str) -> list[Turn]:
        """All turns of an agent, in the order of the episode, whatever segment they are in."""
        turns = [turn for segment in self.segments if segment.agent == agent for turn in segment.turns]
        return sorted(turns, key=lambda turn: turn.index)

    def version_range(self) -> tuple[Version, Version] | None:
        """Lowest and highest version of any sampled-from run of any row, or None without rows."""
        versions = [run.version for segment in self.rows() for run in segment.versions]
        return (min(versions), max(versions)) if versions else None
