"""The service's ASGI application: passes requests to the pool, and returns its answers.

* Every error is a problem body; an unexpected one is logged with an id that the caller gets.
* A client's disconnect kills what runs for it.
* The role is checked before the body is read, and a body over the limit is not read whole. No stream or file of
  a result may be larger than that limit either, since it occupies this process's memory.
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
from headrace.server.uvicorn_protocol import DISCONNECT_CALLBACKS
from headrace.wire.messages import PROBLEM_MEDIA_TYPE
from headrace_sandbox.pool.leased_sandbox import Leased, over
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.result import Limits, check_range
from headrace_sandbox.runtimes.base import Session
from headrace_sandbox.service import messages
from headrace_sandbox.service.messages import API, MEDIA_TYPE
from headrace_sandbox.service.metrics import ServiceMetrics

T = TypeVar("T")

log = logs.logger(__name__)

SANDBOX: frozenset[Role] = frozenset({"sandbox"})
READER: frozenset[Role] = frozenset({"sandbox", "viewer"})
OPEN: frozenset[Role] = frozenset()

CLIENT_LEFT = 499
"""Status for counting requests whose client left before the answer."""

TOO_MANY, NOT_NOW, NOT_SO = 429, 503, 422
"""Statuses of failures: too many requests wait; another attempt may succeed; the request can never succeed."""

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Answer(NamedTuple):
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
        self._fixed: dict[tuple[str, str], tuple[frozenset[Role], Callable[[bytes], Awaitable[Answer]]]] = {
            ("POST", f"{API}/run"): (SANDBOX, self._run),
            ("POST", f"{API}/sandboxes"): (SANDBOX, self._open),
            ("GET", f"{API}/about"): (SANDBOX, self._about),
            ("GET", f"{API}/status"): (READER, self._status),
            ("GET", "/healthz"): (OPEN, self._healthz),
            ("GET", "/readyz"): (OPEN, self._readyz),
            ("GET", "/metrics"): (READER, self._metrics_page),
        }
        self._in_sandbox: dict[str, Callable[[Leased, bytes], Awaitable[Answer]]] = {
            "run": self._run_in,
            "sessions": self._session,
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "upload": self._upload,
            "download": self._download,
            "reset": self._reset,
            "renew": self._renew,
            "close": self._close,
        }
        self._in_session: dict[str, Callable[[Session, bytes], Awaitable[Answer]]] = {
            "run": self._cell,
            "interrupt": self._interrupt,
            "close": self._close_session,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this service speaks HTTP, not {scope['type']}")
        begun_at = time.perf_counter()
        route, status = "unknown", CLIENT_LEFT
        watch = _Watch(scope)
        try:
            try:
                headers = dict(scope["headers"])
                route, roles, handler = self._find(scope["method"], scope["path"])
                self._auth.refuse_web_pages(lambda name: headers.get(name, b"").decode("latin-1"))
                self._auth.check(headers.get(b"authorization", b"").decode("latin-1"), roles)
                body = await _read_body(receive, self._max_body_bytes)
                watch.begin()
                answer = await handler(body)
            except asyncio.CancelledError:
                if watch.has_left:
                    return
                answer = problem(_stopped())
            except HeadraceError as error:
                answer = problem(error)
            except Exception as error:  # noqa: BLE001 - the last resort: it is logged whole, and the caller is told
                answer = _unexpected(error, scope["path"])
            status = answer.status
            await _send(send, answer)
        except _Gone:
            pass  # the client is gone
        finally:
            watch.end()
            _soon(self._metrics.answered, route, status, time.perf_counter() - begun_at)

    def _find(self, method: str, path: str) -> tuple[str, frozenset[Role], Callable[[bytes], Awaitable[Answer]]]:
        """The name, the role and the handler of a route."""
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return path, *fixed
        sandboxes = f"{API}/sandboxes/"
        parts = path.removeprefix(sandboxes).split("/") if method == "POST" and path.startswith(sandboxes) else []
        match parts:
            case [lease, verb] if verb in self._in_sandbox:
                do = self._in_sandbox[verb]
                return f"{sandboxes}{{lease}}/{verb}", SANDBOX, lambda body: do(self._pool.leased(lease), body)
            case [lease, "sessions", name, verb] if verb in self._in_session:
                do_in = self._in_session[verb]
                route = f"{sandboxes}{{lease}}/sessions/{{session}}/{verb}"
                return route, SANDBOX, lambda body: do_in(self._session_of(lease, name), body)
        if any(path == known for _, known in self._fixed):
            raise MethodNotAllowed(f"{path} does not take {method}.", allowed=[m for m, p in self._fixed if p == path])
        raise NotFound(f"There is nothing at {path}.", hint="Use the client in headrace_sandbox.client.")

    # Executions -------------------------------------------------------------------------------------------------

    async def _run(self, body: bytes) -> Answer:
        asked = _decode(body, messages.RunRequest)
        self._check_kept(asked.limits)
        if asked.program is not None:
            work = self._pool.run_code(asked.program, asked.limits, owner=asked.owner, wait_s=asked.wait_s)
        elif asked.command is not None:
            work = self._pool.run(asked.command, asked.limits, owner=asked.owner, wait_s=asked.wait_s)
        else:
            raise InvalidRequest("The request has neither a command nor a program.", hint="Give exactly one of them.")
        with self._metrics.failures():
            result = await work
        _soon(self._metrics.ended, result)
        return Answer(msgspec.msgpack.encode(result))

    def _check_kept(self, limits: Limits) -> None:
        check_range("kept_bytes", limits.kept_bytes, 0, self._max_body_bytes)

    async def _open(self, body: bytes) -> Answer:
        asked = _decode(body, messages.OpenRequest)
        with self._metrics.failures():
            leased = await self._pool.lease(asked.template, asked.ttl_s, owner=asked.owner, wait_s=asked.wait_s)
        self._metrics.leased(leased.queue_s, leased.start_s)
        return Answer(
            msgspec.msgpack.encode(
                messages.Opened(
                    lease=leased.id,
                    isolation=leased.isolation,
                    queue_s=leased.queue_s,
                    start_s=leased.start_s,
                    ttl_s=leased.ttl_s,
                )
            )
        )

    # Leased sandboxes -------------------------------------------------------------------------------------------

    async def _run_in(self, leased: Leased, body: bytes) -> Answer:
        asked = _decode(body, messages.CommandIn)
        self._check_kept(asked.limits)
        with self._metrics.failures():
            result = await leased.run(asked.command, asked.limits)
        _soon(self._metrics.ended, result)
        return Answer(msgspec.msgpack.encode(result))

    async def _read(self, leased: Leased, body: bytes) -> Answer:
        at = _decode(body, messages.At)
        content = await leased.read(at.path, min(at.most_bytes, self._max_body_bytes))
        return Answer(content, media_type="application/octet-stream")

    async def _write(self, leased: Leased, body: bytes) -> Answer:
        at = _decode(body, messages.At)
        await leased.write(at.path, at.content)
        return Answer()

    async def _list(self, leased: Leased, body: bytes) -> Answer:
        return Answer(msgspec.msgpack.encode(await leased.list(_decode(body, messages.At).path)))

    async def _upload(self, leased: Leased, body: bytes) -> Answer:
        at = _decode(body, messages.At)
        await leased.upload(at.content, at.path)
        return Answer()

    async def _download(self, leased: Leased, body: bytes) -> Answer:
        at = _decode(body, messages.At)
        content = await leased.download(at.path, min(at.most_bytes, self._max_body_bytes))
        return Answer(content, media_type="application/octet-stream")

    async def _reset(self, leased: Leased, body: bytes) -> Answer:
        await leased.reset()
        return Answer()

    async def _renew(self, leased: Leased, body: bytes) -> Answer:
        granted_s = leased.renew(_decode(body, messages.Renewal).ttl_s)
        return Answer(msgspec.msgpack.encode(messages.Renewal(ttl_s=granted_s)))

    async def _close(self, leased: Leased, body: bytes) -> Answer:
        await leased.close()
        return Answer()

    # Sessions ---------------------------------------------------------------------------------------------------

    async def _session(self, leased: Leased, body: bytes) -> Answer:
        asked = _decode(body, messages.SessionIn)
        with self._metrics.failures():
            session = await leased.session(asked.kind)
        self._forget_sessions()
        name = new_id()
        self._sessions[leased.id, name] = session
        return Answer(msgspec.msgpack.encode(name))

    def _session_of(self, lease: str, name: str) -> Session:
        self._pool.leased(lease)
        found = self._sessions.get((lease, name))
        if found is None:
            raise over()
        return found

    def _forget_sessions(self) -> None:
        """Remove the sessions of ended leases."""
        for key in [key for key in self._sessions if not self._pool.is_leased(key[0])]:
            del self._sessions[key]

    async def _cell(self, session: Session, body: bytes) -> Answer:
        asked = _decode(body, messages.CellIn)
        self._check_kept(asked.limits)
        with self._metrics.failures():
            result = await session.run(asked.cell, asked.limits)
        _soon(self._metrics.ended, result)
        return Answer(msgspec.msgpack.encode(result))

    async def _interrupt(self, session: Session, body: bytes) -> Answer:
        await session.interrupt()
        return Answer()

    async def _close_session(self, session: Session, body: bytes) -> Answer:
        await session.close()
        for key in [key for key, value in self._sessions.items() if value is session]:
            del self._sessions[key]
        return Answer()

    # The service itself -----------------------------------------------------------------------------------------

    async def _about(self, body: bytes) -> Answer:
        runtime = self._pool.runtime
        return Answer(msgspec.msgpack.encode(messages.About(runtime=runtime.name, isolation=runtime.isolation)))

    async def _status(self, body: bytes) -> Answer:
        return Answer(msgspec.json.encode(self._pool.counts()), media_type="application/json")

    async def _healthz(self, body: bytes) -> Answer:
        return Answer(b'{"healthy":true}', media_type="application/json")

    async def _readyz(self, body: bytes) -> Answer:
        status = NOT_NOW if self.draining else 200
        said = b'{"ready":false,"phase":"draining"}' if self.draining else b'{"ready":true}'
        return Answer(said, status=status, media_type="application/json")

    async def _metrics_page(self, body: bytes) -> Answer:
        return Answer(self._metrics.exposition(), media_type=METRICS_MEDIA_TYPE)


class _Gone(Exception):
    """The client left before its request was whole."""


class _Watch:
    """Cancels the task of a request whose client hangs up."""

    def __init__(self, scope: Scope) -> None:
        self._callbacks: list[Callable[[], object]] = scope["extensions"][DISCONNECT_CALLBACKS]
        self._task: asyncio.Task[Any] | None = None
        self.has_left = False

    def begin(self) -> None:
        self._task = asyncio.current_task()
        self._callbacks.append(self._leave)

    def end(self) -> None:
        if self._task is not None:
            self._callbacks.remove(self._leave)
            self._task = None

    def _leave(self) -> None:
        if self._task is not None:
            self.has_left = True
            self._task.cancel()


def _soon(count: Callable[..., None], *what: object) -> None:
    """Count after the answer is sent: it leaves at the end of this turn of the event loop."""
    asyncio.get_running_loop().call_soon(count, *what)


def problem(error: HeadraceError) -> Answer:
    """The HTTP answer for an error."""
    headers: list[tuple[bytes, bytes]] = []
    status = error.status
    if isinstance(error, SandboxFailure):
        status = TOO_MANY if error.kind == "busy" else NOT_NOW if error.retryable else NOT_SO
        if "retry_after_s" in error.extra:
            headers.append((b"retry-after", b"%d" % max(1, round(error.extra["retry_after_s"]))))
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headrace"'))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.extra["allowed"]).encode()))
    body = msgspec.json.encode({**error.problem(), "status": status})
    return Answer(body, status=status, media_type=PROBLEM_MEDIA_TYPE, headers=tuple(headers))


def _stopped() -> SandboxFailure:
    return SandboxFailure(
        "The service was stopped, and killed this while it ran.",
        hint="Ask again when the service is back.",
        kind="draining",
        retryable=True,
    )


def _unexpected(error: Exception, path: str) -> Answer:
    incident = new_id()
    log.exception("unexpected error", incident=incident, path=path)
    return problem(
        InternalError(
            f"Something unexpected went wrong ({type(error).__name__}).",
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
            raise _Gone
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


async def _send(send: Send, answer: Answer) -> None:
    headers = [
        (b"content-type", answer.media_type.encode()),
        (b"content-length", b"%d" % len(answer.body)),
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
