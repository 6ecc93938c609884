"""Calls a Docker daemon, or Podman's socket, at the address in DOCKER_HOST.

* Calls use the Docker SDK, which blocks: they run in a bounded pool of threads, never on the event loop.
* A call is awaited to its end even if its caller was cancelled, so that nothing is made without our knowledge.
* The streams of a program are read on the event loop, from a connection of their own: the SDK's would block, and it may
  lose data that arrives together with the headers.
* A refusal or an absence of the daemon is a failure of ours, with a remedy.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure

try:
    import docker
    import docker.errors
    import docker.utils
    import requests
except ModuleNotFoundError as error:
    raise SandboxFailure(
        "The Docker SDK for Python is not installed.",
        hint="pip install 'headrace[docker]'",
        kind="runtime-missing",
        retryable=False,
    ) from error

T = TypeVar("T")

THREADS = 8
"""Calls at a time; others wait in order. The daemon does little in parallel."""

API_VERSION = "1.41"
"""The API version of Docker 20.10, which later versions and Podman support too."""

CALL_S = 60.0
"""Deadline for an answer of the daemon."""

READ_BYTES = 256 << 10


class Streams(NamedTuple):
    """The connection to a program's standard streams."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def end(self) -> None:
        """Close it now; unread data is dropped."""
        self.writer.transport.abort()


class NotRunning(Exception):
    """The container exists, and has ended."""


class Daemon:
    """The daemon. ``host``: its address as in DOCKER_HOST, which is the default. ``info``: its description of
    itself."""

    def __init__(self, host: str | None = None) -> None:
        """Raises SandboxFailure ``daemon-unreachable`` or ``bad-address``."""
        self._host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._address = _parse_address(self._host)
        self._local = threading.local()
        self._clients: list[docker.APIClient] = []
        self._threads: ThreadPoolExecutor | None = None
        answer = self._call_blocking(lambda client: client.version())
        self.version: str = answer["Version"]
        self.is_podman = any("Podman" in part.get("Name", "") for part in answer.get("Components") or ())
        self.info: dict[str, Any] = self._call_blocking(lambda client: client.info())

    async def call(self, call: Callable[[docker.APIClient], T]) -> T:
        """Call the SDK. Raises SandboxFailure, or NotRunning."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "docker")
        done = asyncio.get_running_loop().run_in_executor(self._threads, self._call_blocking, call)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    async def streams(self, path: str, body: dict[str, Any]) -> Streams:
        """A connection to the streams of an attach, or of the start of an exec. Raises SandboxFailure."""
        try:
            if isinstance(self._address, str):
                streams = Streams(*await asyncio.open_unix_connection(self._address, limit=READ_BYTES))
            else:
                streams = Streams(*await asyncio.open_connection(*self._address, limit=READ_BYTES))
                # A container depends on such a connection, which is silent for long.
                streams.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            content = json.dumps(body).encode()
            streams.writer.write(
                f"POST /v{API_VERSION}{path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
                f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            async with timeout(CALL_S):
                head = await streams.reader.readuntil(b"\r\n\r\n")
            status = head.split(None, 2)[1]
            if status not in (b"101", b"200"):
                message = (await streams.reader.read(1000)).decode(errors="replace")
                raise NotRunning(message) if status in (b"404", b"409") else _refused(message)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            streams.end()
            raise self._unreachable(error) from error
        except BaseException:
            streams.end()
            raise
        return streams

    def close(self) -> None:
        """Close every connection; calls that still run end by themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        while self._clients:
            self._clients.pop().close()
        self._local = threading.local()

    def _client(self) -> docker.APIClient:
        """The SDK's client for this thread: it does not promise that threads can share one."""
        client: docker.APIClient | None = getattr(self._local, "client", None)
        if client is None:
            try:
                client = docker.APIClient(self._host, version=API_VERSION, timeout=CALL_S)
            except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
                raise self._unreachable(error) from error
            # Else it keeps a connection for every path that it ever requested.
            client.headers["Connection"] = "close"
            self._local.client = client
            self._clients.append(client)
        return client

    def _call_blocking(self, call: Callable[[docker.APIClient], T]) -> T:
        client = self._client()
        try:
            self._try_to_reach()
            return call(client)
        except docker.errors.ImageNotFound as error:
            raise _image_missing(error) from error
        except docker.errors.NotFound as error:
            if "No such image" in str(error.explanation):
                raise _image_missing(error) from error
            raise SandboxFailure(
                f"The container is gone: {error.explanation}.",
                hint="It was removed from outside, or the daemon lost it.",
                kind="sandbox-lost",
                retryable=True,
            ) from error
        except docker.errors.APIError as error:
            if error.status_code == 409:
                raise NotRunning(str(error.explanation)) from error
            raise _refused(str(error.explanation or error)) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise self._unreachable(error) from error

    def _try_to_reach(self) -> None:
        """Connect once, because the SDK would leave the socket of a failed try to the garbage collector. Raises
        OSError."""
        if isinstance(self._address, str):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self._address)

    def _unreachable(self, error: BaseException) -> SandboxFailure:
        return SandboxFailure(
            f"The Docker daemon at {self._host} does not answer: {error}.",
            hint="Is it running, and may this user use its socket? DOCKER_HOST names another one.",
            kind="daemon-unreachable",
            retryable=True,
        )


def _parse_address(host: str) -> str | tuple[str, int]:
    """The path of a socket, or host and port."""
    parts = urlsplit(str(docker.utils.parse_host(host)))
    if parts.scheme == "http+unix":
        return parts.path
    if parts.scheme == "http" and parts.hostname and parts.port:
        return parts.hostname, parts.port
    raise SandboxFailure(
        f"Headrace cannot connect to a Docker daemon at {host}.",
        hint="DOCKER_HOST is unix:///path or tcp://host:port; forward another one to a socket.",
        kind="bad-address",
        retryable=False,
    )


def _image_missing(error: docker.errors.APIError) -> SandboxFailure:
    return SandboxFailure(
        f"{error.explanation}.",
        hint="Pull or load it into the daemon first; Headrace pulls nothing.",
        kind="image-missing",
        retryable=False,
    )


def _refused(message: str) -> SandboxFailure:
    return SandboxFailure(f"The Docker daemon refused: {message.strip()}.", kind="daemon-refused", retryable=True)
