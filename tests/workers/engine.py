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
        self.models: list[dict[str, Any]] = []
        self.healthy = True
        self.aborted = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, generated)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chatted)

    async def _complete(
        self, request: web.Request, shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
    ) -> web.StreamResponse:
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
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(shape(answer))

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _weight_info(self, request: web.Request) -> web.Response:
        self.weight_questions += 1
        if isinstance(self.version, int):
            return web.json_response({"error": {"message": "no"}}, status=self.version)
        return web.json_response({"weight_version": self.version})


def generated(answer: dict[str, Any]) -> dict[str, Any]:
    """A completion in the shape of the generate route."""
    choices = []
    for choice in answer["choices"]:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        content = None
        if logprobs is not None:
            content = [
                {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
                for token, value in zip(ids, logprobs["token_logprobs"], strict=True)
            ]
        choices.append({**choice, "logprobs": content and {"content": content}})
    return {"request_id": "generate-tokens-1", "choices": choices, "prompt_token_ids": None}


def chatted(answer: dict[str, Any]) -> dict[str, Any]:
    """A completion as a chat server gives it."""
    choices = []
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs")
        content = logprobs and [{"token": "x", "logprob": value} for value in logprobs["token_logprobs"]]
        message = {"role": "assistant", "content": choice["text"]}
        choices.append({**choice, "message": message, "logprobs": content and {"content": content}})
    return {"id": "chatcmpl-1", "choices": choices, "prompt_token_ids": choices[0].get("prompt_token_ids")}


@asynccontextmanager
async def serving(answer: Answer, *, generate: bool = False, chat: bool = False) -> AsyncIterator[Engine]:
    """An engine that listens while the block runs. ``generate``: it has vLLM's generate route too; ``chat``: it has a
    chat route alone."""
    engine = Engine(answer)
    application = web.Application()
    if chat:
        application.router.add_post("/v1/chat/completions", engine._chat)
    else:
        application.router.add_post("/v1/completions", engine._complete)
    if generate:
        application.router.add_post("/inference/v1/generate", engine._generate)
    application.router.add_get("/v1/models", engine._list)
    application.router.add_get("/health", engine._health)
    application.router.add_get("/weight_info", engine._weight_info)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield engine
    finally:
        await runner.cleanup()
