"""Client of the sandbox service; it implements ``Runtime``.

* A request that did not reach the service is retried for a while; so is one that may have reached it, if repeating it
  is harmless (reading, renewing, closing).
* An execution that may have begun is run again only if its caller declared it repeatable; otherwise the call ends with
  a retryable failure.
* A cancelled call closes its connection, and the service kills the program that ran for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import msgspec

from headrace.errors import HeadraceError, RequestError, SandboxFailure
from headrace.http.client import HttpClient, NoResponse, Unreachable
from headrace.http.problems import GATEWAY_STATUSES, read_problem
from headrace_sandbox.result import LONGEST_S, ExecResult, Isolation, Limits, check_range
from headrace_sandbox.runtimes.base import FileInfo, PythonProgram, SandboxCommand, SessionKind, Template
from headrace_sandbox.service import messages
from headrace_sandbox.service.messages import API, MEDIA_TYPE

T = TypeVar("T")

WAIT_S = 30.0
"""Default time that a request waits for its turn."""

RECONNECT_S = 10.0
"""Time for which requests to an unreachable service are retried: it may be restarting."""

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts; the last one repeats."""

SILENCE_S = 60.0
"""Time limit for an answer, in addition to the deadlines of the request."""

UNKNOWN_ISOLATION = Isolation(runtime="service", versions={}, active=[])
"""The isolation before the service reported it."""


def client_of(
    address: str, *, token: str = "", owner: str = "", wait_s: float = WAIT_S, repeatable: bool = False
) -> ServiceRuntime:
    """The runtime behind an address: ``unix:///path``, or ``http://host:port`` with a token of the role ``sandbox``.

    ``owner``: the run that everything belongs to; owners share fairly. ``repeatable``: programs may run again if it is
    unknown whether they ran. Used in one event loop. Raises SandboxFailure ``bad-address`` or
    ``bad-limit``.
    """
    check_range("wait_s", wait_s, 0, LONGEST_S)
    return ServiceRuntime(_ServiceConnection(address, token), owner, wait_s, repeatable)


class ServiceRuntime:
    """A ``Runtime``. ``isolation`` is known after ``connect``, or the first result."""

    name = "service"

    def __init__(self, connection: _ServiceConnection, owner: str, wait_s: float, repeatable: bool) -> None:
        self._connection = connection
        self._owner = owner
        self._wait_s = wait_s
        self._repeatable = repeatable
        self.isolation = UNKNOWN_ISOLATION

    def for_owner(self, owner: str) -> ServiceRuntime:
        """The same service, over the same connections, for another owner. Close only one of the two."""
        return ServiceRuntime(self._connection, owner, self._wait_s, self._repeatable)

    async def connect(self) -> messages.ServiceInfo:
        """The isolation of the service's runtime. Raises SandboxFailure ``service-unreachable``."""
        about = _decode(await self._connection.get(f"{API}/about"), messages.ServiceInfo)
        self.isolation = about.isolation
        return about

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return await self._run(messages.RunRequest(command=command, limits=limits, **self._queue_options()), limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        return await self._run(messages.RunRequest(program=program, limits=limits, **self._queue_options()), limits)

    async def open(self, template: Template, ttl_s: float) -> ServiceSandbox:
        """Open a sandbox, as ``Runtime.open``. If the answer is lost, another lease is requested; the lost one
        expires."""
        request = messages.OpenRequest(template=template, ttl_s=ttl_s, **self._queue_options())
        body = await self._connection.post(f"{API}/sandboxes", request, self._wait_s, is_safe=True)
        return ServiceSandbox(self._connection, _decode(body, messages.OpenReply))

    async def close(self) -> None:
        """Close the connections. Running programs are killed; open leases expire."""
        await self._connection.close()

    async def _run(self, request: messages.RunRequest, limits: Limits) -> ExecResult:
        body = await self._connection.post(
            f"{API}/run", request, self._wait_s + limits.whole_s, is_safe=self._repeatable
        )
        result = _decode(body, ExecResult)
        self.isolation = result.isolation
        return result

    def _queue_options(self) -> dict[str, Any]:
        return {"owner": self._owner, "wait_s": self._wait_s}


class ServiceSandbox:
    """A ``Sandbox`` that is leased from the service. ``id`` is the lease's; it is enough to use the sandbox.
    ``queue_s``, ``start_s``: the time until one was free, and the time to make it."""

    def __init__(self, connection: _ServiceConnection, reply: messages.OpenReply) -> None:
        self.id = reply.lease
        self.isolation = reply.isolation
        self.queue_s, self.start_s, self.ttl_s = reply.queue_s, reply.start_s, reply.ttl_s
        self._connection = connection
        self._path = f"{API}/sandboxes/{reply.lease}"

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        request = messages.CommandRequest(command=command, limits=limits)
        return _decode(await self._connection.post(f"{self._path}/run", request, limits.whole_s), ExecResult)

    async def session(self, kind: SessionKind) -> ServiceSession:
        name = _decode(await self._connection.post(f"{self._path}/sessions", messages.SessionRequest(kind=kind)), str)
        return ServiceSession(self._connection, f"{self._path}/sessions/{name}")

    async def read(self, path: str, most_bytes: int) -> bytes:
        return await self._request_file("read", is_safe=True, path=path, most_bytes=most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        await self._request_file("write", path=path, content=content)

    async def list(self, path: str = "") -> list[FileInfo]:
        return _decode(await self._request_file("list", is_safe=True, path=path), list[FileInfo])

    async def upload(self, tar: bytes, path: str = "") -> None:
        await self._request_file("upload", path=path, content=tar)

    async def download(self, path: str, most_bytes: int) -> bytes:
        return await self._request_file("download", is_safe=True, path=path, most_bytes=most_bytes)

    async def reset(self) -> None:
        await self._connection.post(f"{self._path}/reset")

    async def renew(self, ttl_s: float) -> float:
        """Extend the lease to this long from now; returns the granted time in seconds. Raises SandboxFailure
        ``lease-over``."""
        body = await self._connection.post(f"{self._path}/renew", messages.RenewRequest(ttl_s=ttl_s), is_safe=True)
        return _decode(body, messages.RenewRequest).ttl_s

    async def close(self) -> None:
        """Give the sandbox back. An expired lease is not an error."""
        await self._connection.post_close(self._path)

    async def _request_file(self, verb: str, *, is_safe: bool = False, **fields: Any) -> bytes:
        request = messages.FileRequest(**fields)
        return await self._connection.post(f"{self._path}/{verb}", request, is_safe=is_safe)


class ServiceSession:
    """A ``Session`` in a leased sandbox."""

    def __init__(self, connection: _ServiceConnection, path: str) -> None:
        self._connection = connection
        self._path = path

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        request = messages.CellRequest(cell=cell, limits=limits)
        return _decode(await self._connection.post(f"{self._path}/run", request, limits.whole_s), ExecResult)

    async def interrupt(self) -> None:
        await self._connection.post(f"{self._path}/interrupt")

    async def close(self) -> None:
        await self._connection.post_close(self._path)


class _ServiceConnection:
    """Sends requests, and reads answers."""

    def __init__(self, address: str, token: str) -> None:
        headers = {"Content-Type": MEDIA_TYPE, **({"Authorization": f"Bearer {token}"} if token else {})}
        try:
            self._http = HttpClient(address, headers)
        except ValueError as error:
            raise SandboxFailure(
                f"The address of the sandbox service is not usable: {error}.",
                hint="Give an address like unix:///run/headrace-sandbox/service.sock or http://127.0.0.1:8472.",
                kind="bad-address",
                retryable=False,
            ) from error
        self._address = address

    async def get(self, path: str) -> bytes:
        return await self._send("GET", path, b"", SILENCE_S, is_safe=True)

    async def post(
        self, path: str, message: msgspec.Struct | None = None, answer_s: float = 0.0, *, is_safe: bool = False
    ) -> bytes:
        """Send a request. ``answer_s``: the time that the request's own deadlines allow. ``is_safe``: True if it may be
        sent again when its outcome is unknown. Raises SandboxFailure."""
        body = b"" if message is None else msgspec.msgpack.encode(message)
        return await self._send("POST", path, body, answer_s + SILENCE_S, is_safe=is_safe)

    async def post_close(self, path: str) -> None:
        """Close a sandbox or session; if its lease has expired, that has been done."""
        try:
            await self.post(f"{path}/close", is_safe=True)
        except SandboxFailure as failure:
            if failure.kind != "lease-over":
                raise

    async def close(self) -> None:
        await self._http.close()

    async def _send(self, method: str, path: str, body: bytes, timeout_s: float, *, is_safe: bool) -> bytes:
        started_at = time.monotonic()
        tries = 0
        while True:
            try:
                status, content = await self._http.request(method, path, body, timeout_s)
            except Unreachable as error:
                failure = self._unreachable(error)
            except NoResponse as error:
                failure = self._no_answer(error)
                if not is_safe:
                    raise failure from error
            else:
                if status != 200:
                    raise self._failure(status, content)
                return content
            if time.monotonic() - started_at > RECONNECT_S:
                raise failure
            await asyncio.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _failure(self, status: int, body: bytes) -> SandboxFailure:
        """The failure that the service reported, or one for the response of a proxy."""
        error = read_problem(status, body)
        if isinstance(error, SandboxFailure):
            return error
        if isinstance(error, HeadraceError):
            return SandboxFailure(
                f"The sandbox service refused: {error.detail}",
                hint=error.hint,
                kind="service-refused" if isinstance(error, RequestError) else "service-error",
                retryable=not isinstance(error, RequestError),
            )
        return SandboxFailure(
            f"{self._address} answered with status {status}, and is not a sandbox service.",
            kind="service-error",
            retryable=status in GATEWAY_STATUSES,
        )

    def _unreachable(self, error: Unreachable) -> SandboxFailure:
        return SandboxFailure(
            f"The sandbox service at {self._address} cannot be reached: {error}.",
            hint="Start one with: headrace sandbox serve.",
            kind="service-unreachable",
            retryable=True,
        )

    def _no_answer(self, error: NoResponse) -> SandboxFailure:
        return SandboxFailure(
            f"The sandbox service did not answer ({error}); it is unknown whether the program ran.",
            hint="It is not run again automatically, except by a client that is `repeatable`.",
            kind="service-lost",
            retryable=True,
        )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise SandboxFailure(
            f"The sandbox service gave an answer that cannot be read: {error}.", kind="service-error", retryable=False
        ) from error
