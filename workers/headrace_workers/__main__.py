"""``python -m headrace_workers``: the same as ``headrace worker``."""

import sys

import click

from headrace.errors import HeadraceError
from headrace_workers.cli import worker

if __name__ == "__main__":
    try:
        worker.main(prog_name="python -m headrace_workers")
    except HeadraceError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
