"""TRL's own trainers, the real vLLM and real processes of Headrace: a few optimizer steps on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from headrace.client.sync_client import Client
from headrace.integrations.trl_samples import RolloutSample
from headrace.trajectory import Version
from headrace.wire import messages
from tests.e2e.processes import Processes, answers, free_port, wait_for
from tests.sdk.batch.batches import EPISODE, body_of, g24_trajectories
from tests.vllm.server import Trainer, Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

RUNS = ("async", "grpo")

G24 = {"grpo": ((0.0, 0.0, 1.0), 28.0), "reinforce": ((0.75, -2.25, 2.0), 3.5)}
"""Rewards of the episode's three rows by estimator, and the sum of the advantages of its tokens."""

STEPS = 4
"""Steps of the asynchronous trainer; the other makes two."""

TRAINED_WITHIN_S = 300.0
"""Timeout in seconds. Imports take most of the time; a step takes a second on an idle machine."""


class Trained(NamedTuple):
    """The reports of both trainers, and the service's status of their runs."""

    reports: dict[str, Any]
    runs: dict[str, messages.RunStatus]
    versions: dict[str, list[tuple[Version, Version]]]
    """Lowest and highest version of each episode, oldest first."""
    folders: dict[str, list[str]]


@pytest.fixture(scope="module")
def trained(
    vllm_server: tuple[str, Path], trl_trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    policy, model = vllm_server
    folder = tmp_path_factory.mktemp("trl")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Processes(folder / "logs") as processes:
        processes.orchestrator(folder / "data", port).start()
        worker = processes.worker("worker", url, policy)
        worker.command += ("--import", "tests/sdk/integrations/parity.py")
        worker.start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        with Client(url) as client:
            for spec in specs(policy, model):
                client.create_run(spec)
            reports = run_trainers(trl_trainer, url, model, folder)
            yield Trained(
                reports=reports,
                runs={run: client.run(run) for run in RUNS},
                versions={run: versions_of(client, run) for run in RUNS},
                folders={run: sorted(path.name for path in (folder / run).iterdir()) for run in RUNS},
            )
    asyncio.run(restore(policy, model))


def specs(policy: str, model: Path) -> list[dict[str, Any]]:
    common = {
        "group_size": 4,
        "batch_size": 8,
        "sampling": {"max_tokens": 16},
        "policy": {"endpoints": [policy], "renderer": "template", "tokenizer": str(model)},
    }
    return [
        {"name": "async", "environments": [{"id": "test:Parity"}], "estimator": {"name": "grpo"}, **common},
        {"name": "grpo", "estimator": {"name": "none"}, "max_staleness": 0, **common},
    ]


def run_trainers(trainer: Trainer, url: str, model: Path, folder: Path) -> dict[str, Any]:
    batches = {}
    for name, (rewards, _) in G24.items():
        batches[name] = folder / f"g24-{name}"
        batches[name].write_bytes(body_of(g24_trajectories(rewards, 0.0), name=name))
    ask = {
        "url": url,
        "model": str(model),
        "folder": str(folder),
        "steps": STEPS,
        "batches": {name: str(path) for name, path in batches.items()},
        "report": str(folder / "report"),
    }
    trainer.train(ask, TRAINED_WITHIN_S)
    report: dict[str, Any] = json.loads((folder / "report").read_text())
    return report


def versions_of(client: Client, run: str) -> list[tuple[Version, Version]]:
    listed = [(Version.parse(one.low), Version.parse(one.high)) for one in client.trajectories(run) if one.low]
    return listed[::-1]


async def restore(policy: str, model: Path) -> None:
    """Restore the session's server."""
    async with aiohttp.ClientSession() as session:
        await Vllm(session, policy, model).sync(model, "default", mode="abort")


def test_the_asynchronous_trainer_makes_real_steps_on_rows_of_headrace(trained: Trained) -> None:
    report = trained.reports["async"]
    assert report["steps"] == STEPS
    assert report["changed"] == report["parameters"]


def test_its_logprobs_are_those_of_the_engine_token_by_token(trained: Trained) -> None:
    first = trained.reports["async"]["log"][0]  # one policy update behind at most, and the first changes nothing
    assert first["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert first["kl"] == pytest.approx(0.0, abs=1e-4)


def test_each_batch_is_acked_once_with_a_version(trained: Trained) -> None:
    run = trained.runs["async"]
    assert run.version == f"0.{STEPS + 1}", "the first is announced before any step"
    assert (run.batches_acked, run.batches_open) == (STEPS, 0)
    assert run.groups.retired["acked"] == 2 * STEPS


def test_the_servers_sample_with_its_weights(trained: Trained) -> None:
    assert trained.versions["async"][0][0] <= Version(0, 1)
    assert max(high for _, high in trained.versions["async"]) > Version(0, 1)
    assert trained.folders["async"] == [f"step-{STEPS + 1 - k:06d}" for k in (2, 1, 0)]


def test_trl_logs_the_metrics_of_headrace(trained: Trained) -> None:
    lines = [line for line in trained.reports["async"]["log"] if "headrace/batches_total" in line]
    assert sum(line["headrace/batches_total"] for line in lines) >= STEPS
    assert all(0.0 <= line["headrace/episode_reward"] <= 2.0 for line in lines)


def test_a_trainer_that_owns_its_prompts_trains_on_episodes_of_its_own_weights(trained: Trained) -> None:
    report = trained.reports["grpo"]
    assert report["steps"] == 2
    assert report["changed"] == report["parameters"]
    assert [line["reward_std"] > 0 for line in report["log"] if "reward_std" in line] == [True, True]
    assert trained.versions["grpo"] == [(Version(0, step),) * 2 for step in (1, 2) for _ in range(8)]
    assert trained.runs["grpo"].batches_acked == 2


@pytest.mark.parametrize("name", G24)
def test_trl_itself_packs_each_advantage_at_its_rows_own_tokens(trained: Trained, name: str) -> None:
    rows = trained.reports["packed"][name][: len(EPISODE)]
    for shape, terms in zip(EPISODE, rows, strict=True):
        assert terms["token_index"] == list(range(shape.start - 1, shape.end - 1)), (
            "one to the left: what predicts them"
        )
        assert all(terms["old_log_probs"])
        assert len(set(terms["advantages"])) == 1
    assert [len(terms["advantages"]) for terms in rows] == [5, 20, 3]
    assert sum(advantage for terms in rows for advantage in terms["advantages"]) == G24[name][1]


def test_a_sample_has_the_fields_of_trls_class(trained: Trained) -> None:
    assert trained.reports["fields"] == [field.name for field in dataclasses.fields(RolloutSample)]
