"""The learner of examples/train_torch.py: its loss against a direct computation, and the real thing killed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.vllm_server import NAME
from headrace import Client
from tests.components import VLLM_PYTHON
from tests.e2e.processes import ROOT, Process, Processes, answers, free_port, wait_for
from tests.vllm.server import Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

TOKENS = 5
LEARNER_S = 180.0
"""A learner imports torch, which takes a while on a busy machine."""


def loss_of(question: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [str(VLLM_PYTHON), str(Path(__file__).with_name("torch_loss.py"))],
        input=json.dumps(question),
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=LEARNER_S,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def direct(question: dict[str, Any]) -> dict[str, Any]:
    """The same by the definition, token by token, in float64, with the gradient worked out by hand."""
    table, cap, bonus = np.array(question["table"]), question["cap"], question["bonus"]
    logprobs = table - np.log(np.exp(table).sum(1, keepdims=True))
    gradient, ratios, entropies, total = np.zeros_like(table), [], [], 0.0
    for row in question["rows"]:
        for at in np.flatnonzero(row["sampled"]):
            before, token = row["token_ids"][at - 1], row["token_ids"][at]
            row_logprobs, probabilities = logprobs[before], np.exp(logprobs[before])
            entropy = -(probabilities * row_logprobs).sum()
            ratio = np.exp(row_logprobs[token] - row["logprobs"][at])
            weight = min(ratio, cap) * row["advantages"][at]
            total -= weight * row_logprobs[token] + bonus * entropy
            gradient[before] -= weight * (np.eye(TOKENS)[token] - probabilities)
            gradient[before] += bonus * probabilities * (row_logprobs + entropy)
            ratios.append(ratio)
            entropies.append(entropy)
    capped = np.mean(np.array(ratios) > cap)
    means = {"ratio": np.mean(ratios), "capped": capped, "entropy": np.mean(entropies)}
    return {"total": total / len(ratios), "gradient": (gradient / len(ratios)).tolist(), **means}


def test_the_loss_and_its_gradient_are_those_of_a_direct_computation() -> None:
    random = np.random.default_rng(0)
    rows = []
    for length in (9, 4, 12):  # padded to one width
        sampled = (random.random(length) < 0.5).astype(int)
        sampled[0], sampled[-1] = 0, 1
        rows.append(
            {
                "token_ids": random.integers(0, TOKENS, length).tolist(),
                "sampled": sampled.tolist(),
                "logprobs": (-3 * random.random(length) * sampled).tolist(),
                "advantages": (random.normal(size=length) * sampled).tolist(),
            }
        )
    table = random.normal(size=(TOKENS, TOKENS)).tolist()
    question = {"table": table, "rows": rows, "cap": 1.5, "bonus": 0.1}
    found, expected = loss_of(question), direct(question)
    assert 0 < expected["capped"] < 1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture
def service(tmp_path: Path, vllm: Vllm) -> Iterator[tuple[Processes, str]]:
    """An orchestrator and a worker that knows the game; the address of the first."""
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


async def test_a_learner_that_is_killed_goes_on_at_the_right_version(
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
    assert await vllm.version() == "0.4"
    trained = {step["version"]: step["batch"] for step in printed(learner)}
    assert [version for version in trained if version != "0.2"] == ["0.1", "0.3", "0.4"]  # 0.2: killed before it spoke?
    assert len(set(trained.values())) == len(trained)
    assert {found.name for found in checkpoints.iterdir()} == {"0.2", "0.3", "0.4"}
