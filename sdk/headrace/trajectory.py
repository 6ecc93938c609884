"""The trajectory: the stored record of an episode (wire schema 1).

* Engine tokens only: sampled ids and logprobs are the engine's own.
* Append-only: within a segment the prompt of turn k+1 extends the tokens of turn k exactly.
* Spans cover: turns are ordered, disjoint, and cover exactly the positions with ``sampled == 1``.
* A failure is not a zero: a failed trajectory has a ``Failure`` and is never in a batch.
* One terminal record: every dispatched episode ends in exactly one, which the scheduler ensures.
* Versions are known: version runs cover a segment completely.

``validate`` in :mod:`headrace.validation` checks them; :mod:`headrace.wire.codec` turns a trajectory into bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import EpisodeFailure, Layer

Status = Literal["finished", "truncated", "failed", "cancelled"]
"""The status of an episode. ``finished``: the environment ended it. ``truncated``: a budget of turns, tokens or working
time ended it. ``failed``: a failure ended it. ``cancelled``: its result was no longer needed."""

StopReason = Literal[
    "terminated",  # finished: by the environment
    "environment_truncated",  # truncated: a limit of the environment
    "max_turns",  # truncated
    "max_tokens",  # truncated: the context is full
    "working_time",  # truncated: working time, waits not counted
    "failure",  # failed: see Trajectory.failure
    "cancelled",  # cancelled: Trajectory.failure may have the reason
]


MAX_VERSION_PART = (1 << 31) - 1
"""Largest lineage and ``n``, which the log and every reader can hold."""


class Version(NamedTuple):
    """A version of a run's policy: the ``n``-th of its lineage. Its text form is ``"lineage.n"``, as in ``"0.12"``.

    Versions are ordered by (lineage, n): a later lineage is newer.
    """

    lineage: int
    n: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse ``"lineage.n"``, with both numbers at most ``MAX_VERSION_PART``. Raises ValueError."""
        lineage, dot, n = text.partition(".")
        if not dot or not (lineage.isascii() and lineage.isdigit() and n.isascii() and n.isdigit()):
            raise ValueError(f"{text!r} is not a version; a version reads 'lineage.n', as in '0.12'")
        if max(len(lineage), len(n)) > 10 or max(int(lineage), int(n)) > MAX_VERSION_PART:
            raise ValueError(f"{text[:40]!r} is not a version; its numbers are at most {MAX_VERSION_PART}")
        return cls(int(lineage), int(n))


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of an episode. ``kind`` is a short stable identifier, such as ``"no-token-ids"``."""

    layer: Layer
    kind: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, error: EpisodeFailure) -> Failure:
        """The failure that stores an error."""
        return cls(layer=error.layer, kind=error.kind, message=str(error), retryable=error.retryable)


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem instance. The seed determines the environment completely; sampling is seeded per episode.

    ``example`` is a dataset row that is passed to the environment's constructor as ``example=``, unless it is None.
    ``id`` is the submitter's name for the task (its position, for a list or a mixture). ``tags`` are labels by which a
    pull can select groups; like ``id`` they do not change the problem.
    """

    environment: str
    seed: int
    kwargs: dict[str, Any] = {}
    example: dict[str, Any] | None = None
    id: str = ""
    tags: list[str] = []


class PolicyRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A policy by the name of its weights. All members of a group share it; their versions may differ."""

    base: str
    adapter: str | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a segment.

    ``logprobs``: the engine reported them before (``raw``) or after (``processed``) temperature and filters. ``none``:
    the server returned only text; its ids were encoded from the text, and its logprobs are 0. Only an evaluation may
    have ``none``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: Literal["raw", "processed", "none"] = "raw"


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer of the token ids: its name, a fingerprint of vocabulary and template, and the vocabulary's size."""

    name: str
    fingerprint: str
    vocab_size: int


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """The version of the positions from the end of the previous run (or 0) to ``end``."""

    end: int
    lineage: int
    n: int

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.n)


class Placeholder(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``[start, end)`` with the placeholder tokens of an asset, for a policy that sees images."""

    start: int
    end: int
    asset: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call in a turn. ``duration_s`` is its working time."""

    name: str
    arguments: dict[str, Any] = {}
    result: str = ""
    error: str = ""
    duration_s: float = 0.0


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A policy action and the environment's response to it.

    ``index`` counts the turns of the whole episode, over all agents. ``[start, end)`` is the sampled span in the
    segment, at least one token. A reward that arrives between an agent's turns belongs to its last turn.
    ``continued``: the positions in the span at which sampling continued after the engine interrupted it; each part was
    drawn with its own seed. ``said``: the whole text of the span, if the environment got only the part before a stop
    string.
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

    ``token_ids`` i32[n]; ``sampled`` u8[n], 1 where the policy sampled the token; ``logprobs`` f32[n], that of the
    token at the same position, 0 where not sampled. A row is a segment with ``train = true`` and at least one turn.
    ``arrays``: the asset names of large arrays about its tokens, by kind, such as ``routed_experts``.
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
    """Part of a message: text, or an image by the name of its asset. A policy that reads only text gets the ``text`` of
    an image instead.

    ``control_tokens``: the text may contain control tokens of the model, such as ``<|im_end|>``. Set it only for a text
    that you wrote yourself. Without it, they are encoded as text.
    """

    type: Literal["text", "image"]
    text: str = ""
    asset: str = ""
    control_tokens: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message as text, for people; tokens are in the segments. ``turn`` is the turn that wrote it, or -1."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    agent: str = ""
    turn: int = -1


class Asset(msgspec.Struct, frozen=True, kw_only=True):
    """An entry for an image or a large array of the trajectory. ``name`` is the SHA-256 of its bytes, in lower-case
    hexadecimal; :mod:`headrace.assets` encodes and decodes assets."""

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
    """The origin of a record. ``endpoints``: the policy servers used. ``evaluation``: the evaluation it belongs to, if
    any; such a record is never in a batch. ``sampling_seed`` is the episode's seed for sampling. ``first_prompt``: a
    fingerprint of what the policy was shown before the first turn; the same in all members of a group whose seed fixes
    the task."""

    worker: str = ""
    endpoints: list[str] = []
    environment_version: str = ""
    headrace_version: str = ""
    evaluation: str = ""
    sampling_seed: int = 0
    first_prompt: str = ""


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
    """The environment's info after reset, then after each turn: the part that is plain JSON, copied at that moment."""
    control_tokens: int = 0
    """Control tokens of the model that observations, histories and tools spelled; they were encoded as text."""

    def rows(self) -> Iterator[Segment]:
        """The rows: segments with ``train = true`` and at least one turn."""
        return (segment for segment in self.segments if segment.train and segment.turns)

    def agent_turns(self, agent: str) -> list[Turn]:
        """All turns of an agent over all segments, in the order of the episode."""
        turns = [turn for segment in self.segments if segment.agent == agent for turn in segment.turns]
        return sorted(turns, key=lambda turn: turn.index)

    def version_range(self) -> tuple[Version, Version] | None:
        """The lowest and the highest version of all rows, or None without rows."""
        versions = [run.version for segment in self.rows() for run in segment.versions]
        return (min(versions), max(versions)) if versions else None
