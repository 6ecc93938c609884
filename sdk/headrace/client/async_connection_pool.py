"""The async client's sockets: aiohttp's connection pool, with buffers that are reused.

* Proxy settings of the environment are ignored.
* A request is sent once; the operations repeat it.
* Without aiohttp the error names the extra to install.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headrace.client.buffer_pool import BufferPool
from headrace.client.connection_pool import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Origin
from headrace.client.requests import ApiRequest, ApiResponse, TransportFailure, request_headers
from headrace.errors import MissingExtra

if TYPE_CHECKING:
    import aiohttp

MAX_CONNECTIONS = 8
"""Open connections at most: long polls of several runs, beside short calls."""


class AsyncConnectionPool:
    """Sends requests and reads responses; used in one event loop. Raises MissingExtra without aiohttp."""

    def __init__(self, origin: Origin, token: str) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "AsyncClient needs aiohttp, which is not installed.", hint="Run: pip install 'headrace[async]'"
            ) from error
        self._aiohttp = aiohttp
        self._origin = origin
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._buffers = BufferPool()

    async def send(self, request: ApiRequest) -> ApiResponse | TransportFailure:
        """Send once. A network error is returned as a ``TransportFailure``, never raised."""
        session = self._get_session()
        for _ in range(2):  # lets the event loop notice that the server closed an idle connection
            await asyncio.sleep(0)
        read_timeout_s = request.wait_s + (request.read_timeout_s or READ_TIMEOUT_S)
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s)
        try:
            async with session.request(
                request.method,
                self._url(request),
                data=request.body or None,
                headers=request_headers(self._token, request),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                body = await _read_body(response, self._buffers)
        except self._aiohttp.ClientConnectorError as error:
            return TransportFailure(detail=f"cannot connect to {self._origin.url}: {error}", sent=False)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            return TransportFailure(detail=f"{type(error).__name__}: {error}".rstrip(": "), sent=True)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return ApiResponse(status=response.status, headers=headers, body=body)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _url(self, request: ApiRequest) -> Any:
        from yarl import URL

        origin = self._origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        scheme = "https" if origin.secure else "http"
        # The target is quoted already; yarl must not quote it again.
        return URL(f"{scheme}://{host}:{origin.port}{origin.prefix}{request.target}", encoded=True)

    def _get_session(self) -> aiohttp.ClientSession:
        """The session, opened with the first request because it belongs to an event loop."""
        if self._session is None:
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=MAX_CONNECTIONS), trust_env=False
            )
            # Otherwise it repeats some requests itself, and hides that the first may have been carried out. aiohttp
            # has only a private switch.
            self._session._retry_connection = False
        return self._session


async def _read_body(response: aiohttp.ClientResponse, buffers: BufferPool) -> memoryview:
    size = response.content_length
    if size is None:
        return memoryview(await response.read())
    buffer, at = buffers.take(size), 0
    async for chunk in response.content.iter_any():
        buffer[at : at + len(chunk)] = chunk
        at += len(chunk)
    return buffer
