"""A campaign's report for people, and for scripts."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.campaign import ANY_MOMENT, Report
from tests.chaos.roles import PHASES


def show(report: Report, console: Console) -> None:
    """Kills by process and phase, what was checked, what is wrong."""
    table = Table("process", "died while", "kills", title=f"{report.total} kills in {report.duration_s:.0f} s")
    for role, phases in PHASES.items():
        for phase in (*phases, ANY_MOMENT):
            if count := report.kills[role, phase]:
                table.add_row(role, phase, str(count))
        table.add_section()
    console.print(table)
    found = report.findings
    console.print(f"{report.cuts} power cuts took {report.cut_names} names and {report.cut_bytes:,} bytes not synced")
    console.print(
        f"checked: {found.records} acknowledged records, {found.batches} batches ({found.redelivered} served more than "
        f"once), {found.acks} acks, {found.assets} assets; {len(found.wrong)} violations"
    )
    for line in found.wrong[:20]:
        console.print(f"  {line}", style="red")


def as_json(report: Report) -> str:
    """The same, as one line."""
    found = report.findings
    content: dict[str, Any] = {
        "kills": {f"{role} {phase}": count for (role, phase), count in sorted(report.kills.items())},
        "cuts": report.cuts,
        "cut_names": report.cut_names,
        "cut_bytes": report.cut_bytes,
        "records": found.records,
        "batches": found.batches,
        "redelivered": found.redelivered,
        "acks": found.acks,
        "assets": found.assets,
        "wrong": found.wrong,
        "duration_s": round(report.duration_s, 1),
    }
    return json.dumps(content)
