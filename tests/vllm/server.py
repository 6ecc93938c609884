"""The real vLLM of a test session, and a PyTorch forward beside it.

* One server for the whole session, of a tiny model with tied embeddings (the harder case of a reload), with adapters;
  and one of a model that sees images.
* What takes long to start does so when the session begins, while other tests run.
* `vllm` gives it as it was started: unpaused, with its first weights, named "default".
* `torch_logprobs` is transformers' own forward of a folder, in a process of its own.
* `trl_trainer` is a process that has imported TRL and waits for what it is to train.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from examples.tiny_model import write_model
from examples.tiny_vision_model import write_vision_model
from examples.vllm_server import NAME, Server
from tests.components import PARTS, VLLM_PYTHON
from tests.e2e.processes import ROOT

BACKGROUND = 5
"""Niceness of what starts while other tests run: they have deadlines."""


GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
"""Sampling defaults of the session's model: no request of Headrace may be sampled with them."""


class Kind(NamedTuple):
    """A server of the session. ``write`` makes its model in a folder; ``arguments`` are vLLM's."""

    write: Callable[[Path], None]
    arguments: tuple[str, ...]


def write_tied_model(folder: Path) -> None:
    """Write a tiny model with tied embeddings, and with sampling defaults as many published models have them."""
    write_model(folder, tied=True)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))


KINDS: dict[str, Kind] = {
    "vllm_server": Kind(
        write_tied_model,
        (
            *("--max-model-len", "2048"),
            *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8"),
        ),
    ),
    "vision_server": Kind(write_vision_model, ("--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 4}')),
}
"""Kinds of servers, by the fixture that provides them."""


class Begun:
    """A server that starts, in a folder of its own."""

    def __init__(self, kind: Kind) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-vllm-")
        self.model = Path(self._folder.name) / "model"
        kind.write(self.model)
        self.server = Server(self.model, *kind.arguments, log=self.model.with_name("vllm.log"))
        self.pid = self.server.pid

    def end(self) -> None:
        self.server.end()
        self._folder.cleanup()


class Vllm:
    """Short calls to the server. ``model`` is the folder that it was started with."""

    def __init__(self, session: aiohttp.ClientSession, address: str, model: Path) -> None:
        self.session, self.address, self.model = session, address, model

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(f"{self.address}{path}", json=body, **kwargs) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.address}{path}") as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def generate(self, token_ids: list[int], *, model: str = NAME, **sampling: Any) -> dict[str, Any]:
        """Return the single choice of POST /inference/v1/generate."""
        body = {"model": model, "token_ids": token_ids, "sampling_params": {"logprobs": 0, **sampling}}
        status, answer = await self.post("/inference/v1/generate", body)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def call(self, method: str, *arguments: str) -> dict[str, Any]:
        """Call a method of headrace.integrations.vllm; return the answer of the only worker."""
        status, answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        assert status == 200, answer
        (result,) = answer["results"]
        return result

    async def sync(self, folder: Path, version: str, mode: str = "keep") -> None:
        """New weights, as the orchestrator brings them."""
        assert "refused" not in await self.call("headrace_check", str(folder))
        assert (await self.post(f"/pause?mode={mode}&clear_cache=true"))[0] == 200
        loaded = await self.call("headrace_load", str(folder))
        assert "tensors" in loaded, loaded
        assert (await self.post("/update_weight_version", {"new_version": version}))[0] == 200
        assert (await self.post("/resume"))[0] == 200

    async def until_sampling(self) -> None:
        """Wait until another token is sampled."""
        async with asyncio.timeout(30):
            before = await self.metric("vllm:generation_tokens_total")
            while await self.metric("vllm:generation_tokens_total") == before:
                await asyncio.sleep(0.005)

    async def metric(self, name: str) -> float:
        """The value of a metric, summed over labels."""
        _, text = await self.get("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    async def version(self) -> str:
        answer: str = (await self.get("/weight_info"))[1]["weight_version"]
        return answer


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [item["logprob"] for item in choice["logprobs"]["content"]]


class TorchLogprobs:
    """Calls to torch_forward.py."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("torch_forward.py")
        self._process = subprocess.Popen(
            [str(VLLM_PYTHON), str(script)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it runs; torch is imported meanwhile
        self.pid = self._process.pid

    def __call__(
        self, folder: Path, token_ids: list[int], *, adapter: Path | None = None, images: Sequence[bytes] = ()
    ) -> list[float]:
        """The logprob of each token but the first, given those before it, under the weights of a folder. ``images``
        are encoded."""
        asked = {
            "folder": str(folder),
            "adapter": str(adapter) if adapter else None,
            "images": [base64.b64encode(image).decode() for image in images],
            "token_ids": token_ids,
        }
        logprobs: list[float] = self._ask(asked)
        return logprobs

    def loss(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run torch_loss.py; return its answer."""
        found: dict[str, Any] = self._ask(question)
        return found

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


class Trainer:
    """A process that trains with TRL, once, when it is told what."""

    def __init__(self) -> None:
        script = ROOT / "tests" / "sdk" / "integrations" / "trl_trainer.py"
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-trl-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(VLLM_PYTHON), str(script)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.pid = self._process.pid

    def train(self, asked: dict[str, Any], timeout_s: float) -> None:
        """Returns when it has trained."""
        self._process.communicate(json.dumps(asked), timeout_s)
        assert self._process.returncode == 0, self._log.read_text(errors="replace")[-6000:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()


MAKERS: dict[str, Callable[[], Begun | TorchLogprobs | Trainer]] = {
    "torch_logprobs": TorchLogprobs,
    "trl_trainer": Trainer,
    **{name: partial(Begun, kind) for name, kind in KINDS.items()},
}
"""Factories, by the fixture that provides their results."""

_begun: pytest.StashKey[dict[str, Begun | TorchLogprobs | Trainer]] = pytest.StashKey()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what the collected tests ask for: each takes up to a minute, and one processor."""
    begun = session.config.stash.setdefault(_begun, {})
    if session.config.getoption("collectonly"):
        return
    wanted = MAKERS.keys() & {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if wanted and PARTS["vllm"].present():
        begun |= {name: MAKERS[name]() for name in sorted(wanted)}
    for made in begun.values():
        os.setpriority(os.PRIO_PROCESS, made.pid, BACKGROUND)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what no test came to."""
    begun = session.config.stash.get(_begun, {})
    while begun:
        begun.popitem()[1].end()


@contextmanager
def taken(config: pytest.Config, name: str) -> Iterator[Any]:
    """Yield the server that was started under a name, or start it; it ends with the block."""
    made = config.stash[_begun].pop(name, None) or MAKERS[name]()
    try:
        yield made
    finally:
        made.end()


@contextmanager
def ready(config: pytest.Config, name: str, say: Callable[[str], None]) -> Iterator[tuple[str, Path]]:
    """Address and model folder of a server of the session."""
    with taken(config, name) as begun:
        begun.server.wait_until_ready(say)
        yield begun.server.address, begun.model


@pytest.fixture(scope="session")
def torch_logprobs(request: pytest.FixtureRequest) -> Iterator[TorchLogprobs]:
    with taken(request.config, "torch_logprobs") as forward:
        yield forward


@pytest.fixture(scope="module")
def trl_trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with taken(request.config, "trl_trainer") as trainer:
        yield trainer


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shows the progress of a long wait."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", flush=True)  # noqa: T201

    return show


@pytest.fixture(scope="session")
def vllm_server(
    request: pytest.FixtureRequest, torch_logprobs: TorchLogprobs, say: Callable[[str], None]
) -> Iterator[tuple[str, Path]]:
    """Address and model folder. Asks for ``torch_logprobs``, so that torch is imported while the server starts."""
    with ready(request.config, "vllm_server", say) as server:
        yield server


@pytest.fixture(scope="module")
def vision_server(
    request: pytest.FixtureRequest, torch_logprobs: TorchLogprobs, say: Callable[[str], None]
) -> Iterator[tuple[str, Path]]:
    """The same of a model that sees images; it ends with the tests of that model."""
    with ready(request.config, "vision_server", say) as server:
        yield server


@pytest.fixture
async def vllm(vllm_server: tuple[str, Path]) -> AsyncIterator[Vllm]:
    address, model = vllm_server
    async with aiohttp.ClientSession() as session:
        server = Vllm(session, address, model)
        yield server
        await server.sync(model, "default", mode="abort")
