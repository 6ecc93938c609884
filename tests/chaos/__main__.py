"""Kill orchestrator, workers and learner repeatedly, cut the power, check everything, and print a report.

Ends with status 1 on any violation. With --fault the orchestrator has that fault, and violations are expected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.chaos.campaign import Campaign, CampaignSettings
from tests.chaos.faults import FAULTS
from tests.chaos.report import as_json, print_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=240, help="total number of kills (default 240)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    parser.add_argument("--pace", type=float, default=2.0, help="work between kills; 1 is about a second (default 2)")
    parser.add_argument("--within-s", type=float, default=480.0, help="seconds for the kills (default 480)")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: a temporary one)")
    parser.add_argument("--fault", default="", choices=["", *FAULTS], help="fault of the orchestrator")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as scratch:
        report = Campaign(options.folder or Path(scratch), campaign_settings(options), log_progress).run()
    if options.json:
        sys.stdout.write(as_json(report) + "\n")
    else:
        print_report(report, Console())
    return 1 if report.findings.violations else 0


def campaign_settings(options: argparse.Namespace) -> CampaignSettings:
    """The settings of a campaign. An orchestrator with a fault dies in slow syncs, each time with a power cut that
    loses all unsynced data: that shows the fault if a response was sent before."""
    if not options.fault:
        return CampaignSettings(kills=options.kills, seed=options.seed, pace=options.pace, within_s=options.within_s)
    return CampaignSettings(
        kills=options.kills,
        seed=options.seed,
        within_s=options.within_s,
        phases={"orchestrator": ("syncing", "syncing an ack")},
        any_moment=0.0,
        pace=0.3,
        log_file_bytes=24 << 10,
        cuts=1.0,
        surviving_shares=(0.0,),
        disk_failures=0.0,
        sync_s=(0.2,),
        fault=options.fault,
    )


def log_progress(line: str) -> None:
    sys.stderr.write(f"chaos: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
