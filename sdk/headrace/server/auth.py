"""Authorization of requests: bearer tokens with roles.

* A loopback bind needs no tokens; any other bind without tokens is refused at start.
* Tokens come from a file, and are compared by digest in constant time. One token under two names is refused.
* Without tokens the service accepts requests of programs, not of web pages: it refuses those with another origin or
  host (status 403), or with a body of a type that any page may send (status 415).

The file is TOML, with one table for each token::

    [[tokens]]
    name = "trainer"
    roles = ["learner"]
    token = "..."            # or: sha256 = "<hex digest of the token>"

Roles: ``learner``, ``worker``, ``sandbox``, ``viewer``, and ``admin``, which has access to every route.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import string
import tomllib
from collections.abc import Callable, Set
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from headrace.errors import Forbidden, ForeignOrigin, SetupError, Unauthorized, UnsupportedMediaType
from headrace.wire.messages import RECORDS_MEDIA_TYPE

Role = Literal["learner", "worker", "sandbox", "viewer", "admin"]

ROLES: tuple[Role, ...] = get_args(Role)

MIN_TOKEN_LENGTH = 16
"""Fewest characters of a token: shorter ones can be guessed over the network."""

BODY_TYPES = frozenset({"application/json", "application/msgpack", RECORDS_MEDIA_TYPE, "application/octet-stream"})
"""Types of request bodies. A browser sends them to another origin than the page's only if that origin allows it."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    roles: list[Role]
    token: str = ""
    sha256: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[_Entry]


class Token(NamedTuple):
    """A token of the file."""

    digest: bytes
    name: str
    roles: frozenset[Role]


class Auth:
    """Checks the ``Authorization`` header of a request against the roles of its route."""

    def __init__(self, tokens: list[Token] | None) -> None:
        self._tokens = tokens

    @property
    def needs_tokens(self) -> bool:
        """True if routes with roles need a token."""
        return self._tokens is not None

    def check(self, authorization: str, roles: Set[Role]) -> None:
        """Raise Unauthorized or Forbidden unless the header's token has one of the roles. No roles: open to all."""
        if self._tokens is not None and roles:
            self.require(self.identify(_token_in(authorization)), roles)

    def require(self, token: Token, roles: Set[Role]) -> None:
        """Raise Forbidden unless the token has one of the roles."""
        if "admin" not in token.roles and not token.roles & roles:
            raise Forbidden(
                f"The token {token.name!r} has the role {' and '.join(sorted(token.roles))}; "
                f"this route needs {' or '.join(sorted(roles | {'admin'}))}.",
                hint="Use a token with that role.",
            )

    def refuse_web_pages(self, header: Callable[[bytes], str]) -> None:
        """Raise ForeignOrigin or UnsupportedMediaType for a request that a web page can make a browser send, if the
        service has no tokens.

        ``header`` returns a header of the request, or an empty string.
        """
        if self._tokens is not None:
            return
        host, origin = header(b"host"), header(b"origin")
        if host and not _is_loopback_host(host):
            raise ForeignOrigin(
                f"Without tokens this service accepts only requests to its loopback address, not to {host!r}.",
                hint="Use http://127.0.0.1 with the port, or give the service a token file with --tokens.",
            )
        if origin and not is_own_origin(origin, host):
            raise ForeignOrigin(
                f"Without tokens this service refuses requests of web pages of another origin ({origin!r}).",
                hint="Give the service a token file with --tokens, and send a token.",
            )
        media_type = header(b"content-type").partition(";")[0].strip().lower()
        has_body = header(b"content-length") not in ("", "0") or bool(header(b"transfer-encoding"))
        if has_body and media_type not in BODY_TYPES:
            raise UnsupportedMediaType(
                f"Without tokens this service refuses a body of type {media_type or 'unknown'!r}.",
                hint="Send the header 'Content-Type: application/json'.",
            )

    def identify(self, text: str) -> Token:
        """The token with that text. Raises Unauthorized."""
        digest = hashlib.sha256(text.encode()).digest()
        match = None
        for token in self._tokens or ():  # all of them, so that the time taken reveals nothing
            if hmac.compare_digest(token.digest, digest):
                match = token
        if not text or match is None:
            raise Unauthorized(
                "The token is unknown to this service." if text else "This service needs a bearer token.",
                hint="Send 'Authorization: Bearer <token>' with a token from the service's token file. Commands, "
                "workers and clients take it from HEADRACE_TOKEN, for a sandbox service from HEADRACE_SANDBOX_TOKEN.",
            )
        return match


def load_auth(tokens: Path | None, host: str) -> Auth:
    """The authorization of a service that binds ``host``; ``tokens`` is its token file, if any.

    Raises SetupError for a bind other than loopback without tokens, or for an invalid file.
    """
    if tokens is not None:
        return Auth(_read_tokens(tokens))
    if not is_loopback(host):
        raise SetupError(
            f"Binding {host} would open the service to the network, but no tokens are set.",
            hint="Give a token file with --tokens, or bind 127.0.0.1.",
        )
    return Auth(None)


def is_own_origin(origin: str, host: str) -> bool:
    """True if the origin is that of the host to which a request was sent."""
    return origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())


def is_loopback(host: str) -> bool:
    """True if the name or address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=64)
def _is_loopback_host(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _token_in(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def _read_tokens(file: Path) -> list[Token]:
    try:
        entries = msgspec.toml.decode(file.read_bytes(), type=_File).tokens
    except OSError as error:
        raise SetupError(f"The token file {file} cannot be read: {error.strerror}.", hint="Check --tokens.") from error
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(
            f"The token file {file} is not valid: {error}.",
            hint=f"Each [[tokens]] table has a name, roles (of {', '.join(ROLES)}), and token or sha256.",
        ) from error
    if not entries:
        raise SetupError(f"The token file {file} holds no token.", hint="Add a [[tokens]] table.")
    tokens: dict[bytes, Token] = {}
    for entry in entries:
        digest = _digest(file, entry)
        if digest in tokens:
            raise SetupError(
                f"The tokens {tokens[digest].name!r} and {entry.name!r} in {file} are the same.",
                hint="List all roles of a token in one table.",
            )
        tokens[digest] = Token(digest, entry.name, frozenset(entry.roles))
    return list(tokens.values())


def _digest(file: Path, entry: _Entry) -> bytes:
    problem = ""
    if bool(entry.token) == bool(entry.sha256):
        problem = "needs either token or sha256"
    elif entry.token and len(entry.token) < MIN_TOKEN_LENGTH:
        problem = f"has a token of fewer than {MIN_TOKEN_LENGTH} characters"
    elif entry.sha256 and not (len(entry.sha256) == 64 and set(entry.sha256) <= set(string.hexdigits)):
        problem = "has a sha256 that is not 64 hexadecimal digits"
    elif not entry.roles:
        problem = "has no roles"
    if problem:
        raise SetupError(f"The token {entry.name!r} in {file} {problem}.", hint="Correct the token file.")
    return bytes.fromhex(entry.sha256) if entry.sha256 else hashlib.sha256(entry.token.encode()).digest()
