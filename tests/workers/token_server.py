"""A policy server in vLLM's protocol, with a real tokenizer and a policy that any prefix determines; it can be told to
get one thing wrong."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from headrace.errors import InfrastructureFailure
from headrace.trajectory import Message
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer
from headrace_workers.renderers.template_renderer import TemplateRenderer

SHARES = (0.6, 0.25, 0.1, 0.05)
"""Probabilities of the four tokens that may come next."""

LONGEST = 300
"""Most tokens of prompt and answer."""

OTHERWISE = -20.0
"""Log-probability of a token that never comes."""


@functools.cache
def _next_tokens(last: tuple[int, ...], vocab_size: int) -> list[int]:
    return random.Random(str(list(last))).sample([id_ for id_ in range(vocab_size) if id_ % 7], 4)


class TokenServer:
    """Serves ``policy``. ``wrong`` names what it gets wrong; empty: nothing. Sampling parameters that a request does
    not state are those of the model's ``generation_config.json``, as in vLLM; with ``overrides`` they always are."""

    def __init__(self, tokenizer: FolderTokenizer, wrong: str = "") -> None:
        self.tokenizer = tokenizer
        self.renderer = TemplateRenderer(tokenizer)
        self.wrong = wrong
        self.url = ""
        self._running = 0
        self._asked = 0

    def _next(self, prefix: list[int]) -> list[int]:
        """The four tokens that may come, the likeliest first."""
        return _next_tokens(tuple(prefix[-5:]), self.tokenizer.vocab_size)

    def _logprob(self, prefix: list[int], token: int) -> float:
        following = self._next(prefix)
        return math.log(SHARES[following.index(token)]) if token in following else OTHERWISE

    def _shares(self, body: dict[str, Any]) -> list[float]:
        """The probabilities of the four tokens after temperature, top_k and top_p."""
        neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}
        sampling = neutral | self.tokenizer.sampling_defaults
        if self.wrong != "overrides":
            sampling |= {name: body[name] for name in neutral if body.get(name) is not None}
        powers = [share ** (1 / (sampling["temperature"] or 1.0)) for share in SHARES]
        kept = powers[: sampling["top_k"]] if sampling["top_k"] > 0 else powers
        whole, before = sum(kept), [sum(kept[:rank]) for rank in range(len(kept))]
        return [
            share if less < sampling["top_p"] * whole else 0.0 for share, less in zip(kept, before, strict=True)
        ] + [0.0] * (len(SHARES) - len(kept))

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        self._asked += 1
        prompt = list(body["prompt"])
        seed = self._asked if self.wrong in ("seed", "greedy") else body.get("seed")
        drawn = random.Random(f"{seed} {index}")
        greedy = body.get("temperature") == 0 and self.wrong != "greedy"
        ids: list[int] = []
        logprobs: list[float] = []
        finish = "length"
        stops = [] if self.wrong == "stop token" else body.get("stop_token_ids", [])
        strings = [] if self.wrong == "stop string" else body.get("stop", [])
        shares = self._shares(body)
        while len(ids) < body["max_tokens"]:
            following = self._next(prompt + ids)
            ids.append(following[0] if greedy else drawn.choices(following, shares)[0])
            logprobs.append(self._logprob(prompt + ids[:-1], ids[-1]))
            if ids[-1] in stops or any(stop in self.tokenizer.decode(ids) for stop in strings):
                finish = "stop"
                break
        scored = [None, *({str(t): {"logprob": self._logprob(prompt[:at], t)}} for at, t in enumerate(prompt) if at)]
        if self.wrong == "scores":
            logprobs = [value - 1.0 for value in logprobs]
        return {
            "index": index,
            "text": "",
            "finish_reason": finish,
            "token_ids": None if self.wrong == "no ids" else ids,
            "logprobs": {"token_logprobs": logprobs[self.wrong == "logprobs" :]},
            "prompt_token_ids": prompt[1:] if self.wrong == "echo" else prompt,
            "prompt_logprobs": scored if "prompt_logprobs" in body and self.wrong != "unscored" else None,
        }

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body.get("prompt")
        if not prompt or max(prompt) >= self.tokenizer.vocab_size - (self.wrong == "fewer ids"):
            return _refusal("Token id is out of vocabulary")
        if len(prompt) > LONGEST and self.wrong != "truncates":
            return _refusal("maximum context length")
        if len(prompt) + body["max_tokens"] > LONGEST and self.wrong != "truncates":
            return _refusal("max_tokens cannot be greater than max_model_len")
        self._running += 1
        try:
            if body.get("ignore_eos"):
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            self._running += self.wrong == "abort"
            raise
        finally:
            self._running -= 1
        count = 1 if self.wrong == "n" else body.get("n", 1)
        return web.json_response({"choices": [self._choice(body, index) for index in range(count)]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            messages = [Message(role=item["role"], content=item["content"]) for item in body["messages"]]
            try:
                tokens = self.renderer.start(messages).new_ids
            except InfrastructureFailure as failure:
                return _refusal(str(failure))
            if self.wrong == "forges":
                tokens = self.tokenizer.encode(self.tokenizer.decode(tokens))
        else:
            tokens = self.tokenizer.encode(body["prompt"])
        return web.json_response({"tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.tokenizer.decode((await request.json())["tokens"])})

    async def _models(self, request: web.Request) -> web.Response:
        if self.wrong == "unnamed":
            return web.json_response({})
        name = "other" if self.wrong == "model" else "policy"
        return web.json_response({"data": [{"id": name, "max_model_len": LONGEST}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "latest" if self.wrong == "version" else "0.3"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{model_name="policy"}} {self._running}\n')


def _refusal(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def serving_tokens(server: TokenServer) -> AsyncIterator[TokenServer]:
    """The server listens while the block runs."""
    application = web.Application()
    application.add_routes(
        [
            web.get("/health", _healthy),
            web.get("/v1/models", server._models),
            web.get("/weight_info", server._weight_info),
            web.get("/metrics", server._metrics),
            web.post("/v1/completions", server._complete),
            web.post("/tokenize", server._tokenize),
            web.post("/detokenize", server._detokenize),
        ]
    )
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield server
    finally:
        await runner.cleanup()
