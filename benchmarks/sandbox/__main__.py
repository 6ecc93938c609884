"""Measures sandboxes with all limits on, beside a bare interpreter and peers.

make bench-sandbox                  # takes minutes; rows of missing parts name them
make bench-sandbox ARGS=speed       # one part: speed, rate, footprint, peers

Compared values are measured in turns in one run, so that other work on the machine slows both.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.sandbox import footprint, peers, rate, speed
from benchmarks.table import Row, missing, report
from headrace.errors import SandboxFailure

PARTS = {"speed": speed.rows, "rate": rate.rows, "footprint": footprint.rows, "peers": peers.rows}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"No part {', '.join(unknown)}. There are: {', '.join(PARTS)}.")
    report("sandbox", [row for name in wanted for row in rows(name)])


def rows(name: str) -> list[Row]:
    """The rows of one part, or one row that names the missing program."""
    try:
        return asyncio.run(PARTS[name]())
    except SandboxFailure as error:
        if error.kind != "runtime-missing":
            raise
        return [missing(name, str(error))]


if __name__ == "__main__":
    main()
