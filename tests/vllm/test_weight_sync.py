"""The real vLLM gets new weights from the orchestrator, under episodes that a worker plays on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_model import WEIGHTS, write_model
from headrace.trajectory import Trajectory
from headrace.wire import messages
from tests.orchestrator.policy_servers.deployment import Deployment, working
from tests.vllm.server import TorchLogprobs, Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

CLOSE = 1e-3
UPDATES = 3


def apart(record: Trajectory, folders: dict[str, Path], reference: TorchLogprobs) -> float:
    """The largest difference of a record's logprobs from a PyTorch forward pass with the weights of its versions."""
    worst = 0.0
    for segment in record.segments:
        start = 0
        for run in segment.versions:
            at = [i for i in range(max(start, 1), run.end) if segment.sampled[i]]
            start = run.end
            if at:
                right = reference(folders[str(run.version)], segment.token_ids[: run.end].tolist())
                worst = max(worst, max(abs(float(segment.logprobs[i]) - right[i - 1]) for i in at))
    return worst


async def test_updates_of_a_real_engine_under_load_lose_no_episode_and_every_token_is_of_the_weights_it_names(
    vllm: Vllm, torch_logprobs: TorchLogprobs, tmp_path: Path
):
    folders = {"0.0": vllm.model}
    async with working(
        tmp_path, [vllm.address], slots=6, imports=["tests.orchestrator.policy_servers.environment"]
    ) as (made, _):
        await made.create_run(
            environments=[{"id": "policies:Slow", "kwargs": {"step_s": 0.0}}],
            policy={
                "endpoints": made.addresses,
                "renderer": "template",
                "tokenizer": str(vllm.model),
                "sync": {"pause_lease_s": 30.0},
            },
            sampling={"max_tokens": 48},
        )
        await made.until_played(4)
        for n in range(1, UPDATES + 1):
            folders[f"0.{n}"] = tmp_path / f"version-{n}"
            write_model(folders[f"0.{n}"], seed=n, tied=True)
            await made.announce(n, messages.Weights(path=str(folders[f"0.{n}"])))
            await made.until_served(n)
            await made.until_played(4)
        await refused(made, tmp_path)
        records = await made.records()
    assert {record.status for record in records} <= {"finished", "truncated"}
    versions = {str(run.version) for record in records for segment in record.segments for run in segment.versions}
    assert versions == set(folders)
    assert max(apart(record, folders, torch_logprobs) for record in records) < CLOSE


async def refused(made: Deployment, folder: Path) -> None:
    """A folder that is cut short is refused without a pause, and the engine goes on."""
    bad = folder / "bad"
    write_model(bad, seed=9, tied=True)
    file = bad / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    paused = (await made.servers()).servers[0].paused_s
    await made.announce(UPDATES + 1, messages.Weights(path=str(bad)))
    reason = await made.until_said(f"weight sync of version 0.{UPDATES + 1} failed")
    assert "not a complete safetensors file" in reason.message
    await made.until_played(2)
    server = (await made.servers()).servers[0]
    assert (server.state, server.version, server.paused_s) == ("serving", f"0.{UPDATES}", paused)
