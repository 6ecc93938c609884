"""Storage options of every command that starts an orchestrator.

* By default nothing is deleted, and only a full disk stops admission.
* A command that starts the orchestrator as a child passes the options on unchanged.
* The environment can set the options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from headrace.bounds import MAX_EXACT
from headrace.server.option_types import SecondsRange
from headrace_orchestrator.buffer.retention_rules import RetentionRules

_OPTIONS: tuple[tuple[str, click.IntRange | click.FloatRange, str], ...] = (
    (
        "--keep-age-s",
        SecondsRange(0),
        "Delete files of the log whose newest record is older, in seconds.",
    ),
    (
        "--keep-trajectories",
        click.IntRange(0, MAX_EXACT),
        "Delete the oldest files while so many trajectories remain.",
    ),
    ("--keep-bytes", click.IntRange(0, MAX_EXACT), "Delete the oldest files while this many bytes of the log remain."),
    (
        "--max-held-bytes",
        click.IntRange(1, MAX_EXACT),
        "Maximum bytes of all runs' groups in flight; above it no group is admitted.",
    ),
    (
        "--max-disk-bytes",
        click.IntRange(1, MAX_EXACT),
        "Most bytes of log and assets; above it no group is admitted.",
    ),
)


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command takes them as keyword arguments, None by default."""
    for name, kind, text in reversed(_OPTIONS):
        variable = "HEADRACE_" + name.removeprefix("--").replace("-", "_").upper()
        command = click.option(name, type=kind, default=None, envvar=variable, show_envvar=True, help=text)(command)
    return command


def storage_settings(
    *,
    keep_age_s: float | None,
    keep_trajectories: int | None,
    keep_bytes: int | None,
    max_held_bytes: int | None,
    max_disk_bytes: int | None,
) -> dict[str, Any]:
    """The fields of ``Settings`` that the options set."""
    retention = RetentionRules(age_s=keep_age_s, trajectories=keep_trajectories, size_bytes=keep_bytes)
    return {"retention": retention, "max_held_bytes": max_held_bytes, "max_disk_bytes": max_disk_bytes}


def storage_arguments(options: dict[str, Any]) -> list[str]:
    """The same options as arguments of a child's command line."""
    return [
        part
        for name, value in options.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", f"{value}")
    ]
