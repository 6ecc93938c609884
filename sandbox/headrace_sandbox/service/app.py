"""The service's ASGI application: passes requests to the pool, and returns its replies.

* Every error is a problem body; an unexpected one is logged with an id that the caller gets.
* When a client disconnects, its running program is killed.
* The role is checked before the body is read, and a body over the limit is not read whole. The same limit applies to
  each stream and file of a result, since it occupies this process's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.common.ids import new_id
from headrace.errors import (
    HeadraceError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTooLarge,
    SandboxFailure,
)
from headrace.server import logs
from headrace.server.auth import Auth, Role
from headrace.server.uvicorn_protocol import DISCONNECT_CALLBACKS, TOKEN_ACCEPTED
from headrace.wire.messages import PROBLEM_MEDIA_TYPE
from headrace_sandbox.pool.leased_sandbox import LeasedSandbox, lease_over
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.result import ExecResult, Limits, check_range
from headrace_sandbox.runtimes.base import Session
from headrace_sandbox.service import messages
from headrace_sandbox.service.messages import API, MEDIA_TYPE
from headrace_sandbox.service.metrics import ServiceMetrics

T = TypeVar("T")

log = logs.logger(__name__)

SANDBOX_ROLE: frozenset[Role] = frozenset({"sandbox"})
READER_ROLES: frozenset[Role] = frozenset({"sandbox", "viewer"})
NO_ROLE: frozenset[Role] = frozenset()

OPEN_BODY_BYTES = 16 << 10
"""Most bytes of the body of a request that needs no token."""

CLIENT_DISCONNECTED = 499
"""Status in metrics for requests whose client disconnected before the reply."""

TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE, UNPROCESSABLE = 429, 503, 422
"""Statuses of failures: too many requests wait; another attempt may succeed; the request can never succeed."""

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpReply(NamedTuple):
    """Return value of a handler."""

    body: bytes = b""
    status: int = 200
    media_type: str = MEDIA_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class App:
    """The ASGI application, under a protocol with ``DISCONNECT_CALLBACKS``."""

    def __init__(self, pool: Pool, auth: Auth, metrics: ServiceMetrics, max_body_bytes: int) -> None:
        self._pool = pool
        self._auth = auth
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[tuple[str, str], Session] = {}
        self.draining = False
        self._fixed: dict[tuple[str, str], tuple[frozenset[Role], Callable[[bytes], Awaitable[HttpReply]]]] = {
            ("POST", f"{API}/run"): (SANDBOX_ROLE, self._run),
            ("POST", f"{API}/sandboxes"): (SANDBOX_ROLE, self._open_sandbox),
            ("GET", f"{API}/about"): (SANDBOX_ROLE, self._about),
            ("GET", f"{API}/status"): (READER_ROLES, self._status),
            ("GET", "/healthz"): (NO_ROLE, self._healthz),
            ("GET", "/readyz"): (NO_ROLE, self._readyz),
            ("GET", "/metrics"): (READER_ROLES, self._metrics_page),
        }
        self._in_sandbox: dict[str, Callable[[LeasedSandbox, bytes], Awaitable[HttpReply]]] = {
            "run": self._run_in,
            "sessions": self._open_session,
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "upload": self._upload,
            "download": self._download,
            "reset": self._reset,
            "renew": self._renew,
            "close": self._close,
        }
        self._in_session: dict[str, Callable[[Session, bytes], Awaitable[HttpReply]]] = {
            "run": self._run_cell,
            "interrupt": self._interrupt,
            "close": self._close_session,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this service supports HTTP, not {scope['type']}")
        started_at = time.perf_counter()
        route, status = "unknown", CLIENT_DISCONNECTED
        watch = _DisconnectWatch(scope)
        try:
            try:
                headers = dict(scope["headers"])
                route, roles, handler = self._find(scope["method"], scope["path"])
                self._auth.refuse_web_pages(lambda name: headers.get(name, b"").decode("latin-1"))
                self._auth.check(headers.get(b"authorization", b"").decode("latin-1"), roles)
                if roles:
                    scope["extensions"][TOKEN_ACCEPTED]()
                body = await _read_body(receive, self._max_body_bytes if roles else OPEN_BODY_BYTES)
                watch.begin()
                reply = await handler(body)
            except asyncio.CancelledError:
                if watch.is_disconnected:
                    return
                reply = problem(_stopped_failure())
            except HeadraceError as error:
                reply = problem(error)
            except Exception as error:  # noqa: BLE001 - unexpected errors are logged whole, and reported to the caller
                reply = _unexpected_error(error, scope["path"])
            status = reply.status
            await _send(send, reply)
        except _ClientDisconnected:
            pass  # a reply is not possible
        finally:
            watch.end()
            _count_later(self._metrics.answered, route, status, time.perf_counter() - started_at)

    def _find(self, method: str, path: str) -> tuple[str, frozenset[Role], Callable[[bytes], Awaitable[HttpReply]]]:
        """The name, the role and the handler of a route."""
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return path, *fixed
        sandboxes = f"{API}/sandboxes/"
        parts = path.removeprefix(sandboxes).split("/") if method == "POST" and path.startswith(sandboxes) else []
        match parts:
            case [lease, verb] if verb in self._in_sandbox:
                handle = self._in_sandbox[verb]
                return f"{sandboxes}{{lease}}/{verb}", SANDBOX_ROLE, lambda body: handle(self._pool.leased(lease), body)
            case [lease, "sessions", name, verb] if verb in self._in_session:
                handle_in = self._in_session[verb]
                route = f"{sandboxes}{{lease}}/sessions/{{session}}/{verb}"
                return route, SANDBOX_ROLE, lambda body: handle_in(self._session_of(lease, name), body)
        if any(path == known for _, known in self._fixed):
            raise MethodNotAllowed(f"{path} does not take {method}.", allowed=[m for m, p in self._fixed if p == path])
        raise NotFound(f"The path {path} does not exist.", hint="Use the client in headrace_sandbox.client.")

    # Executions -------------------------------------------------------------------------------------------------

    async def _run(self, body: bytes) -> HttpReply:
        request = _decode(body, messages.RunRequest)
        self._check_kept_bytes(request.limits)
        if request.program is not None:
            work = self._pool.run_code(request.program, request.limits, owner=request.owner, wait_s=request.wait_s)
        elif request.command is not None:
            work = self._pool.run(request.command, request.limits, owner=request.owner, wait_s=request.wait_s)
        else:
            raise InvalidRequest("The request has neither a command nor a program.", hint="Give exactly one of them.")
        return await self._reply_with_result(work)

    async def _reply_with_result(self, work: Awaitable[ExecResult]) -> HttpReply:
        with self._metrics.failures():
            result = await work
        _count_later(self._metrics.ended, result)
        return HttpReply(msgspec.msgpack.encode(result))

    def _check_kept_bytes(self, limits: Limits) -> None:
        check_range("kept_bytes", limits.kept_bytes, 0, self._max_body_bytes)

    async def _open_sandbox(self, body: bytes) -> HttpReply:
        request = _decode(body, messages.OpenRequest)
        with self._metrics.failures():
            leased = await self._pool.lease(request.template, request.ttl_s, owner=request.owner, wait_s=request.wait_s)
        self._metrics.leased(leased.queue_s, leased.start_s)
        return HttpReply(
            msgspec.msgpack.encode(
                messages.OpenReply(
                    lease=leased.id,
                    isolation=leased.isolation,
                    queue_s=leased.queue_s,
                    start_s=leased.start_s,
                    ttl_s=leased.ttl_s,
                )
            )
        )

    # Leased sandboxes -------------------------------------------------------------------------------------------

    async def _run_in(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.CommandRequest)
        self._check_kept_bytes(request.limits)
        return await self._reply_with_result(leased.run(request.command, request.limits))

    async def _read(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.FileRequest)
        content = await leased.read(request.path, min(request.most_bytes, self._max_body_bytes))
        return HttpReply(content, media_type="application/octet-stream")

    async def _write(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.FileRequest)
        await leased.write(request.path, request.content)
        return HttpReply()

    async def _list(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        return HttpReply(msgspec.msgpack.encode(await leased.list(_decode(body, messages.FileRequest).path)))

    async def _upload(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.FileRequest)
        await leased.upload(request.content, request.path)
        return HttpReply()

    async def _download(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.FileRequest)
        content = await leased.download(request.path, min(request.most_bytes, self._max_body_bytes))
        return HttpReply(content, media_type="application/octet-stream")

    async def _reset(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        await leased.reset()
        return HttpReply()

    async def _renew(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        granted_s = leased.renew(_decode(body, messages.RenewRequest).ttl_s)
        return HttpReply(msgspec.msgpack.encode(messages.RenewRequest(ttl_s=granted_s)))

    async def _close(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        await leased.close()
        return HttpReply()

    # Sessions ---------------------------------------------------------------------------------------------------

    async def _open_session(self, leased: LeasedSandbox, body: bytes) -> HttpReply:
        request = _decode(body, messages.SessionRequest)
        with self._metrics.failures():
            session = await leased.session(request.kind)
        self._forget_sessions()
        name = new_id()
        self._sessions[leased.id, name] = session
        return HttpReply(msgspec.msgpack.encode(name))

    def _session_of(self, lease: str, name: str) -> Session:
        self._pool.leased(lease)
        session = self._sessions.get((lease, name))
        if session is None:
            raise lease_over()
        return session

    def _forget_sessions(self) -> None:
        """Remove the sessions of ended leases."""
        for key in [key for key in self._sessions if not self._pool.is_leased(key[0])]:
            del self._sessions[key]

    async def _run_cell(self, session: Session, body: bytes) -> HttpReply:
        request = _decode(body, messages.CellRequest)
        self._check_kept_bytes(request.limits)
        return await self._reply_with_result(session.run(request.cell, request.limits))

    async def _interrupt(self, session: Session, body: bytes) -> HttpReply:
        await session.interrupt()
        return HttpReply()

    async def _close_session(self, session: Session, body: bytes) -> HttpReply:
        await session.close()
        for key in [key for key, value in self._sessions.items() if value is session]:
            del self._sessions[key]
        return HttpReply()

    # The service itself -----------------------------------------------------------------------------------------

    async def _about(self, body: bytes) -> HttpReply:
        runtime = self._pool.runtime
        return HttpReply(
            msgspec.msgpack.encode(messages.ServiceInfo(runtime=runtime.name, isolation=runtime.isolation))
        )

    async def _status(self, body: bytes) -> HttpReply:
        return HttpReply(msgspec.json.encode(self._pool.counts()), media_type="application/json")

    async def _healthz(self, body: bytes) -> HttpReply:
        return HttpReply(b'{"healthy":true}', media_type="application/json")

    async def _readyz(self, body: bytes) -> HttpReply:
        status = SERVICE_UNAVAILABLE if self.draining else 200
        content = b'{"ready":false,"phase":"draining"}' if self.draining else b'{"ready":true}'
        return HttpReply(content, status=status, media_type="application/json")

    async def _metrics_page(self, body: bytes) -> HttpReply:
        return HttpReply(self._metrics.exposition(), media_type=METRICS_MEDIA_TYPE)


class _ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class _DisconnectWatch:
    """Cancels the task of a request whose client disconnects."""

    def __init__(self, scope: Scope) -> None:
        self._callbacks: list[Callable[[], object]] = scope["extensions"][DISCONNECT_CALLBACKS]
        self._task: asyncio.Task[Any] | None = None
        self.is_disconnected = False

    def begin(self) -> None:
        self._task = asyncio.current_task()
        self._callbacks.append(self._cancel)

    def end(self) -> None:
        if self._task is not None:
            self._callbacks.remove(self._cancel)
            self._task = None

    def _cancel(self) -> None:
        if self._task is not None:
            self.is_disconnected = True
            self._task.cancel()


def _count_later(count: Callable[..., None], *arguments: object) -> None:
    """Count after the reply was sent, which happens at the end of this turn of the event loop."""
    asyncio.get_running_loop().call_soon(count, *arguments)


def problem(error: HeadraceError) -> HttpReply:
    """The HTTP reply for an error."""
    headers: list[tuple[bytes, bytes]] = []
    status = error.status
    if isinstance(error, SandboxFailure):
        status = SERVICE_UNAVAILABLE if error.retryable else UNPROCESSABLE
        if error.kind == "busy":
            status = TOO_MANY_REQUESTS
        if "retry_after_s" in error.extra:
            headers.append((b"retry-after", b"%d" % max(1, round(error.extra["retry_after_s"]))))
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headrace"'))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.extra["allowed"]).encode()))
    body = msgspec.json.encode({**error.problem(), "status": status})
    return HttpReply(body, status=status, media_type=PROBLEM_MEDIA_TYPE, headers=tuple(headers))


def _stopped_failure() -> SandboxFailure:
    return SandboxFailure(
        "The service was stopped while this ran, and killed it.",
        hint="Try again when the service is back.",
        kind="draining",
        retryable=True,
    )


def _unexpected_error(error: Exception, path: str) -> HttpReply:
    incident = new_id()
    log.exception("unexpected error", incident=incident, path=path)
    return problem(
        InternalError(
            f"An unexpected error occurred ({type(error).__name__}).",
            hint=f"See the service's log for incident {incident}.",
            incident=incident,
        )
    )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"The body is not a valid {kind.__name__}: {error}.", hint="Use the client of this version."
        ) from error


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise RequestTooLarge(
                f"The body is larger than {limit} bytes, the most that this service reads.",
                hint="Send less at a time, or start the service with a larger --max-body-mib.",
                limit_bytes=limit,
            )
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send(send: Send, reply: HttpReply) -> None:
    headers = [
        (b"content-type", reply.media_type.encode()),
        (b"content-length", b"%d" % len(reply.body)),
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
