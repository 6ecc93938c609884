"""The HTTP client for vLLM's ``/v1/completions``, with token ids in and out.

* Token ids are asked for and needed: text without ids is refused as ``no-token-ids``.
* Each way a request can fail has a kind of its own, and says whether another try could help.
* Only a connection error is retried inside a turn, a bounded number of times, each try under its own id.
* Cancelling a call closes its connection, so that the engine stops.
* Proxy settings are ignored, and the pool has one connection for each slot.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from headrace.errors import PolicyFailure
from headrace.trajectory import Version, VersionRun
from headrace_workers.policies.base import Policy, Sample, SampleRequest, one_version
from headrace_workers.policies.confirmations import Confirmations, read_version

MAX_TRIES = 3
"""Tries of one turn, the first included, when the connection fails. More would hide a dead server."""

BACKOFF_S = 0.1
"""Pause before the second try; it doubles. A restarted load balancer is back within it."""

QUOTE_CHARACTERS = 300
"""How much of an error body a failure quotes."""

KEEPALIVE_S = 60.0
"""How long an idle connection is kept: longer than an environment's usual turn."""

CONFIRM_TIMEOUT_S = 10.0
"""Deadline of one question for the weight version."""


class _VersionSpan(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[_VersionSpan] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


class _WeightInfo(msgspec.Struct):
    weight_version: Any = None


class _Answer(NamedTuple):
    status: int
    body: bytes


_encode = msgspec.json.Encoder().encode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_weight_info = msgspec.json.Decoder(_WeightInfo).decode


class CompletionsPolicies:
    """Clients of all endpoints that a worker talks to; they share one connection pool.

    ``slots`` is the number of episodes that may run at once, so the number of requests that may be open.
    ``default_endpoint`` serves runs that name none.
    """

    def __init__(self, *, slots: int, default_endpoint: str, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._default_endpoint = default_endpoint
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._policies: dict[str, CompletionsPolicy] = {}

    def at(self, endpoints: Sequence[str]) -> Policy:
        address = (endpoints[0] if endpoints else self._default_endpoint).rstrip("/")
        if not address:
            raise PolicyFailure(
                "Nothing says where the policy is served.",
                hint="Set policy.endpoints in the run spec, or start the worker with --policy-endpoint.",
                kind="no-endpoint",
                retryable=False,
            )
        policy = self._policies.get(address)
        if policy is None:
            policy = self._policies[address] = CompletionsPolicy(self._open(), address, self._clock)
        return policy

    async def close(self) -> None:
        """Close every connection; open requests end, and their engines stop."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # One connection for each slot and one for the version questions of each endpoint: nothing ever queues here.
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=self._slots + 1, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


class CompletionsPolicy:
    """The policy behind one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str, clock: Callable[[], float]) -> None:
        self._session = session
        self.endpoint = endpoint
        self._clock = clock
        self._confirmations = Confirmations(self._weight_version, clock)
        self._answers_carry_versions = False

    async def sample(self, request: SampleRequest) -> Sample:
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._sample(request)
        except TimeoutError as error:
            raise PolicyFailure(
                f"{self.endpoint} did not answer within {request.timeout_s:g} s.", kind="timeout", retryable=True
            ) from error

    async def _sample(self, request: SampleRequest) -> Sample:
        known = self._confirmations.known
        before = known if known is not None and self._answers_carry_versions else await self._confirmations.before()
        answer, waiting_s = await self._complete(request)
        choice = self._read(answer, request)
        token_ids, logprobs = self._tokens(choice)
        if choice.weight_versions is not None:
            versions = [_run(span) for span in choice.weight_versions]
            self._check_spans(choice.weight_versions)
            self._answers_carry_versions = True
            if versions:
                self._confirmations.learn(versions[-1].version)
        else:
            self._answers_carry_versions = False
            versions = one_version(len(token_ids), min(before, await self._confirmations.after()))
        return Sample(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=choice.finish_reason or "",
            versions=versions,
            waiting_s=waiting_s,
        )

    async def _complete(self, request: SampleRequest) -> tuple[_Answer, float]:
        body = _encode(_request_body(request))
        waiting_s = 0.0
        for number in range(1, MAX_TRIES + 1):
            headers = {"Content-Type": "application/json", "X-Request-Id": f"{request.id}-{number}"}
            try:
                async with self._session.post(
                    f"{self.endpoint}/v1/completions", data=body, headers=headers
                ) as response:
                    return _Answer(response.status, await response.read()), waiting_s
            except aiohttp.ClientConnectionError as error:
                if number == MAX_TRIES:
                    raise self._unreachable(error, number) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._unreachable(error, number) from error
            pause_s = BACKOFF_S * 2 ** (number - 1)
            await asyncio.sleep(pause_s)
            waiting_s += pause_s
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: Exception, tries: int) -> PolicyFailure:
        refused = isinstance(error, aiohttp.ClientConnectorError)
        return PolicyFailure(
            f"No answer from {self.endpoint} after {tries} tries: {type(error).__name__}: {error}.",
            hint="Is the policy server running at that address?",
            kind="connection-refused" if refused else "connection-lost",
            retryable=True,
        )

    def _read(self, answer: _Answer, request: SampleRequest) -> _Choice:
        if answer.status != 200:
            raise _refusal(self.endpoint, answer)
        try:
            choices = _decode_completion(answer.body).choices
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            choices = _lenient(answer.body, error)
        if len(choices) != 1:
            raise PolicyFailure(
                f"The answer holds {len(choices)} choices, not one.", kind="unreadable-response", retryable=True
            )
        choice = choices[0]
        if choice.finish_reason == "abort":
            raise PolicyFailure("The engine aborted the request.", kind="aborted", retryable=True)
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(request.prompt):
            raise PolicyFailure(
                f"The engine saw a prompt of {len(choice.prompt_token_ids)} tokens that is not the one of "
                f"{len(request.prompt)} that was sent.",
                kind="prompt-changed",
                retryable=False,
            )
        return choice

    def _tokens(self, choice: _Choice) -> tuple[list[int], list[Any]]:
        if choice.token_ids is None:
            raise PolicyFailure(
                f"{self.endpoint} answered with text but without token ids. Text is never turned back into tokens.",
                hint="The server must return token ids: it needs to know `return_token_ids` (vLLM 0.10.2 or later).",
                kind="no-token-ids",
                retryable=False,
            )
        if choice.logprobs is None or choice.logprobs.token_logprobs is None:
            raise PolicyFailure(
                f"{self.endpoint} answered without logprobs.",
                hint="The server must return the logprob of each sampled token for `logprobs: 0`.",
                kind="no-logprobs",
                retryable=False,
            )
        return choice.token_ids, choice.logprobs.token_logprobs

    def _check_spans(self, spans: list[_VersionSpan]) -> None:
        start = 0
        for span in spans:
            if span.start != start:
                raise PolicyFailure(
                    f"The answer's weight versions leave a gap: one starts at {span.start}, not {start}.",
                    kind="versions-do-not-cover",
                    retryable=True,
                )
            start = span.end

    async def _weight_version(self) -> Version:
        try:
            question = self._session.get(f"{self.endpoint}/weight_info")
            async with asyncio.timeout(CONFIRM_TIMEOUT_S), question as response:
                answer = _Answer(response.status, await response.read())
        except TimeoutError as error:
            raise PolicyFailure(
                f"{self.endpoint} did not say its weight version within {CONFIRM_TIMEOUT_S:g} s.",
                kind="timeout",
                retryable=True,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error, 1) from error
        if answer.status != 200:
            raise _refusal(f"{self.endpoint}/weight_info", answer)
        try:
            return read_version(_decode_weight_info(answer.body).weight_version)
        except msgspec.DecodeError as error:
            raise _unreadable(answer.body, error) from error


def _request_body(request: SampleRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _run(span: _VersionSpan) -> VersionRun:
    version = read_version(span.version)
    return VersionRun(span.end, version.lineage, version.n)


def _refusal(who: str, answer: _Answer) -> PolicyFailure:
    """The failure that an HTTP status stands for."""
    quoted = _quote(answer.body)
    if answer.status == 429:
        return PolicyFailure(f"{who} is over its rate limit (429): {quoted}", kind="rate-limited", retryable=True)
    if answer.status >= 500:
        return PolicyFailure(f"{who} failed ({answer.status}): {quoted}", kind="server-error", retryable=True)
    return PolicyFailure(
        f"{who} refused the request ({answer.status}): {quoted}",
        hint="Check the run's policy.model and limits against what the server offers.",
        kind="request-refused",
        retryable=False,
    )


def _lenient(body: bytes, first_error: Exception) -> list[_Choice]:
    """Read an answer that strict JSON refuses for NaN or Infinity, so that the check can name the position."""
    try:
        return msgspec.convert(json.loads(body), _Completion).choices
    except (ValueError, msgspec.ValidationError):
        raise _unreadable(body, first_error) from first_error


def _unreadable(body: bytes, error: Exception) -> PolicyFailure:
    return PolicyFailure(
        f"The answer cannot be read ({error}): {_quote(body)}", kind="unreadable-response", retryable=True
    )


def _quote(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTE_CHARACTERS else text[:QUOTE_CHARACTERS] + "…"
