"""Plain requests to a policy server.

* No answer is repaired and no request is retried: the checks use the server's own answers.
* A timeout, a broken connection or an unreadable answer fails the check that sent the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import PolicyFailure
from headrace.wire import policy_server
from headrace_workers.policies.protocols import decode_leniently
from headrace_workers.policies.server_errors import quote
from headrace_workers.policy_check.findings import CheckFailed

T = TypeVar("T")


class ServerAnswer(NamedTuple):
    """The status and body of an answer."""

    status: int
    body: bytes

    @property
    def summary(self) -> str:
        """Status and beginning of the body, for messages."""
        return f"{self.status}: {quote(self.body)}"

    def read(self, kind: type[T]) -> T:
        """Decode the body as a struct. Raises CheckFailed."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            try:
                return decode_leniently(self.body, kind, error)  # it may contain a NaN, which the check reports
            except PolicyFailure as failure:
                raise CheckFailed(failure.detail, _PROTOCOL) from error


_PROTOCOL = "The server must support vLLM's protocol (see docs/policy.md)."


NEUTRAL: dict[str, Any] = msgspec.to_builtins(policy_server.SamplingParameters(max_tokens=16))
"""The sampling parameters of a request that states no others."""


class TokenizeResponse(msgspec.Struct):
    """Answer of ``/tokenize``."""

    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """Answer of ``/detokenize``."""

    prompt: str


class CheckedServer:
    """The connection to a policy server that serves ``model``. Each request may take ``timeout_s`` seconds."""

    def __init__(self, session: aiohttp.ClientSession, address: str, model: str, timeout_s: float) -> None:
        self._session = session
        self.address = address
        self.model = model
        self._timeout_s = timeout_s

    async def get(self, path: str) -> ServerAnswer:
        """Send a GET. Raises CheckFailed."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, **fields: Any) -> ServerAnswer:
        """Send a POST of these fields with the model's name. Raises CheckFailed."""
        return await self._ask("POST", path, {"model": self.model, **fields})

    async def sample(self, prompt: Sequence[int] | str, **fields: Any) -> list[policy_server.CompletionChoice]:
        """Sample through the completions route with ids and logprobs, from the policy's own distribution by default.
        Raises CheckFailed."""
        answer = await self.post(
            policy_server.COMPLETIONS,
            **{**NEUTRAL, "prompt": prompt, "logprobs": 0, "return_token_ids": True, **fields},
        )
        if answer.status != 200:
            raise CheckFailed(f"{policy_server.COMPLETIONS} refused the request ({answer.summary})", _PROTOCOL)
        choices = answer.read(policy_server.CompletionResponse).choices
        if not choices:
            raise CheckFailed("the answer has no choice", _PROTOCOL)
        return choices

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> ServerAnswer:
        try:
            async with (
                timeout(self._timeout_s),
                self._session.request(method, f"{self.address}{path}", json=body) as response,
            ):
                return ServerAnswer(response.status, await response.read())
        except TimeoutError as error:
            raise CheckFailed(
                f"{path} did not answer within {self._timeout_s:g} s",
                "Check whether the server is busy or stuck; --timeout-s allows more time.",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CheckFailed(
                f"{path}: {type(error).__name__}: {error}", "Check that the server is running at that address."
            ) from error
