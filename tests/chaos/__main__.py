"""Kill orchestrator, workers and learner again and again, cut the power, check everything, print what happened.

Ends with status 1 on any violation. With --mutant the orchestrator has a fault, and violations are what is expected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.chaos.campaign import Campaign, Course
from tests.chaos.mutants import MUTANTS
from tests.chaos.table import as_json, show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=240, help="kills in all (default 240)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that chance decides here (default 0)")
    parser.add_argument("--pace", type=float, default=2.0, help="work between kills, 1 is about a second (default 2)")
    parser.add_argument("--within-s", type=float, default=480.0, help="seconds to kill in (default 480)")
    parser.add_argument("--folder", type=Path, help="keep all files here (default: a folder that is removed)")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="give the orchestrator this fault")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as scratch:
        report = Campaign(given.folder or Path(scratch), course(given), say).run()
    if given.json:
        sys.stdout.write(as_json(report) + "\n")
    else:
        show(report, Console())
    return 1 if report.findings.wrong else 0


def course(given: argparse.Namespace) -> Course:
    """A mutant's orchestrator dies in slow syncs, each time with the power and all that was not synced: there its fault
    shows, if its answer came out before."""
    if not given.mutant:
        return Course(kills=given.kills, seed=given.seed, pace=given.pace, within_s=given.within_s)
    return Course(
        kills=given.kills,
        seed=given.seed,
        within_s=given.within_s,
        phases={"orchestrator": ("syncing", "syncing an ack")},
        any_moment=0.0,
        pace=0.3,
        log_file_bytes=24 << 10,
        cuts=1.0,
        reached=(0.0,),
        refusals=0.0,
        sync_s=(0.2,),
        mutant=given.mutant,
    )


def say(line: str) -> None:
    sys.stderr.write(f"chaos: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
