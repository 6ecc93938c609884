"""Handlers of the HTML pages: the console and its stream of changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace_orchestrator.api.http import HttpRequest, HttpResponse
from headrace_orchestrator.console import render
from headrace_orchestrator.service import Service

HTML = "text/html; charset=utf-8"

REFRESH_S = 1.0
"""Interval in which the console looks for a change: as often as a person can read."""

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every page. The pages load nothing, and the browser enforces that."""


def page(text: str) -> HttpResponse:
    """The response with an HTML page."""
    return HttpResponse(text.encode(), media_type=HTML, headers=PAGE_HEADERS)


async def console(service: Service, request: HttpRequest) -> HttpResponse:
    return page(render.console(service.status(), service.phase()))


async def events(service: Service, request: HttpRequest) -> HttpResponse:
    return HttpResponse(
        _changes(service, request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def _changes(service: Service, request: HttpRequest) -> AsyncIterator[bytes]:
    """The console's content whenever it changes, until the client disconnects or the service stops."""
    last = ""
    disconnected = request.disconnected()
    while not disconnected.done() and not service.draining:
        content = render.content(service.status(), service.phase())
        if content != last:
            last = content
            yield b"".join(b"data: " + line + b"\n" for line in content.encode().splitlines()) + b"\n"
        await asyncio.wait({disconnected}, timeout=REFRESH_S)
