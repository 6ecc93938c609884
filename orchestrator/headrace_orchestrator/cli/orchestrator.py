"""``headrace orchestrator``: run the orchestrator process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from headrace_orchestrator.cli.address_options import binding_options, data_option
from headrace_orchestrator.cli.storage_options import storage_options, storage_settings
from headrace_orchestrator.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "text")


@click.command(short_help="Run the orchestrator in this process, until it is stopped.")
@data_option("Data directory; made if missing. One orchestrator at a time owns it.")
@binding_options
@storage_options
@click.option("--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="Lowest severity.")
@click.option(
    "--log-format", default="auto", show_default=True, type=click.Choice(FORMATS), help="Format of log lines."
)
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

    The bound address is in DATA/address. Start workers separately: see `headrace worker`.

    \b
    Example:
      headrace orchestrator --data /var/lib/headrace --host 0.0.0.0 --tokens tokens.toml
    """
    from headrace_orchestrator import server  # imports the web server, which no other command needs

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
