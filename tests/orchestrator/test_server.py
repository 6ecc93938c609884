"""The start and the stop of the orchestrator's server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.errors import StoreError
from headrace_orchestrator.server import serve
from headrace_orchestrator.service import lifecycle
from headrace_orchestrator.service.storage.retention import RetentionLoop
from headrace_orchestrator.settings import Settings
from tests.orchestrator.serving import Api, orchestrator, until


async def test_the_port_answers_from_the_start(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    async with orchestrator(data_dir) as api:
        await api.create_run()
    proceed = threading.Event()
    real = lifecycle.replay

    def slow(*args: Any, **more: Any) -> None:
        proceed.wait(30)
        real(*args, **more)

    monkeypatch.setattr(lifecycle, "replay", slow)
    stop = asyncio.Event()
    ready = asyncio.Event()
    running = asyncio.create_task(serve(Settings(data=data_dir, port=0), ready=lambda address: ready.set(), stop=stop))
    url = await until(lambda: address_of(data_dir))
    async with aiohttp.ClientSession(url) as session:
        api = Api(session)
        await api.ask("GET", "/healthz")
        problem = await until(lambda: phase(api, "reading the log"))
        assert problem["done"] == 0
        assert problem["total"] == sum(file.stat().st_size for file in (data_dir / "log").glob("*.log"))
        async with session.post("/v1/worker/lease", data=b'{"worker":"w","slots":1,"free":1}') as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
        async with session.get("/metrics") as answer:
            assert "headrace_ready 0.0" in await answer.text()
        async with session.get("/") as answer:
            assert "reading the log" in await answer.text()
        assert not ready.is_set()
        proceed.set()
        await ready.wait()
        await api.ask("GET", "/readyz")
    stop.set()
    await running


async def test_a_stop_during_the_start_ends_the_process(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
    begun = threading.Event()
    real = lifecycle.replay

    def slow(core: Any, store: Any, now: float, *, damaged: Any, stopping: Any) -> None:
        begun.set()
        while not stopping():
            threading.Event().wait(0.01)
        real(core, store, now, damaged=damaged, stopping=stopping)

    monkeypatch.setattr(lifecycle, "replay", slow)
    stop = asyncio.Event()
    running = asyncio.create_task(serve(Settings(data=data_dir, port=0), ready=lambda address: None, stop=stop))
    await asyncio.to_thread(begun.wait, 30)
    stop.set()
    await running
    monkeypatch.undo()
    async with orchestrator(data_dir) as api:
        assert (await api.ask("GET", "/v1/runs/run"))["episodes"] == {"finished": 4}


async def test_a_background_task_that_fails_ends_the_process_with_its_error(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    async def fail(self: RetentionLoop) -> list[int]:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(RetentionLoop, "step", fail)
    with pytest.raises(StoreError, match=r"task RetentionLoop.run failed \(ZeroDivisionError: a fault\)"):
        await serve(Settings(data=data_dir, port=0), ready=lambda address: None)
    monkeypatch.undo()
    async with orchestrator(data_dir) as api:
        await api.ask("GET", "/readyz")


async def test_cancelling_the_task_stops_it_gracefully(data_dir: Path):
    ready = asyncio.Event()
    running = asyncio.create_task(serve(Settings(data=data_dir, port=0), ready=lambda address: ready.set()))
    await ready.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with orchestrator(data_dir) as api:
        assert (await api.ask("GET", "/healthz"))["epoch"] == 2


async def test_every_response_has_the_epoch(api: Api):
    for method, path, status in (("GET", "/healthz", 200), ("GET", "/nothing", 404), ("POST", "/v1/runs", 400)):
        async with api.session.request(method, path) as answer:
            assert answer.status == status
            assert answer.headers["Headrace-Epoch"] == "1"


async def test_a_head_request_is_answered_without_a_body(api: Api):
    async with api.session.head("/healthz") as answer:
        assert answer.status == 200
        assert await answer.read() == b""


async def address_of(data: Path) -> str:
    try:
        return (data / "address").read_text().strip()
    except FileNotFoundError:
        return ""


async def phase(api: Api, name: str) -> Any:
    problem = await api.ask("GET", "/readyz", status=503)
    return problem if problem["phase"] == name else None
