"""Output and exit codes of commands.

* Piped output has no escape codes.
* Text from a model, an environment or a server cannot control a terminal.
* An error is its message and hint, without a traceback.
* An error prints its message and its hint once.
* An id is never broken over lines.
* A cell of a listing is one line, also if a name contains line ends and tabs.
* With ``--json`` an error is a problem on standard error.
* An invalid command line ends with 2.
* An unreachable service ends with 3.
* A command without a result in time ends with 4.

Results go to standard output, everything else to standard error. A terminal gets tables and colour, a pipe gets lines
with tabs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from headrace.errors import HeadraceError, ServingEnd, Unavailable

OK, FAILED, USAGE, UNREACHABLE, NO_RESULT = range(5)

CLI_RETRY_FOR_S = 2.0
"""Time for which a command retries: short, because a person waits for it. A training loop retries for longer."""

ID_COLUMNS = frozenset({"id", "run", "worker"})
"""Columns of ids, which people copy: a narrow terminal shortens other columns."""

CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters except tab and line end, and characters that change the writing direction."""

ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROL_CODES}

if TYPE_CHECKING:
    # Imported where they are used: a command that prints nothing of them starts faster.
    from rich.console import Console
    from rich.table import Table

    from headrace.client.sync_client import Client

LINE_ESCAPES = {**ESCAPES, 9: "\\t", 10: "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""The same with tabs and line ends, which would split a row of a listing."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Shared:
    """The values of the options shared by all commands."""

    json: bool = False
    debug: bool = False


def shared() -> Shared:
    """The shared options of the running command."""
    return click.get_current_context().find_object(Shared) or Shared()


def json_option(command: F) -> F:
    """Add ``--json``."""

    def store(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.ensure_object(Shared).json |= value

    option = click.option(
        "--json", is_flag=True, expose_value=False, is_eager=True, callback=store, help="Print JSON, for scripts."
    )
    return option(command)


def service_options(command: F) -> F:
    """Add ``--url`` and ``--token``."""
    url = click.option(
        "--url", envvar="HEADRACE_URL", show_envvar=True, help="Address of the orchestrator. Default: this machine."
    )
    token = click.option("--token", envvar="HEADRACE_TOKEN", show_envvar=True, help="Bearer token. Default: none.")
    return url(token(command))


def connect(url: str | None, token: str | None) -> Client:
    """Connect a client with short retries."""
    from headrace.client.sync_client import Client

    return Client(url, token=token, retry_for_s=CLI_RETRY_FOR_S, keepalive=False)


def console() -> Console:
    """The console of standard output, with colour and tables only on a terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def notes() -> Console:
    """The console of standard error, for progress and remarks."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def on_terminal() -> bool:
    """Return True if standard output is a terminal that can show live views."""
    return sys.stdout.isatty()


def emit(value: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def emit_line(value: Any) -> None:
    """Print one JSON document on one line of standard output."""
    click.echo(msgspec.json.encode(value).decode())


def printable(text: str) -> str:
    """Escape the characters that control a terminal."""
    return text.translate(ESCAPES)


def one_line(text: str) -> str:
    """Escape the characters that control a terminal or split a line."""
    return text.translate(LINE_ESCAPES)


def note(text: str) -> None:
    """Print a remark on standard error, except with ``--json``."""
    if not shared().json:
        from rich.markup import escape

        notes().print(escape(printable(text)), soft_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", spare: Sequence[str] = ()) -> None:
    """Print a table on a terminal, or a header line and lines with tabs to a pipe. A narrow terminal drops ``spare``
    columns in order."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    if not on_terminal():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(row))
        return
    terminal = console()
    columns, rows = fitting(columns, rows, spare, terminal.width)
    terminal.print(rich_table(columns, rows, title=title))


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Remove as many spare columns as needed to fit the table into the width, in characters."""
    for name in spare:
        widths = [max(map(len, cells)) + 1 for cells in zip(columns, *rows, strict=True)]
        if sum(widths) <= width:
            break
        at = list(columns).index(name)
        columns, *rows = ([*cells[:at], *cells[at + 1 :]] for cells in (columns, *rows))
    return columns, rows


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    """Make a Rich table; cells are text, not markup."""
    from rich.markup import escape
    from rich.table import Table

    rich = Table(title=title or None, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        rich.add_column(column, overflow="fold", no_wrap=column in ID_COLUMNS)
    for row in rows:
        rich.add_row(*(escape(one_line(cell)) for cell in row))
    return rich


def facts(entries: Mapping[str, str]) -> None:
    """Print names and values, one pair a line."""
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        value = one_line(value)
        click.echo(f"{name:<{width}}  {value}" if on_terminal() else f"{name}\t{value}")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; None is a dash."""
    return "–" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def span(seconds: float) -> str:
    """Format a duration."""
    if seconds < 0:
        return "–"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def exit_code(error: HeadraceError) -> int:
    """The exit code for an error."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    return NO_RESULT if isinstance(error, ServingEnd) else FAILED


def report(error: HeadraceError, *, as_json: bool) -> None:
    """Print an error on standard error."""
    if as_json:
        click.echo(msgspec.json.encode(error.problem()).decode(), err=True)
        return
    from rich.markup import escape

    stderr = notes()
    stderr.print(f"[bold red]Error:[/] {escape(printable(error.detail))}", soft_wrap=True)
    if error.hint:
        stderr.print(escape(printable(error.hint)), soft_wrap=True)
