"""HTTP calls to policy servers, which carry out the controller's decisions.

* A call returns a server's problem as its result, and never raises because of a server.
* Before weights change, the server's weight name says that a load has begun, so that this is known after a crash.
* A load succeeds only if every process of the engine confirms it; only then does the server get the version's name.
* A refused load changes nothing, not even the name.
* A server is loaded only while it is paused.
* Proxy settings of the environment are not used.
"""

from __future__ import annotations

import asyncio
import math
from typing import Literal, TypeVar

import aiohttp
import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import PolicyFailure
from headrace.wire.messages import Weights
from headrace.wire.policy_server import (
    CHECK,
    CHECK_ADAPTER,
    HEALTH,
    IS_PAUSED,
    LOAD,
    LOAD_ADAPTER,
    METRICS,
    MODELS,
    PAUSE,
    RESUME,
    RPC,
    UNLOAD_ADAPTER,
    UPDATE_WEIGHT_VERSION,
    WEIGHT_INFO,
    AdapterRequest,
    LoadResult,
    ModelList,
    PauseInfo,
    RpcRequest,
    RpcResponse,
    VersionUpdate,
    WeightInfo,
    loading_name,
    weight_version_name,
)
from headrace_orchestrator.policy_servers.admission import Reading
from headrace_orchestrator.policy_servers.controller import PolicyServerCall
from headrace_orchestrator.policy_servers.server_state import CallProblem, ProbeResult
from headrace_orchestrator.policy_servers.vllm_metrics import read_load

_T = TypeVar("_T")

PROBE_TIMEOUT_S = 5.0
"""Deadline of a probe. An engine answers between two steps, and a step takes long for a long prompt on a CPU."""

ADAPTER_TIMEOUT_S = 60.0
"""Deadline for a server to read an adapter from its disk."""

_NO_RUNTIME_ADAPTERS = (
    ". Can the server load adapters while it runs? vLLM needs --enable-lora, --max-lora-rank of at least the adapter's "
    "rank, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
)

CHECK_ANSWER_TIMEOUT_S = 60.0
"""Deadline for each answer of a server that checks files. It answers at once while it hashes them."""

PENDING_PAUSE_S = 0.1
"""Pause before a server that hashes files is asked again."""

CONNECTIONS = 4
"""Connections to one server: enough for a probe, a long call, and a call that ends requests."""

MAX_RESPONSE_BYTES = 16 << 20
"""Longest response body that is read; the metrics of many engines fit."""

QUOTED_CHARACTERS = 300
"""Number of characters of a response that a message quotes."""


class NotChecked(Exception):
    """Raised for a server that cannot check an adapter's files."""


class PolicyServerCalls:
    """The calls to all policy servers, over their own connections."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def probe(self, address: str) -> ProbeResult:
        """Probe a server."""
        try:
            async with timeout(PROBE_TIMEOUT_S):
                await self._ask("GET", address, HEALTH, missing_ok=True)
                info = await self._read(address, WEIGHT_INFO, WeightInfo)
                paused = await self._read(address, IS_PAUSED, PauseInfo)
        except TimeoutError:
            return ProbeResult(f"it did not answer within {PROBE_TIMEOUT_S:g} s")
        except PolicyFailure as failure:
            return ProbeResult(failure.detail)
        weights = "" if info is None or info.weight_version is None else str(info.weight_version)
        return ProbeResult(weights=weights, paused=paused is not None and paused.is_paused)

    async def read_metrics(self, address: str) -> Reading:
        """Read a server's load from its metrics."""
        try:
            async with timeout(PROBE_TIMEOUT_S):
                body = await self._ask("GET", address, METRICS, missing_ok=True)
            return read_load("" if body is None else body.decode(errors="replace")) or "none"
        except (TimeoutError, PolicyFailure, ValueError):
            return "no answer"

    async def carry_out(self, call: PolicyServerCall) -> CallProblem | None:
        """Make a call; returns the problem, if any."""
        try:
            async with timeout(None if call.timeout_s == math.inf else call.timeout_s):
                return await self._carry_out(call)
        except TimeoutError:
            text = f"it did not answer {call.kind} within {call.timeout_s:.3g} s"
            return CallProblem("timeout", text, untouched=call.kind != "load")
        except PolicyFailure as failure:
            return CallProblem(failure.kind, failure.detail, untouched=call.kind != "load")

    async def _carry_out(self, call: PolicyServerCall) -> CallProblem | None:
        if call.kind == "resume":
            await self._ask("POST", call.address, RESUME)
        elif call.kind in ("pause", "end-requests"):
            # The caches hold values that were computed with the old weights.
            await self._ask("POST", call.address, f"{PAUSE}?mode={call.mode}&clear_cache=true")
        elif call.version is not None and call.weights is not None:
            if call.kind == "check":
                return _problem_in(await self._check(call.address, CHECK, call.weights))
            return await self._load(call.address, weight_version_name(call.version, call.run), call.weights)
        return None

    async def _load(self, address: str, name: str, weights: Weights) -> CallProblem | None:
        paused = await self._read(address, IS_PAUSED, PauseInfo)
        if paused is None or not paused.is_paused:
            return CallProblem("not-paused", "it is no longer paused; it was probably restarted", untouched=True)
        info = await self._read(address, WEIGHT_INFO, WeightInfo)
        previous_name = "" if info is None else str(info.weight_version)
        await self._set_name(address, loading_name(previous_name, name))
        results = await self._rpc(address, LOAD, weights)
        problem = _problem_in(results)
        if problem is None:
            await self._set_name(address, name)
        elif problem.untouched:
            await self._set_name(address, previous_name)
        return problem

    async def _set_name(self, address: str, name: str) -> None:
        await self._ask("POST", address, UPDATE_WEIGHT_VERSION, VersionUpdate(new_version=name))

    async def _check(self, address: str, method: str, weights: Weights) -> list[LoadResult]:
        """Check files, and wait while the server hashes them. It serves requests meanwhile."""
        while True:
            try:
                async with timeout(CHECK_ANSWER_TIMEOUT_S):
                    results = await self._rpc(address, method, weights)
            except TimeoutError as error:
                detail = f"it did not answer {method} within {CHECK_ANSWER_TIMEOUT_S:.3g} s"
                raise PolicyFailure(detail, kind="timeout", retryable=True) from error
            if not any(result.pending for result in results):
                return results
            await asyncio.sleep(PENDING_PAUSE_S)

    async def _rpc(self, address: str, method: str, weights: Weights) -> list[LoadResult]:
        args = [weights.path, weights.digest] if weights.digest else [weights.path]
        try:
            body = await self._ask("POST", address, RPC, RpcRequest(method=method, args=args))
        except PolicyFailure as failure:
            if failure.kind not in ("server-error", "request-refused"):
                raise
            if method == CHECK_ADAPTER:
                raise NotChecked(failure.detail) from failure
            failure.detail += (
                ". Can the server load weights from a folder? vLLM needs VLLM_SERVER_DEV_MODE=1 and "
                "--worker-extension-cls headrace.integrations.vllm.WorkerExtension"
            )
            raise
        return _decoded(body or b"", RPC, RpcResponse).results

    async def list_adapters(self, address: str) -> dict[str, str] | None:
        """List a server's adapters as folders by name; None if it does not answer."""
        try:
            async with timeout(PROBE_TIMEOUT_S):
                models = await self._read(address, MODELS, ModelList)
        except (TimeoutError, PolicyFailure):
            return None
        return {} if models is None else {card.id: card.root or "" for card in models.data if card.parent is not None}

    async def check_adapter(self, address: str, weights: Weights) -> CallProblem | None:
        """Ask a server whether an adapter's files are the announced ones, and fit its model; returns the problem, if
        any. Raises NotChecked."""
        try:
            async with timeout(ADAPTER_TIMEOUT_S):
                return _problem_in(await self._check(address, CHECK_ADAPTER, weights))
        except TimeoutError:
            return CallProblem("timeout", f"it did not answer within {ADAPTER_TIMEOUT_S:g} s", untouched=True)
        except PolicyFailure as failure:
            return CallProblem(failure.kind, failure.detail, untouched=True)

    async def change_adapter(self, address: str, kind: Literal["load", "unload"], name: str, path: str) -> str:
        """Load or unload an adapter; returns the problem, if any."""
        route = LOAD_ADAPTER if kind == "load" else UNLOAD_ADAPTER
        try:
            async with timeout(ADAPTER_TIMEOUT_S):
                await self._ask("POST", address, route, AdapterRequest(lora_name=name, lora_path=path))
        except TimeoutError:
            return f"it did not answer within {ADAPTER_TIMEOUT_S:g} s"
        except PolicyFailure as failure:
            no_route = "404" in failure.detail and "Not Found" in failure.detail
            return f"{failure.detail}{_NO_RUNTIME_ADAPTERS}" if no_route else failure.detail
        return ""

    async def _read(self, address: str, path: str, kind: type[_T]) -> _T | None:
        """Send a GET request and decode its response; None if the server does not have the route."""
        body = await self._ask("GET", address, path, missing_ok=True)
        return None if body is None else _decoded(body, path, kind)

    async def _ask(
        self, method: str, address: str, path: str, body: object = None, *, missing_ok: bool = False
    ) -> bytes | None:
        """Send a request and return the body; None for a 404, if allowed. Raises PolicyFailure."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._open().request(method, f"{address}{path}", data=data, headers=headers) as response:
                content, status = await _read_body(response), response.status
        except (aiohttp.ClientError, OSError) as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            raise PolicyFailure(
                "nothing listens at this address"
                if refused
                else f"the connection broke ({error or type(error).__name__})",
                kind="connection-refused" if refused else "connection-lost",
                retryable=True,
            ) from error
        if status == 404 and missing_ok:
            return None
        if status >= 300:
            raise PolicyFailure(
                f"{path} answered {status}: {_quote(content)}",
                kind="server-error" if status >= 500 else "request-refused",
                retryable=status >= 500,
            )
        return content

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of a response. Raises ClientPayloadError if it is too long."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise aiohttp.ClientPayloadError(f"the response is longer than {MAX_RESPONSE_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _problem_in(results: list[LoadResult]) -> CallProblem | None:
    """The problem in the results of a check or a load; None if all succeeded."""
    refused = [result.refused for result in results if result.refused]
    mixed = [result.mixed for result in results if result.mixed]
    if mixed or (refused and len(refused) < len(results)):
        return CallProblem(
            "weights-mixed", f"its weights are a mixture of the old and the new ones: {(mixed or refused)[0]}"
        )
    if refused:
        kind = next((result.kind for result in results if result.kind), "weights-refused")
        return CallProblem(kind, refused[0], untouched=True)
    return None if results else CallProblem("unreadable-response", f"{RPC} returned no result")


def _decoded(body: bytes, path: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyFailure(
            f"the response of {path} cannot be read ({error}): {_quote(body)}",
            kind="unreadable-response",
            retryable=True,
        ) from error


def _quote(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTED_CHARACTERS else text[:QUOTED_CHARACTERS] + "…"
