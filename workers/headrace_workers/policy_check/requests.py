"""Plain questions to a policy server, as its protocol has them.

* Nothing is mended and nothing tried again: what the server says is what is checked.
* Silence, a broken connection and an answer that cannot be read fail the check that asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import PolicyFailure
from headrace.wire import policy_server
from headrace_workers.policies.protocols import lenient
from headrace_workers.policies.server_errors import quoted
from headrace_workers.policy_check.findings import Failed

T = TypeVar("T")


class Answer(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes

    @property
    def said(self) -> str:
        """The beginning of the body, for a message."""
        return f"{self.status}: {quoted(self.body)}"

    def read(self, kind: type[T]) -> T:
        """The body as a struct. Raises Failed."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            try:
                return lenient(self.body, kind, error)  # it may only hold a NaN, which is for the check to name
            except PolicyFailure as failure:
                raise Failed(failure.detail, _ENGINE) from error


_ENGINE = "The server must speak vLLM's protocol; the page on policy servers has it."


class Tokenized(msgspec.Struct):
    """Answer of ``/tokenize``."""

    tokens: list[int]


class Detokenized(msgspec.Struct):
    """Answer of ``/detokenize``."""

    prompt: str


class Server:
    """A policy server that serves ``model``. Each question has ``timeout_s`` seconds."""

    def __init__(self, session: aiohttp.ClientSession, address: str, model: str, timeout_s: float) -> None:
        self._session = session
        self.address = address
        self.model = model
        self._timeout_s = timeout_s

    async def get(self, path: str) -> Answer:
        """The answer to a GET. Raises Failed."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, **fields: Any) -> Answer:
        """The answer to a POST of these fields, with the model's name. Raises Failed."""
        return await self._ask("POST", path, {"model": self.model, **fields})

    async def sample(self, prompt: Sequence[int] | str, **fields: Any) -> list[policy_server.CompletionChoice]:
        """Sample through the completions route: ids and logprobs are asked for. Raises Failed."""
        answer = await self.post(
            policy_server.COMPLETIONS, **{"prompt": prompt, "logprobs": 0, "return_token_ids": True, **fields}
        )
        if answer.status != 200:
            raise Failed(f"{policy_server.COMPLETIONS} refused the request ({answer.said})", _ENGINE)
        choices = answer.read(policy_server.CompletionResponse).choices
        if not choices:
            raise Failed("the answer holds no choice", _ENGINE)
        return choices

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        try:
            async with (
                timeout(self._timeout_s),
                self._session.request(method, f"{self.address}{path}", json=body) as response,
            ):
                return Answer(response.status, await response.read())
        except TimeoutError as error:
            raise Failed(
                f"{path} did not answer within {self._timeout_s:g} s",
                "Is the server busy, or stuck? --timeout-s gives it more time.",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(
                f"{path}: {type(error).__name__}: {error}", "Is the server running, and is that its address?"
            ) from error
