"""A stand-in for vLLM over real HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

DROP = object()
"""An answer that breaks the connection off."""

Answer = Callable[["Engine", dict[str, Any]], Any]


def completion(
    ids: list[int] | None, logprobs: list[float] | None, *, text: str = "text", finish: str = "stop", **more: Any
) -> dict[str, Any]:
    """The body of an answer with one choice, in vLLM's shape."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, "stop_reason": None, **more}
    if ids is not None:
        choice["token_ids"] = ids
    choice["logprobs"] = None if logprobs is None else {"token_logprobs": logprobs, "tokens": [], "top_logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": {}}


class Engine:
    """Answers completions with ``answer`` and weight questions with ``version``; keeps what was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.version: Any = "0.1"
        self.url = ""
        self.request_ids: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.weight_questions = 0
        self.aborted = asyncio.Event()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if "X-Request-Id" not in request.headers:
            return web.json_response({"error": {"message": "an empty request"}}, status=400)
        self.request_ids.append(request.headers["X-Request-Id"])
        body = await request.json()
        self.bodies.append(body)
        try:
            answer = self.answer(self, body)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        if answer is DROP:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def _weight_info(self, request: web.Request) -> web.Response:
        self.weight_questions += 1
        if isinstance(self.version, int):
            return web.json_response({"error": {"message": "no"}}, status=self.version)
        return web.json_response({"weight_version": self.version})


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Engine]:
    """An engine that listens while the block runs."""
    engine = Engine(answer)
    application = web.Application()
    application.router.add_post("/v1/completions", engine._complete)
    application.router.add_get("/weight_info", engine._weight_info)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield engine
    finally:
        await runner.cleanup()
