"""Adapters at a real orchestrator: they are loaded during running episodes, and every turn records its adapter."""

from __future__ import annotations

import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_model import read, write, write_model
from examples.tiny_model import write_adapter as write_peft_adapter
from headrace.trajectory import Segment, Version
from headrace.wire import messages
from headrace_orchestrator.policy_servers.adapter_files import adapter_problem, base_problem
from headrace_workers.tiny_policy.adapters import CONFIG, FILE, write_adapter
from headrace_workers.tiny_policy.model import SIZE, Floats, neutral_weights
from tests.orchestrator.policy_servers.deployment import Deployment, deployment, weights_of
from tests.orchestrator.policy_servers.doubles import double, get, post
from tests.orchestrator.serving import orchestrator

MATH = {"adapter": "math"}


def frozen_weights(name: str) -> Floats:
    return np.random.default_rng(zlib.crc32(name.encode())).normal(scale=0.5, size=SIZE)


def trained(deployed: Deployment, n: int, **fields: int) -> messages.Weights:
    path = deployed.folder / f"math-{n}"
    write_adapter(path, weights_of(Version(0, n)), **fields)
    return messages.Weights(path=str(path), kind="adapter")


async def names(address: str) -> list[str]:
    return [card["id"] for card in (await get(address, "/v1/models"))["data"]]


async def test_adapter_versions_are_loaded_during_running_episodes_and_every_turn_records_its_version(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await deployed.create_run(policy=MATH)
        await deployed.until_played(2)
        for n in range(1, 6):
            await deployed.announce(n, trained(deployed, n))
            await deployed.until_served(n)
            await deployed.until_played(2)
        await deployed.until_played(6)  # earlier episodes have ended
        assert {f"0.{n}" for n in (0, 5)} <= await deployed.check_truth()
        records = await deployed.records()
        assert {segment.policy.adapter for record in records for segment in record.segments} == {"math"}
        assert set(await names(deployed.addresses[0])) == {"policy", "run/math@0.4", "run/math@0.5"}
        assert (await get(deployed.addresses[0], "/weight_info"))["weight_version"] == "0.0", "the base model stays"


async def test_a_group_plays_against_one_frozen_opponent_and_the_next_against_another(tmp_path: Path) -> None:
    for name in "abc":
        write_adapter(tmp_path / name, frozen_weights(name))
    policy = {
        **MATH,
        "adapters": [{"name": name, "path": str(tmp_path / name)} for name in "abc"],
        "agents": {"player_1": {"train": False, "adapters": list("abc"), "routing": "round_robin"}},
    }

    def weights(segment: Segment, version: Version) -> Floats:
        adapter = segment.policy.adapter or ""
        return weights_of(version) if adapter == "math" else frozen_weights(adapter)

    async with deployment(tmp_path, servers=1) as (deployed, _, _):
        await deployed.create_run(environments=[{"id": "game:Nim-v0"}], policy=policy)
        await deployed.announce(1, trained(deployed, 1))
        await deployed.until_played(12)
        await deployed.check_truth(weights)
        played = defaultdict(set)
        for record in await deployed.records():
            for segment in record.segments:
                if not segment.train:
                    played[record.group].add(segment.policy.adapter)
        assert all(len(adapters) == 1 for adapters in played.values()), "one for all members of a group"
        assert set.union(*played.values()) == {"a", "b", "c"}


async def test_an_unfit_adapter_is_refused_with_the_reason_and_the_served_version_stays(tmp_path: Path) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run(policy=MATH)
        await deployed.announce(1, trained(deployed, 1))
        await deployed.until_served(1)
        await deployed.announce(2, trained(deployed, 2, rank=64))
        assert "LoRA rank 64" in (await deployed.until_said("adapter")).message
        incomplete = trained(deployed, 3)
        Path(incomplete.path, FILE).unlink()
        await deployed.announce(3, incomplete)
        await deployed.until_said("once it is complete")
        await deployed.announce(4, messages.Weights(path=str(tmp_path / "nowhere"), kind="adapter"))
        assert (await deployed.until_said("nowhere")).facts["kind"] == "weights-missing"
        (server,) = (await deployed.servers()).servers
        assert (server.state, server.version) == ("serving", "0.1")
        await deployed.announce(5, trained(deployed, 5))
        await deployed.until_served(5)
        await api.ask("POST", "/v1/runs/run/close")
        await deployed.until(lambda servers: not servers)
        assert await names(one) == ["policy"], "closing a run unloads its adapters"


async def test_a_run_accepts_only_weights_of_the_kind_that_it_trains(tmp_path: Path) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run(policy=MATH)
        request = messages.VersionRequest(version="0.1", weights=deployed.write(1))
        problem = await deployed.api.ask("POST", "/v1/runs/run/version", request, status=400)
        assert "trains adapter 'math'" in problem["detail"]


async def test_after_a_restart_of_the_orchestrator_the_version_is_known_and_lost_adapters_are_loaded_again(
    tmp_path: Path,
) -> None:
    async with double() as one:
        async with orchestrator(tmp_path / "data") as api:
            deployed = Deployment("", api, tmp_path, [one])
            await deployed.create_run(policy=MATH)
            await deployed.announce(1, trained(deployed, 1))
            await deployed.until_served(1)
        await post(one, "/v1/unload_lora_adapter", {"lora_name": "run/math@0.1"})
        async with orchestrator(tmp_path / "data") as api:
            await Deployment("", api, tmp_path, [one]).until_served(1)
        assert "run/math@0.1" in await names(one)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "has no adapter_config.json"),
        ("{", "cannot be read"),
        ('{"peft_type": "IA3"}', "not the configuration of a LoRA adapter"),
        ('{"peft_type": "LORA", "r": 0}', "rank r = 0"),
        ('{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "other"}', "made for base 'other'"),
    ],
)
def test_a_folder_that_is_not_an_adapter_as_peft_writes_it_or_has_another_base_is_refused_with_the_reason(
    tmp_path: Path, config: str | None, reason: str
) -> None:
    write_adapter(tmp_path / "new", neutral_weights())
    write_adapter(tmp_path / "old", neutral_weights())
    assert adapter_problem(str(tmp_path / "new"), str(tmp_path / "old")) is None
    assert adapter_problem(str(tmp_path / "not here")) is None, "the server may see it"
    if config is None:
        (tmp_path / "new" / CONFIG).unlink()
    else:
        (tmp_path / "new" / CONFIG).write_text(config)
    found = adapter_problem(str(tmp_path / "new"), str(tmp_path / "old"))
    assert found is not None
    assert reason in found.message


def with_moved_layers(folder: Path, layers: str) -> None:
    """Give the adapter's tensors of these layers names with one component too many."""
    tensors = read(folder / FILE)
    write(folder / FILE, {name.replace(f"model.{layers}", f"model.model.{layers}"): t for name, t in tensors.items()})


@pytest.mark.parametrize(("layers", "count"), [("layers", 8), ("layers.1", 4)])
def test_tensors_that_fit_nothing_in_the_base_are_listed_where_the_server_cannot_check_them(
    tmp_path: Path, layers: str, count: int
) -> None:
    write_model(tmp_path / "base")
    write_peft_adapter(tmp_path / "adapter", tmp_path / "base")
    assert base_problem(str(tmp_path / "adapter")) is None
    with_moved_layers(tmp_path / "adapter", layers)
    found = base_problem(str(tmp_path / "adapter"))
    assert found is not None
    assert found.kind == "adapter-does-not-fit"
    assert found.message.count("belongs to no module") == count


async def test_tensors_that_do_not_fit_are_named_in_a_typed_reason_and_the_version_before_is_served(
    tmp_path: Path,
) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run(policy=MATH)
        await deployed.announce(1, trained(deployed, 1))
        await deployed.until_served(1)
        path = tmp_path / "math-2"
        write_adapter(path, weights_of(Version(0, 2)))
        (path / FILE).write_bytes((path / FILE).read_bytes().replace(b'"weights"', b'"weighty"'))
        await deployed.announce(2, messages.Weights(path=str(path), kind="adapter"))
        reason = await deployed.until_said("['weighty']")
        assert (reason.code, reason.facts["kind"]) == ("adapters", "adapter-does-not-fit")
        (server,) = (await deployed.servers()).servers
        assert (server.state, server.version) == ("serving", "0.1")


async def test_an_adapter_of_zeros_is_served(tmp_path: Path) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run(policy=MATH)
        write_adapter(tmp_path / "zeros", np.zeros(SIZE))
        await deployed.announce(1, messages.Weights(path=str(tmp_path / "zeros"), kind="adapter"))
        await deployed.until_served(1)
