"""A row of the route table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError
from headrace.server.auth import Role
from headrace_orchestrator.api.http import DirectHandler, Handler


@dataclass(frozen=True)
class Query:
    """A field of the query."""

    name: str
    text: str
    kind: str = "string"


@dataclass(frozen=True, kw_only=True)
class Route:
    """An operation. Without ``roles`` it is open to all, with or without a token. ``request`` and ``response`` are the
    types of the JSON bodies, or a media type as text. ``name``: the operation, by default the name of the handler.
    ``direct`` does the same as ``handler`` without a task."""

    method: str
    path: str
    summary: str
    handler: Handler
    name: str = ""
    direct: DirectHandler | None = None
    roles: frozenset[Role] = frozenset()
    request: Any = None
    response: Any = None
    status: int = 200
    query: tuple[Query, ...] = ()
    errors: tuple[type[HeadraceError], ...] = ()
