"""The tiny policy over HTTP: vLLM's completions protocol, as raw ASGI for speed.

* ``POST /v1/completions`` takes prompt token ids and returns token ids, log-probabilities and weight versions.
* ``POST /inference/v1/generate`` does the same in vLLM's format of that route.
* Errors have vLLM's format: 400 for an invalid request, 404 for another model.
* ``POST /weights`` replaces all weights, and only then confirms their version.
* It pauses, loads folders and names weights by vLLM's routes (``headrace_workers.tiny_policy.weight_updates``).
* It loads adapters, each another weight vector, by vLLM's routes (``headrace_workers.tiny_policy.adapters``).
* A client that disconnects ends its request; ``vllm:num_requests_running`` counts the live ones.
* Two live requests never share an id (``X-Request-Id``): the second is refused.
* ``POST /misbehave`` makes it a test double of a failing server.

Other routes: ``GET /health``, ``/version``, ``/v1/models``, ``/weight_info``, ``/weights``, ``/metrics``,
``/misbehave``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar, get_args
from urllib.parse import parse_qs

import msgspec
import numpy as np

from headrace.errors import InvalidRequest, NotFound, RequestError
from headrace.trajectory import Version
from headrace.wire import policy_server
from headrace_workers.renderers.bytes_renderer import END
from headrace_workers.tiny_policy import adapters, weight_updates
from headrace_workers.tiny_policy.adapters import TinyPolicyAdapters
from headrace_workers.tiny_policy.faults import (
    SPOILS,
    STOP_OVERRUNS,
    FaultInjector,
    FaultSettings,
    RequestFault,
    falsify,
    overrun,
)
from headrace_workers.tiny_policy.messages import (
    MAX_MODEL_LEN,
    TinyGenerateRequest,
    TinyPolicyRequest,
    completion_choice,
    generate_answer,
    prompt_logprobs_field,
    read_completion,
    read_generate,
    read_prompt,
    sampler_settings,
)
from headrace_workers.tiny_policy.model import SIZE
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.prompt_logprobs import prompt_logprobs
from headrace_workers.tiny_policy.sampler import Generation, SamplerSettings, end_generation
from headrace_workers.tiny_policy.weight_updates import Aborted, Engine, LoadFailed, UnloadableWeights, read_announced

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

VERSION_HEADER = "x-weight-version"
"""Header with the version of the weights in a body of ``/weights``."""

SAMPLING_ROUTES = (policy_server.COMPLETIONS, policy_server.GENERATE)

CHECKED_FILES = {policy_server.CHECK: weight_updates.FILE, policy_server.CHECK_ADAPTER: adapters.FILE}
"""The file of a folder that a method of ``/collective_rpc`` checks."""

ABORTED = Generation([], [], "", policy_server.ABORTED, None)
"""The answer to a request that a pause aborted."""


class ClientGoneError(Exception):
    """Raised when the client has disconnected."""


_encode = msgspec.json.Encoder().encode


class TinyPolicyServer:
    """The ASGI application."""

    def __init__(self, policy: TinyPolicy, faults: FaultInjector, *, model: str = "policy") -> None:
        self._policy = policy
        self._faults = faults
        self._model = model
        self._engine = Engine(policy)
        self._adapters = TinyPolicyAdapters(model, policy)
        self._live: dict[str, asyncio.Event] = {}
        """Events by request id; setting one aborts the request."""
        self._finished = 0
        self._sampled_tokens = 0
        self._numbers = itertools.count(1)
        self._routes: dict[tuple[str, str], Callable[[Scope, bytes], tuple[bytes, str, str]]] = {
            ("GET", "/health"): lambda scope, body: (b"", "text/plain", ""),
            ("GET", "/version"): lambda scope, body: _json({"version": "headrace-tiny-policy"}),
            ("GET", "/v1/models"): self._models,
            ("GET", policy_server.WEIGHT_INFO): lambda scope, body: _json({"weight_version": self._engine.name}),
            ("GET", policy_server.IS_PAUSED): lambda scope, body: _json({"is_paused": self._engine.paused}),
            ("POST", policy_server.RESUME): self._resume,
            ("POST", policy_server.UPDATE_WEIGHT_VERSION): self._rename,
            ("POST", policy_server.ABORT_REQUESTS): self._abort,
            ("POST", policy_server.LOAD_ADAPTER): lambda scope, body: _adapter(body, self._adapters.load),
            ("POST", policy_server.UNLOAD_ADAPTER): lambda scope, body: _adapter(body, self._adapters.unload),
            ("GET", "/weights"): self._get_weights,
            ("POST", "/weights"): self._post_weights,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/misbehave"): lambda scope, body: _json(msgspec.structs.asdict(self._faults.settings)),
            ("POST", "/misbehave"): self._misbehave,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            return
        body = await _read(receive)
        try:
            if scope["path"] in SAMPLING_ROUTES and scope["method"] == "POST":
                await _answer(send, 200, await self._sample(scope, body, receive))
                return
            if scope["path"] == policy_server.PAUSE and scope["method"] == "POST":
                await self._engine.pause(_pause_mode(scope))
                await _answer(send, 200, _encode({"status": "paused"}))
                return
            if scope["path"] == policy_server.RPC and scope["method"] == "POST":
                await _answer(send, 200, await self._rpc(body))
                return
            route = self._routes.get((scope["method"], scope["path"]))
            if route is None:
                raise NotFound(f"No route {scope['method']} {scope['path']}.")
            payload, media_type, version = route(scope, body)
            await _answer(send, 200, payload, media_type, version)
        except ClientGoneError:
            return
        except LoadFailed:
            await _answer(send, 500, _error(500, "The load failed, as set by /misbehave."))
        except _Refused as refused:
            await _answer(send, refused.status, _error(refused.status, str(refused)))
        except RequestError as error:
            await _answer(send, error.status, _error(error.status, str(error)))

    async def _sample(self, scope: Scope, body: bytes, receive: Receive) -> bytes:
        request = (read_generate if scope["path"] == policy_server.GENERATE else read_completion)(body)
        request_id = _header(scope, b"x-request-id") or f"{next(self._numbers):x}"
        if request_id in self._live:
            raise InvalidRequest(f"Request id {request_id} is already running.")
        self._live[request_id] = asyncio.Event()
        try:
            fault = self._faults.next_fault()
            if fault.wait_s > 0 or self._engine.paused:
                return await self._answer_later(fault, request, request_id, receive)
            if fault.fail:
                raise _Refused(self._faults.settings.fail_status)
            return self._complete(request, request_id, fault.lie)
        finally:
            del self._live[request_id]

    async def _answer_later(
        self, fault: RequestFault, request: TinyPolicyRequest, request_id: str, receive: Receive
    ) -> bytes:
        """Answer a request with a delay, or after a pause of the engine. Raises ClientGoneError."""

        def answer() -> bytes:
            if fault.fail:
                raise _Refused(self._faults.settings.fail_status)
            return self._complete(request, request_id, fault.lie)

        work = asyncio.ensure_future(self._engine.sample(fault.wait_s, answer))
        aborted = asyncio.ensure_future(self._live[request_id].wait())
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait(
                [work, aborted] if self._faults.settings.keep_generating else [work, aborted, gone],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                return work.result()
            raise Aborted if aborted.done() else ClientGoneError
        except Aborted:
            return self._complete(request, request_id, "", aborted=True)
        finally:
            gone.cancel()
            aborted.cancel()
            work.cancel()

    def _complete(self, request: TinyPolicyRequest, request_id: str, lie: str, *, aborted: bool = False) -> bytes:
        policy = self._adapters.policy(request.model)
        prompt = read_prompt(request.prompt)
        sampling = sampler_settings(request, len(prompt))
        generations = [ABORTED] * request.n if aborted else self._generate(policy, prompt, sampling, request, lie)
        of_prompt = None
        if request.prompt_logprobs is not None:
            of_prompt = prompt_logprobs_field(prompt, prompt_logprobs(policy.model, prompt))
        version = self._engine.name
        choices = [
            completion_choice(index, generation, request, version, of_prompt)
            for index, generation in enumerate(generations)
        ]
        completion_tokens = sum(len(generation.token_ids) for generation in generations)
        self._sampled_tokens += completion_tokens
        self._finished += len(generations)
        answer = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "total_tokens": len(prompt) + completion_tokens,
                "completion_tokens": completion_tokens,
            },
        }
        if lie:
            falsify(lie, answer, prompt)
        if isinstance(request, TinyGenerateRequest):
            answer = generate_answer(answer)
        # Only the standard library's encoder writes NaN and infinities as literals.
        payload = json.dumps(answer).encode() if lie else _encode(answer)
        return SPOILS[lie](payload) if lie in SPOILS else payload

    def _generate(
        self, policy: TinyPolicy, prompt: list[int], sampling: SamplerSettings, request: TinyPolicyRequest, lie: str
    ) -> list[Generation]:
        reply = self._faults.settings.reply_to(prompt)
        longer = sampling._replace(stop=()) if lie in STOP_OVERRUNS else sampling
        if reply is None:
            generations, _ = policy.generate(prompt, longer, count=request.n, seed=request.seed)
        else:
            ids = [*reply.encode(), END]
            generations = [end_generation(ids, [0.0] * len(ids), longer)] * request.n
        if longer is not sampling:
            generations = [overrun(generation, sampling) for generation in generations]
        return generations

    def _models(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        card = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "headrace",
            "root": self._model,
            "parent": None,
            "max_model_len": MAX_MODEL_LEN,
        }
        return _json({"object": "list", "data": [card, *self._adapters.cards()]})

    def _abort(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        for name in _read_control(body, policy_server.AbortRequests).request_ids:
            abort = self._live.get(name.removeprefix(policy_server.GENERATE_PREFIX))
            if abort is not None:
                abort.set()
        return b"", "text/plain", ""

    def _get_weights(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        content = self._policy.weights.astype("<f8").tobytes()
        return content, "application/octet-stream", str(self._policy.version)

    def _post_weights(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        try:
            version = Version.parse(_header(scope, VERSION_HEADER.encode()))
        except ValueError as error:
            raise InvalidRequest(f"Header {VERSION_HEADER}: {error}.") from error
        if len(body) != 8 * SIZE:
            raise InvalidRequest(
                f"The body has {len(body)} bytes.", hint=f"Send {SIZE} little-endian float64 values, {8 * SIZE} bytes."
            )
        self._policy.load(np.frombuffer(body, dtype="<f8").astype(np.float64), version)
        self._engine.rename(str(version))
        return _json({"weight_version": self._engine.name})

    def _resume(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        self._engine.resume()
        return _json({"status": "resumed"})

    def _rename(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        name = _read_control(body, policy_server.VersionUpdate).new_version
        self._engine.rename(name)
        return _json({"success": True, "new_version": name})

    async def _rpc(self, body: bytes) -> bytes:
        request = _read_control(body, policy_server.RpcRequest)
        if request.method in CHECKED_FILES:
            try:
                read_announced(*request.args, file=CHECKED_FILES[request.method])
                result = policy_server.LoadResult(tensors=1, bytes=8 * SIZE)
            except UnloadableWeights as error:
                result = error.result()
        elif request.method == policy_server.LOAD:
            result = await self._engine.load(request.args, *self._faults.next_load())
        else:
            raise _Refused(500)
        return _encode(policy_server.RpcResponse(results=[result]))

    def _metrics(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        values = {
            "vllm:num_requests_running": ("gauge", len(self._live) - self._engine.waiting),
            "vllm:num_requests_waiting": ("gauge", self._engine.waiting),
            "vllm:request_success_total": ("counter", self._finished),
            "vllm:generation_tokens_total": ("counter", self._sampled_tokens),
            # The tiny policy has no cache.
            "vllm:kv_cache_usage_perc": ("gauge", 0),
            "vllm:num_preemptions_total": ("counter", 0),
            "vllm:prefix_cache_queries_total": ("counter", 0),
            "vllm:prefix_cache_hits_total": ("counter", 0),
        }
        lines = [
            f'# TYPE {name} {kind}\n{name}{{model_name="{self._model}"}} {value}\n'
            for name, (kind, value) in values.items()
        ]
        return "".join(lines).encode(), "text/plain; version=0.0.4", ""

    def _misbehave(self, scope: Scope, body: bytes) -> tuple[bytes, str, str]:
        self._faults.set(_read_control(body, FaultSettings))
        return _json(msgspec.structs.asdict(self._faults.settings))


def _adapter(body: bytes, change: Callable[[policy_server.AdapterRequest], str]) -> tuple[bytes, str, str]:
    return change(_read_control(body, policy_server.AdapterRequest)).encode(), "text/plain", ""


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("Out of range float values are not JSON compliant: a failure set by /misbehave.")
        self.status = status


_T = TypeVar("_T")


def _read_control(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request cannot be read: {error}.") from error


def _pause_mode(scope: Scope) -> policy_server.PauseMode:
    query = parse_qs(scope["query_string"].decode("latin-1"))
    mode = query.get("mode", ["abort"])[0]
    modes: tuple[policy_server.PauseMode, ...] = get_args(policy_server.PauseMode)
    for known in modes:
        if mode == known:
            return known
    raise InvalidRequest(f"mode: {mode!r} is not one of {modes}")


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts = [body]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def _answer(
    send: Send, status: int, payload: bytes, media_type: str = "application/json", version: str = ""
) -> None:
    headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(payload))]
    if version:
        headers.append((VERSION_HEADER.encode(), version.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


def _json(value: Any) -> tuple[bytes, str, str]:
    return _encode(value), "application/json", ""


def _error(status: int, message: str) -> bytes:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    error = {"message": message, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}
    return _encode({"error": error})


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""
