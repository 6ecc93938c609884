"""Sessions of browsers that signed in with a token.

* A browser sends its token once; after that a cookie with a random value stands for it, until the session ends.
* Web pages cannot read the cookie, and requests that other sites cause do not carry it.
* A session ends when the browser signs out, after ``SESSION_S`` seconds, or with the process.
* A request with a cookie that changes something must come from a page of this service.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import ForeignOrigin
from headrace.server.auth import Auth, Role, Token, is_own_origin

SESSION_S = 12 * 3600.0
"""Seconds after which a browser must sign in again: a working day."""

MAX_SESSIONS = 1000
"""Most sessions; the oldest ends at the next one."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""

ReadHeader = Callable[[bytes], str]
"""Returns a header of a request, or an empty string."""


PAGE_ROLES = frozenset[Role]({"viewer"})
"""Roles of the tokens with which a browser may sign in."""


class _Session(NamedTuple):
    token: Token
    ends_at: float


class BrowserSessions:
    """The sessions of one service. ``clock``: the time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}  # the oldest first

    def begin(self, token: Token, header: ReadHeader) -> str:
        """Begin a session; returns the header ``Set-Cookie`` of its response."""
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        name = secrets.token_urlsafe(32)
        self._sessions[name] = _Session(token, self._clock() + SESSION_S)
        return _cookie(name, header)

    def end(self, header: ReadHeader) -> str:
        """End the session of a request; returns the header ``Set-Cookie`` that deletes its cookie."""
        self._sessions.pop(_session_in(header), None)
        return f"{_cookie('', header)}; Max-Age=0"

    def token(self, header: ReadHeader, method: str) -> Token | None:
        """The token of a request's session; None without one. Raises ForeignOrigin for a request that changes something
        and may come from a page of another site."""
        if not self._sessions:
            return None
        session = self._sessions.get(_session_in(header))
        if session is None or session.ends_at <= self._clock():
            return None
        if method not in SAFE_METHODS:
            require_own_origin(header)
        return session.token


class Browser(NamedTuple):
    """The client of a request, as the handlers of pages see it."""

    auth: Auth
    sessions: BrowserSessions
    header: ReadHeader

    def sign_in(self, token: str) -> str:
        """Begin a session; returns ``Set-Cookie``. Raises Unauthorized, Forbidden or ForeignOrigin."""
        require_own_origin(self.header)
        found = self.auth.identify(token)
        self.auth.require(found, PAGE_ROLES)
        return self.sessions.begin(found, self.header)

    def sign_out(self) -> str:
        """End the session; returns ``Set-Cookie``. Raises ForeignOrigin."""
        require_own_origin(self.header)
        return self.sessions.end(self.header)

    @property
    def is_signed_in(self) -> bool:
        return self.sessions.token(self.header, "GET") is not None


def require_own_origin(header: ReadHeader) -> None:
    """Raise ForeignOrigin unless a browser states that a page of this service caused the request."""
    site, origin = header(b"sec-fetch-site"), header(b"origin")
    if site == "same-origin" or (not site and is_own_origin(origin, header(b"host"))):
        return
    raise ForeignOrigin(
        f"The request comes from a page of another origin ({origin or site or 'not named'}).",
        hint="Use the pages of this service, or send the header 'Authorization: Bearer <token>'.",
    )


def _cookie(value: str, header: ReadHeader) -> str:
    secure = "; Secure" if header(b"origin").startswith("https:") else ""
    return f"{_name(header)}={value}; Path=/; HttpOnly; SameSite=Strict{secure}"


def _name(header: ReadHeader) -> str:
    """The cookie's name, with the port: browsers do not tell the ports of a host apart."""
    port = header(b"host").rpartition(":")[2]
    return f"headrace-{port}" if port.isascii() and port.isdecimal() else "headrace"


def _session_in(header: ReadHeader) -> str:
    for part in header(b"cookie").split(";"):
        name, _, value = part.strip().partition("=")
        if name == _name(header):
            return value
    return ""
