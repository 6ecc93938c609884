"""``python -m tests.compatibility.write_data FOLDER``: writes the data of the version that is checked out.

* Real processes write it: orchestrator, workers and policy servers of the command line; learners use the client. A
  worker made of plain requests is used where the outcome of a real one would be random.
* It fails unless the log has every kind of event, three files, and open batches.
* The data contain paths below FOLDER: choose a neutral one, such as /var/lib/headrace.

It makes ``FOLDER/VERSION.tar.xz``: a data directory, a backup of it, and ``expected.json``, the content that this
version reads from both. Put the archive beside this file. It takes three minutes, because files of the log end by age.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace import Client
from headrace_workers.tiny_policy.adapters import write_adapter
from headrace_workers.tiny_policy.model import neutral_weights
from tests.compatibility import run_specs
from tests.compatibility.orchestrator_process import HEADRACE, Orchestrator
from tests.compatibility.scenario import Scenario
from tests.compatibility.summary import control_events, summary
from tests.e2e.processes import Process, Processes, answers, free_port, wait_for

KEEP_AGE_S = 240
"""Seconds that records are kept. A file of the log is sealed after a quarter of this."""

KINDS = frozenset(
    [
        "AttemptCancelled",
        "AttemptEnded",
        "BatchAcked",
        "BatchDissolved",
        "BatchLeased",
        "BatchReleased",
        "Dispatched",
        "EvaluationEnded",
        "EvaluationStarted",
        "GroupAdmitted",
        "GroupCut",
        "GroupRetired",
        "MemberAdded",
        "PrioritiesSet",
        "RunClosed",
        "RunCreated",
        "ServerAdded",
        "ServerDrained",
        "ServerRemoved",
        "SessionStarted",
        "ShardFetched",
        "TaskQuarantined",
        "VersionAnnounced",
        "WeightsLoaded",
        "WorkerDraining",
    ]
)
"""Kinds of events that 0.1.0 stores, by their tags."""


def write(folder: Path) -> Path:
    """Write everything into a new folder; returns the archive."""
    folder.mkdir(parents=True)
    with Processes(folder / "logs") as processes:
        _play(processes, folder)
    _require_everything(folder / "data")
    subprocess.run([HEADRACE, "restore", folder / "backup", folder / "restored"], check=True)
    expected = {
        "data": summary(folder / "data", folder / "of-data"),
        "backup": summary(folder / "restored", folder / "of-backup"),
    }
    _require_open_batches(expected)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    return _pack(folder)


def _play(processes: Processes, folder: Path) -> None:
    addresses = {pool: _policy_server(processes, pool) for pool in run_specs.POOLS}
    for name in run_specs.ADAPTERS:
        write_adapter(folder / "weights" / name, neutral_weights())
    orchestrator = Orchestrator(processes, folder / "data", "--keep-age-s", str(KEEP_AGE_S))
    orchestrator.start()
    with Client(orchestrator.url, keepalive=False) as client:
        for spec in run_specs.all_specs(addresses, folder / "weights"):
            client.create_run(spec)
    workers = [_worker(processes, orchestrator.url, f"{pool}-1", pool, addresses[pool]) for pool in run_specs.POOLS]
    workers.append(_worker(processes, orchestrator.url, "default-2", "default", addresses["default"]))
    scenario = Scenario(orchestrator.url, addresses, folder / "weights")
    scenario.first_file()
    _wait_for_file(folder, 2)
    orchestrator.kill()
    orchestrator.start()
    scenario.second_file()
    _wait_for_file(folder, 3)
    scenario.third_file()
    for worker in workers:
        worker.end()
    scenario.leave_open()
    subprocess.run([HEADRACE, "backup", folder / "data", folder / "backup"], check=True)
    scenario.continue_after_the_backup()
    orchestrator.end()


def _policy_server(processes: Processes, pool: str) -> str:
    port = free_port()
    processes.add(f"policy-{pool}", "tiny-policy", "--port", str(port), python=str(HEADRACE)).start()
    address = f"http://127.0.0.1:{port}"
    wait_for(f"the policy server of pool {pool}", lambda: answers(f"{address}/health"))
    return address


def _worker(processes: Processes, url: str, name: str, pool: str, policy: str) -> Process:
    return processes.add(
        name,
        *("worker", "--orchestrator", url, "--name", name, "--pool", pool, "--slots", "4"),
        *("--policy-endpoint", policy, "--import", "tests.compatibility.environments"),
        python=str(HEADRACE),
    ).start()


def _wait_for_file(folder: Path, number: int) -> None:
    wait_for(f"file {number} of the log", (folder / "data" / "log" / f"{number:08d}.log").exists, KEEP_AGE_S / 2)


def _require_everything(data: Path) -> None:
    files = sorted(path.name for path in (data / "log").iterdir())
    assert files == ["00000001.log", "00000002.log", "00000003.log"], f"the log has other files: {files}"
    kinds = {event["type"] for event in control_events(data)}
    assert kinds >= KINDS, f"no event of {sorted(KINDS - kinds)}"


def _require_open_batches(expected: dict[str, Any]) -> None:
    for content in expected.values():
        learners = content["redelivered"]
        is_expected = all(bool(learners[name]["batches"]) == (name != "other") for name in learners)
        assert is_expected, f"other batches are open: {learners}"


def _pack(folder: Path) -> Path:
    archive = folder / f"{version('headrace')}.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        for name in ("data", "backup", "expected.json"):
            packed.add(folder / name, arcname=name, filter=_without_owner)
    return archive


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    sys.stdout.write(f"{write(parser.parse_args().folder)}\n")
