"""Settings of a service process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace_sandbox.pool.messages import PoolSettings


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of one service process."""

    runtime: str
    """Name of the runtime; one that fails its self-test is an error."""
    allow_unsafe: bool = False
    """True to allow a runtime that does not isolate."""
    socket: Path | None = None
    """Unix socket to listen on; only its owner, and its group if one is given, may connect."""
    group: str = ""
    """Group that may connect to the socket, beside its owner: a name or a number."""
    host: str = ""
    """Address to bind instead of a socket. Anything but loopback needs ``tokens``."""
    port: int = 0
    """Port to bind; 0 lets the system choose."""
    tokens: Path | None = None
    """TOML file of bearer tokens (``headrace.server.auth`` describes it); clients need the role ``sandbox``."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    """Bounds of the pool."""
    warm: int = 0
    """Sandboxes of the plain template that are kept ready."""
    max_body_bytes: int = 64 << 20
    """Largest request body that is read, in bytes. Default 64 MiB."""
    grace_s: float = 10.0
    """Seconds for executions to end after SIGTERM. Default 10."""
    log_level: str = "info"
    """Least severity that is logged."""
