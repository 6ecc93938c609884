"""``headrace fsck``: check a data directory, and rebuild its projection.

* A sound directory ends with 0, lost records with 5, redundant damage with 6.
"""

from __future__ import annotations

from pathlib import Path

import click

from headrace_orchestrator.cli.output import OK, emit, json_option, note, shared
from headrace_orchestrator.cli.progress import progress
from headrace_orchestrator.console.render import size
from headrace_orchestrator.service.fsck.findings import FsckFinding, FsckReport
from headrace_orchestrator.service.fsck.fsck import check
from headrace_orchestrator.service.fsck.fsck import rebuild as rebuild_projection

LOST, DAMAGED = 5, 6


@click.command(short_help="Check a data directory; rebuild its projection.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--rebuild", is_flag=True, help="First rebuild the projection from the log. The service must be stopped.")
@json_option
@click.pass_context
def fsck(ctx: click.Context, directory: Path, rebuild: bool) -> None:
    """Read everything in the data directory DIR, or in a backup, and list all damage.

    Checks every record, both copies of events, the heads and footers of files, the projection against the log,
    and assets. The service may be running. Nothing is written without --rebuild.

    \b
    Exit codes beside those of `headrace --help`:
      0  all is sound
      5  records are lost; each is named
      6  something is damaged but nothing is lost: another copy, an older head or the log replaces it

    \b
    Examples:
      headrace fsck headrace-data
      headrace fsck --rebuild headrace-data
    """
    if rebuild:
        with progress("Rebuilding") as on_progress:
            count = rebuild_projection(directory, on_progress=on_progress)
        note(f"The projection was rebuilt: {count} trajectories.")
    with progress("Checking") as on_progress:
        report = check(directory, on_progress=on_progress)
    if shared().json:
        emit(report)
    else:
        _print_report(report)
    lost = any(finding.lost for finding in report.findings)
    ctx.exit(LOST if lost else DAMAGED if report.findings else OK)


def _print_report(report: FsckReport) -> None:
    for finding in report.findings:
        click.echo(_line(finding))
    counts = ", ".join(f"{count} {name}" for name, count in report.frames.items())
    note(
        f"{report.files} file{'s' * (report.files != 1)}, {size(report.size_bytes)}: {counts}; {report.assets} assets."
    )
    if report.unfinished_bytes:
        note(f"The last {report.unfinished_bytes} bytes are an unfinished append that was never acknowledged.")
    if report.unprojected_bytes:
        note(f"The projection is {size(report.unprojected_bytes)} behind the log; the next start updates it.")
    count = len(report.findings)
    note(f"{count} finding{'s' * (count > 1)}." if count else "All is sound.")


def _line(finding: FsckFinding) -> str:
    """Format a finding as a line."""
    where = f"{finding.file} at offset {finding.offset}" if finding.file.startswith("log/") else finding.file
    what = f", {finding.size_bytes} bytes" if finding.size_bytes else ""
    kind = f" ({finding.type})" if finding.type else ""
    names = f" [{', '.join(finding.names)}]" if finding.names else ""
    return f"{where}{what}{kind}: {finding.problem}.{names} {finding.cost}"
