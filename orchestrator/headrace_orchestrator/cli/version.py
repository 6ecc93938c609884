"""``headrace version``: print the versions of Headrace and of what it runs on."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed

import click

from headrace.common.formats import SCHEMA
from headrace_orchestrator.cli.output import emit, facts, json_option, shared


@click.command()
@json_option
def version() -> None:
    """Print the version.

    \b
    Example:
      headrace version --json
    """
    versions = {
        "headrace": installed("headrace"),
        "schema": str(SCHEMA),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if shared().json:
        emit(versions)
    else:
        facts(versions)
