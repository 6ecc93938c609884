"""Digests of announced weights at a real deployment: what is sampled belongs to the version that the record names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.errors import WeightsChanged
from headrace.trajectory import Version
from headrace.weight_files import weight_digest
from headrace.wire import messages
from headrace_orchestrator.policy_servers.adapter_files import unchecked_problem
from headrace_workers.tiny_policy.adapters import write_adapter
from headrace_workers.tiny_policy.weight_updates import write_folder
from tests.orchestrator.policy_servers.deployment import Deployment, deployment, weights_of
from tests.orchestrator.policy_servers.doubles import double, post
from tests.orchestrator.serving import orchestrator


def with_digest(weights: messages.Weights) -> messages.Weights:
    return msgspec.structs.replace(weights, digest=weight_digest(weights.path, weights.kind))


def trained(deployed: Deployment, n: int) -> messages.Weights:
    path = deployed.folder / f"math-{n}"
    write_adapter(path, weights_of(Version(0, n)))
    return with_digest(messages.Weights(path=str(path), kind="adapter"))


async def test_files_with_another_digest_are_refused_until_the_announced_ones_are_back(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await deployed.create_run()
        await deployed.announce(1, with_digest(deployed.write(1)))
        await deployed.until_served(1)
        weights = with_digest(deployed.write(2))
        write_folder(Path(weights.path), weights_of(Version(0, 5)))
        await deployed.announce(2, weights)
        reason = await deployed.until_said("are not those that were announced")
        assert (reason.code, reason.facts["kind"]) == ("weight-sync", WeightsChanged.code)
        await deployed.until_played(2)
        assert {(s.state, s.version) for s in (await deployed.servers()).servers} == {("serving", "0.1")}
        write_folder(Path(weights.path), weights_of(Version(0, 2)))
        await deployed.until_served(2)
        await deployed.until_played(6)
        assert "0.2" in await deployed.check_truth()


async def test_files_that_are_replaced_while_servers_load_them_change_no_weights(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await deployed.create_run()
        await deployed.announce(1, with_digest(deployed.write(1)))
        await deployed.until_served(1)
        for address in deployed.addresses:
            await post(address, "/misbehave", {"load": "late", "load_s": 1.0, "load_times": 1})
        weights = with_digest(deployed.write(2))
        await deployed.announce(2, weights)
        await deployed.until(lambda servers: all(server.state == "syncing" for server in servers.values()))
        write_folder(Path(weights.path), weights_of(Version(0, 7)))
        await deployed.until_said("are not those that were announced")
        await deployed.until(lambda servers: all(server.state == "serving" for server in servers.values()))
        await deployed.until_played(6)
        assert await deployed.check_truth() <= {"0.0", "0.1"}


async def test_the_same_bytes_under_a_new_number_are_told_to_the_learner_and_in_the_reasons(tmp_path: Path) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run()
        third = with_digest(deployed.write(3))
        for n, weights, earlier in ((3, third, None), (4, with_digest(deployed.write(4)), None), (9, third, "0.3")):
            body = messages.VersionRequest(version=f"0.{n}", weights=weights)
            reply = await api.ask("POST", "/v1/runs/run/version", body)
            assert reply.get("same_weights_as") == earlier
        reason = await deployed.until_said("version 0.9 has the same weight files as version 0.3")
        assert reason.facts["kind"] == "same-weights"
        reply = await deployed.servers()
        assert "has the same weight files" in reply.sync
        assert list(reply.digests) == ["0.3", "0.4"]
        assert reply.digests["0.3"] == third.digest


async def test_an_adapter_with_another_digest_is_refused_and_the_version_before_is_served(tmp_path: Path) -> None:
    async with double() as one, orchestrator(tmp_path / "data") as api:
        deployed = Deployment("", api, tmp_path, [one])
        await deployed.create_run(policy={"adapter": "math"})
        await deployed.announce(1, trained(deployed, 1))
        await deployed.until_served(1)
        second = trained(deployed, 2)
        write_adapter(Path(second.path), weights_of(Version(0, 5)))
        await deployed.announce(2, second)
        reason = await deployed.until_said("are not those that were announced")
        assert (reason.code, reason.facts["kind"]) == ("adapters", WeightsChanged.code)
        (server,) = (await deployed.servers()).servers
        assert (server.state, server.version) == ("serving", "0.1")
        await deployed.announce(3, trained(deployed, 3))
        await deployed.until_served(3)


@pytest.mark.parametrize("changed", [False, True])
def test_the_digest_of_an_adapter_that_its_server_cannot_check_is_checked_here(tmp_path: Path, changed: bool) -> None:
    write_adapter(tmp_path, weights_of(Version(0, 1)))
    digest = weight_digest(tmp_path, "adapter")
    if changed:
        write_adapter(tmp_path, weights_of(Version(0, 2)))
    found = unchecked_problem(str(tmp_path), digest)
    assert (found.kind if found is not None else "") == (WeightsChanged.code if changed else "")
    assert unchecked_problem(str(tmp_path / "not here"), digest) is None, "the server may see it"
