"""Dispatch: from a request to its route, through auth, to an answer.

* Every error is a problem body; an unexpected one is logged with an id that the caller gets.
* Every answer carries the epoch.
* The table's roles are checked before the body is read.
* A small request to a route that can do without gets no task of its own.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from headrace.errors import HeadraceError, InternalError, MethodNotAllowed, NotFound, StoreError, Unavailable
from headrace.ids import new_id
from headrace.server import logs
from headrace.server.auth import Auth
from headrace.wire.messages import HEADER_WAIT_S, PROBLEM_MEDIA_TYPE
from headrace_orchestrator.api.direct import SMALL_BYTES, Direct, Reply
from headrace_orchestrator.api.http import Answer, Call, headers_of, read_body, send_answer, whole_head
from headrace_orchestrator.api.route import Route
from headrace_orchestrator.api.routes import ROUTES
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.waiters import ClientGone

log = logs.logger(__name__)

RETRY_AFTER_S = 1
"""Seconds after which a client that was told ``unavailable`` may ask again."""

MAX_DIGITS = 18
"""Of a body's length: more are no number that is worth reading."""

CLIENT_LEFT = 499
"""Status under which requests are counted whose client left before its answer."""

UNKNOWN_ROUTE = "unknown"
"""Route label of requests that match nothing: a scanner must not make new time series."""


class Router:
    """Finds the route of a method and path: fixed paths by lookup, others by pattern."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._fixed = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._patterns: list[tuple[re.Pattern[str], Route]] = [
            (compile_path(route.path)[0], route) for route in routes if "{" in route.path
        ]

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """Raises NotFound, or MethodNotAllowed that names the methods which the path does have."""
        route = self._fixed.get((method, path))
        if route is not None:
            return route, {}
        others = [method_ for method_, fixed in self._fixed if fixed == path]
        for pattern, route in self._patterns:
            found = pattern.match(path)
            if found and route.method == method:
                return route, found.groupdict()
            if found:
                others.append(route.method)
        if others:
            allowed = sorted(set(others))
            raise MethodNotAllowed(
                f"{path} does not take {method}.", hint=f"It takes {', '.join(allowed)}.", allowed=allowed
            )
        raise NotFound(f"There is nothing at {path}.", hint="/docs lists all routes.")


class _Arrived(NamedTuple):
    """A request that is taken directly; ``begun`` is when its turn came, in seconds."""

    route: Route
    scope: Scope
    begun: float


class App:
    """The ASGI application. No middleware: worker routes are called thousands of times a second."""

    def __init__(self, service: Service, auth: Auth, metrics: Metrics, max_body_bytes: int, max_wait_s: float) -> None:
        self._service = service
        self._auth = auth
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._max_wait_s = max_wait_s
        self._router = Router(ROUTES)
        self._direct = {(route.method, route.path): route for route in ROUTES if route.direct is not None}
        self._arrived: list[tuple[_Arrived, bytes, Reply]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this service speaks HTTP, not {scope['type']}")
        begun = time.perf_counter()
        method, template, status = scope["method"], UNKNOWN_ROUTE, CLIENT_LEFT
        call: Call | None = None
        try:
            try:
                header = headers_of(scope)
                route, params = self._router.find("GET" if method == "HEAD" else method, scope["path"])
                template = route.path
                self._admit(header, route)
                body = await read_body(receive, header(b"content-length"), self._max_body_bytes)
                call = Call(params, scope["query_string"], body, receive, self._max_wait_s)
                answer = await self._answer(route, call)
            except HeadraceError as error:
                answer = problem(error)
            except ClientGone:
                return  # nobody to answer
            except Exception as error:  # noqa: BLE001 - the last resort: it is logged whole, and the caller is told
                answer = _unexpected(error, method, scope["path"])
            status = answer.status
            await send_answer(scope, send, answer, self._service.epoch)
        finally:
            if call is not None:
                call.close()
            self._metrics.answered(method, template, status, time.perf_counter() - begun)

    def direct(self, scope: Scope) -> Direct | None:
        """What takes the body of a request that needs no task of its own; None for all others, and for those that are
        refused: the way of all requests says why."""
        route = self._direct.get((scope["method"], scope["path"]))
        if route is None:
            return None
        header = headers_of(scope)
        length = header(b"content-length")
        if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > min(SMALL_BYTES, self._max_body_bytes):
            return None
        try:
            self._admit(header, route)
        except HeadraceError:
            return None
        return functools.partial(self._take, _Arrived(route, scope, time.perf_counter()))

    def _take(self, request: _Arrived, body: bytes, reply: Reply) -> None:
        """Those of a turn of the event loop are carried on together: one step after the other for all is faster than
        all steps for one after the other."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._take_arrived)
        self._arrived.append((request, body, reply))

    def _take_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for request, body, reply in arrived:
            route, scope, _ = request
            told = functools.partial(self._tell, request, reply)
            try:
                assert route.direct is not None
                call = Call({}, scope["query_string"], body, _nothing_more, self._max_wait_s)
                route.direct(self._service, call, told)
            except Exception as error:  # noqa: BLE001 - the caller is told, in a step of its own
                asyncio.get_running_loop().call_soon(told, error)

    def _tell(self, request: _Arrived, reply: Reply, given: msgspec.Struct | Exception) -> None:
        route, _, begun = request
        if isinstance(given, HeadraceError):
            answer = problem(given)
        elif isinstance(given, Exception):
            answer = _unexpected(given, route.method, route.path)
        else:
            answer = Answer(msgspec.json.encode(given), status=route.status)
        assert isinstance(answer.body, bytes)
        self._metrics.answered(route.method, route.path, answer.status, time.perf_counter() - begun)
        reply(answer.status, whole_head(answer, answer.body, self._service.epoch), answer.body)

    def _admit(self, header: Callable[[bytes], str], route: Route) -> None:
        """Raises Unauthorized or Forbidden."""
        self._auth.refuse_pages(header)
        self._auth.check(header(b"authorization"), route.roles)

    async def _answer(self, route: Route, call: Call) -> Answer:
        reply = await route.handler(self._service, call)
        answer = reply if isinstance(reply, Answer) else Answer(msgspec.json.encode(reply), status=route.status)
        if call.granted_s is None:
            return answer
        return replace(answer, headers={**answer.headers, HEADER_WAIT_S: f"{call.granted_s:g}"})


async def _nothing_more() -> Message:
    """What comes behind a body that is there whole: nothing, and nobody waits for it."""
    raise AssertionError("a request that was taken directly asks for more")


def problem(error: HeadraceError) -> Answer:
    """The answer for an error."""
    if isinstance(error, StoreError):
        log.error("store refused", detail=error.detail)
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.extra["allowed"])
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="headrace", Basic realm="headrace"'
    return Answer(
        msgspec.json.encode(error.problem()), status=error.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers
    )


def _unexpected(error: Exception, method: str, path: str) -> Answer:
    incident = new_id()
    log.error("unexpected error", exc_info=error, incident=incident, method=method, path=path)
    return problem(
        InternalError(
            f"Something unexpected went wrong ({type(error).__name__}).",
            hint=f"The service's log has the whole story under incident {incident}.",
            incident=incident,
        )
    )
