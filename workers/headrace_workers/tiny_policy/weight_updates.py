"""How vLLM is paused and gets new weights, for the double: requests are held back, a folder is loaded, it is named.

* A paused engine takes requests and holds them back. ``keep``: those under way go on after it. ``wait``: they are
  finished before the pause answers. ``abort``: they end with what they have, which here is nothing.
* A folder is refused whole, and changes nothing, unless it has the policy's one tensor in its shape.
* Loads are carried out in the order in which they were asked for, also if whoever asked has gone.
* What weights are called is changed by nobody but the caller, as in vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.common.timeouts import timeout
from headrace.errors import InvalidRequest
from headrace.wire.policy_server import LoadResult, PauseMode, parse_weight_version
from headrace_workers.tiny_policy.model import SIZE, Floats
from headrace_workers.tiny_policy.policy import TinyPolicy

TENSOR = "weights"
FILE = "model.safetensors"


def write_folder(folder: Path, weights: Floats, file: str = FILE) -> None:
    """Write weights f64[SIZE] as the double loads them: one safetensors file, complete before it has its name."""
    data = weights.astype("<f8").tobytes()
    head = json.dumps({TENSOR: {"dtype": "F64", "shape": list(weights.shape), "data_offsets": [0, len(data)]}}).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{file}"
    unfinished.write_bytes(struct.pack("<Q", len(head)) + head + data)
    unfinished.replace(folder / file)


def read_folder(folder: str, file: str = FILE) -> Floats:
    """The weights of a folder. Raises InvalidRequest that says what is wrong with it."""
    path = Path(folder) / file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    try:
        (size,) = struct.unpack_from("<Q", data)
        tensors = {name: item for name, item in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
        entry = tensors.get(TENSOR)
    except (struct.error, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{path} is no whole safetensors file: {error}") from error
    if entry is None or len(tensors) > 1:
        raise InvalidRequest(f"{path} holds {sorted(tensors)}, the policy has {[TENSOR]}")
    if (entry["dtype"], entry["shape"]) != ("F64", [SIZE]):
        raise InvalidRequest(
            f"{TENSOR} has shape {entry['shape']} of {entry['dtype']}, the policy's is [{SIZE}] of F64"
        )
    if len(data) != 8 + size + 8 * SIZE:
        raise InvalidRequest(
            f"{path} has {len(data)} bytes, not the {8 + size + 8 * SIZE} of its header: it is cut short"
        )
    return np.frombuffer(data, "<f8", SIZE, 8 + size).astype(np.float64)


class Aborted(Exception):
    """The engine ended the request, since it is to be paused."""


class Engine:
    """What holds requests back, loads folders and names weights."""

    def __init__(self, policy: TinyPolicy) -> None:
        self._policy = policy
        self._called = ""
        self._mode: PauseMode | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._abort = asyncio.Event()
        self._loading = asyncio.Lock()
        #: Requests that are held back, and those under way.
        self.waiting = 0
        self.running = 0

    @property
    def name(self) -> str:
        """What the weights are called."""
        return self._called or str(self._policy.version)

    @property
    def paused(self) -> bool:
        """Whether requests are held back."""
        return self._mode is not None

    async def sample(self, seconds: float, make: Callable[[], bytes]) -> bytes:
        """Carry out a request that takes so long. Raises Aborted."""
        await self._held()
        self.running += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with timeout(seconds):
                    await self._abort.wait()
                raise Aborted
            if self._mode == "keep":
                self.running -= 1
                try:
                    await self._held()
                finally:
                    self.running += 1
            return make()
        finally:
            self.running -= 1

    async def _held(self) -> None:
        self.waiting += 1
        try:
            await self._resumed.wait()
        finally:
            self.waiting -= 1

    async def pause(self, mode: PauseMode) -> None:
        """Hold requests back; returns when none is worked on."""
        self._mode = mode
        self._resumed.clear()
        if mode == "abort":
            self._abort.set()
            self._abort = asyncio.Event()
        while mode == "wait" and self.running and self._mode == mode:
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        """Let requests go on."""
        self._mode = None
        self._resumed.set()

    def rename(self, name: str) -> None:
        """What the weights are called from now on."""
        version = parse_weight_version(name)
        self._called = name if name != str(version) else ""
        if version is not None:
            self._policy.load(self._policy.weights, version)

    async def load(self, folder: str, fault: str, seconds: float) -> LoadResult:
        """Load a folder under the name that the weights have; ``fault`` is how it goes wrong. Raises LoadFailed."""
        # Not ended with whoever asked: an engine does not notice.
        return await asyncio.shield(asyncio.ensure_future(self._load(folder, fault, seconds)))

    async def _load(self, folder: str, fault: str, seconds: float) -> LoadResult:
        async with self._loading:
            await asyncio.sleep(seconds)
            if fault == "die":
                os._exit(1)
            try:
                weights = read_folder(folder)
            except InvalidRequest as error:
                return LoadResult(refused=error.detail)
            if fault:  # half of them are new
                weights[: SIZE // 2] = self._policy.weights[: SIZE // 2]
            self._policy.load(weights, self._policy.version)
            if fault == "fail":
                raise LoadFailed
            return LoadResult(mixed="the double was told to") if fault else LoadResult(tensors=1, bytes=8 * SIZE)


class LoadFailed(Exception):
    """A load that broke off."""
