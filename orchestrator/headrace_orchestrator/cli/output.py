"""What commands print, and how they end.

* Piped output has no escape codes.
* What a model, an environment or a server said cannot steer a terminal.
* An error is its message and hint, without a traceback.
* An error says each thing once.
* An id is never broken over lines.
* With JSON an error is a problem on standard error.
* A command line that is not valid ends with 2.
* A service that is not reachable ends with 3.
* Nothing in time ends with 4.

Results go to standard output, everything else to standard error. On a terminal there are tables and colour; piped
there are lines with tabs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.client.sync_client import Client
from headrace.errors import HeadraceError, ServingEnd, Unavailable

OK, FAILED, USAGE, UNREACHABLE, NOTHING = range(5)

CLI_RETRY_FOR_S = 2.0
"""A person at a terminal wants to know soon that nothing answers; a training loop is more patient."""

WHOLE = frozenset({"id", "run", "worker"})
"""Columns of ids: people copy them, so on a narrow terminal the other columns give way."""

STEERING = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters but tab and line end, and those that turn the direction of writing."""

SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in STEERING}

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Shared:
    """What the options that every command has were given as."""

    json: bool = False
    debug: bool = False


def shared() -> Shared:
    """Of the command that runs now."""
    return click.get_current_context().find_object(Shared) or Shared()


def json_option(command: F) -> F:
    """Adds ``--json``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.ensure_object(Shared).json |= value

    option = click.option(
        "--json", is_flag=True, expose_value=False, is_eager=True, callback=remember, help="Print JSON, for scripts."
    )
    return option(command)


def service_options(command: F) -> F:
    """Adds ``--url`` and ``--token``."""
    url = click.option(
        "--url", envvar="HEADRACE_URL", show_envvar=True, help="Address of the orchestrator. Default: this machine."
    )
    token = click.option("--token", envvar="HEADRACE_TOKEN", show_envvar=True, help="Bearer token. Default: none.")
    return url(token(command))


def connect(url: str | None, token: str | None) -> Client:
    """A client with the patience of a person."""
    return Client(url, token=token, retry_for_s=CLI_RETRY_FOR_S, keepalive=False)


def console() -> Console:
    """Standard output, with colour and tables only on a terminal."""
    return Console(file=sys.stdout, highlight=False)


def notes() -> Console:
    """Standard error: progress and remarks."""
    return Console(file=sys.stderr, highlight=False)


def on_terminal() -> bool:
    """Whether standard output is a terminal, so that live views make sense."""
    return sys.stdout.isatty()


def emit(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def emit_line(value: Any) -> None:
    """One JSON document on one line of standard output."""
    click.echo(msgspec.json.encode(value).decode())


def printable(text: str) -> str:
    """The text with characters that steer a terminal written out."""
    return text.translate(SHOWN)


def note(text: str) -> None:
    """A remark for a person; not printed with ``--json``."""
    if not shared().json:
        notes().print(escape(printable(text)), soft_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", spare: Sequence[str] = ()) -> None:
    """A table on a terminal; piped, a header line and lines with tabs. Where a terminal is too narrow, ``spare``
    columns are left out, the first one first."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if not on_terminal():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(row))
        return
    on = console()
    columns, rows = fitting(columns, rows, spare, on.width)
    on.print(rich_table(columns, rows, title=title))


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The table without as many of the spare columns as it takes to fit into the width, in characters."""
    for name in spare:
        widths = [max(map(len, cells)) + 1 for cells in zip(columns, *rows, strict=True)]
        if sum(widths) <= width:
            break
        at = list(columns).index(name)
        columns, *rows = ([*cells[:at], *cells[at + 1 :]] for cells in (columns, *rows))
    return columns, rows


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    """The table as Rich draws it; cells are text, not markup."""
    drawn = Table(title=title or None, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column in WHOLE)
    for row in rows:
        drawn.add_row(*(escape(printable(cell)) for cell in row))
    return drawn


def facts(entries: Mapping[str, str]) -> None:
    """Names and values, one a line."""
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        click.echo(f"{name:<{width}}  {value}" if on_terminal() else f"{name}\t{value}")


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 0:
        return "–"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def exit_code(error: HeadraceError) -> int:
    """The exit code that stands for an error."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    return NOTHING if isinstance(error, ServingEnd) else FAILED


def report(error: HeadraceError, *, as_json: bool) -> None:
    """Print an error on standard error."""
    if as_json:
        click.echo(msgspec.json.encode(error.problem()).decode(), err=True)
        return
    written = notes()
    written.print(f"[bold red]Error:[/] {escape(printable(error.detail))}", soft_wrap=True)
    if error.hint:
        written.print(escape(printable(error.hint)), soft_wrap=True)
