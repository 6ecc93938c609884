"""Calls to policy servers: what the controller decides, carried out. It decides nothing itself.

* A probe never raises: what is wrong is what it found.
* Proxy settings of the environment are not used.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
import msgspec

from headrace.engine import HEALTH, IS_PAUSED, METRICS, WEIGHT_INFO, PauseInfo, WeightInfo
from headrace.errors import PolicyFailure
from headrace_orchestrator.policies.admission import Reading
from headrace_orchestrator.policies.reading import read_load
from headrace_orchestrator.policies.server import Seen

_T = TypeVar("_T")

PROBE_TIMEOUT_S = 5.0
"""An engine answers between two of its steps, which take long where a CPU works through a long prompt."""

CONNECTIONS = 4
"""To one server: a probe, a call that takes long, and what ends one."""

QUOTED = 300
"""Characters of an answer that a message quotes."""


class Control:
    """The calls, over connections of their own."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def probe(self, address: str) -> Seen:
        """How a server is."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._ask("GET", address, HEALTH, missing_ok=True)
                named = await self._read(address, WEIGHT_INFO, WeightInfo)
                paused = await self._read(address, IS_PAUSED, PauseInfo)
        except TimeoutError:
            return Seen(f"it did not answer within {PROBE_TIMEOUT_S:g} s")
        except PolicyFailure as failure:
            return Seen(failure.detail)
        weights = "" if named is None or named.weight_version is None else str(named.weight_version)
        return Seen(weights=weights, paused=paused is not None and paused.is_paused)

    async def read_metrics(self, address: str) -> Reading:
        """How busy a server is, by its metrics."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                body = await self._ask("GET", address, METRICS, missing_ok=True)
            return read_load("" if body is None else body.decode(errors="replace")) or "none"
        except (TimeoutError, PolicyFailure, ValueError):
            return "no answer"

    async def _read(self, address: str, path: str, kind: type[_T]) -> _T | None:
        """An answer; None where the server has no such route."""
        body = await self._ask("GET", address, path, missing_ok=True)
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PolicyFailure(
                f"{path} answers what cannot be read ({error}): {_quote(body)}",
                kind="unreadable-response",
                retryable=True,
            ) from error

    async def _ask(
        self, method: str, address: str, path: str, body: object = None, *, missing_ok: bool = False
    ) -> bytes | None:
        """The body of a good answer; None for a 404, if that may be. Raises PolicyFailure."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._open().request(method, f"{address}{path}", data=data, headers=headers) as answer:
                found, status = await answer.read(), answer.status
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            raise PolicyFailure(
                "nobody listens there" if refused else f"the connection broke ({error or type(error).__name__})",
                kind="connection-refused" if refused else "connection-lost",
                retryable=True,
            ) from error
        if status == 404 and missing_ok:
            return None
        if status >= 300:
            raise PolicyFailure(
                f"{path} answers {status}: {_quote(found)}",
                kind="server-error" if status >= 500 else "request-refused",
                retryable=status >= 500,
            )
        return found

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


def _quote(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTED else text[:QUOTED] + "…"
