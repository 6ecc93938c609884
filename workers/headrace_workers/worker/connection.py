"""The worker's connection to the orchestrator.

* What cannot be reached is ``Unavailable``; an error of the service comes back as its own class.
* An answer of an epoch older than one seen before counts as no answer.
* Proxy settings are ignored, and redirects not followed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from headrace.assets import AssetData
from headrace.errors import HeadraceError, RequestTooLarge, Unavailable
from headrace.http.client import HttpClient, NoResponse, Unreachable
from headrace.http.problems import read_problem
from headrace.runspec import RunSpec, parse_run_spec
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT

ANSWER_S = 30.0
"""Longest silence of the orchestrator beyond the wait that was asked for; a group commit takes milliseconds."""

_LENGTH = struct.Struct("<I")
_encode = msgspec.json.Encoder().encode

T = TypeVar("T")
ReplyType = TypeVar(
    "ReplyType",
    messages.LeaseReply,
    messages.HeartbeatReply,
    messages.SubmitReply,
    messages.AssetsReply,
    messages.PolicyServersReply,
)


class EpochFence:
    """The highest epoch seen. One fence serves all connections of a worker, from any thread."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, epoch: int) -> None:
        """Raise Unavailable for an epoch older than one seen before."""
        if epoch < self.epoch:
            raise Unavailable(
                f"The answer is of epoch {epoch}, but epoch {self.epoch} has begun.",
                hint="A paused older orchestrator has woken up; its answers are ignored.",
            )
        self.epoch = epoch


class OrchestratorConnection:
    """All requests of a worker. Belongs to the event loop that first uses it."""

    def __init__(self, url: str, *, worker: str, token: str, fence: EpochFence) -> None:
        self._url = url.rstrip("/")
        self._worker = worker
        self._token = token
        self._fence = fence
        self._client: HttpClient | None = None

    async def lease(self, request: messages.LeaseRequest, *, answer_s: float = ANSWER_S) -> messages.LeaseReply:
        """Ask for work. ``answer_s``: the longest silence beyond the wait that the request asks for."""
        body = await self._post("/worker/lease", _encode(request), timeout_s=request.wait_s + answer_s)
        return self._check_epoch(_decode(body, messages.LeaseReply))

    async def heartbeat(
        self, request: messages.HeartbeatRequest, *, timeout_s: float = ANSWER_S
    ) -> messages.HeartbeatReply:
        """Renew the leases of all that the worker holds."""
        body = await self._post("/worker/heartbeat", _encode(request), timeout_s=timeout_s)
        return self._check_epoch(_decode(body, messages.HeartbeatReply))

    async def submit(self, entries: Sequence[tuple[messages.AttemptKey, bytes]]) -> list[messages.SubmitResult]:
        """Hand in records; gives one result each, in their order."""
        target = f"/worker/submit?worker={quote(self._worker, safe='')}"
        body = await self._post(target, submission_body(entries), media_type=messages.RECORDS_MEDIA_TYPE)
        results = self._check_epoch(_decode(body, messages.SubmitReply)).results
        if [result.episode for result in results] != [key.episode for key, _ in entries]:
            raise Unavailable("The answer to a submission does not list its records.")
        return results

    async def missing_assets(self, names: list[str]) -> list[str]:
        """Of these assets those that are to be sent; the others are kept for a while."""
        body = await self._post("/worker/assets", _encode(messages.AssetsRequest(names=names)))
        missing = self._check_epoch(_decode(body, messages.AssetsReply)).missing
        if not set(missing) <= set(names):
            raise Unavailable("The answer names assets that nobody asked about.")
        return missing

    async def send_asset(self, asset: AssetData) -> None:
        """Send an asset; returns when it is on disk. Raises InvalidAsset, RequestTooLarge."""
        body = await self._request("PUT", f"/assets/{asset.name}", asset.data, messages.ASSET_MEDIA_TYPE, ANSWER_S)
        self._check_epoch(_decode(body, messages.AssetsReply))

    async def hand_back(self, attempts: list[messages.AttemptKey]) -> None:
        """Give attempts back that will not be finished."""
        await self._post("/worker/return", _encode(messages.ReturnRequest(worker=self._worker, attempts=attempts)))

    async def run_spec(self, run: str) -> RunSpec:
        """The spec of a run. Raises UnknownRun, InvalidRunSpec."""
        body = await self._request("GET", f"/runs/{quote(run, safe='')}", b"", "", ANSWER_S)
        return parse_run_spec(_decode(body, messages.RunStatus).spec)

    async def servers(self, run: str, revision: int, wait_s: float) -> messages.PolicyServersReply:
        """The policy servers of a run; waits while ``revision`` is still theirs. Raises UnknownRun."""
        target = f"/runs/{quote(run, safe='')}/servers?revision={revision}&wait_s={wait_s:g}"
        body = await self._request("GET", target, b"", "", wait_s + ANSWER_S)
        return self._check_epoch(_decode(body, messages.PolicyServersReply))

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def _post(
        self, target: str, body: bytes, *, timeout_s: float = ANSWER_S, media_type: str = "application/json"
    ) -> bytes:
        return await self._request("POST", target, body, media_type, timeout_s)

    async def _request(self, method: str, target: str, body: bytes, media_type: str, timeout_s: float) -> bytes:
        headers = {"Content-Type": media_type} if media_type else None
        try:
            status, answer = await self._open().request(method, f"{messages.API}{target}", body, timeout_s, headers)
        except (Unreachable, NoResponse, ValueError) as error:
            raise Unavailable(
                f"No answer from the orchestrator at {self._url}: {error}.", hint="Is it running at that address?"
            ) from error
        if status >= 300:
            raise _answer_error(status, answer, len(body))
        return answer

    def _open(self) -> HttpClient:
        if self._client is None:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._client = HttpClient(self._url, headers)
        return self._client

    def _check_epoch(self, reply: ReplyType) -> ReplyType:
        self._fence.check(reply.epoch)
        return reply


def submission_body(entries: Sequence[tuple[messages.AttemptKey, bytes]]) -> bytes:
    """The body of ``POST /v1/worker/submit``: heads as JSON, then the records, see ``wire.Submission``."""
    heads = _encode(
        [
            messages.SubmissionHead(episode=key.episode, attempt=key.attempt, nonce=key.nonce, size_bytes=len(record))
            for key, record in entries
        ]
    )
    padding = bytes(-(_LENGTH.size + len(heads)) % ALIGNMENT)
    return b"".join([_LENGTH.pack(len(heads)), heads, padding, *(record for _, record in entries)])


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"The answer is no {kind.__name__}: {error}.", hint="Is there a proxy in between?") from error


def _answer_error(status: int, body: bytes, sent_bytes: int) -> HeadraceError:
    """What an error answer stands for. Only the orchestrator itself may refuse a record; a page from in between may
    not, whatever its status."""
    said = read_problem(status, body)
    if said is None and status == 413:
        return RequestTooLarge(
            f"A proxy in front of the orchestrator refused a body of {sent_bytes} bytes with 413: "
            f"{body[:200].decode(errors='replace')}",
            hint="Raise its body limit (nginx: client_max_body_size) to the orchestrator's setting max_body_bytes.",
            proxy=True,
        )
    return said or Unavailable(
        f"The orchestrator's address answered {status}, and not in its words: {body[:200].decode(errors='replace')}",
        hint="Is the address the orchestrator's, and is there a proxy in between?",
    )
