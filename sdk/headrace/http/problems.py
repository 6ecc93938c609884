"""Problem bodies: an error of the orchestrator, as opposed to the error page of a proxy.

* A problem body of Headrace is recognized by its type.
* Any other body with an error status comes from a proxy, and says nothing about the request itself.
* The status in the body does not override the status of the response.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import TYPE_PREFIX, HeadraceError, from_problem

GATEWAY_STATUSES = frozenset({408, 425, 429, 502, 503, 504, 520, 521, 522, 523, 524})
"""Statuses with which a proxy responds although the same request may succeed later."""


def read_problem(status: int, body: bytes | memoryview) -> HeadraceError | None:
    """The orchestrator's error, or None if the body is not one of its problem bodies."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not str(problem.get("type", "")).startswith(TYPE_PREFIX):
        return None
    return from_problem({**problem, "status": status})
