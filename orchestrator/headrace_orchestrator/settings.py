"""Settings of an orchestrator process."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.wire.messages import MAX_WAIT_S
from headrace_orchestrator.buffer.retention_rules import KEEP_ALL, RetentionRules


class Address(NamedTuple):
    """The address on which a server listens, with the port that was bound."""

    host: str
    port: int

    @property
    def local_host(self) -> str:
        """The host for clients on this machine: the loopback address for a wildcard bind."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The base address for clients on this machine."""
        host = self.local_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one orchestrator process. Every field but ``data`` has a default that fits one machine."""

    data: Path
    """Data directory; made if missing. Only one orchestrator at a time can own it."""
    host: str = "127.0.0.1"
    """Address to bind. An address other than loopback needs ``tokens``."""
    port: int = 8470
    """Port to bind; 0 lets the system choose. The chosen one is in ``<data>/address`` and given to ``ready``."""
    tokens: Path | None = None
    """TOML file of bearer tokens, in the format of ``headrace.server.auth``. Default: none, loopback only."""
    environments: Set[str] | None = None
    """Environment ids that the workers know: runs and groups with another id are refused at once. Default: unknown, so
    that a wrong id leads to failed episodes of kind ``unknown-environment``."""
    max_body_bytes: int = 256 << 20
    """Largest request body that is read, in bytes. Default 256 MiB, for a worker's spool of long trajectories."""
    max_wait_s: float = MAX_WAIT_S
    """Longest long poll, in seconds. Keep it below the read timeout of any proxy in front. Default 60."""
    log_file_bytes: int = 256 << 20
    """Size at which the log continues in a new file, in bytes. Default 256 MiB."""
    retention: RetentionRules = KEEP_ALL
    """Rules for deleting old files of the log. Default: they are never deleted."""
    max_held_bytes: int | None = None
    """Maximum bytes of all runs' groups in flight, including reservations. Default: only each run's own bound."""
    max_disk_bytes: int | None = None
    """Bytes of log and assets, including reservations, at which admission stops. Default: no bound."""
    asset_promise_s: float = 300.0
    """Seconds for which an image or array is kept until a record refers to it. Default 300: most outages are shorter,
    and a worker that comes later only has to send it again."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """``auto``: readable on a terminal, JSON lines elsewhere."""
    shutdown_timeout_s: float = 10.0
    """Seconds for open requests to end after SIGTERM before their connections are closed. Default 10."""
