"""``headrace version``."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed

import click

from headrace.trajectory import SCHEMA
from headrace_orchestrator.cli.output import emit, facts, json_option, shared


@click.command()
@json_option
def version() -> None:
    """Print the version.

    \b
    Example:
      headrace version --json
    """
    found = {
        "headrace": installed("headrace"),
        "schema": str(SCHEMA),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if shared().json:
        emit(found)
    else:
        facts(found)
