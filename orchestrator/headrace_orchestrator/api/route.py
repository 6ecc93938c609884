"""One row of the route table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError
from headrace.server.auth import Role
from headrace_orchestrator.api.http import DirectHandler, Handler


@dataclass(frozen=True)
class Query:
    """A field of the address."""

    name: str
    text: str
    kind: str = "string"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operation. No ``roles``: open to all, tokens or not. ``request`` and ``response`` are the JSON bodies' types,
    or a media type as text. ``direct`` does what ``handler`` does, without a task."""

    method: str
    path: str
    summary: str
    handler: Handler
    direct: DirectHandler | None = None
    roles: frozenset[Role] = frozenset()
    request: Any = None
    response: Any = None
    status: int = 200
    query: tuple[Query, ...] = ()
    errors: tuple[type[HeadraceError], ...] = ()
