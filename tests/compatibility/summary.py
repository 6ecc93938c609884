"""The summary of a data directory: read without a service, from an export, and from the responses of a service.

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
from tests.compatibility.http_worker import request_bytes, request_json
from tests.compatibility.orchestrator_process import HEADRACE, Orchestrator
from tests.e2e.processes import Processes

LEARNERS = {"trainer": ("after", 1), "ranks": ("ranks-6", 2), "other": ("after", 1)}
"""Learners of the run ``guess``, the session of each, and its number of ranks. The first two left a batch open; the
last one nacked its batch."""

SOFT = frozenset(("epoch", "age_s", "hold_s", "seen_s", "reasons", "attainable", "servers", "weight_sync")) | {
    "learner_doing",
    "learner_doing_s",
    "learner_waiting",
}
"""Fields of responses that change with a restart or over time."""


def summary(data: Path, scratch: Path) -> dict[str, Any]:
    """The whole summary. ``scratch``: a folder for copies, made if missing."""
    shutil.copytree(data, scratch / "served")
    with Processes(scratch / "logs") as processes:
        orchestrator = Orchestrator(processes, scratch / "served")
        orchestrator.start()
        answers = {"served": served(orchestrator.url, data), "redelivered": redelivered(orchestrator.url)}
        orchestrator.end()
    return {"stored": stored(data), "exported": exported(data, scratch / "exported"), **answers}


def frames(data: Path) -> Iterator[Frame]:
    """All frames of an undamaged log."""
    for number in log_files.numbers_in(data / "log"):
        path = log_files.path_of(data / "log", number)
        for item in log_files.LogFile(number, path, path.stat().st_size, None).scan():
            assert isinstance(item, Frame), item
            yield item


def control_events(data: Path) -> list[dict[str, Any]]:
    """The events of the log as plain values, read without the scheduler's types."""
    payloads = (frame.payload for frame in frames(data) if frame.type is FrameType.CONTROL)
    return [event for payload in payloads for event in msgspec.msgpack.decode(payload)]


# Without a service --------------------------------------------------------------------------------------------


def stored(data: Path) -> dict[str, Any]:
    """Everything that ``headrace.open`` reads."""
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
            {**_trajectory(item), "record": _sha256(reader.record(item.id))} for item in reader.trajectories()
        ],
        "batches": [_batch(stored_batch) for stored_batch in reader.batches()],
        "assets": {
            asset.name: len(reader.asset(asset.name)) for item in reader.trajectories() for asset in item.assets
        },
    }


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "run": trajectory.run,
        "group": trajectory.group,
        "episode": trajectory.episode,
        "attempt": trajectory.attempt,
        "status": trajectory.status,
        "versions": [str(version) for version in trajectory.version_range() or ()],
        "rewards": [[turn.reward for turn in segment.turns] for segment in trajectory.segments],
        "agents": [segment.agent for segment in trajectory.segments],
        "token_ids": [_sha256(segment.token_ids.tobytes()) for segment in trajectory.segments],
    }


def _batch(stored_batch: headrace.offline.StoredBatch) -> dict[str, Any]:
    batch = stored_batch.load()
    batch.verify()
    served = [row.served_advantages for row in batch.rows]
    return {
        "id": stored_batch.id,
        "state": stored_batch.state,
        "made": None if stored_batch.made is None else str(stored_batch.made),
        "manifest": msgspec.to_builtins(stored_batch.manifest),
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
    """Responses of a service right after its start on ``data``, without soft fields."""
    api = f"{url}/v1"
    runs: dict[str, Any] = {}
    for run in request_json("GET", f"{api}/runs"):
        path = f"{api}/runs/{run['name']}"
        servers = request_json("GET", f"{path}/servers")
        runs[run["name"]] = {
            "status": _without_soft_fields(request_json("GET", path)),
            "groups": request_json("GET", f"{path}/groups"),
            "servers": [server["address"] for server in servers.get("servers", [])],
            "skipped": servers.get("skipped", []),
            "trajectories": _without_soft_fields(request_json("GET", f"{path}/trajectories?limit=1000")),
        }
    for event in control_events(data):
        if event["type"] == "EvaluationStarted":
            run, id = event["run"], event["evaluation"]
            runs[run].setdefault("evaluations", {})[id] = _without_soft_fields(
                request_json("GET", f"{api}/runs/{run}/evaluations/{id}")
            )
    workers = [worker for worker in request_json("GET", f"{api}/workers") if worker["leased"] or worker["draining"]]
    return {"runs": runs, "workers": {worker["worker"]: _without_soft_fields(worker) for worker in workers}}


def _without_soft_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_soft_fields(item) for name, item in value.items() if name not in SOFT}
    return [_without_soft_fields(item) for item in value] if isinstance(value, list) else value


def redelivered(url: str) -> dict[str, Any]:
    """Batches that the learners get by resuming, with the SHA-256 of each shard."""
    replies = {}
    for learner, (session, shards) in LEARNERS.items():
        request = {"learner": learner, "session": session, "shards": shards}
        reply = request_json("POST", f"{url}/v1/runs/guess/resume", request)
        bodies = {
            batch: [_body(url, batch, {**request, "shard": n}) for n in range(shards)] for batch in reply["batches"]
        }
        replies[learner] = {
            "lost": reply.get("lost", {}),
            "batches": {batch: [_sha256(body) for body in shards_of] for batch, shards_of in bodies.items()},
        }
    return replies


def _body(url: str, batch: str, request: dict[str, Any]) -> bytes:
    fields = {"request": f"resume-{batch}", "batch": batch}
    return request_bytes("POST", f"{url}/v1/runs/guess/pull", {**request, **fields})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def differences(expected: Any, actual: Any, where: str = "") -> list[str]:
    """Differences from the expected values. Additional fields are allowed."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        missing = [f"{where}.{name} is missing" for name in expected if name not in actual]
        both = [name for name in expected if name in actual]
        return missing + [
            line for name in both for line in differences(expected[name], actual[name], f"{where}.{name}")
        ]
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{where}[{number}]")]
    return [] if expected == actual else [f"{where} is {actual!r}, not {expected!r}"]
