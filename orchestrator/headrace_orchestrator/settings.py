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
    def url(self) -> str:
        """Base address for clients; a wildcard bind is reached over loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one orchestrator process. Every field but ``data`` has a default that fits one machine."""

    data: Path
    """Data directory; made if missing. One orchestrator at a time owns it."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs ``tokens``."""
    port: int = 8470
    """Port to bind; 0 lets the system choose. The chosen one is in ``<data>/address`` and given to ``ready``."""
    tokens: Path | None = None
    """TOML file of bearer tokens (``headrace.server.auth`` says how it reads). Default: none, loopback only."""
    environments: Set[str] | None = None
    """Environment ids that the workers know. Given: runs and groups that name another are refused at once. Default:
    unknown, so that a wrong id shows up as failed episodes of kind ``unknown-environment``."""
    max_body_bytes: int = 256 << 20
    """Largest request body that is read, in bytes. Default 256 MiB: a worker's spool of long trajectories."""
    max_wait_s: float = MAX_WAIT_S
    """Longest long poll that is granted, in seconds: below the read timeout of any proxy in between. Default 60."""
    log_file_bytes: int = 256 << 20
    """Size at which the log goes on in a new file, in bytes. Default 256 MiB."""
    retention: RetentionRules = KEEP_ALL
    """When old files of the log are deleted. Default: never."""
    max_held_bytes: int | None = None
    """Bytes that groups in flight of all runs may hold, reservations included. Default: each run's own bound alone."""
    max_disk_bytes: int | None = None
    """Bytes of log and assets, reservations included, at which admission stops. Default: no bound."""
    asset_promise_s: float = 300.0
    """Seconds for which an image or array is kept for a record that is to refer to it. Default 300: most outages are
    shorter, and a worker that is later only has to send it again."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """``auto``: readable on a terminal, JSON lines elsewhere."""
    shutdown_timeout_s: float = 10.0
    """Seconds that open requests get to end after SIGTERM, before their connections are closed. Default 10."""
