"""Handlers of the HTML pages: the console with its stream of changes, the page to sign in, and the files they load.

* A browser that asks for a page without a token gets the page to sign in, and after that the page that it asked for.
* Pages have no scripts and styles of their own: they load them from the service, and from nowhere else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from urllib.parse import parse_qsl

from headrace.errors import Forbidden, HeadraceError, Unauthorized
from headrace_orchestrator.api.http import HttpRequest, HttpResponse
from headrace_orchestrator.console import render
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.shell import HEADRACE_VERSION

HTML = "text/html; charset=utf-8"

REFRESH_S = 1.0
"""Interval in which the console looks for a change: as often as a person can read."""

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every page. The pages load only files of this service, and the browser enforces that."""

_PAGE_PATH = re.compile(r"/[a-z.-]*")
"""Paths of pages: links on them are relative, so none has a second slash."""


def page(text: str, *, status: int = 200) -> HttpResponse:
    """The response with an HTML page."""
    return HttpResponse(text.encode(), status=status, media_type=HTML, headers=PAGE_HEADERS)


def is_signed_in(request: HttpRequest) -> bool:
    """True if a browser sent the request after it signed in."""
    return request.browser is not None and request.browser.is_signed_in


async def console(service: Service, request: HttpRequest) -> HttpResponse:
    return page(render.console(service.status(), service.phase(), is_signed_in=is_signed_in(request)))


# Signing in


def is_page_path(path: str) -> bool:
    """True if a browser may ask for the path as a page."""
    return _PAGE_PATH.fullmatch(path) is not None


def is_page(path: str, header: Callable[[bytes], str]) -> bool:
    """True if a browser asks for a page."""
    return is_page_path(path) and "text/html" in header(b"accept")


def sign_in_page(path: str, error: HeadraceError | None = None, *, problem: str = "") -> HttpResponse:
    """The page to sign in, which leads to the page with that path."""
    page_name = path[1:] if is_page_path(path) else ""
    return page(render.sign_in(HEADRACE_VERSION, page_name, problem), status=error.status if error else 200)


async def show_sign_in(service: Service, request: HttpRequest) -> HttpResponse:
    assert request.browser is not None
    if request.browser.is_signed_in or not request.browser.auth.needs_tokens:
        return _redirect("")
    return sign_in_page("/")


async def sign_in(service: Service, request: HttpRequest) -> HttpResponse:
    """Begin a session with the token of the form."""
    assert request.browser is not None
    if not request.browser.auth.needs_tokens:
        return _redirect("")
    form = dict(parse_qsl(request.body.decode("latin-1")))
    try:
        cookie = request.browser.sign_in(form.get("token", "").strip())
    except (Unauthorized, Forbidden) as error:
        return sign_in_page(f"/{form.get('page', '')}", error, problem=error.detail)
    return _redirect(form.get("page", ""), cookie)


async def sign_out(service: Service, request: HttpRequest) -> HttpResponse:
    assert request.browser is not None
    return _redirect("sign-in", request.browser.sign_out())


def _redirect(page_name: str, cookie: str = "") -> HttpResponse:
    """The response that leads a browser to a page of this service, with GET."""
    target = page_name if is_page_path(f"/{page_name}") else ""
    headers = {"Location": f"./{target}", "Cache-Control": "no-store", **({"Set-Cookie": cookie} if cookie else {})}
    return HttpResponse(b"", status=303, media_type=HTML, headers=headers)


async def script(service: Service, request: HttpRequest) -> HttpResponse:
    return _file("console.js", "text/javascript; charset=utf-8")


async def style(service: Service, request: HttpRequest) -> HttpResponse:
    return _file("console.css", "text/css; charset=utf-8")


def _file(name: str, media_type: str) -> HttpResponse:
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return HttpResponse(render.static_file(name), media_type=media_type, headers=headers)


# The stream of changes


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
