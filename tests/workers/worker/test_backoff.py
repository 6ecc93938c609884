"""Backoff while the orchestrator is unavailable."""

from __future__ import annotations

from typing import Any, cast

from structlog.testing import capture_logs

from headrace.errors import Forbidden, HeadraceError, Unauthorized, Unavailable
from headrace.wire import messages
from headrace_workers.worker.backoff import FIRST_S, LAST_S, REFUSED_LAST_S, Backoff
from headrace_workers.worker.heartbeat import RETRY_S, Heartbeat

AWAY = Unavailable("Nobody answers.")


class Slept:
    """Sleep function that records the pauses."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


async def test_pauses_double_up_to_a_limit_and_retries_are_unlimited() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    for _ in range(12):
        await backoff.pause(AWAY)
    assert slept.pauses_s[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert slept.pauses_s[-1] == LAST_S


async def test_pauses_have_random_jitter_of_up_to_a_half() -> None:
    slept = Slept()
    await Backoff(sleep=slept, random_share=lambda: 0.0).pause(AWAY)
    assert slept.pauses_s == [FIRST_S / 2]


async def test_a_pause_is_at_most_longest_s() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    for _ in range(8):
        await backoff.pause(AWAY, longest_s=0.3)
    assert max(slept.pauses_s) == 0.3


async def test_a_success_resets_the_pause() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    await backoff.pause(AWAY)
    await backoff.pause(AWAY)
    backoff.reset()
    await backoff.pause(AWAY)
    assert slept.pauses_s[-1] == FIRST_S


async def test_a_refused_token_is_logged_as_the_cause_and_retried_less_often() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    with capture_logs() as lines:
        for _ in range(12):
            await backoff.pause(Unauthorized("Nobody knows this token."), longest_s=0.3)
        await backoff.pause(Forbidden("Not for learners."))
    assert slept.pauses_s[-1] == REFUSED_LAST_S
    assert [line["event"] for line in lines] == ["the token was refused"] * 12 + ["the worker was refused"]


async def test_refused_heartbeats_slow_down_and_an_answered_one_resets_the_interval() -> None:
    connection = Answering(Unauthorized("Nobody knows this token."))
    beating = heartbeat(connection)
    with capture_logs() as lines:
        pauses_s = [await beating._beat() for _ in range(12)]
    assert pauses_s[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert pauses_s[-1] == REFUSED_LAST_S
    assert {line["event"] for line in lines} == {"the token was refused"}
    connection.error = None
    assert await beating._beat() == 7.0
    connection.error = Unauthorized("Nobody knows this token.")
    assert await beating._beat() == RETRY_S


async def test_refused_heartbeats_are_repeated_often_enough_for_the_held_leases() -> None:
    beating = heartbeat(Answering(Unauthorized("Nobody knows this token.")))
    beating.add_term(6.0)
    assert max([await beating._beat() for _ in range(12)]) == 2.0


class Answering:
    """Orchestrator connection that answers heartbeats with an error, if one is set."""

    def __init__(self, error: HeadraceError | None) -> None:
        self.error = error

    async def heartbeat(self, request: messages.HeartbeatRequest, *, timeout_s: float) -> messages.HeartbeatReply:
        if self.error is not None:
            raise self.error
        return messages.HeartbeatReply(epoch=1, interval_s=7.0)


def heartbeat(connection: Answering) -> Heartbeat:
    def ignore(given: Any) -> None:
        pass

    def content() -> messages.HeartbeatRequest:
        return messages.HeartbeatRequest(worker="w", slots=1)

    return Heartbeat(cast(Any, connection), content=content, on_reply=ignore, on_defect=ignore)
