"""What a policy is: prompt token ids in, sampled token ids and their logprobs out.

* Every try has an id of its own: episode, attempt, turn and try are part of it.
* Sampled ids and logprobs are taken as the engine gave them, or refused; never mended.
* Each fault of a sample has a kind of its own and names its position.
* Version runs cover the sample whole, in order.
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
from headrace.trajectory import Message, Sampling, Version, VersionRun

Interrupted = Literal["continue", "restart"]
"""``continue``: go on from the tokens that are there, on the new weights. ``restart``: sample the turn again."""

AnyProtocol = Literal["auto", "generate", "completions", "chat"]
"""How a server is asked. ``auto``: the best way that it knows."""

_TWO_SEEDS = struct.Struct("<QQ")
_WORD = 2**64 - 1

LOWEST_LOGPROB = float(np.finfo(np.float32).min)
"""Logprobs are stored as float32; a lower value would become an infinity."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to be sampled.

    ``id`` names the turn (``episode-attempt-turn``); whoever sends a request appends the number of the try.
    ``group`` and ``episode`` say whose turn it is: a router keeps both where their prefix is cached.
    ``prompt`` int[n] token ids, all below ``vocab_size``; ``messages`` and ``tools`` (JSON schemas of functions, in the
    form of OpenAI's) say the same for a server that renders itself.
    ``images``: those that the prompt shows, in order, each with one token in it.
    ``sampling`` carries this turn's own seed; temperature 0 is greedy. ``structured_outputs``: what the answer must
    match, as vLLM has it. ``interrupted``: what becomes of an answer that the engine ended for new weights.
    ``timeout_s`` bounds the whole call, its retries included; what is paused for new weights is not counted.
    ``adapter``: the trained adapter of the run, which samples this turn in the version that the server has; ``model``
    is then its base. ``frozen``: whether ``model`` is a frozen adapter.
    ``text_will_do``: nothing is trained on this turn, so a server that gives no token ids is good enough.
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
    structured_outputs: dict[str, Any] | None = None
    interrupted: Interrupted = "continue"
    text_will_do: bool = False
    adapter: str = ""
    frozen: bool = False


class SeenPrompt(NamedTuple):
    """A prompt with images, as the engine saw it. ``token_ids`` int[n]; ``images``: the range ``[start, end)`` of the
    tokens that stand for each image, in order."""

    token_ids: list[int]
    images: list[tuple[int, int]]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine sampled.

    ``token_ids`` int[n] and ``logprobs`` float[n], n ≥ 1. ``versions`` are runs ``(end, version)`` over these n
    positions. ``continued``: the positions at which sampling went on after an interruption, each part with a seed of
    its own (``part_seed``). ``prompt``: the ids that the engine saw, where it rendered the messages itself.
    ``seen``: a prompt with images, all tokens of each image in it.
    ``text``: all that a server gave that gives no ids; the arrays are empty then.
    ``servers``: where it was sampled, in order, failed tries included. ``waiting_s``: part of the call that was no
    sampling (pauses for new weights, backoff, no server that takes requests); ``paused_s``: the pauses alone.
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
    """Tokens whose logprobs are wanted. ``id`` names the request, as in ``SampleRequest``. ``token_ids`` int[n]."""

    id: str
    model: str
    token_ids: Sequence[int]
    timeout_s: float


class Policy(Protocol):
    """Samples turns."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Raises PolicyFailure; ``extra["servers"]`` are those that were asked, as in ``Sample``.
        Cancelling the call aborts it at the engine."""
        ...


class PolicySource(Protocol):
    """Gives the policy behind endpoints."""

    def at(self, endpoints: Sequence[str], *, run: str = "", protocol: AnyProtocol = "auto") -> Policy:
        """The policy that these servers serve. Raises PolicyFailure ``no-endpoint``.

        ``run``: the run whose servers these are, if the orchestrator keeps them; its list goes before ``endpoints``.
        """
        ...

    async def score(self, endpoints: Sequence[str], request: ScoreRequest) -> npt.NDArray[np.float32]:
        """f32[n]: the logprob of each token under the policy that these servers serve, 0 for the first. Raises
        PolicyFailure."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges for the worker's heartbeat. Safe to call from any thread."""
        ...

    async def close(self) -> None:
        """Close what is open."""
        ...


def part_seed(seed: int | None, part: int) -> int | None:
    """The seed of a part of an interrupted turn, 63 bits; part 0 has the turn's own. With the same seed, an engine
    would draw the first tokens of each part by the same random numbers."""
    if seed is None or part == 0:
        return seed
    packed = _TWO_SEEDS.pack(seed & _WORD, part)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"part").digest(), "little") >> 1


def one_version(count: int, version: Version) -> list[VersionRun]:
    """Version runs of a sample of ``count`` tokens that one version made."""
    return [VersionRun(count, version.lineage, version.n)]


def check_sample(sample: Sample, vocab_size: int, max_tokens: int) -> None:
    """Raise the PolicyFailure that says what is wrong with a sample, if anything is."""
    count = len(sample.token_ids)
    if count == 0:
        raise PolicyFailure("The policy sampled no token.", kind="empty-sample", retryable=True)
    if count > max_tokens:
        raise PolicyFailure(
            f"The policy sampled {count} tokens, and {max_tokens} was the most that it was allowed.",
            hint="The server must respect `max_tokens`; a proxy or a server default may override it.",
            kind="too-many-tokens",
            retryable=False,
        )
    if len(sample.logprobs) != count:
        kind = "logprobs-too-few" if len(sample.logprobs) < count else "logprobs-too-many"
        raise _broken(kind, f"The policy gave {count} token ids but {len(sample.logprobs)} logprobs.")
    if min(sample.token_ids) < 0 or max(sample.token_ids) >= vocab_size:
        _refuse_token(sample.token_ids, vocab_size)
    if not _in_range(sample.logprobs):
        _refuse_logprob(sample.logprobs)
    _check_versions(sample.versions, count)


def _in_range(logprobs: Sequence[float]) -> bool:
    # One pass in C each. A NaN hides from min and max, but not from the sum.
    try:
        return math.isfinite(math.fsum(logprobs)) and max(logprobs) <= 0.0 and min(logprobs) >= LOWEST_LOGPROB
    except (TypeError, ValueError, OverflowError):
        return False


def _refuse_token(token_ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise _broken(
                "token-out-of-range",
                f"Token id {token} at position {position} is not below {vocab_size}.",
            )


def _refuse_logprob(logprobs: Sequence[float | None]) -> None:
    for position, value in enumerate(logprobs):
        where = f"at position {position}"
        if value is None:
            raise _broken("logprob-missing", f"The engine has no logprob {where}.")
        if math.isnan(value):
            raise _broken("logprob-nan", f"The logprob {where} is NaN.")
        if math.isinf(value):
            raise _broken("logprob-infinite", f"The logprob {where} is {value}.")
        if value > 0:
            raise _broken("logprob-positive", f"The logprob {where} is {value}, above 0.")
        if value < LOWEST_LOGPROB:
            raise _broken("logprob-out-of-range", f"The logprob {where} is {value}, below what a float32 can hold.")


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
        detail, hint="The sample is refused whole; nothing of it is stored or mended.", kind=kind, retryable=True
    )
