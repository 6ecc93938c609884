"""The learner of examples/train_torch.py after a kill: it continues at the right version, and reuses no batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import NAME
from headrace import Client
from tests.components import VLLM_PYTHON
from tests.e2e.processes import ROOT, Process, Processes, answers, free_port, wait_for
from tests.vllm.server import Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

LEARNER_S = 180.0
"""A learner imports torch, which takes a while on a busy machine."""


@pytest.fixture
def service(tmp_path: Path, vllm: Vllm) -> Iterator[tuple[Processes, str]]:
    """Start an orchestrator and a worker that imports the game; yield the orchestrator's address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Processes(tmp_path / "logs") as processes:
        processes.orchestrator(tmp_path / "data", port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        worker = processes.worker("worker", url, vllm.address)
        worker.command += ["--import", str(ROOT / "examples" / "kinds.py")]
        worker.start()
        yield processes, url


def printed(learner: Process) -> list[dict[str, Any]]:
    lines = learner.log.read_text().splitlines() if learner.log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


async def test_a_killed_learner_continues_at_the_right_version(
    tmp_path: Path, vllm: Vllm, service: tuple[Processes, str]
) -> None:
    processes, url = service
    spec = json.loads((ROOT / "examples" / "kinds.json").read_text())
    policy = {"renderer": "template", "tokenizer": str(vllm.model), "endpoints": [vllm.address], "model": NAME}
    checkpoints = tmp_path / "checkpoints"
    learner = processes.add(
        "learner",
        str(ROOT / "examples" / "train_torch.py"),
        *("--url", url, "--model", str(vllm.model)),
        *("--checkpoints", str(checkpoints), "--versions", "4", "--json"),
        python=str(VLLM_PYTHON),
        OMP_NUM_THREADS="1",
    )
    with Client(url, keepalive=False) as client:
        client.create_run({**spec, "batch_size": 4, "policy": policy})
        learner.start()
        # It dies between checkpoint and ack, or soon after.
        wait_for("version 0.2 is saved", (checkpoints / "0.2").exists, LEARNER_S, every_s=0.001)
        learner.kill()
        learner.start()
        wait_for("the learner has ended", lambda: not learner.running, LEARNER_S)
        assert learner.exit_code == 0, learner.tail()
        assert client.run("kinds").version == "0.4"
        wait_for("vLLM serves it", lambda: client.servers("kinds").servers[0].version == "0.4")
    assert await vllm.version() == "kinds@0.4"
    trained = {step["version"]: step["batch"] for step in printed(learner)}
    assert [version for version in trained if version != "0.2"] == ["0.1", "0.3", "0.4"]  # 0.2: killed before it spoke?
    assert len(set(trained.values())) == len(trained)
    assert {found.name for found in checkpoints.iterdir()} == {"0.2", "0.3", "0.4"}
