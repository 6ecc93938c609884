"""Pauses of a policy server, loads of weights from a folder, and the weight versions that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.policy_conformance.conftest import COMPLETIONS, GENERATE, Server, ids, logprobs

CHECK, LOAD = "headrace_check", "headrace_load"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


async def call(server: Server, method: str, *arguments: str) -> dict[str, Any]:
    status, answer = await server.post("/collective_rpc", {"method": method, "args": list(arguments)})
    assert status == 200, answer
    (result,) = answer["results"]
    return result


async def well(server: Server, path: str, body: Any = None) -> Any:
    status, answer = await server.post(path, body)
    assert status == 200, answer
    return answer


async def load(server: Server, folder: Path, name: str, mode: str = "keep") -> None:
    """New weights, as the orchestrator brings them."""
    await well(server, f"/pause?mode={mode}&clear_cache=true")
    result = await call(server, LOAD, str(folder))
    assert result["tensors"] >= 1
    assert not result.get("refused")
    await well(server, "/update_weight_version", {"new_version": name})
    await well(server, "/resume")


async def version(server: Server) -> str:
    answer: str = (await server.get("/weight_info"))[1]["weight_version"]
    return answer


async def paused(server: Server) -> bool:
    answer: bool = (await server.get("/is_paused"))[1]["is_paused"]
    return answer


@pytest.fixture(autouse=True)
async def _first_weights(server: Server) -> AsyncIterator[None]:
    await load(server, server.kind.folders[0], "0.0", mode="abort")
    yield
    await server.misbehave()
    await load(server, server.kind.folders[0], "0.0", mode="abort")


async def test_weights_of_a_folder_are_the_ones_that_sample_once_they_are_loaded(server: Server):
    others = server.kind.folders[1]
    before = (await server.sample(seed=1))["choices"][0]
    await load(server, others, "0.1")
    choice = (await server.sample(seed=1))["choices"][0]
    assert np.allclose(logprobs(choice), server.kind.logprobs(others, server.prompt, ids(choice)), atol=1e-3)
    assert logprobs(choice) != logprobs(before)


async def test_weights_get_their_name_only_when_the_caller_sets_it(server: Server):
    await well(server, "/pause?mode=keep&clear_cache=true")
    await call(server, LOAD, str(server.kind.folders[1]))
    assert await version(server) == "0.0"
    answer = await well(server, "/update_weight_version", {"new_version": "3.14"})
    assert answer["new_version"] == "3.14"
    assert await version(server) == "3.14"
    await well(server, "/resume")
    choice = (await server.sample(GENERATE))["choices"][0]
    assert choice["weight_versions"] == [{"version": "3.14", "start": 0, "end": len(ids(choice))}]


async def test_a_name_may_be_any_text(server: Server):
    await well(server, "/update_weight_version", {"new_version": "0.0 -> 0.1"})
    assert await version(server) == "0.0 -> 0.1"


async def test_a_check_changes_nothing(server: Server):
    before = await server.sample(seed=1)
    assert (await call(server, CHECK, str(server.kind.folders[1])))["tensors"] >= 1
    assert logprobs((await server.sample(seed=1))["choices"][0]) == logprobs(before["choices"][0])
    assert await version(server) == "0.0"
    assert not await paused(server)


@pytest.mark.parametrize("method", [CHECK, LOAD])
async def test_a_folder_that_cannot_be_loaded_is_refused_without_an_effect(server: Server, tmp_path: Path, method: str):
    short = tmp_path / "short"
    short.mkdir()
    for file in server.kind.folders[0].glob("*.safetensors"):
        (short / file.name).write_bytes(file.read_bytes()[:-1])
    before = await server.sample(seed=1)
    for folder in (tmp_path / "absent", tmp_path, short):
        result = await call(server, method, str(folder))
        assert str(folder) in result["refused"]
    assert logprobs((await server.sample(seed=1))["choices"][0]) == logprobs(before["choices"][0])


async def test_an_unknown_method_is_an_error_without_an_effect(server: Server):
    status, body = await server.post(
        "/collective_rpc", {"method": "nothing", "args": []}, headers={"Connection": "close"}
    )
    assert status == 500
    assert body["error"]["message"]
    await server.sample()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_paused_server_is_healthy_and_delays_new_requests_until_it_is_resumed(server: Server, mode: str):
    await well(server, f"/pause?mode={mode}&clear_cache=true")
    await well(server, f"/pause?mode={mode}&clear_cache=true")
    assert await paused(server)
    assert (await server.get("/health"))[0] == 200
    asking = [asyncio.create_task(server.ask(path, seed=1)) for path in (GENERATE, COMPLETIONS)]
    await server.until("vllm:num_requests_running", 0)
    done, _ = await asyncio.wait(asking, timeout=0.3)
    assert not done
    await well(server, "/resume")
    await well(server, "/resume")
    assert not await paused(server)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200]


async def test_an_unknown_pause_mode_is_an_error(server: Server):
    status, _ = await server.post("/pause?mode=sometimes")
    assert status in (400, 422)
    assert not await paused(server)


@pytest.mark.parametrize(
    ("mode", "reason", "names"),
    [("keep", {"stop", "length"}, "0.1"), ("wait", {"stop", "length"}, "0.0"), ("abort", {"abort"}, "0.0")],
)
async def test_a_running_request_continues_with_keep_finishes_with_wait_and_ends_with_abort(
    server: Server, mode: str, reason: set[str], names: str
):
    await server.misbehave(slow_s=1.0)
    asking = asyncio.create_task(server.ask(GENERATE, **LONG))
    await server.until("vllm:num_requests_running", 1)
    await load(server, server.kind.folders[1], "0.1", mode=mode)
    status, answer = await asking
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] in reason
    spans = choice["weight_versions"]
    assert {span["version"] for span in spans} <= {"0.0", names}
    assert [span["end"] for span in spans][-1:] == ([len(ids(choice))] if ids(choice) else [])
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])][: len(spans)]
    assert len(logprobs(choice)) == len(ids(choice))
