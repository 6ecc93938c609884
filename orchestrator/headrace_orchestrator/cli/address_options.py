"""Options of every command that starts or reads an orchestrator: data directory, address, tokens and longest poll."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.server.option_types import SecondsRange

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def data_option(text: str) -> Decorator:
    """Add ``--data``; ``text`` is its help."""
    return click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        callback=_not_empty,
        default=Path("headrace-data"),
        show_default=True,
        envvar="HEADRACE_DATA",
        show_envvar=True,
        help=text,
    )


def _not_empty(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    if value == Path():
        raise click.BadParameter("it names no directory.", ctx, param)
    return value


def binding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--host``, ``--port``, ``--tokens`` and ``--max-wait-s``."""
    for option in reversed(_BINDING):
        command = option(command)
    return command


_BINDING: tuple[Decorator, ...] = (
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to bind. Any but loopback needs --tokens."
    ),
    click.option(
        "--port", default=8470, show_default=True, type=click.IntRange(0, 65535), help="0: the system chooses."
    ),
    click.option("--tokens", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="TOML file of tokens."),
    click.option(
        "--max-wait-s",
        default=60.0,
        show_default=True,
        type=SecondsRange(1),
        envvar="HEADRACE_MAX_WAIT_S",
        show_envvar=True,
        help="Longest long poll, in seconds: keep it below the read timeout of a proxy in front.",
    ),
)
