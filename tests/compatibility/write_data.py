"""``python -m tests.compatibility.write_data FOLDER``: writes the data of the version that is checked out.

* Real processes write it: orchestrator, workers and policy servers of the command line; learners use the client. Plain
  requests stand for a worker where a real one would leave the outcome to chance.
* It ends with an error unless every kind of event is there, three files of the log, and open batches.
* The data hold paths below FOLDER: choose one that means nothing, such as /var/lib/headrace.

It makes ``FOLDER/VERSION.tar.xz``: a data directory, a backup of it, and ``expected.json``, which is what this version
reads in both. Put the archive beside this file. It takes three minutes, since the log's files end by their age.
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
from tests.compatibility.summary import control_records, summary
from tests.e2e.processes import Process, Processes, answers, free_port, wait_for

KEEP_AGE_S = 240
"""A file of the log ends after a quarter of this. None is deleted before all of it."""

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
    """Write everything into a new folder; gives the archive."""
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
    scenario.go_on_after_the_backup()
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
    kinds = {record["type"] for record in control_records(data)}
    assert kinds >= KINDS, f"no record of {sorted(KINDS - kinds)}"


def _require_open_batches(expected: dict[str, Any]) -> None:
    for found in expected.values():
        left = found["redelivered"]
        assert all(bool(left[name]["batches"]) == (name != "other") for name in left), f"other batches are open: {left}"


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
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that is not there yet")
    sys.stdout.write(f"{write(parser.parse_args().folder)}\n")
