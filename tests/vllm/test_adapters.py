"""Adapters in the real vLLM: a trained one gets new versions under running requests, beside a frozen one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from examples.tiny_model import read, write, write_adapter
from examples.vllm_server import NAME
from headrace.trajectory import Sampling
from headrace.wire import messages
from headrace_workers.policies import Policy, Sample, SampleRequest, ServedPolicies
from tests.orchestrator.policy_servers.deployment import Deployment
from tests.orchestrator.serving import orchestrator
from tests.vllm.server import TorchLogprobs, Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

PROMPT = list(range(40, 90))


async def sample(policy: Policy, number: int, max_tokens: int, *, model: str = NAME, frozen: bool = False) -> Sample:
    request = SampleRequest(
        id=f"turn-{number}",
        group="g",
        episode=f"e{number}",
        model=model,
        prompt=PROMPT,
        sampling=Sampling(temperature=1.0, seed=number),
        max_tokens=max_tokens,
        stop=[],
        stop_token_ids=[],
        timeout_s=120,
        vocab_size=100_000,
        adapter="" if frozen else "math",
        frozen=frozen,
    )
    return await policy.sample(request)


def version_of(made: Sample) -> str:
    (run,) = made.versions
    return str(run.version)


async def test_two_adapters_answer_differently_and_new_versions_come_under_running_requests(
    vllm: Vllm, torch_logprobs: TorchLogprobs, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("v1", "v2", "opponent", "big")}
    for seed, (name, folder) in enumerate(folders.items(), 1):
        write_adapter(folder, vllm.model, seed=seed, rank=16 if name == "big" else 4)

    def logprobs_are_of(made: Sample, adapter: str) -> bool:
        right = torch_logprobs(vllm.model, [*PROMPT, *made.token_ids], adapter=folders[adapter])[len(PROMPT) - 1 :]
        return max(abs(said - true) for said, true in zip(made.logprobs, right, strict=True)) < 1e-3

    async with orchestrator(tmp_path / "data") as api:

        async def servers(run: str, revision: int, wait_s: float) -> messages.PolicyServersReply:
            reply = await api.ask("GET", f"/v1/runs/{run}/servers?revision={revision}&wait_s={wait_s}")
            return msgspec.convert(reply, messages.PolicyServersReply)

        deployment = Deployment("", api, tmp_path, [vllm.address])
        opponent = {"name": "opponent", "path": str(folders["opponent"])}
        agents = {"player_1": {"train": False, "adapters": ["opponent"]}}
        await deployment.create_run(policy={"model": NAME, "adapter": "math", "adapters": [opponent], "agents": agents})
        policies = ServedPolicies(default_endpoints=[], clock=time.monotonic, list_servers=servers)
        policy = policies.at([vllm.address], run="run")
        try:
            await deployment.announce(1, messages.Weights(path=str(folders["v1"]), kind="adapter"))
            await deployment.until_served(1)
            frozen = await sample(policy, 0, 16, model="run/opponent", frozen=True)
            long = [asyncio.create_task(sample(policy, number, 600)) for number in range(1, 9)]
            await vllm.until_sampling()
            await deployment.announce(2, messages.Weights(path=str(folders["v2"]), kind="adapter"))
            await deployment.until_served(2)
            assert not all(task.done() for task in long), "they straddle the new version"
            short: list[Sample] = []
            while len(short) < 3 or version_of(short[-3]) != "0.2":
                short.append(await sample(policy, len(short), 16))
                assert len(short) < 50, "a worker hears of a version at once"
            old = await asyncio.gather(*long)

            assert {version_of(made) for made in old} == {"0.1"}, "what began on a version ends on it"
            assert all(logprobs_are_of(made, "v1") for made in old)
            assert all(logprobs_are_of(made, {"0.1": "v1", "0.2": "v2"}[version_of(made)]) for made in short)
            assert logprobs_are_of(frozen, "opponent")
            assert not logprobs_are_of(frozen, "v1")

            await deployment.announce(3, messages.Weights(path=str(folders["big"]), kind="adapter"))
            await deployment.until_said("rank")
            await deployment.announce(4, messages.Weights(path=str(tmp_path / "nowhere"), kind="adapter"))
            await deployment.until_said("nowhere: the folder does not exist here")
            assert version_of(await sample(policy, 9, 16)) == "0.2"
            await api.ask("POST", "/v1/runs/run/close")
            await deployment.until(lambda found: not found)
        finally:
            await policies.close()
        _, listed = await vllm.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == [NAME]


@pytest.mark.parametrize(("layers", "count"), [("layers", 8), ("layers.1", 4)])
async def test_an_adapter_whose_tensors_fit_no_module_is_refused_with_their_names(
    vllm: Vllm, tmp_path: Path, layers: str, count: int
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, vllm.model)
    assert await vllm.call("headrace_check_adapter", str(folder)) == {"tensors": 8}
    tensors = read(folder / "adapter_model.safetensors")
    moved = {name.replace(f"model.{layers}", f"model.model.{layers}"): tensor for name, tensor in tensors.items()}
    write(folder / "adapter_model.safetensors", moved)
    refused = await vllm.call("headrace_check_adapter", str(folder))
    assert refused["kind"] == "adapter-does-not-fit"
    assert all(name in refused["refused"] for name in moved if name not in tensors)
    assert refused["refused"].count("belongs to no module") == count


async def test_turns_stay_on_the_version_before_an_adapter_that_does_not_fit_and_zeros_are_served(
    vllm: Vllm, torch_logprobs: TorchLogprobs, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("v1", "wide", "zeros")}
    for folder in folders.values():
        write_adapter(folder, vllm.model, seed=1)
    tensors = read(folders["wide"] / "adapter_model.safetensors")
    write(
        folders["wide"] / "adapter_model.safetensors",
        {name: np.pad(tensor, ((0, 0), (0, 2))) if "lora_A" in name else tensor for name, tensor in tensors.items()},
    )
    write(folders["zeros"] / "adapter_model.safetensors", {name: 0 * tensor for name, tensor in tensors.items()})

    async with orchestrator(tmp_path / "data") as api:
        deployment = Deployment("", api, tmp_path, [vllm.address])
        await deployment.create_run(policy={"model": NAME, "adapter": "math"})
        await deployment.announce(1, messages.Weights(path=str(folders["v1"]), kind="adapter"))
        await deployment.until_served(1)
        await deployment.announce(2, messages.Weights(path=str(folders["wide"]), kind="adapter"))
        reason = await deployment.until_said("are for a weight of shape")
        assert (reason.code, reason.facts["kind"]) == ("adapters", "adapter-does-not-fit")
        (server,) = (await deployment.servers()).servers
        assert (server.state, server.version) == ("serving", "0.1")
        await deployment.announce(3, messages.Weights(path=str(folders["zeros"]), kind="adapter"))
        await deployment.until_served(3)
        policies = ServedPolicies(default_endpoints=[], clock=time.monotonic)
        try:
            made = await sample(policies.at([vllm.address]), 1, 8, model="run/math@0.3", frozen=True)
        finally:
            await policies.close()
        base = torch_logprobs(vllm.model, [*PROMPT, *made.token_ids])[len(PROMPT) - 1 :]
        assert max(abs(said - true) for said, true in zip(made.logprobs, base, strict=True)) < 1e-3
        await api.ask("POST", "/v1/runs/run/close")
        await deployment.until(lambda found: not found)
