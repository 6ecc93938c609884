"""The command group: mounts every command, and turns errors into messages and exit codes in one place.

* A command is imported when it is used, so that a command starts quickly.
* Commands of other packages mount by entry point.
* A command whose package is not installed says so.
* An unexpected error is a message too, and ``--debug`` shows its traceback.
"""

from __future__ import annotations

import errno
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from headrace.errors import HeadraceError, InternalError, InvalidRequest, MissingExtra
from headrace_orchestrator.cli.output import FAILED, USAGE, Shared, exit_code, report

COMMANDS = {
    "backup": "headrace_orchestrator.cli.backup:backup",
    "close": "headrace_orchestrator.cli.close:close",
    "demo": "headrace_orchestrator.cli.demo.command:demo",
    "doctor": "headrace_orchestrator.cli.doctor:doctor",
    "export": "headrace_orchestrator.cli.export:export",
    "fsck": "headrace_orchestrator.cli.fsck:fsck",
    "orchestrator": "headrace_orchestrator.cli.orchestrator:orchestrator",
    "restore": "headrace_orchestrator.cli.backup:restore",
    "run": "headrace_orchestrator.cli.run:run",
    "runs": "headrace_orchestrator.cli.runs:runs",
    "servers": "headrace_orchestrator.cli.servers:servers",
    "top": "headrace_orchestrator.cli.top:top",
    "trajectories": "headrace_orchestrator.cli.trajectories:trajectories",
    "up": "headrace_orchestrator.cli.up:up",
    "version": "headrace_orchestrator.cli.version:version",
}
"""The commands of this package, imported at their first use."""

PLUGINS = "headrace.commands"
"""Entry-point group of click commands. A command has the name of its entry point."""


class Commands(click.Group):
    """A group that mounts the commands of other packages and reports errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *_plugins()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return _load(EntryPoint(cmd_name, f"{COMMANDS[cmd_name]} [server]", PLUGINS))
        point = _plugins().get(cmd_name)
        return None if point is None else _load(point)

    def invoke(self, ctx: click.Context) -> Any:
        options = ctx.ensure_object(Shared)
        as_json = "--json" in [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if not as_json:
                raise
            report(InvalidRequest(error.format_message()), as_json=True)
            ctx.exit(USAGE)
        except HeadraceError as error:
            if options.debug:
                raise
            report(error, as_json=as_json)
            ctx.exit(exit_code(error))
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            if options.debug or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            report(_unexpected(error), as_json=as_json)
            ctx.exit(FAILED)


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLUGINS)}


def _load(point: EntryPoint) -> click.Command:
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        # The command stays in the list; running it says which package it needs.
        missing = MissingExtra(
            f"`headrace {point.name}` needs {error.name}, which is not installed.",
            hint=f"Run: pip install 'headrace[{point.extras[0] if point.extras else 'all'}]'",
        )
        return _Missing(point.name, missing)
    if not isinstance(command, click.Command):
        raise InternalError(f"The entry point {point.value} of {PLUGINS} is not a click command.")
    return command


class _Missing(click.Command):
    """The placeholder of a command whose package cannot be imported."""

    def __init__(self, name: str, error: MissingExtra) -> None:
        super().__init__(
            name, short_help=f"(not installed) {error.hint}", context_settings={"ignore_unknown_options": True}
        )
        self.params = [click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)]
        self._error = error

    def invoke(self, ctx: click.Context) -> Any:
        raise self._error


def _unexpected(error: Exception) -> HeadraceError:
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return InternalError(f"{message}.", hint="`headrace --debug ...` shows where.")
    return InternalError(f"{type(error).__name__}: {error}", hint="`headrace --debug ...` shows where.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Headrace keeps learners fed: it runs episodes on workers and serves batches of stored trajectories.

    Try `headrace demo` first. `headrace up` runs everything on this machine.

    \b
    Exit codes:
      0  ok
      1  it failed; the message says why and what to do
      2  the command line is not valid
      3  the service is not reachable
      4  nothing came in time, or the run is finished
      5  records are lost (`fsck`)
      6  something is damaged and nothing is lost (`fsck`)
    """
    ctx.ensure_object(Shared).debug = debug
