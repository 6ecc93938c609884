"""``headrace orchestrator``: just that process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from headrace_orchestrator.cli.storage import storage_options, storage_settings
from headrace_orchestrator.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "text")

max_wait_option = click.option(
    "--max-wait-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=1),
    envvar="HEADRACE_MAX_WAIT_S",
    show_envvar=True,
    help="Longest long poll, in seconds: keep it below the read timeout of a proxy in front.",
)


@click.command(short_help="Run the orchestrator in this process, until it is stopped.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("headrace-data"),
    show_default=True,
    envvar="HEADRACE_DATA",
    show_envvar=True,
    help="Data directory; made if missing. One orchestrator at a time owns it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind. Not loopback: needs --tokens.")
@click.option("--port", default=8470, show_default=True, type=click.IntRange(0, 65535), help="0: the system chooses.")
@click.option("--tokens", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="TOML file of tokens.")
@max_wait_option
@storage_options
@click.option("--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="Least severity.")
@click.option("--log-format", default="auto", show_default=True, type=click.Choice(FORMATS), help="How lines look.")
def orchestrator(
    data: Path,
    host: str,
    port: int,
    tokens: Path | None,
    max_wait_s: float,
    log_level: Literal["debug", "info", "warning", "error"],
    log_format: Literal["auto", "json", "text"],
    **storage: Any,
) -> None:
    """Run the orchestrator in this process, until SIGTERM or Ctrl-C.

    The address it bound is in DATA/address. Workers are started apart: see `headrace worker`.

    \b
    Example:
      headrace orchestrator --data /var/lib/headrace --host 0.0.0.0 --tokens tokens.toml
    """
    from headrace_orchestrator import server  # it brings the web server, which no other command needs

    settings = Settings(
        data=data,
        host=host,
        port=port,
        tokens=tokens,
        max_wait_s=max_wait_s,
        log_level=log_level,
        log_format=log_format,
        **storage_settings(**storage),
    )
    server.run(settings)
