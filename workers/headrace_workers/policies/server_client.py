"""The client of one policy server.

* A request is sent once; the caller decides about retries.
* Token ids are required, unless the request accepts text.
* Each cause of failure has its own failure kind, which determines whether another try could help.
* Cancelling a call closes its connection and aborts the request by its id, so that the engine stops.
* The server's protocol and models are determined once, by requests that sample nothing.
* An answer that reports the weights of each token is trusted; otherwise the versions that the server confirms before
  and after the call bracket it.
* Redirects are not followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.common.timeouts import timeout
from headrace.errors import PolicyFailure
from headrace.http.client import ClientResponse, HttpClient, IncompleteResponse, NoResponse, Unreachable
from headrace.trajectory import VersionRun
from headrace.wire import policy_server
from headrace.wire.prompt_logprobs import prompt_logprobs_request, read_prompt_logprobs, version_changed_failure
from headrace_workers.policies.base import AnyProtocol, Sample, SampleRequest, ScoreRequest, one_version
from headrace_workers.policies.images import seen_prompt
from headrace_workers.policies.protocols import PROTOCOLS, AnswerChoice, SamplingProtocol, decode_leniently
from headrace_workers.policies.server_errors import context_overflow, refusal
from headrace_workers.policies.version_confirmation import Confirmations, confirmed_name, read_version

CONFIRM_TIMEOUT_S = 10.0
"""Deadline of one request for the weight version, or for the server's properties."""

PROBE_TIMEOUT_S = 5.0
"""Deadline of one health probe. A busy server answers late, a frozen one never."""

SHUTDOWN_S = 1.0
"""Longest wait for pending aborts in ``close``."""

NO_ANSWER = frozenset({"connection-refused", "connection-lost"})
"""Failure kinds without any answer: the same server may be asked again."""

REQUEST_FAULTS = frozenset({"context-overflow", "request-refused", "prompt-out-of-vocabulary"})
"""Failure kinds caused by the request: another server would give the same answer."""

HEALTHY_FAILURES = frozenset(
    {
        "rate-limited",
        "unknown-model",
        "version-changed",
        "adapter-not-loaded",
        "weights-of-another-run",
        "server-ejected",
    }
)
"""Failure kinds for which another try may help, and which do not count as failures of the server."""

MoveReason = Literal["not-responding", "server-ejected"]
"""Failure kinds of requests that move to another server. An ejected server may never answer them."""

MAX_ANSWER_BYTES = 256 << 20
"""Limit on the size of an answer: the logprobs of a million tokens fit. An endless answer would fill the memory within
its deadline."""

_MOVE_REASONS: dict[MoveReason, str] = {
    "not-responding": "does not answer, not even a health probe",
    "server-ejected": "was ejected, and it is unknown when it returns",
}
_ABSENT = frozenset({404, 405})
_encode = msgspec.json.Encoder().encode
_decode_weight_info = msgspec.json.Decoder(policy_server.WeightInfo).decode
_decode_models = msgspec.json.Decoder(policy_server.ModelList).decode


class PolicyServerClient:
    """The client of one server, for all policies that it serves. ``clock`` is monotonic, in seconds."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        """Raises PolicyFailure ``bad-address``."""
        self._connections = _connections(address)
        self.address = address
        self._confirmations = Confirmations(self._weight_name, clock)
        self._answers_carry_versions = False
        self._discovery: asyncio.Task[None] | None = None
        self._best_protocol: SamplingProtocol | None = None
        self._context_lengths: dict[str, int] = {}
        self._open: dict[asyncio.Timeout, Callable[[], bool]] = {}
        self._move_failures: dict[asyncio.Timeout, PolicyFailure] = {}
        self._aborts: set[asyncio.Task[ClientResponse]] = set()

    async def sample(
        self, request: SampleRequest, *, protocol: AnyProtocol, request_id: str, can_move: Callable[[], bool], run: str
    ) -> Sample:
        """Sample one turn, or a part of it. Raises PolicyFailure; ``finish_reason`` may be ``engine.ABORTED``.

        ``can_move`` returns True if another server could take the request. ``run``: the run whose weights are required;
        empty for any.
        """
        if self._best_protocol is None:
            await self._discover_once()
        used = PROTOCOLS[protocol] if protocol != "auto" else self._best_protocol
        assert used is not None
        if request.images and used.name != "generate":
            raise PolicyFailure(
                f"{self.address} does not support images with a prompt of token ids.",
                hint="Serve with vLLM's generate route (--enable-scale-out).",
                kind="images-not-taken",
                retryable=False,
            )
        request = self._fit_to_context(request)
        before = await self._version_before(request)
        try:
            answer = await self._post(used.path, used.body(request), request_id, can_move)
        except BaseException as error:
            if used.name == "generate" and not isinstance(error, PolicyFailure):
                self._abort(request_id)
            raise
        if answer.status != 200:
            raise await self._refused(answer)
        choice = used.read(answer.body)
        prompt = self._check_prompt(choice, request, used)
        if choice.token_ids is None or (used.name == "chat" and prompt is None):
            return self._text_sample(choice, request)
        if choice.logprobs is None:
            raise PolicyFailure(
                f"{self.address} answered without logprobs.",
                hint="The server must return the logprob of each sampled token on request.",
                kind="no-logprobs",
                retryable=False,
            )
        return Sample(
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,  # type: ignore[arg-type]  # the check of the sample refuses None
            finish_reason=choice.finish_reason,
            versions=await self._versions(choice, len(choice.token_ids), before, run),
            prompt=prompt,
            seen=seen_prompt(request.prompt, len(request.images), choice.prompt, choice.images)
            if request.images
            else None,
        )

    async def score(self, request: ScoreRequest, *, request_id: str) -> npt.NDArray[np.float32]:
        """Logprobs f32[n] of the tokens under the version of the server, which must not change meanwhile. Raises
        PolicyFailure."""
        before = await self._confirmations.before()
        body = prompt_logprobs_request(request.model, request.token_ids)
        answer = await self._post(policy_server.COMPLETIONS, body, request_id, lambda: True)
        if answer.status != 200:
            raise await self._refused(answer)
        scores = read_prompt_logprobs(answer.body, request.token_ids)
        after = await self._confirmations.after()
        if after != before:
            raise version_changed_failure(self.address, before, after)
        return scores

    def fail_open_requests(self, kind: MoveReason) -> None:
        """Fail the open requests that could move to another server, with this failure kind."""
        reason = _MOVE_REASONS[kind]
        for scope in [scope for scope, can_move in self._open.items() if can_move()]:
            self._move_failures[scope] = PolicyFailure(f"{self.address} {reason}.", kind=kind, retryable=True)
            scope.reschedule(asyncio.get_running_loop().time())

    def _abort(self, request_id: str) -> None:
        """Abort a request at the engine by its id. Closing the connection already aborts it, unless a proxy hides that
        from the server."""
        body = _encode(policy_server.AbortRequests(request_ids=[policy_server.GENERATE_PREFIX + request_id]))
        task = asyncio.get_running_loop().create_task(
            self._ask("POST", policy_server.ABORT_REQUESTS, PROBE_TIMEOUT_S, body=body)
        )
        self._aborts.add(task)
        task.add_done_callback(self._abort_done)

    def _abort_done(self, task: asyncio.Task[ClientResponse]) -> None:
        self._aborts.discard(task)
        if not task.cancelled():
            task.exception()  # ignored: other requests to the server report its failure

    async def close(self) -> None:
        """Wait for pending aborts, and close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=SHUTDOWN_S)
        for task in self._aborts:
            task.cancel()
        await self._connections.close()

    def close_connections(self) -> None:
        """Close all connections."""
        self._connections.abort()

    async def problem(self) -> str:
        """Probe the server's health; return the problem, or an empty text if it is healthy."""
        try:
            answer = await self._ask("GET", policy_server.HEALTH, PROBE_TIMEOUT_S)
        except PolicyFailure as failure:
            return str(failure)
        # A server without a health route also counts as healthy.
        return "" if answer.status < 500 else str(refusal(f"{self.address}{policy_server.HEALTH}", *answer))

    def forget_properties(self) -> None:
        """Forget the server's protocol and models: another server may have replaced it."""
        self._best_protocol = None
        self._context_lengths = {}
        self._answers_carry_versions = False

    # One answer

    def _fit_to_context(self, request: SampleRequest) -> SampleRequest:
        """Reduce the request's tokens to the room left in the server's context."""
        # An adapter that was loaded later has the context length of its base model.
        context_length = self._context_lengths.get(request.model, min(self._context_lengths.values(), default=None))
        if context_length is None:
            return request
        room = context_length - len(request.prompt)
        if room < 1:
            raise context_overflow(
                f"The prompt of {len(request.prompt)} tokens fills the context of {self.address} ({context_length})."
            )
        return request if request.max_tokens <= room else msgspec.structs.replace(request, max_tokens=room)

    def _check_prompt(
        self, choice: AnswerChoice, request: SampleRequest, protocol: SamplingProtocol
    ) -> list[int] | None:
        """The prompt, if the server rendered it itself. Raises PolicyFailure if it differs from the sent one."""
        if protocol.name == "chat":
            return choice.prompt
        if request.images:
            return None  # the engine's prompt has more tokens; `seen_prompt` compares the prompts
        if choice.prompt is not None and choice.prompt != list(request.prompt):
            raise PolicyFailure(
                f"The engine's prompt of {len(choice.prompt)} tokens differs from the sent one of "
                f"{len(request.prompt)}.",
                kind="prompt-changed",
                retryable=False,
            )
        return None

    def _text_sample(self, choice: AnswerChoice, request: SampleRequest) -> Sample:
        if not (request.accepts_text and choice.text):
            raise PolicyFailure(
                f"{self.address} answered with text but without token ids. Text is never tokenized again.",
                hint="For training the server must return token ids, with `return_token_ids` (vLLM 0.10.2 or later). "
                "Evaluations need none.",
                kind="no-token-ids",
                retryable=False,
            )
        return Sample(token_ids=[], logprobs=[], finish_reason=choice.finish_reason, versions=[], text=choice.text)

    # Versions

    async def _version_before(self, request: SampleRequest) -> str | PolicyFailure:
        last_name = self._confirmations.last_name
        if last_name is not None and self._answers_carry_versions:
            return last_name
        try:
            return await self._confirmations.before()
        except PolicyFailure as failure:
            if request.accepts_text and failure.kind == "request-refused":
                return failure  # a server without versions may still answer with text
            raise

    async def _versions(
        self, choice: AnswerChoice, count: int, before: str | PolicyFailure, run: str
    ) -> list[VersionRun]:
        if choice.spans is None:
            self._answers_carry_versions = False
            if isinstance(before, PolicyFailure):
                raise before
            if not count:
                return []
            names = before, await self._confirmations.after()
            return one_version(count, min(read_version(name, run) for name in names))
        _check_spans(choice.spans)
        versions = [VersionRun(span.end, *read_version(span.version, run)) for span in choice.spans]
        self._answers_carry_versions = True
        if versions:
            self._confirmations.learn(str(choice.spans[-1].version))
        return versions

    async def _weight_name(self) -> str:
        answer = await self._ask("GET", policy_server.WEIGHT_INFO, CONFIRM_TIMEOUT_S)
        if answer.status != 200:
            raise refusal(f"{self.address}{policy_server.WEIGHT_INFO}", *answer)
        try:
            return confirmed_name(_decode_weight_info(answer.body).weight_version)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return confirmed_name(decode_leniently(answer.body, policy_server.WeightInfo, error).weight_version)

    # Properties of the server

    async def _discover_once(self) -> None:
        if self._discovery is None:
            self._discovery = asyncio.get_running_loop().create_task(self._discover())
            self._discovery.add_done_callback(self._discovered)
        await asyncio.shield(self._discovery)

    def _discovered(self, task: asyncio.Task[None]) -> None:
        self._discovery = None
        if not task.cancelled():
            task.exception()  # raised in the waiting callers, if any

    async def _discover(self) -> None:
        for card in (await self._models()).data:
            if card.max_model_len is not None:
                self._context_lengths[card.id] = card.max_model_len
        # An empty request samples nothing. An existing route answers that it is invalid; vLLM answers 403 if disabled.
        if await self._status_of_empty_request(policy_server.GENERATE) in (400, 422):
            self._best_protocol = PROTOCOLS["generate"]
        elif (
            await self._status_of_empty_request(policy_server.COMPLETIONS) in _ABSENT
            and await self._status_of_empty_request(policy_server.CHAT) not in _ABSENT
        ):
            self._best_protocol = PROTOCOLS["chat"]
        else:
            self._best_protocol = PROTOCOLS["completions"]

    async def _status_of_empty_request(self, path: str) -> int:
        try:
            return (await self._ask("POST", path, CONFIRM_TIMEOUT_S, body=b"{}")).status
        except PolicyFailure as failure:
            if failure.kind == "connection-lost":
                return 0  # some servers close the connection instead of refusing an invalid request
            raise

    async def _models(self) -> policy_server.ModelList:
        answer = await self._ask("GET", policy_server.MODELS, CONFIRM_TIMEOUT_S)
        try:
            return _decode_models(answer.body) if answer.status == 200 else policy_server.ModelList()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return policy_server.ModelList()  # not every server lists its models

    async def _refused(self, answer: ClientResponse) -> PolicyFailure:
        failure = refusal(self.address, *answer)
        if failure.kind != "unknown-model":
            return failure
        try:
            names = sorted(card.id for card in (await self._models()).data)
        except PolicyFailure:
            names = []
        if names:
            failure.hint = f"The server has {', '.join(names)}. Set policy.model (or the agent's base) to one of them."
        return failure

    # HTTP

    async def _post(self, path: str, body: bytes, request_id: str, can_move: Callable[[], bool]) -> ClientResponse:
        try:
            async with timeout(None) as scope:
                self._open[scope] = can_move
                try:
                    return await self._connections.request(
                        "POST", path, body, None, {policy_server.REQUEST_ID: request_id}
                    )
                finally:
                    del self._open[scope]
        except TimeoutError as error:
            failure = self._move_failures.get(scope)
            if failure is None:
                raise
            raise failure from error
        except (Unreachable, NoResponse) as error:
            raise self._unreachable(error) from error
        finally:
            self._move_failures.pop(scope, None)

    async def _ask(self, method: str, path: str, timeout_s: float, body: bytes = b"") -> ClientResponse:
        try:
            async with timeout(timeout_s):
                return await self._connections.request(method, path, body, None)
        except TimeoutError as error:
            raise PolicyFailure(
                f"{self.address}{path} did not answer within {timeout_s:g} s.", kind="timeout", retryable=True
            ) from error
        except (Unreachable, NoResponse) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Unreachable | NoResponse) -> PolicyFailure:
        if isinstance(error, IncompleteResponse):
            return PolicyFailure(
                f"The answer of {self.address} is incomplete: {error}.", kind="unreadable-response", retryable=True
            )
        refused = isinstance(error, Unreachable)
        return PolicyFailure(
            f"No answer from {self.address}: {error}.",
            hint="Check that the policy server is running at that address.",
            kind="connection-refused" if refused else "connection-lost",
            retryable=True,
        )


def _connections(address: str) -> HttpClient:
    try:
        return HttpClient(address, {"Content-Type": "application/json"}, MAX_ANSWER_BYTES)
    except ValueError as error:
        raise PolicyFailure(
            f"The address of a policy server is invalid: {error}.",
            hint="Use an address such as http://127.0.0.1:8000.",
            kind="bad-address",
            retryable=False,
        ) from error


def _check_spans(spans: list[policy_server.VersionSpan]) -> None:
    start = 0
    for span in spans:
        if span.start != start:
            raise PolicyFailure(
                f"The answer's weight versions leave a gap: one starts at {span.start}, not {start}.",
                kind="versions-do-not-cover",
                retryable=True,
            )
        start = span.end
