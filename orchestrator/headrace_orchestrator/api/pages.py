"""Handlers that answer with pages: the console and its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace_orchestrator.api.http import Answer, Call
from headrace_orchestrator.console import render
from headrace_orchestrator.service import Service

HTML = "text/html; charset=utf-8"

REFRESH_S = 1.0
"""How often the console looks for a change: as often as a person can read."""

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""The pages load nothing from anywhere, and say so to the browser."""


def page(text: str) -> Answer:
    """An HTML page."""
    return Answer(text.encode(), media_type=HTML, headers=PAGE_HEADERS)


async def console(service: Service, call: Call) -> Answer:
    return page(render.console(service.status(), service.phase()))


async def events(service: Service, call: Call) -> Answer:
    return Answer(_changes(service, call), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _changes(service: Service, call: Call) -> AsyncIterator[bytes]:
    """The console's content, each time that it is another one, until the client leaves or the service stops."""
    last = ""
    left = call.left()
    while not left.done() and not service.draining:
        content = render.content(service.status(), service.phase())
        if content != last:
            last = content
            yield b"".join(b"data: " + line + b"\n" for line in content.encode().splitlines()) + b"\n"
        await asyncio.wait({left}, timeout=REFRESH_S)
