"""Client of the sandbox service; it implements ``Runtime``.

* A request that did not reach the service is sent again for a while; so is one that may have, if doing it twice does no
  harm (reading, renewing, closing).
* An execution that may have begun is not run again, unless its caller says that it is repeatable: the answer is a
  retryable failure.
* A cancelled call closes its connection, and the service kills what ran for it.
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
"""Time for which an unreachable service is tried again: it may be restarting."""

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts; the last one repeats."""

SILENCE_S = 60.0
"""Time to wait for an answer beyond the deadlines of the request."""

UNKNOWN = Isolation(runtime="service", versions={}, active=[])
"""The isolation before the service reported it."""


def client_of(
    address: str, *, token: str = "", owner: str = "", wait_s: float = WAIT_S, repeatable: bool = False
) -> ServiceRuntime:
    """The runtime behind an address: ``unix:///path``, or ``http://host:port`` with a token of the role ``sandbox``.

    ``owner``: on whose account everything runs (a run's id); owners share fairly. ``repeatable``: programs may run
    again if it is unknown whether they ran. Used in one event loop. Raises SandboxFailure ``bad-address`` or
    ``bad-limit``.
    """
    check_range("wait_s", wait_s, 0, LONGEST_S)
    return ServiceRuntime(_Calls(address, token), owner, wait_s, repeatable)


class ServiceRuntime:
    """A ``Runtime``. ``isolation`` is known after ``connect``, or the first result."""

    name = "service"

    def __init__(self, calls: _Calls, owner: str, wait_s: float, repeatable: bool) -> None:
        self._calls = calls
        self._owner = owner
        self._wait_s = wait_s
        self._repeatable = repeatable
        self.isolation = UNKNOWN

    def for_owner(self, owner: str) -> ServiceRuntime:
        """The same service, over the same connections, for another owner. Close only one of the two."""
        return ServiceRuntime(self._calls, owner, self._wait_s, self._repeatable)

    async def connect(self) -> messages.About:
        """The isolation of the service's runtime. Raises SandboxFailure ``service-unreachable``."""
        about = _decoded(await self._calls.get(f"{API}/about"), messages.About)
        self.isolation = about.isolation
        return about

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return await self._run(messages.RunRequest(command=command, limits=limits, **self._turn()), limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        return await self._run(messages.RunRequest(program=program, limits=limits, **self._turn()), limits)

    async def open(self, template: Template, ttl_s: float) -> ServiceSandbox:
        """Open a sandbox, as ``Runtime.open``. If the answer is lost, request another lease; the lost one expires."""
        asked = messages.OpenRequest(template=template, ttl_s=ttl_s, **self._turn())
        body = await self._calls.post(f"{API}/sandboxes", asked, self._wait_s, is_safe=True)
        return ServiceSandbox(self._calls, _decoded(body, messages.Opened))

    async def close(self) -> None:
        """Close the connections. What runs is killed; leases that were not closed run out."""
        await self._calls.close()

    async def _run(self, asked: messages.RunRequest, limits: Limits) -> ExecResult:
        body = await self._calls.post(f"{API}/run", asked, self._wait_s + limits.wall_s, is_safe=self._repeatable)
        result = _decoded(body, ExecResult)
        self.isolation = result.isolation
        return result

    def _turn(self) -> dict[str, Any]:
        return {"owner": self._owner, "wait_s": self._wait_s}


class ServiceSandbox:
    """A ``Sandbox`` that is leased from the service. ``id`` is the lease's; knowing it is enough to use the sandbox.
    ``queue_s``, ``start_s``: the time until one was free, and the time to make it."""

    def __init__(self, calls: _Calls, opened: messages.Opened) -> None:
        self.id = opened.lease
        self.isolation = opened.isolation
        self.queue_s, self.start_s, self.ttl_s = opened.queue_s, opened.start_s, opened.ttl_s
        self._calls = calls
        self._path = f"{API}/sandboxes/{opened.lease}"

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        asked = messages.CommandIn(command=command, limits=limits)
        return _decoded(await self._calls.post(f"{self._path}/run", asked, limits.wall_s), ExecResult)

    async def session(self, kind: SessionKind) -> ServiceSession:
        name = _decoded(await self._calls.post(f"{self._path}/sessions", messages.SessionIn(kind=kind)), str)
        return ServiceSession(self._calls, f"{self._path}/sessions/{name}")

    async def read(self, path: str, most_bytes: int) -> bytes:
        return await self._at("read", messages.At(path=path, most_bytes=most_bytes), is_safe=True)

    async def write(self, path: str, content: bytes) -> None:
        await self._at("write", messages.At(path=path, content=content))

    async def list(self, path: str = "") -> list[FileInfo]:
        return _decoded(await self._at("list", messages.At(path=path), is_safe=True), list[FileInfo])

    async def upload(self, tar: bytes, path: str = "") -> None:
        await self._at("upload", messages.At(path=path, content=tar))

    async def download(self, path: str, most_bytes: int) -> bytes:
        return await self._at("download", messages.At(path=path, most_bytes=most_bytes), is_safe=True)

    async def reset(self) -> None:
        await self._calls.post(f"{self._path}/reset")

    async def renew(self, ttl_s: float) -> float:
        """Extend the lease to this long from now; returns the time that was granted, in seconds. Raises SandboxFailure
        ``lease-over``."""
        body = await self._calls.post(f"{self._path}/renew", messages.Renewal(ttl_s=ttl_s), is_safe=True)
        return _decoded(body, messages.Renewal).ttl_s

    async def close(self) -> None:
        """Give the sandbox back. An expired lease is not an error."""
        try:
            await self._calls.post(f"{self._path}/close", is_safe=True)
        except SandboxFailure as failure:
            if failure.kind != "lease-over":
                raise

    async def _at(self, verb: str, at: messages.At, *, is_safe: bool = False) -> bytes:
        return await self._calls.post(f"{self._path}/{verb}", at, is_safe=is_safe)


class ServiceSession:
    """A ``Session`` in a leased sandbox."""

    def __init__(self, calls: _Calls, path: str) -> None:
        self._calls = calls
        self._path = path

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        asked = messages.CellIn(cell=cell, limits=limits)
        return _decoded(await self._calls.post(f"{self._path}/run", asked, limits.wall_s), ExecResult)

    async def interrupt(self) -> None:
        await self._calls.post(f"{self._path}/interrupt")

    async def close(self) -> None:
        try:
            await self._calls.post(f"{self._path}/close", is_safe=True)
        except SandboxFailure as failure:
            if failure.kind != "lease-over":
                raise


class _Calls:
    """Sends requests, and reads answers."""

    def __init__(self, address: str, token: str) -> None:
        headers = {"Content-Type": MEDIA_TYPE, **({"Authorization": f"Bearer {token}"} if token else {})}
        try:
            self._connections = HttpClient(address, headers)
        except ValueError as error:
            raise SandboxFailure(
                f"A sandbox service cannot be spoken to: {error}.",
                hint="Give an address like unix:///run/headrace-sandbox/service.sock or http://127.0.0.1:8471.",
                kind="bad-address",
                retryable=False,
            ) from error
        self._address = address

    async def get(self, path: str) -> bytes:
        return await self._send("GET", path, b"", SILENCE_S, is_safe=True)

    async def post(
        self, path: str, message: msgspec.Struct | None = None, takes_s: float = 0.0, *, is_safe: bool = False
    ) -> bytes:
        """Send a request. ``takes_s``: how long the answer may take by its own deadlines. ``is_safe``: true if it may
        be sent again when its outcome is unknown. Raises SandboxFailure."""
        body = b"" if message is None else msgspec.msgpack.encode(message)
        return await self._send("POST", path, body, takes_s + SILENCE_S, is_safe=is_safe)

    async def close(self) -> None:
        await self._connections.close()

    async def _send(self, method: str, path: str, body: bytes, timeout_s: float, *, is_safe: bool) -> bytes:
        begun_at = time.monotonic()
        tries = 0
        while True:
            try:
                status, said = await self._connections.request(method, path, body, timeout_s)
            except Unreachable as error:
                failure = self._unreachable(error)
            except NoResponse as error:
                failure = self._lost(error)
                if not is_safe:
                    raise failure from error
            else:
                if status != 200:
                    raise self._failure(status, said)
                return said
            if time.monotonic() - begun_at > RECONNECT_S:
                raise failure
            await asyncio.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _failure(self, status: int, said: bytes) -> SandboxFailure:
        """The failure that the service reported, or one for a response of a proxy in between."""
        error = read_problem(status, said)
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
            f"Something at {self._address} that is not a sandbox service answered with status {status}.",
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

    def _lost(self, error: NoResponse) -> SandboxFailure:
        return SandboxFailure(
            f"The sandbox service did not answer ({error}); it is unknown whether the program ran.",
            hint="It is not run again automatically, except by a client that is `repeatable`.",
            kind="service-lost",
            retryable=True,
        )


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise SandboxFailure(
            f"The sandbox service gave an answer that cannot be read: {error}.", kind="service-error", retryable=False
        ) from error
