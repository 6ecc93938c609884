"""Routes that carry out one command of the scheduler each, without a handler of their own.

* The types of request and response are those of the command; without a return value the response is the epoch alone.
* The response of a command is sent when what it rests on is on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack, get_type_hints

import msgspec

from headrace.errors import HeadraceError
from headrace.server.auth import Role
from headrace_orchestrator.api.http import HttpRequest, HttpResponse
from headrace_orchestrator.api.route import Route
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service import Service

R = TypeVar("R", bound=msgspec.Struct)
Reply = msgspec.Struct | None

BoundCommand = Callable[[SchedulerState, HttpRequest, R, float], Reply]
"""A command that takes its other arguments from the parameters of the path."""


class Options(TypedDict):
    """The fields of a ``Route`` that a command does not determine."""

    method: NotRequired[str]
    roles: frozenset[Role]
    errors: NotRequired[tuple[type[HeadraceError], ...]]


def command(
    path: str,
    function: Callable[[SchedulerState, R, float], Reply],
    summary: str,
    **options: Unpack[Options],
) -> Route:
    """The route of a command on the whole service."""
    return _route(path, function, lambda state, _, body, now: function(state, body, now), summary, options)


def run_command(
    path: str,
    function: Callable[[SchedulerState, Run, R, float], Reply],
    summary: str,
    **options: Unpack[Options],
) -> Route:
    """The route of a command on the ``{run}`` of its path."""

    def bound(state: SchedulerState, request: HttpRequest, body: R, now: float) -> Reply:
        return function(state, state.run(request.params["run"]), body, now)

    return _route(path, function, bound, summary, options)


def batch_command(
    path: str,
    function: Callable[[SchedulerState, Run, str, R, float], Reply],
    summary: str,
    **options: Unpack[Options],
) -> Route:
    """The route of a command on the ``{run}`` and the ``{batch}`` of its path."""

    def bound(state: SchedulerState, request: HttpRequest, body: R, now: float) -> Reply:
        return function(state, state.run(request.params["run"]), request.params["batch"], body, now)

    return _route(path, function, bound, summary, options)


def _route(
    path: str, function: Callable[..., Reply], bound: BoundCommand[Any], summary: str, options: Options
) -> Route:
    types = get_type_hints(function)
    kind, returned = types["request"], types["return"]

    async def handle(service: Service, request: HttpRequest) -> HttpResponse | msgspec.Struct:
        body = request.read(kind)
        reply = await service.execute(lambda state, now: bound(state, request, body, now))
        return done(service) if reply is None else reply

    return Route(
        method=options.get("method", "POST"),
        path=path,
        summary=summary,
        name=function.__name__,
        handler=handle,
        request=kind,
        response=None if returned is type(None) else returned,
        roles=options["roles"],
        errors=options.get("errors", ()),
    )


def done(service: Service) -> HttpResponse:
    """The response of an operation that returns nothing."""
    return HttpResponse(b'{"epoch":%d}' % service.epoch)
