"""A recording proxy between the orchestrator and its clients.

* It records everything that the orchestrator acknowledged, as clients got it: accepted records, pulled batches, acks.
* It uses no state of the service and decodes only what it needs, so that it can detect the service's errors.
* While the orchestrator is down, it drops connections, as a dead process would.
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
    """Everything that was acknowledged to a client."""

    records: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By episode: SHA-256 of each record that was answered ``accepted``."""
    batches: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By batch, or shard of a batch: SHA-256 of each body that was served."""
    generations: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By batch or shard: generations under which it was served."""
    acks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By batch: generations whose ack was answered with 200."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """By batch: ids of its trajectories."""
    assets: set[str] = field(default_factory=set)
    """Names of the assets that accepted records refer to."""
    granted: set[str] = field(default_factory=set)
    """Episodes that were granted to a worker."""
    epochs: set[int] = field(default_factory=set)


class Recorder:
    """Runs the proxy in a thread. Use as a context manager; clients connect to ``url``."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.acknowledged = Acknowledged()
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
        except ConnectionResetError:  # the client was killed
            raise asyncio.CancelledError from None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=body, headers=headers
            ) as answer:
                content = await answer.read()
                self._record(request.path, body, answer.status, answer.headers, content)
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
                return web.Response(status=answer.status, headers=kept, body=content)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    def _record(self, path: str, sent: bytes, status: int, headers, received: bytes) -> None:  # type: ignore[no-untyped-def]
        if status != 200:
            return
        if "Headrace-Epoch" in headers:
            self.acknowledged.epochs.add(int(headers["Headrace-Epoch"]))
        parts = path.strip("/").split("/")
        if parts[1:] == ["worker", "submit"]:
            verdicts = {item["episode"]: item["verdict"] for item in json.loads(received)["results"]}
            for episode, record in split_submission(sent):
                if verdicts.get(episode) == "accepted":
                    self.acknowledged.records[episode].append(hashlib.sha256(record).hexdigest())
                    self.acknowledged.assets.update(asset.name for asset in decode_head(record).assets)
        elif parts[1:] == ["worker", "lease"]:
            self.acknowledged.granted.update(attempt["episode"] for attempt in json.loads(received).get("attempts", []))
        elif parts[-1] == "pull" and "batch" in headers.get("Content-Type", ""):
            manifest = Batch.parse(memoryview(received)).manifest
            pull = json.loads(sent)
            shards = pull.get("shards", 1)
            served = manifest.batch if shards == 1 else f"{manifest.batch}, shard {pull.get('shard', 0)} of {shards}"
            self.acknowledged.members[manifest.batch] = manifest.trajectories
            self.acknowledged.batches[served].append(hashlib.sha256(received).hexdigest())
            self.acknowledged.generations[served].append(int(headers["Headrace-Generation"]))
        elif parts[-1] == "ack":
            self.acknowledged.acks[parts[-2]].add(json.loads(sent)["generation"])


def split_submission(body: bytes) -> list[tuple[str, bytes]]:
    """Episodes and records of a submission body, as ``headrace.wire.messages.SubmissionHead`` describes it."""
    (length,) = struct.unpack_from("<I", body)
    heads = json.loads(body[4 : 4 + length])
    offset = -(-(4 + length) // 64) * 64
    records = []
    for head in heads:
        records.append((head["episode"], body[offset : offset + head["size_bytes"]]))
        offset += head["size_bytes"]
    return records
