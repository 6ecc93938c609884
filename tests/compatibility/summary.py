"""Summary of a data directory, as a build reads it: without a service, in an export, and as a service on it answers.

The version that wrote the data and the version that is tested run the same functions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace.store import log_files
from headrace.store.log_format import Frame, FrameType
from headrace.trajectory import Trajectory
from tests.compatibility.http_worker import ask, ask_for_bytes
from tests.compatibility.orchestrator_process import HEADRACE, Orchestrator
from tests.e2e.processes import Processes

LEARNERS = {"trainer": ("after", 1), "ranks": ("ranks-6", 2), "other": ("after", 1)}
"""Learners of the run ``guess``, the session in which each asks, and its ranks. The first two left a batch open, and
the last one gave it back."""

SOFT = frozenset(("epoch", "age_s", "hold_s", "seen_s", "reasons", "attainable", "servers", "weight_sync")) | {
    "learner_doing",
    "learner_doing_s",
    "learner_waiting",
}
"""Fields of answers that a restart, or the time, changes."""


def summary(data: Path, scratch: Path) -> dict[str, Any]:
    """All of it. ``scratch``: a folder for copies, made if missing."""
    shutil.copytree(data, scratch / "served")
    with Processes(scratch / "logs") as processes:
        orchestrator = Orchestrator(processes, scratch / "served")
        orchestrator.start()
        answers = {"served": served(orchestrator.url, data), "redelivered": redelivered(orchestrator.url)}
        orchestrator.end()
    return {"stored": stored(data), "exported": exported(data, scratch / "exported"), **answers}


def frames(data: Path) -> Iterator[Frame]:
    """All frames of the log, which is sound."""
    for number in log_files.numbers_in(data / "log"):
        path = log_files.path_of(data / "log", number)
        for item in log_files.LogFile(number, path, path.stat().st_size, None).scan():
            assert isinstance(item, Frame), item
            yield item


def control_records(data: Path) -> list[dict[str, Any]]:
    """The events of the log as plain values, read without the scheduler's types."""
    found = (frame.payload for frame in frames(data) if frame.type is FrameType.CONTROL)
    return [record for payload in found for record in msgspec.msgpack.decode(payload)]


# Without a service --------------------------------------------------------------------------------------------


def stored(data: Path) -> dict[str, Any]:
    """What ``headrace.open`` gives."""
    reader = headrace.open(data, strict=True)
    return {
        "runs": [
            {
                "name": run.name,
                "spec": run.spec,
                "closed": run.closed,
                "version": str(run.version),
                "trajectories": run.trajectories,
                "batches": run.batches,
            }
            for run in reader.runs()
        ],
        "trajectories": [
            {**_trajectory(found), "record": _sha256(reader.record(found.id))} for found in reader.trajectories()
        ],
        "batches": [_batch(found) for found in reader.batches()],
        "assets": {
            asset.name: len(reader.asset(asset.name)) for found in reader.trajectories() for asset in found.assets
        },
    }


def _trajectory(found: Trajectory) -> dict[str, Any]:
    return {
        "id": found.id,
        "run": found.run,
        "group": found.group,
        "episode": found.episode,
        "attempt": found.attempt,
        "status": found.status,
        "versions": [str(version) for version in found.version_range() or ()],
        "rewards": [[turn.reward for turn in segment.turns] for segment in found.segments],
        "agents": [segment.agent for segment in found.segments],
        "token_ids": [_sha256(segment.token_ids.tobytes()) for segment in found.segments],
    }


def _batch(found: headrace.offline.StoredBatch) -> dict[str, Any]:
    batch = found.load()
    batch.verify()
    served = [row.served_advantages for row in batch.rows]
    return {
        "id": found.id,
        "state": found.state,
        "made": None if found.made is None else str(found.made),
        "manifest": msgspec.to_builtins(found.manifest),
        "rows": [row.trajectory.id for row in batch.rows],
        "bins": [row.bin for row in batch.rows],
        "returns": [row.returns.tolist() for row in batch.rows],
        "advantages": [None if advantages is None else advantages.tolist() for advantages in served],
    }


def exported(data: Path, folder: Path) -> list[dict[str, Any]]:
    """The lines of ``headrace export --format jsonl``."""
    subprocess.run([HEADRACE, "export", data, folder, "--format", "jsonl"], check=True, capture_output=True)
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().splitlines()]


# With a service -----------------------------------------------------------------------------------------------


def served(url: str, data: Path) -> dict[str, Any]:
    """What a service answers right after its start, but for what is soft; ``data`` is what it started on."""
    api = f"{url}/v1"
    runs: dict[str, Any] = {}
    for run in ask("GET", f"{api}/runs"):
        path = f"{api}/runs/{run['name']}"
        servers = ask("GET", f"{path}/servers")
        runs[run["name"]] = {
            "status": _hard(run),
            "groups": ask("GET", f"{path}/groups"),
            "servers": [server["address"] for server in servers.get("servers", [])],
            "skipped": servers.get("skipped", []),
            "trajectories": _hard(ask("GET", f"{path}/trajectories?limit=1000")),
        }
    for record in control_records(data):
        if record["type"] == "EvaluationStarted":
            run, id = record["run"], record["evaluation"]
            runs[run].setdefault("evaluations", {})[id] = _hard(ask("GET", f"{api}/runs/{run}/evaluations/{id}"))
    workers = [worker for worker in ask("GET", f"{api}/workers") if worker["leased"] or worker["draining"]]
    return {"runs": runs, "workers": {worker["worker"]: _hard(worker) for worker in workers}}


def _hard(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hard(item) for name, item in value.items() if name not in SOFT}
    return [_hard(item) for item in value] if isinstance(value, list) else value


def redelivered(url: str) -> dict[str, Any]:
    """The batches that learners get which left some open, and the SHA-256 of each of their shards."""
    found = {}
    for learner, (session, shards) in LEARNERS.items():
        request = {"learner": learner, "session": session, "shards": shards}
        reply = ask("POST", f"{url}/v1/runs/guess/resume", request)
        bodies = {
            batch: [_body(url, batch, {**request, "shard": n}) for n in range(shards)] for batch in reply["batches"]
        }
        found[learner] = {
            "lost": reply.get("lost", {}),
            "batches": {batch: [_sha256(body) for body in shards_of] for batch, shards_of in bodies.items()},
        }
    return found


def _body(url: str, batch: str, request: dict[str, Any]) -> bytes:
    named = {"request": f"resume-{batch}", "batch": batch}
    return ask_for_bytes("POST", f"{url}/v1/runs/guess/pull", {**request, **named})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Where what was found is not what was expected. It may have fields besides."""
    if isinstance(expected, dict) and isinstance(found, dict):
        gone = [f"{where}.{name} is missing" for name in expected if name not in found]
        both = [name for name in expected if name in found]
        return gone + [line for name in both for line in differences(expected[name], found[name], f"{where}.{name}")]
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{where}[{number}]")]
    return [] if expected == found else [f"{where} is {found!r}, not {expected!r}"]
