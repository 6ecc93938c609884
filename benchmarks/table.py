"""Table that every benchmark prints and saves.

* A row compares our figure with another one measured in the same run; only the ratio is meaningful.
* ``reach`` is the ratio to reach, and ``ok`` is true if it was reached. A missed goal is not an error.
* Work that needs a part that is not installed has a row with the reason.
* ``build/bench/NAME.json`` has the same rows, the machine and the date.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path("build/bench")


@dataclass(frozen=True)
class Row:
    """A comparison. ``better`` tells whether a higher or a lower ratio ``ours / theirs`` is better; ``aim`` is a
    further goal. A figure that could not be measured is None, and ``against`` gives the reason."""

    work: str
    ours: float | None
    unit: str
    against: str
    theirs: float | None
    reach: float
    better: Literal["higher", "lower"]
    aim: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.theirs is None else self.ours / self.theirs

    @property
    def ok(self) -> bool:
        return self.ratio is not None and (
            self.ratio >= self.reach if self.better == "higher" else self.ratio <= self.reach
        )


def missing(work: str, reason: str) -> Row:
    """Make the row of work that needs a part that is not installed. ``reason``: the part and how to install it."""
    return Row(work, None, "", reason, None, 1.0, "higher")


def machine() -> dict[str, str | int | float]:
    """Describe this machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": f"{platform.python_version()} ({_build()})",
        "load_1min": round(os.getloadavg()[0], 1),
    }


def report(name: str, rows: list[Row]) -> None:
    """Print the rows as a table and save them as ``build/bench/NAME.json``."""
    host, date = machine(), datetime.now(UTC).isoformat(timespec="seconds")
    caption = ", ".join(f"{key} {value}" for key, value in host.items())
    table = Table(title=f"{name} · {date}", caption=caption, title_justify="left", caption_justify="left")
    numbers = ("ours", "theirs", "ratio", "reach", "aim")
    for column in ("work", "ours", "unit", "against", "theirs", "ratio", "reach", "aim", "ok"):
        table.add_column(column, justify="right" if column in numbers else "left")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        table.add_row(
            row.work,
            _number(row.ours),
            row.unit,
            row.against,
            _number(row.theirs),
            "–" if row.ratio is None else f"{row.ratio:.3g}",
            f"{sign} {row.reach:g}",
            "" if row.aim is None else f"{row.aim:g}",
            "–" if row.ratio is None else "yes" if row.ok else "NO",
        )
    Console(width=160).print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = [{**asdict(row), "ratio": row.ratio, "ok": row.ok} for row in rows]
    text = json.dumps({"name": name, "date": date, "machine": host, "rows": results}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _build() -> str:
    """Return where the interpreter's code is: in a shared library it is slower."""
    maps = Path("/proc/self/maps")
    return "shared library" if maps.exists() and "libpython" in maps.read_text() else "static"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
