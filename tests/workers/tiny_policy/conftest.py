"""A tiny policy server in a separate process, without faults at the start of each test."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

COMMAND = [sys.executable, "-m", "headrace_workers.tiny_policy", "--port", "0"]


class Api:
    """Short calls to the server."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session = session
        self.address = address

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(f"{self.address}{path}", json=body, **kwargs) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.address}{path}") as response:
            body = await response.read()
            return response.status, json.loads(body) if response.content_type == "application/json" else body

    async def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 64, "logprobs": 0, "return_token_ids": True}
        return await self.post("/v1/completions", {**body, **fields})

    async def misbehave(self, **settings: Any) -> None:
        status, answer = await self.post("/misbehave", settings)
        assert status == 200, answer

    async def running(self) -> int:
        _, text = await self.get("/metrics")
        line = next(line for line in text.decode().splitlines() if line.startswith("vllm:num_requests_running{"))
        return int(line.split()[-1])

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(10):
            while await self.running() != count:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["address"]
    process.terminate()
    process.wait(timeout=20)
    process.stdout.close()


@pytest.fixture
async def api(server: str) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession() as session:
        api = Api(session, server)
        await api.misbehave()
        yield api
        await api.misbehave()
