"""The two servers that the suite runs against, behind one face: the tiny policy, and the real vLLM.

Both speak the policy protocol (docs/policy.md). What one of them does and the other does not is a defect of the double.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from examples.tiny_model import write_model
from headrace_workers.tiny_policy.model import SIZE, Model, neutral_weights
from headrace_workers.tiny_policy.weight_updates import write_folder
from tests.workers.tiny_policy import prompts

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""The model of the real server has other defaults."""


class Kind(NamedTuple):
    """One kind of server. ``logprobs(folder, prompt, ids)`` computes the logprobs of sampled ids independently."""

    address: str
    prompt: list[int]
    folders: tuple[Path, Path]  # the weights that it starts with, and others
    logprobs: Callable[[Path, list[int], list[int]], list[float]]
    vocabulary: int
    is_double: bool


class Server:
    """Short calls to a server of either kind."""

    def __init__(self, session: aiohttp.ClientSession, kind: Kind) -> None:
        self.session, self.kind, self.prompt = session, kind, kind.prompt

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(f"{self.kind.address}{path}", json=body, **kwargs) as response:
            return response.status, _read(await response.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.kind.address}{path}") as response:
            return response.status, _read(await response.text())

    async def ask(self, path: str, **fields: Any) -> tuple[int, Any]:
        """Sample on either route, with the same words for the same things."""
        headers = fields.pop("headers", None)
        body = {"model": "policy", "return_token_ids": True, **{k: fields.pop(k) for k in ("model",) if k in fields}}
        prompt = fields.pop("prompt", self.prompt)
        sampling = {"max_tokens": 64, "logprobs": 0, **NEUTRAL, **fields}
        if path == GENERATE:
            body |= {"token_ids": prompt, "sampling_params": sampling}
        else:
            body |= {"prompt": prompt, **sampling}
        return await self.post(path, body, headers=headers)

    async def sample(self, path: str = GENERATE, **fields: Any) -> Any:
        """The answer to a request that is well."""
        status, answer = await self.ask(path, **fields)
        assert status == 200, answer
        return answer

    async def metric(self, name: str) -> float:
        """The value of a metric, summed over labels."""
        _, text = await self.get("/metrics")
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert values, name
        return sum(values)

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(30):
            while await self.metric(name) != value:
                await asyncio.sleep(0.01)

    async def misbehave(self, **settings: Any) -> None:
        """Makes the double slow; a real model is slow enough."""
        if self.kind.is_double:
            assert (await self.post("/misbehave", settings))[0] == 200


def ids(choice: Any) -> list[int]:
    found: list[int] = choice["token_ids"]
    return found


def logprobs(choice: Any) -> list[float]:
    """The logprobs of the sampled tokens, from either route."""
    told = choice["logprobs"]
    return [item["logprob"] for item in told["content"]] if "content" in told else list(told["token_logprobs"])


@pytest.fixture(scope="session")
def tiny_policy_server() -> Iterator[str]:
    command = [sys.executable, "-m", "headrace_workers.tiny_policy", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["address"]
    process.terminate()
    process.wait(timeout=20)
    process.stdout.close()


@pytest.fixture(
    scope="session",
    params=["tiny", pytest.param("vllm", marks=[pytest.mark.component("vllm"), pytest.mark.timeout(900)])],
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    others = tmp_path_factory.mktemp("weights") / "others"
    if request.param == "vllm":
        address, model = request.getfixturevalue("vllm_server")
        forward = request.getfixturevalue("torch_logprobs")
        write_model(others, seed=1, tied=True)

        def torch(folder: Path, prompt: list[int], sampled: list[int]) -> list[float]:
            told: list[float] = forward(folder, prompt + sampled)[len(prompt) - 1 :]
            return told

        return Kind(address, [*b"Guess a number."], (model, others), torch, 280, is_double=False)
    first = tmp_path_factory.mktemp("weights") / "first"
    weights = {first: neutral_weights(), others: np.random.default_rng(0).normal(size=SIZE)}
    for folder in weights:
        write_folder(folder, weights[folder])

    def exact(folder: Path, prompt: list[int], sampled: list[int]) -> list[float]:
        model = Model(weights[folder])
        whole = [model.log_prob(prompt, sampled[:end]) for end in range(len(sampled) + 1)]
        return [after - before for before, after in pairwise(whole)]

    address = request.getfixturevalue("tiny_policy_server")
    return Kind(address, prompts.guessing([10, 40]), (first, others), exact, 262, is_double=True)


@pytest.fixture
async def server(kind: Kind) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as session:
        server = Server(session, kind)
        await server.misbehave()
        yield server
        await server.misbehave()


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
