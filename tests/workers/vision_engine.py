"""A policy server that sees images, in the shapes of vLLM's generate route: a prompt comes with one token for each
image, and is answered with all of them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

IMAGE = 9
"""The id that stands for an image."""

ANSWER = [3] * 10
"""The policy's default answer."""


class VisionEngine:
    """``sizes``: tokens of the images, in their order; the last one goes for all later ones. ``drift``: how many more
    each has with every request, as in an engine that cannot make up its mind."""

    def __init__(self, *sizes: int, drift: int = 0, generate: bool = True, answer: list[int] = ANSWER) -> None:
        self.sizes = list(sizes) or [64]
        self.drift = drift
        self.generate = generate
        self.answer = answer
        self.url = ""
        self.prompts: list[list[int]] = []
        """Prompts as they were sent."""
        self.seen: list[list[int]] = []
        """Prompts as they were expanded."""
        self.images: list[list[bytes]] = []
        """The images of each request."""

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.generate or "token_ids" not in body:
            return web.json_response({"error": {"message": "no"}}, status=400 if self.generate else 403)
        more = self.drift * len(self.prompts)
        self.prompts.append(body["token_ids"])
        parts = body.get("content_parts", [])
        self.images.append([base64.b64decode(part["url"].partition(",")[2]) for part in parts])
        prompt: list[int] = []
        ranges: list[dict[str, int]] = []
        for token in body["token_ids"]:
            if token == IMAGE and len(ranges) < len(parts):
                size = self.sizes[min(len(ranges), len(self.sizes) - 1)] + more
                ranges.append({"offset": len(prompt), "length": size})
                prompt += [IMAGE] * size
            else:
                prompt.append(token)
        self.seen.append(prompt)
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": self.answer,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in self.answer]},
            "weight_versions": [{"version": "0.1", "start": 0, "end": len(self.answer)}],
        }
        answer = {"choices": [choice], "prompt_token_ids": prompt, "mm_placeholders": {"image": ranges}}
        return web.json_response(answer)

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0.1"})


@asynccontextmanager
async def serving_vision(engine: VisionEngine) -> AsyncIterator[VisionEngine]:
    """The engine listens while the block runs."""
    application = web.Application()
    application.router.add_post("/inference/v1/generate", engine._generate)
    application.router.add_get("/weight_info", engine._weight_info)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield engine
    finally:
        await runner.cleanup()
