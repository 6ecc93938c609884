"""Weight updates of the tiny policy, as in vLLM: pause, load a folder, set its name, resume.

* A paused engine accepts requests and delays them. ``keep``: running requests continue after the pause. ``wait``: they
  finish before the pause returns. ``abort``: they end with the tokens sampled so far, of which this policy has none.
* A folder is refused, and changes nothing, unless it has the policy's one tensor in its shape and the announced digest.
* Loads are carried out in order, even if the client has disconnected.
* Only the caller changes the name of the weights, as in vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrace.common.timeouts import timeout
from headrace.errors import InvalidRequest
from headrace.weight_files import WeightFilesError, WeightsKind, file_states, require_digest
from headrace.wire.policy_server import LoadResult, PauseMode, parse_weight_version
from headrace_workers.tiny_policy.model import SIZE, Floats
from headrace_workers.tiny_policy.policy import TinyPolicy

TENSOR = "weights"
FILE = "model.safetensors"


def write_folder(folder: Path, weights: Floats, file: str = FILE) -> None:
    """Write weights f64[SIZE] as a folder to load: one safetensors file, complete before it gets its name."""
    data = weights.astype("<f8").tobytes()
    head = json.dumps({TENSOR: {"dtype": "F64", "shape": list(weights.shape), "data_offsets": [0, len(data)]}}).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{file}"
    unfinished.write_bytes(struct.pack("<Q", len(head)) + head + data)
    unfinished.replace(folder / file)


class UnloadableWeights(InvalidRequest):
    """Files that the tiny policy cannot load. ``kind``: the code of an InvalidWeights error."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    def result(self) -> LoadResult:
        """The result of a check or load that refused the files."""
        return LoadResult(refused=self.detail, kind=self.kind)


def read_folder(folder: str, file: str = FILE) -> Floats:
    """Read the weights of a folder. Raises UnloadableWeights that names the fault."""
    path = Path(folder) / file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnloadableWeights("weights-missing", f"{path}: {error.strerror}") from error
    try:
        (size,) = struct.unpack_from("<Q", data)
        tensors = {name: item for name, item in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
        entry = tensors.get(TENSOR)
    except (struct.error, ValueError, AttributeError) as error:
        raise UnloadableWeights("weights-damaged", f"{path} is not a complete safetensors file: {error}") from error
    unfit = "adapter-does-not-fit" if file != FILE else "weights-do-not-fit"
    if entry is None or len(tensors) > 1:
        raise UnloadableWeights(unfit, f"{path} contains {sorted(tensors)}, the policy has {[TENSOR]}")
    if (entry["dtype"], entry["shape"]) != ("F64", [SIZE]):
        raise UnloadableWeights(
            unfit, f"{TENSOR} has shape {entry['shape']} of {entry['dtype']}, the policy's is [{SIZE}] of F64"
        )
    if len(data) != 8 + size + 8 * SIZE:
        raise UnloadableWeights(
            "weights-damaged",
            f"{path} has {len(data)} bytes, not the {8 + size + 8 * SIZE} of its header: it is cut short",
        )
    return np.frombuffer(data, "<f8", SIZE, 8 + size).astype(np.float64)


def read_announced(folder: str, digest: str = "", *, file: str = FILE) -> Floats:
    """Read the weights of a folder, whose files must have this digest and not change meanwhile. Raises
    UnloadableWeights."""
    kind: WeightsKind = "full" if file == FILE else "adapter"
    try:
        if digest:
            require_digest(folder, kind, digest)
        states = file_states(folder, kind)
        weights = read_folder(folder, file)
        if digest:
            require_digest(folder, kind, digest)
        if file_states(folder, kind) != states:
            raise WeightFilesError("weights-changed", f"{folder}: its files changed while they were read")
    except WeightFilesError as error:
        raise UnloadableWeights(error.kind, str(error)) from error
    return weights


class Aborted(Exception):
    """Raised when a pause ends the request."""


class Engine:
    """The engine: delays requests during a pause, loads folders and names weights."""

    def __init__(self, policy: TinyPolicy) -> None:
        self._policy = policy
        self._name = ""
        self._mode: PauseMode | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._abort = asyncio.Event()
        self._loading = asyncio.Lock()
        self.waiting = 0
        """Requests delayed by a pause."""
        self.running = 0

    @property
    def name(self) -> str:
        """The name of the weights."""
        return self._name or str(self._policy.version)

    @property
    def paused(self) -> bool:
        """True while requests are delayed."""
        return self._mode is not None

    async def sample(self, seconds: float, answer: Callable[[], bytes]) -> bytes:
        """Answer a request after ``seconds``, and after a pause. Raises Aborted."""
        await self._wait_until_resumed()
        self.running += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with timeout(seconds):
                    await self._abort.wait()
                raise Aborted
            if self._mode == "keep":
                self.running -= 1
                try:
                    await self._wait_until_resumed()
                finally:
                    self.running += 1
            return answer()
        finally:
            self.running -= 1

    async def _wait_until_resumed(self) -> None:
        self.waiting += 1
        try:
            await self._resumed.wait()
        finally:
            self.waiting -= 1

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine. With the mode ``wait``, returns when no request is running."""
        self._mode = mode
        self._resumed.clear()
        if mode == "abort":
            self._abort.set()
            self._abort = asyncio.Event()
        while mode == "wait" and self.running and self._mode == mode:
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        """Resume requests."""
        self._mode = None
        self._resumed.set()

    def rename(self, name: str) -> None:
        """Set the name of the weights."""
        version = parse_weight_version(name)
        self._name = name if name != str(version) else ""
        if version is not None:
            self._policy.load(self._policy.weights, version)

    async def load(self, args: Sequence[str], fault: str, seconds: float) -> LoadResult:
        """Load a folder, keeping the name of the weights. ``args``: the folder and the digest of its files, if known;
        ``fault`` is the fault to inject. Raises LoadFailed."""
        # It continues if the client disconnects: an engine does not notice.
        return await asyncio.shield(asyncio.ensure_future(self._load(args, fault, seconds)))

    async def _load(self, args: Sequence[str], fault: str, seconds: float) -> LoadResult:
        async with self._loading:
            await asyncio.sleep(seconds)
            if fault == "die":
                os._exit(1)
            try:
                weights = read_announced(*args)
            except UnloadableWeights as error:
                return error.result()
            if fault:  # half of the weights are new
                weights[: SIZE // 2] = self._policy.weights[: SIZE // 2]
            self._policy.load(weights, self._policy.version)
            if fault == "fail":
                raise LoadFailed
            return LoadResult(mixed="set by /misbehave") if fault else LoadResult(tensors=1, bytes=8 * SIZE)


class LoadFailed(Exception):
    """Raised by a load that failed halfway."""
