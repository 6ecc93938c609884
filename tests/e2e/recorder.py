"""A recording proxy between the orchestrator and everybody who talks to it.

* It writes down what the orchestrator acknowledged, as the other side saw it: accepted records, pulled batches, acks.
* It keeps no state of the service and decodes only what it needs, so that it can accuse the service.
* While the orchestrator is down it drops connections, as a dead process would.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from headrace.batch.batch import Batch
from headrace.wire.codec import decode_head

HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}


@dataclass
class Acknowledged:
    """What was seen to be acknowledged."""

    records: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Episode → sha256 of each record that was answered ``accepted``."""
    batches: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Batch, or shard of a batch → sha256 of each body that was served for it."""
    generations: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The same → generations it was served under."""
    acks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Batch → generations whose ack was answered with 200."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Batch → ids of its trajectories."""
    assets: set[str] = field(default_factory=set)
    """Names of what accepted records refer to."""
    granted: set[str] = field(default_factory=set)
    """Episodes that were granted to a worker."""
    epochs: set[int] = field(default_factory=set)


class Recorder:
    """Runs the proxy on a thread of its own. Use as a context manager; ``url`` is where clients connect."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.seen = Acknowledged()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder")

    def __enter__(self) -> Recorder:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except ConnectionResetError:  # whoever asked was killed
            raise asyncio.CancelledError from None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=body, headers=headers
            ) as answer:
                content = await answer.read()
                self._note(request.path, body, answer.status, answer.headers, content)
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
                return web.Response(status=answer.status, headers=kept, body=content)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    def _note(self, path: str, sent: bytes, status: int, headers, got: bytes) -> None:  # type: ignore[no-untyped-def]
        if status != 200:
            return
        if "Headrace-Epoch" in headers:
            self.seen.epochs.add(int(headers["Headrace-Epoch"]))
        parts = path.strip("/").split("/")
        if parts[1:] == ["worker", "submit"]:
            verdicts = {item["episode"]: item["verdict"] for item in json.loads(got)["results"]}
            for episode, record in split_submission(sent):
                if verdicts.get(episode) == "accepted":
                    self.seen.records[episode].append(hashlib.sha256(record).hexdigest())
                    self.seen.assets.update(asset.name for asset in decode_head(record).assets)
        elif parts[1:] == ["worker", "lease"]:
            self.seen.granted.update(attempt["episode"] for attempt in json.loads(got).get("attempts", []))
        elif parts[-1] == "pull" and "batch" in headers.get("Content-Type", ""):
            manifest = Batch.parse(memoryview(got)).manifest
            wanted = json.loads(sent)
            shards = wanted.get("shards", 1)
            served = manifest.batch if shards == 1 else f"{manifest.batch}, shard {wanted.get('shard', 0)} of {shards}"
            self.seen.members[manifest.batch] = manifest.trajectories
            self.seen.batches[served].append(hashlib.sha256(got).hexdigest())
            self.seen.generations[served].append(int(headers["Headrace-Generation"]))
        elif parts[-1] == "ack":
            self.seen.acks[parts[-2]].add(json.loads(sent)["generation"])


def split_submission(body: bytes) -> list[tuple[str, bytes]]:
    """(episode, record) of a submission body, as ``headrace.wire.messages.SubmissionHead`` describes it."""
    (length,) = struct.unpack_from("<I", body)
    heads = json.loads(body[4 : 4 + length])
    offset = -(-(4 + length) // 64) * 64
    found = []
    for head in heads:
        found.append((head["episode"], body[offset : offset + head["size_bytes"]]))
        offset += head["size_bytes"]
    return found
