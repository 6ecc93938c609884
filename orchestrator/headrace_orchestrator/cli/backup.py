"""``headrace backup`` and ``headrace restore``: copy a data directory, and restore a copy."""

from __future__ import annotations

import time
from pathlib import Path

import click

from headrace_orchestrator.buffer.backup.backup import back_up
from headrace_orchestrator.buffer.backup.restore import restore as restore_backup
from headrace_orchestrator.cli.fsck import LOST
from headrace_orchestrator.cli.output import emit, json_option, note, shared
from headrace_orchestrator.cli.progress import progress
from headrace_orchestrator.console.render import size

Folder = click.Path(path_type=Path, file_okay=False)


@click.command(short_help="Copy a data directory, with the service running or not.")
@click.argument("directory", metavar="DIR", type=Folder)
@click.argument("destination", metavar="DEST", type=Folder)
@json_option
@click.pass_context
def backup(ctx: click.Context, directory: Path, destination: Path) -> None:
    """Copy the data directory DIR into the folder DEST, while its service runs.

    DEST then contains everything that was acknowledged before the command began. Later runs copy only new data. All
    files are synced, read back and compared by digest. An interrupted run leaves the previous copy usable. Ends with 5
    if a damaged part was not copied.

    \b
    Example:
      headrace backup headrace-data /mnt/backup/headrace
    """
    with progress("Copying") as on_progress:
        report = back_up(directory, destination, now_ms=time.time_ns() // 1_000_000, on_progress=on_progress)
    for name in report.damaged_assets:
        note(f"The asset {name} is damaged in {directory}; it was not copied.")
    for name in report.kept_files:
        note(f"{directory}/log/{name} was damaged after an earlier run copied it; the copy keeps the undamaged file.")
    if shared().json:
        emit(report)
    else:
        note(
            f"{destination} contains the log up to offset {report.offset} of {report.file or 'an empty log'}: "
            f"{report.copied_files} of {report.files} files and {report.copied_assets} of {report.assets} assets were "
            f"new, {size(report.copied_bytes)}."
        )
    if report.damaged_assets or report.kept_files:
        ctx.exit(LOST)


@click.command(short_help="Restore a backup into a new data directory.")
@click.argument("source", metavar="BACKUP", type=Folder)
@click.argument("directory", metavar="DIR", type=Folder)
@click.option("--despite-damage", is_flag=True, help="Restore damaged files too; only the damaged records are lost.")
@json_option
@click.pass_context
def restore(ctx: click.Context, source: Path, directory: Path, despite_damage: bool) -> None:
    """Restore BACKUP, written by `headrace backup`, into DIR, which must be missing or empty.

    Every file is compared with its digest. The directory begins a new epoch: workers and learners that have talked to
    its service refuse answers of the old one. Everything acknowledged after the backup is lost. Ends with 5 if a
    damaged part was report.

    \b
    Example:
      headrace restore /mnt/backup/headrace headrace-data && headrace orchestrator --data headrace-data
    """
    with progress("Restoring") as on_progress:
        report = restore_backup(
            source, directory, now_s=int(time.time()), despite_damage=despite_damage, on_progress=on_progress
        )
    if shared().json:
        emit(report)
    else:
        note(
            f"{directory} is ready for a service: {report.files} files and {report.assets} assets, "
            f"{size(report.size_bytes)}."
        )
        for name in report.damaged:
            note(f"{name} is damaged: `headrace fsck {directory}` lists the lost records.")
    if report.damaged:
        ctx.exit(LOST)
