"""The worker's connection to the orchestrator.

* A failed connection is ``Unavailable``; an error of the service is raised as its own class.
* An answer from an older epoch than one seen before is discarded as ``Unavailable``.
* Proxy settings are ignored, and redirects are not followed.
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
from headrace.runspec import RunSpec, read_run_spec
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT

ANSWER_S = 30.0
"""Longest wait for an answer beyond the requested long poll; a group commit takes milliseconds."""

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
    """The highest epoch seen. All connections of a worker share one fence, from any thread."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, epoch: int) -> None:
        """Raise Unavailable for an epoch older than one seen before."""
        if epoch < self.epoch:
            raise Unavailable(
                f"The answer is from epoch {epoch}, but epoch {self.epoch} has started.",
                hint="An older orchestrator was paused and runs again; its answers are ignored.",
            )
        self.epoch = epoch


class OrchestratorConnection:
    """Requests of a worker to the orchestrator. Belongs to the event loop that first uses it."""

    def __init__(self, url: str, *, worker: str, token: str, fence: EpochFence) -> None:
        self._url = url.rstrip("/")
        self._worker = worker
        self._token = token
        self._fence = fence
        self._client: HttpClient | None = None

    async def lease(self, request: messages.LeaseRequest, *, answer_s: float = ANSWER_S) -> messages.LeaseReply:
        """Lease attempts. ``answer_s``: the longest wait for an answer beyond the request's long poll."""
        body = await self._post("/worker/lease", _encode(request), timeout_s=request.wait_s + answer_s)
        return self._check_epoch(_decode(body, messages.LeaseReply))

    async def heartbeat(
        self, request: messages.HeartbeatRequest, *, timeout_s: float = ANSWER_S
    ) -> messages.HeartbeatReply:
        """Renew the leases of all attempts that the worker holds."""
        body = await self._post("/worker/heartbeat", _encode(request), timeout_s=timeout_s)
        return self._check_epoch(_decode(body, messages.HeartbeatReply))

    async def submit(self, entries: Sequence[tuple[messages.AttemptKey, bytes]]) -> list[messages.SubmitResult]:
        """Submit records; returns one result for each, in order."""
        target = f"/worker/submit?worker={quote(self._worker, safe='')}"
        body = await self._post(target, submission_body(entries), media_type=messages.RECORDS_MEDIA_TYPE)
        results = self._check_epoch(_decode(body, messages.SubmitReply)).results
        if [result.episode for result in results] != [key.episode for key, _ in entries]:
            raise Unavailable("The answer to a submission does not match its records.")
        return results

    async def missing_assets(self, names: list[str]) -> list[str]:
        """Return the assets of ``names`` that must be sent; the others are kept for a while."""
        body = await self._post("/worker/assets", _encode(messages.AssetsRequest(names=names)))
        missing = self._check_epoch(_decode(body, messages.AssetsReply)).missing
        if not set(missing) <= set(names):
            raise Unavailable("The answer names assets that were not in the request.")
        return missing

    async def send_asset(self, asset: AssetData) -> None:
        """Send an asset, and return when the orchestrator has stored it. Raises InvalidAsset, RequestTooLarge."""
        body = await self._request("PUT", f"/assets/{asset.name}", asset.data, messages.ASSET_MEDIA_TYPE, ANSWER_S)
        self._check_epoch(_decode(body, messages.AssetsReply))

    async def return_attempts(self, attempts: list[messages.AttemptKey]) -> None:
        """Return attempts that the worker will not finish."""
        await self._post("/worker/return", _encode(messages.ReturnRequest(worker=self._worker, attempts=attempts)))

    async def run_spec(self, run: str) -> RunSpec:
        """Fetch the spec of a run, without its list of tasks. Raises UnknownRun, InvalidRunSpec."""
        body = await self._request("GET", f"/runs/{quote(run, safe='')}?tasks=false", b"", "", ANSWER_S)
        return read_run_spec(_decode(body, messages.RunStatus).spec)

    async def servers(self, run: str, revision: int, wait_s: float) -> messages.PolicyServersReply:
        """Fetch the policy servers of a run; waits up to ``wait_s`` for a newer revision. Raises UnknownRun."""
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
                f"The orchestrator at {self._url} did not answer: {error}.",
                hint="Check that it is running at that address.",
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
    """Body of ``POST /v1/worker/submit``: heads as JSON, then the records; see ``wire.Submission``."""
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
        raise Unavailable(f"The answer is not a {kind.__name__}: {error}.", hint="Check for a proxy.") from error


def _answer_error(status: int, body: bytes, sent_bytes: int) -> HeadraceError:
    """Convert an error answer to an exception. Only the orchestrator itself can refuse a record; an error page of a
    proxy cannot, whatever its status."""
    problem = read_problem(status, body)
    if problem is None and status == 413:
        return RequestTooLarge(
            f"A proxy in front of the orchestrator refused a body of {sent_bytes} bytes with 413: "
            f"{body[:200].decode(errors='replace')}",
            hint="Raise its body limit (nginx: client_max_body_size) to the orchestrator's setting max_body_bytes.",
            proxy=True,
        )
    return problem or Unavailable(
        f"The address answered {status}, but not in the orchestrator's format: {body[:200].decode(errors='replace')}",
        hint="Check that the address is the orchestrator's, and for a proxy in between.",
    )
