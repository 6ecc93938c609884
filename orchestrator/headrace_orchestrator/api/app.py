"""Dispatch: from a request to its route, through auth, to an answer.

* Every error is a problem body; an unexpected one is logged with an id that the caller gets.
* Every answer carries the epoch.
* The table's roles are checked before the body is read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError, InternalError, MethodNotAllowed, NotFound, StoreError, Unavailable
from headrace.ids import new_id
from headrace.tokens import Auth
from headrace.wire import HEADER_WAIT_S, PROBLEM_MEDIA_TYPE
from headrace_orchestrator import logs
from headrace_orchestrator.api.http import Answer, Call, headers_of, read_body, send_answer
from headrace_orchestrator.api.route import Route
from headrace_orchestrator.api.routes import ROUTES
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.waiting import ClientGone

log = logs.logger(__name__)

RETRY_AFTER_S = 1
"""Seconds after which a client that was told ``unavailable`` may ask again."""

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


class App:
    """The ASGI application. No middleware: worker routes are called thousands of times a second."""

    def __init__(self, service: Service, auth: Auth, metrics: Metrics, max_body_bytes: int, max_wait_s: float) -> None:
        self._service = service
        self._auth = auth
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._max_wait_s = max_wait_s
        self._router = Router(ROUTES)

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
                self._auth.refuse_pages(header)
                self._auth.check(header(b"authorization"), route.roles)
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

    async def _answer(self, route: Route, call: Call) -> Answer:
        reply = await route.handler(self._service, call)
        answer = reply if isinstance(reply, Answer) else Answer(msgspec.json.encode(reply), status=route.status)
        if call.granted_s is None:
            return answer
        return replace(answer, headers={**answer.headers, HEADER_WAIT_S: f"{call.granted_s:g}"})


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
    log.exception("unexpected error", incident=incident, method=method, path=path)
    return problem(
        InternalError(
            f"Something unexpected went wrong ({type(error).__name__}).",
            hint=f"The service's log has the whole story under incident {incident}.",
            incident=incident,
        )
    )
