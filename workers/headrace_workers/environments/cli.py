"""``headrace env``: lists environments and checks one against the protocol.

* ``list`` prints every environment id that a worker on this machine knows.
* ``check`` runs an environment in a process of its own and prints each violation of the protocol; the exit code is 1
  if there are any.
"""

from __future__ import annotations

import json

import click

import headrace
from headrace_workers.environments.check_process import check_in_process
from headrace_workers.environments.conformance import DEFAULT_ACTIONS
from headrace_workers.imports import import_all

_import_option = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE|FILE.py",
    help="Module or file to import first. May be repeated.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("env", short_help="List environments, and check your own.")
def env() -> None:
    """List the known environments, or check an environment against the protocol."""


@env.command("list")
@_import_option
@_json_option
def list_ids(imports: tuple[str, ...], as_json: bool) -> None:
    """List every known environment id. An id such as `rg:*` is a whole family.

    \b
    Example:
      headrace env list
    """
    import_all(imports)
    ids = headrace.registered()
    click.echo(
        json.dumps(ids) if as_json else "\n".join(ascii(id_)[1:-1] if not id_.isprintable() else id_ for id_ in ids)
    )


@env.command("check")
@click.argument("environment")
@_import_option
@click.option(
    "--action",
    "actions",
    multiple=True,
    metavar="TEXT",
    help=r"Action to use, such as '\boxed{1}'; choose actions that lead far into an episode. May be repeated.",
)
@click.option(
    "--call-timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0.1, 86400.0),
    metavar="SECONDS",
    help="Deadline of each call of the environment.",
)
@click.option("--kwargs", default="{}", metavar="JSON", help="Arguments of the constructor.")
@_json_option
@click.pass_context
def check(
    context: click.Context,
    environment: str,
    imports: tuple[str, ...],
    actions: tuple[str, ...],
    call_timeout: float,
    kwargs: str,
    as_json: bool,
) -> None:
    """Run ENVIRONMENT and print each violation of the protocol. The exit code is 1 if there are any.

    \b
    Example:
      headrace env check example:Countdown --import countdown.py --action '\\boxed{1}' --action '\\boxed{3}'
    """
    try:
        arguments = json.loads(kwargs)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--kwargs is not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise click.UsageError("--kwargs is not a JSON object, such as '{\"terms\": 4}'.")
    problems = check_in_process(
        environment, arguments, actions=actions or DEFAULT_ACTIONS, imports=imports, call_s=call_timeout
    )
    if as_json:
        click.echo(json.dumps([problem._asdict() for problem in problems]))
    else:
        click.echo("\n".join(map(str, problems)) or f"{environment} keeps the protocol.")
    context.exit(1 if problems else 0)
