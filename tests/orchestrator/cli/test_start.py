"""The start of the command line: a command imports what it needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from headrace_orchestrator.cli.app import COMMANDS, cli

HEAVY = [
    *("aiohttp", "asyncio", "http.client", "jinja2", "numpy", "pydantic", "rich", "sqlite3", "ssl", "structlog"),
    *("uvicorn", "headrace.client", "headrace_orchestrator.service", "headrace_workers"),
]
"""Modules that take long to import: numeric arrays, models, servers, clients, tables."""

PROGRAM = """
import sys
sys.argv = ["headrace", *{arguments!r}]
from headrace_orchestrator.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"], ["version", "--help"]])
def test_the_start_imports_nothing_heavy(arguments: list[str]) -> None:
    program = PROGRAM.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.split() == []
    assert "headrace" in done.stdout


def test_a_command_is_imported_when_it_is_used() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_a_command_whose_package_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "top", "no_such_package.cli:top")
    command = cli.get_command(click.Context(cli), "top")
    assert command is not None
    assert "no_such_package" not in (command.short_help or "")
    assert "pip install 'headrace[server]'" in (command.short_help or "")
