"""Storage options of the commands that start an orchestrator."""

from __future__ import annotations

from typing import Any

import click
from click.testing import CliRunner

from headrace_orchestrator.buffer.retention_rules import KEEP_ALL, RetentionRules
from headrace_orchestrator.cli.storage_options import storage_arguments, storage_options, storage_settings

GIVEN = ["--keep-age-s", "3600", "--keep-bytes", "1000000", "--max-disk-bytes", "2000000"]


def taken(arguments: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command with these arguments; returns the values of its options."""
    values: dict[str, Any] = {}
    command = click.command()(storage_options(lambda **options: values.update(options)))
    result = CliRunner().invoke(command, arguments, env=environment)
    assert result.exit_code == 0, result.output
    return values


def test_by_default_nothing_is_deleted_and_only_a_full_disk_stops_admission():
    assert storage_settings(**taken([])) == {"retention": KEEP_ALL, "max_held_bytes": None, "max_disk_bytes": None}
    assert storage_arguments(taken([])) == []


def test_options_become_settings():
    settings = storage_settings(**taken(GIVEN))
    assert settings["retention"] == RetentionRules(age_s=3600, size_bytes=1_000_000)
    assert settings["max_disk_bytes"] == 2_000_000


def test_a_child_gets_the_options_unchanged():
    assert taken(storage_arguments(taken(GIVEN))) == taken(GIVEN)


def test_the_environment_can_set_the_options():
    assert taken([], {"HEADRACE_KEEP_TRAJECTORIES": "500"})["keep_trajectories"] == 500
