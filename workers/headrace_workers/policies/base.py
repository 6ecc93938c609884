"""The policy interface: prompt token ids in, sampled token ids and their logprobs out.

* Every try has a unique id: episode, attempt, turn and try are part of it.
* Sampled ids and logprobs are used as the engine returned them, or refused; they are never repaired.
* Each fault of a sample has its own failure kind, and its position in the message.
* Version runs cover the whole sample, in order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.assets import AssetData
from headrace.errors import PolicyFailure
from headrace.runspec import PolicySpec, SamplingSpec
from headrace.trajectory import Message, Sampling, Version, VersionRun

AnyProtocol = Literal["auto", "generate", "completions", "chat"]
"""The protocol of requests to a server. ``auto``: the best one that the server supports."""

_TWO_SEEDS = struct.Struct("<QQ")
_WORD = 2**64 - 1

LOWEST_LOGPROB = float(np.finfo(np.float32).min)
"""Logprobs are stored as float32; a lower value would become an infinity."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to sample one turn.

    ``id`` names the turn (``episode-attempt-turn``); the sender appends the number of the try.
    ``group`` and ``episode`` identify the episode: a router keeps both at the server that caches their prefix.
    ``prompt`` int[n] token ids, all below ``vocab_size``; ``messages`` and ``tools`` (JSON schemas of functions, in the
    form of OpenAI's) are the same prompt for a server that renders it itself.
    ``images``: the images of the prompt, in order, each with one token in it.
    ``sampling`` has this turn's own seed; temperature 0 is greedy. ``sampling_spec`` and ``policy_spec`` are the run's,
    for settings that only the policy client uses.
    ``timeout_s`` limits the whole call, including retries; pauses for new weights do not count.
    ``adapter``: the trained adapter of the run, which samples this turn in the version that the server has; ``model``
    is then its base. ``frozen``: whether ``model`` is a frozen adapter.
    ``accepts_text``: the turn is not trained on, so a server may return text instead of token ids.
    """

    id: str
    group: str
    episode: str
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    timeout_s: float
    vocab_size: int
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[AssetData] = ()
    sampling_spec: SamplingSpec = SamplingSpec()
    policy_spec: PolicySpec = PolicySpec()
    accepts_text: bool = False
    adapter: str = ""
    frozen: bool = False


class SeenPrompt(NamedTuple):
    """A prompt with images, as the engine saw it. ``token_ids`` int[n]; ``images``: the range ``[start, end)`` of the
    tokens of each image, in order."""

    token_ids: list[int]
    images: list[tuple[int, int]]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's sampled tokens, as the engine returned them.

    ``token_ids`` int[n] and ``logprobs`` float[n], n ≥ 1. ``versions`` are runs ``(end, version)`` over these n
    positions. ``continued``: the positions at which sampling resumed after an interruption, each part with its own seed
    (``part_seed``). ``prompt``: the ids that the engine saw, if it rendered the messages itself.
    ``seen``: a prompt with images, including all tokens of each image.
    ``text``: the answer of a server that returns no ids; the arrays are then empty.
    ``servers``: the servers of all tries, in order, including failed ones. ``waiting_s``: the part of the call without
    sampling (pauses for new weights, backoff, no server available); ``paused_s``: only the pauses.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    versions: Sequence[VersionRun]
    continued: Sequence[int] = ()
    prompt: Sequence[int] | None = None
    seen: SeenPrompt | None = None
    text: str | None = None
    servers: Sequence[str] = ()
    waiting_s: float = 0.0
    paused_s: float = 0.0


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for logprobs of given tokens, ``token_ids`` int[n]. ``id`` names it, as in ``SampleRequest``."""

    id: str
    model: str
    token_ids: Sequence[int]
    timeout_s: float


class Policy(Protocol):
    """Samples turns."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Raises PolicyFailure, with the servers of all tries in ``extra["servers"]``. Cancelling the
        call aborts it at the engine."""
        ...


class PolicySource(Protocol):
    """A provider of policies by endpoint."""

    def at(self, endpoints: Sequence[str], *, run: str = "", protocol: AnyProtocol = "auto") -> Policy:
        """The policy that these servers serve. Raises PolicyFailure ``no-endpoint``.

        ``run``: the run of the servers, if the orchestrator manages them; then its list replaces ``endpoints``.
        """
        ...

    async def score(self, endpoints: Sequence[str], request: ScoreRequest) -> npt.NDArray[np.float32]:
        """Logprobs f32[n] of each token under the policy that these servers serve, 0 for the first. Raises
        PolicyFailure."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges for the worker's heartbeat. Safe to call from any thread."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def part_seed(seed: int | None, part: int) -> int | None:
    """The seed of a part of an interrupted turn, 63 bits; part 0 has the turn's own seed. With a common seed, an engine
    would draw the first tokens of each part with the same random numbers."""
    if seed is None or part == 0:
        return seed
    packed = _TWO_SEEDS.pack(seed & _WORD, part)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"part").digest(), "little") >> 1


def one_version(count: int, version: Version) -> list[VersionRun]:
    """Version runs of a sample of ``count`` tokens from one version."""
    return [VersionRun(count, version.lineage, version.n)]


def append_versions(versions: list[VersionRun], runs: Sequence[VersionRun], start: int) -> None:
    """Append the version runs of a sample that starts at ``start``; equal neighbours are joined."""
    for run in runs:
        if versions and versions[-1].version == run.version:
            versions.pop()
        versions.append(VersionRun(start + run.end, run.lineage, run.n))


def check_sample(sample: Sample, vocab_size: int, max_tokens: int) -> None:
    """Raise a PolicyFailure that names the fault of an invalid sample."""
    count = len(sample.token_ids)
    if count == 0:
        raise PolicyFailure("The policy sampled no tokens.", kind="empty-sample", retryable=True)
    if count > max_tokens:
        raise PolicyFailure(
            f"The policy sampled {count} tokens; the limit is {max_tokens}.",
            hint="The server must respect `max_tokens`; a proxy or a server default may override it.",
            kind="too-many-tokens",
            retryable=False,
        )
    if len(sample.logprobs) != count:
        kind = "logprobs-too-few" if len(sample.logprobs) < count else "logprobs-too-many"
        raise _broken(kind, f"The policy returned {count} token ids but {len(sample.logprobs)} logprobs.")
    if min(sample.token_ids) < 0 or max(sample.token_ids) >= vocab_size:
        _refuse_token(sample.token_ids, vocab_size)
    if not _in_range(sample.logprobs):
        _refuse_logprob(sample.logprobs)
    _check_versions(sample.versions, count)


def _in_range(logprobs: Sequence[float]) -> bool:
    # Each is one pass in C. min and max do not detect a NaN; the sum does.
    try:
        return math.isfinite(math.fsum(logprobs)) and max(logprobs) <= 0.0 and min(logprobs) >= LOWEST_LOGPROB
    except (TypeError, ValueError, OverflowError):
        return False


def _refuse_token(token_ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise _broken(
                "token-out-of-range",
                f"Token id {token} at position {position} is not below the vocabulary size {vocab_size}.",
            )


def _refuse_logprob(logprobs: Sequence[float | None]) -> None:
    for position, value in enumerate(logprobs):
        where = f"at position {position}"
        if value is None:
            raise _broken("logprob-missing", f"The engine returned no logprob {where}.")
        if math.isnan(value):
            raise _broken("logprob-nan", f"The logprob {where} is NaN.")
        if math.isinf(value):
            raise _broken("logprob-infinite", f"The logprob {where} is {value}.")
        if value > 0:
            raise _broken("logprob-positive", f"The logprob {where} is {value}, above 0.")
        if value < LOWEST_LOGPROB:
            raise _broken("logprob-out-of-range", f"The logprob {where} is {value}, below the range of float32.")


def _check_versions(versions: Sequence[VersionRun], count: int) -> None:
    end = 0
    for run in versions:
        if run.end <= end:
            raise _broken("versions-do-not-cover", f"A version run ends at {run.end}, not after {end}.")
        end = run.end
    if end != count:
        raise _broken("versions-do-not-cover", f"The version runs cover {end} of {count} sampled tokens.")


def _broken(kind: str, detail: str) -> PolicyFailure:
    return PolicyFailure(
        detail, hint="The whole sample is refused; no part of it is stored or repaired.", kind=kind, retryable=True
    )
