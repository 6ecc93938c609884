"""A campaign's report as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.campaign import ANY_MOMENT, Report
from tests.chaos.roles import PHASES


def print_report(report: Report, console: Console) -> None:
    """Print kills by process and phase, the number of checks, and the violations."""
    table = Table("process", "died while", "kills", title=f"{report.total} kills in {report.duration_s:.0f} s")
    for role, phases in PHASES.items():
        for phase in (*phases, ANY_MOMENT):
            if count := report.kills[role, phase]:
                table.add_row(role, phase, str(count))
        table.add_section()
    console.print(table)
    findings = report.findings
    console.print(f"a waiting client was told of {report.told_losses} losses of the log's writer")
    console.print(
        f"{report.cuts} power cuts lost {report.cut_names} names and {report.cut_bytes:,} bytes that were not synced"
    )
    console.print(
        f"checked: {findings.records} acknowledged records, {findings.batches} batches ({findings.redelivered} served "
        f"more than once), {findings.acks} acks, {findings.assets} assets; {len(findings.violations)} violations"
    )
    for line in findings.violations[:20]:
        console.print(f"  {line}", style="red")


def as_json(report: Report) -> str:
    """The report as one line of JSON."""
    findings = report.findings
    content: dict[str, Any] = {
        "kills": {f"{role} {phase}": count for (role, phase), count in sorted(report.kills.items())},
        "cuts": report.cuts,
        "cut_names": report.cut_names,
        "cut_bytes": report.cut_bytes,
        "told_losses": report.told_losses,
        "records": findings.records,
        "batches": findings.batches,
        "redelivered": findings.redelivered,
        "acks": findings.acks,
        "assets": findings.assets,
        "violations": findings.violations,
        "duration_s": round(report.duration_s, 1),
    }
    return json.dumps(content)
