"""Submissions that arrive in a few turns of the event loop, and answers that leave in one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import StoreError
from headrace.wire.messages import Submission, SubmitResult
from headrace_orchestrator.api.gathering import LARGE_BYTES, ON_ITS_WAY_BYTES, Pieces, _Gathering, _keep_in_cache
from headrace_orchestrator.service import submission_batcher as module
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_batcher import Gate
from headrace_orchestrator.service.submission_records import Submitted
from tests.orchestrator.serving import orchestrator, record_for, submission


class Judge:
    """Stands in for intake, core and log: notes what was judged together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.together: list[list[str]] = []
        self.commits = self.syncs = 0
        self.accepted: dict[str, Any] = {}
        self._error = error
        monkeypatch.setattr(module, "Intake", lambda *given: self)
        self.store = SimpleNamespace(log=self)
        self.core = None

    def now(self) -> float:
        return 0.0

    def judge(self, submitted: Sequence[Submitted]) -> list[SubmitResult]:
        self.together.append([item.head.episode for item in submitted])
        if self._error is not None:
            raise self._error
        return [SubmitResult(episode=item.head.episode, verdict="accepted") for item in submitted]

    def commit(self, accepted: Any) -> None:
        self.commits += 1

    async def synced(self) -> None:
        self.syncs += 1

    def gate(self) -> Gate:
        return Gate(cast(Shell, self), cast(Any, None))


def body(*episodes: str) -> list[Submitted]:
    return [
        Submitted("w", Submission(episode=id, attempt=1, nonce="n", size_bytes=64), memoryview(b"")) for id in episodes
    ]


async def judged(gate: Gate, submitted: Sequence[Submitted]) -> list[SubmitResult]:
    told: asyncio.Future[list[SubmitResult]] = asyncio.get_running_loop().create_future()

    def tell(given: list[SubmitResult] | Exception) -> None:
        if isinstance(given, Exception):
            told.set_exception(given)
        else:
            told.set_result(given)

    gate.take(submitted, tell)
    return await told


async def test_what_is_judged_together_shares_one_wait_for_the_disk_and_each_submission_gets_its_own_results(
    monkeypatch: pytest.MonkeyPatch,
):
    judge = Judge(monkeypatch)
    gate = judge.gate()
    first, second = await asyncio.gather(judged(gate, body("a", "b")), judged(gate, body("c")))
    assert [result.episode for result in first] == ["a", "b"]
    assert [result.episode for result in second] == ["c"]
    assert judge.together == [["a", "b", "c"]]
    assert (judge.commits, judge.syncs) == (1, 1)


async def test_submissions_of_a_few_turns_of_the_event_loop_are_judged_together(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    gate = judge.gate()
    told = []
    for name in ("a", "b"):
        told.append(asyncio.create_task(judged(gate, body(name))))
        await asyncio.sleep(0)
        assert not judge.together
    await asyncio.gather(*told)
    assert judge.together == [["a", "b"]]


async def test_no_turn_of_the_event_loop_judges_many_records(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    gate = judge.gate()
    half = [f"{number}" for number in range(module.MAX_TOGETHER // 2)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(judged(gate, body(*half)) for _ in range(6)))
    counting.cancel()
    assert [len(records) for records in judge.together] == [module.MAX_TOGETHER] * 3
    assert turns >= 3


async def test_what_goes_wrong_with_the_store_is_told_to_everyone_whose_records_were_judged_together(
    monkeypatch: pytest.MonkeyPatch,
):
    judge = Judge(monkeypatch, StoreError("the disk is full"))
    gate = judge.gate()
    told = await asyncio.gather(judged(gate, body("a")), judged(gate, body("b")), return_exceptions=True)
    assert [type(error) for error in told] == [StoreError, StoreError]
    assert judge.commits == 1


async def test_no_result_is_told_that_the_disk_refused(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)

    async def refuse() -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(judge, "synced", refuse)
    gate = judge.gate()
    told = await asyncio.gather(judged(gate, body("a")), judged(gate, body("b")), return_exceptions=True)
    assert [type(error) for error in told] == [StoreError, StoreError]


async def test_whoever_cannot_be_told_its_results_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    gate = judge.gate()
    gate.take(body("a"), lambda given: 1 / 0)  # type: ignore[arg-type, return-value]
    assert [result.episode for result in await judged(gate, body("b"))] == ["b"]
    assert judge.together == [["a", "b"]]


async def test_the_same_record_twice_at_once_is_accepted_once(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempt = (await api.lease(free=1))[0]
        record = submission([(attempt, record_for(attempt))])
        answers = await asyncio.gather(*(api.submit(record) for _ in range(8)))
        assert sorted(results[0].verdict for results in answers) == ["accepted"] + ["duplicate"] * 7


class Wire:
    """A transport that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []

    def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    def writelines(self, parts: list[bytes]) -> None:
        self.parts = parts
        self.calls.append(("write", b"".join(parts)))

    def close(self) -> None:
        self.calls.append(("close", b""))

    def is_closing(self) -> bool:
        return ("close", b"") in self.calls


async def test_what_an_answer_is_made_of_in_one_turn_of_the_event_loop_is_sent_in_one_write():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write(b"head")
    transport.write(b"body")
    assert not wire.calls
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"headbody"), ("write", b"next")]


async def test_what_is_there_whole_is_sent_at_once_and_behind_what_is_held_back():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write_whole(b"first")
    assert wire.calls == [("write", b"first")]
    transport.write(b"head")
    transport.write_whole(b"last")
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"first"), ("write", b"headlast")]


async def test_a_body_may_come_in_pieces_and_nobody_joins_them():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    pieces = Pieces((b"bo", memoryview(b"dy")))
    assert len(pieces) == 4
    transport.write(b"head")
    transport.write(pieces)
    await asyncio.sleep(0)
    assert wire.parts == [b"head", *pieces.parts]


@pytest.mark.parametrize("waits", [False, True], ids=["nothing waits", "something waits"])
async def test_a_large_answer_arrives_whole_whatever_the_kernel_takes_at_once(waits: bool):
    """While it copies, other threads run: it is asked in a call that gives up the interpreter."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=theirs)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        gathering = _Gathering(transport)
        parts = [b"head", os.urandom(3 * LARGE_BYTES), memoryview(os.urandom(2 * LARGE_BYTES)), b"tail"]
        sent = b"".join(parts)
        for part in parts:
            gathering.write(part)
            if waits:
                await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        transport.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("theirs", "bounded"), [("127.0.0.1", True), ("127.0.0.2", False)])
async def test_what_is_on_its_way_to_a_client_of_this_machine_fits_a_processors_cache(theirs: str, bounded: bool):
    """Another address of the loopback stands for another machine. What is asked for may be more than the kernel's bound
    (``net.core.wmem_max``): then the bound is meant."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Sizes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            _keep_in_cache(transport)
            ours = transport.get_extra_info("socket")
            accepted.set_result(ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            transport.close()

    server = await asyncio.get_running_loop().create_server(Sizes, "127.0.0.1", 0)
    async with server:
        with socket.create_connection(server.sockets[0].getsockname(), source_address=(theirs, 0)):
            size_bytes = await accepted
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY_BYTES)
        assert (size_bytes == asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)) is bounded


async def test_a_connection_is_closed_behind_what_was_written_to_it():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write(b"last words")
    transport.close()
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"last words"), ("close", b"")]
