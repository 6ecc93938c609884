"""Messages between a client and the service: msgpack, since they contain bytes.

Durations are in seconds. Errors are problem bodies, as everywhere in Headrace; a fault of ours is a SandboxFailure with
its kind.
"""

from __future__ import annotations

import msgspec

from headrace_sandbox.result import Isolation, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, SessionKind, Template

API = "/v1"

MEDIA_TYPE = "application/msgpack"


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Run a command or program in a fresh sandbox. Exactly one of ``command`` and ``program``. ``owner``: the run that
    it belongs to; owners share fairly. ``wait_s``: the longest wait for its turn."""

    command: SandboxCommand | None = None
    program: PythonProgram | None = None
    limits: Limits
    owner: str = ""
    wait_s: float


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lease a sandbox for ``ttl_s``."""

    template: Template
    ttl_s: float
    owner: str = ""
    wait_s: float


class OpenReply(msgspec.Struct, frozen=True, kw_only=True):
    """A leased sandbox. ``ttl_s``: the granted time of the lease."""

    lease: str
    isolation: Isolation
    queue_s: float
    start_s: float
    ttl_s: float


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run a command in a leased sandbox."""

    command: SandboxCommand
    limits: Limits


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Begin a session."""

    kind: SessionKind


class CellRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run a cell in a session."""

    cell: str
    limits: Limits


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Read or write a path in a sandbox. ``most_bytes``: the largest size to read. ``content``: bytes to write."""

    path: str = ""
    most_bytes: int = 0
    content: bytes = b""


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Extend a lease to this long from now; the reply has the granted time."""

    ttl_s: float


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The isolation of the service's runtime."""

    runtime: str
    isolation: Isolation
