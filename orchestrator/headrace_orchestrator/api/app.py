"""The ASGI application: from a request to its route, through auth, to a response.

* Every error becomes a problem body; an unexpected one is logged with an id that the client gets.
* Every response carries the epoch.
* The roles in the route table are checked before the body is read.
* A browser that asks for a page without a token gets the page to sign in.
* Before a token was accepted, little of a body is read.
* A small request to a route with a direct handler needs no task of its own.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from headrace.common.ids import new_id
from headrace.errors import (
    HeadraceError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    StoreError,
    Unauthorized,
    Unavailable,
)
from headrace.server import logs
from headrace.server.auth import Auth
from headrace.server.uvicorn_protocol import SMALL_BYTES, TOKEN_ACCEPTED, BodyHandler, Respond
from headrace.wire.messages import HEADER_WAIT_S, PROBLEM_MEDIA_TYPE
from headrace_orchestrator.api import pages
from headrace_orchestrator.api.browser_sessions import Browser, BrowserSessions
from headrace_orchestrator.api.http import (
    HttpRequest,
    HttpResponse,
    headers_of,
    read_body,
    response_head,
    send_response,
)
from headrace_orchestrator.api.route import Route
from headrace_orchestrator.api.routes import ROUTES
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.waiters import ClientDisconnected

log = logs.logger(__name__)

RETRY_AFTER_S = 1
"""Value of ``Retry-After`` with the error ``unavailable``."""

OPEN_BODY_BYTES = 16 << 10
"""Most bytes of the body of a request that needs no token, or whose body is ignored."""

MAX_DIGITS = 18
"""Most digits of a ``Content-Length``; a longer one is not parsed."""

CLIENT_CLOSED_REQUEST = 499
"""Status in the metrics of requests whose client disconnected before the response, as nginx has it."""

UNKNOWN_ROUTE = "unknown"
"""Route label in the metrics of requests that match no route: a scanner must not add time series."""


class Router:
    """Finds the route of a method and a path: fixed paths by lookup, others by pattern."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._fixed = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._patterns: list[tuple[re.Pattern[str], Route]] = [
            (compile_path(route.path)[0], route) for route in routes if "{" in route.path
        ]

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route and the parameters of its path. Raises NotFound, or MethodNotAllowed with the allowed methods."""
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
        raise NotFound(f"No route matches {path}.", hint="/docs lists all routes.")


class _RoutedRequest(NamedTuple):
    """A request to a direct handler. ``started_at``: the time when its headers were read, in seconds."""

    route: Route
    scope: Scope
    started_at: float


class OrchestratorApp:
    """The application. It has no middleware: worker routes are called thousands of times a second."""

    def __init__(self, service: Service, auth: Auth, metrics: Metrics, max_body_bytes: int, max_wait_s: float) -> None:
        self._service = service
        self._auth = auth
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._max_wait_s = max_wait_s
        self._sessions = BrowserSessions(time.monotonic)
        self._router = Router(ROUTES)
        self._direct = {(route.method, route.path): route for route in ROUTES if route.direct is not None}
        self._pending: list[tuple[_RoutedRequest, bytes, Respond]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"unsupported scope {scope['type']!r}; this service speaks HTTP only")
        started_at = time.perf_counter()
        method, template, status = scope["method"], UNKNOWN_ROUTE, CLIENT_CLOSED_REQUEST
        request: HttpRequest | None = None
        try:
            try:
                header = headers_of(scope)
                route, params = self._router.find("GET" if method == "HEAD" else method, scope["path"])
                template = route.path
                self._authorize(header, route, scope)
                body = await read_body(receive, header(b"content-length"), self._body_limit(route))
                browser = Browser(self._auth, self._sessions, header)
                request = HttpRequest(params, scope["query_string"], body, receive, self._max_wait_s, browser)
                response = await self._response(route, request)
            except Unauthorized as error:
                asks_for_page = method == "GET" and pages.is_page(scope["path"], header)
                response = pages.sign_in_page(scope["path"], error) if asks_for_page else problem_response(error)
            except HeadraceError as error:
                response = problem_response(error)
            except ClientDisconnected:
                return  # the connection is closed
            except Exception as error:  # noqa: BLE001 - the last resort: it is logged whole, and the client gets an id
                response = _internal_error(error, method, scope["path"])
            status = response.status
            await send_response(send, response, self._service.epoch)
        finally:
            if request is not None:
                request.close()
            self._metrics.count_request(method, template, status, time.perf_counter() - started_at)

    def direct(self, scope: Scope) -> BodyHandler | None:
        """The function that takes the body of a request to a direct handler. None for all other requests, and for those
        that are refused: these are answered by ``__call__``."""
        route = self._direct.get((scope["method"], scope["path"]))
        if route is None:
            return None
        header = headers_of(scope)
        length = header(b"content-length")
        if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > min(SMALL_BYTES, self._max_body_bytes):
            return None
        try:
            self._authorize(header, route, scope)
        except HeadraceError:
            return None
        return functools.partial(self._enqueue, _RoutedRequest(route, scope, time.perf_counter()))

    def _enqueue(self, request: _RoutedRequest, body: bytes, respond: Respond) -> None:
        """Queue a request. Those of one turn of the event loop are handled together: one step after the other for all
        of them is faster than all steps for one request after the other."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._handle_pending)
        self._pending.append((request, body, respond))

    def _handle_pending(self) -> None:
        pending, self._pending = self._pending, []
        for request, body, respond in pending:
            route, scope, _ = request
            on_stored = functools.partial(self._respond, request, respond)
            try:
                assert route.direct is not None
                http_request = HttpRequest({}, scope["query_string"], body, _no_more_messages, self._max_wait_s)
                route.direct(self._service, http_request, on_stored)
            except Exception as error:  # noqa: BLE001 - it becomes the response, in a turn of its own
                asyncio.get_running_loop().call_soon(on_stored, error)

    def _respond(self, request: _RoutedRequest, respond: Respond, result: msgspec.Struct | Exception) -> None:
        route, _, started_at = request
        if isinstance(result, HeadraceError):
            response = problem_response(result)
        elif isinstance(result, Exception):
            response = _internal_error(result, route.method, route.path)
        else:
            response = HttpResponse(msgspec.json.encode(result), status=route.status)
        assert isinstance(response.body, bytes)
        self._metrics.count_request(route.method, route.path, response.status, time.perf_counter() - started_at)
        respond(response.status, response_head(response, response.body, self._service.epoch), response.body)

    def _authorize(self, header: Callable[[bytes], str], route: Route, scope: Scope) -> None:
        """Raise Unauthorized or Forbidden."""
        self._auth.refuse_web_pages(header)
        if not route.roles:
            return
        authorization = header(b"authorization")
        token = None if authorization else self._sessions.token(header, scope["method"])
        if token is not None:
            self._auth.require(token, route.roles)
        else:
            self._auth.check(authorization, route.roles)
        scope["extensions"][TOKEN_ACCEPTED]()

    def _body_limit(self, route: Route) -> int:
        """Most bytes of a body: few for a route that takes none, or is open to all."""
        return self._max_body_bytes if route.roles and route.request is not None else OPEN_BODY_BYTES

    async def _response(self, route: Route, request: HttpRequest) -> HttpResponse:
        reply = await route.handler(self._service, request)
        if isinstance(reply, HttpResponse):
            response = reply
        else:
            response = HttpResponse(msgspec.json.encode(reply), status=route.status)
        if request.granted_s is not None:
            response.headers = {**response.headers, HEADER_WAIT_S: f"{request.granted_s:g}"}
        return response


async def _no_more_messages() -> Message:
    """The ``receive`` of a direct handler, which has the whole body already."""
    raise AssertionError("a direct handler waits for a message")


def problem_response(error: HeadraceError) -> HttpResponse:
    """The response for an error."""
    if isinstance(error, StoreError):
        log.error("store refused", detail=error.detail)
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.extra["allowed"])
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="headrace"'
    return HttpResponse(
        msgspec.json.encode(error.problem()), status=error.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers
    )


def _internal_error(error: Exception, method: str, path: str) -> HttpResponse:
    incident = new_id()
    log.error("unexpected error", exc_info=error, incident=incident, method=method, path=path)
    return problem_response(
        InternalError(
            f"Something unexpected went wrong ({type(error).__name__}).",
            hint=f"The service's log has the details under incident {incident}.",
            incident=incident,
        )
    )
