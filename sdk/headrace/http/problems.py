"""Telling an error of the orchestrator from a page that a proxy wrote in its place.

* Only a problem body of Headrace's own counts as its word; it is known by its type.
* Whatever else comes with an error status was written by somebody in between, and says nothing about the request.
* The body's status does not override that of the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import TYPE_PREFIX, HeadraceError, from_problem

GATEWAY_STATUSES = frozenset({408, 425, 429, 502, 503, 504, 520, 521, 522, 523, 524})
"""Statuses that a proxy answers when the same request may work later."""


def read_problem(status: int, body: bytes | memoryview) -> HeadraceError | None:
    """The orchestrator's own error, or None where the body is not one of its problem bodies."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not str(problem.get("type", "")).startswith(TYPE_PREFIX):
        return None
    return from_problem({**problem, "status": status})
