"""Pauses while the orchestrator is away."""

from __future__ import annotations

from headrace.errors import Unavailable
from headrace_workers.worker.backoff import FIRST_S, LAST_S, Backoff

AWAY = Unavailable("Nobody answers.")


class Slept:
    """Counts what would have been slept."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


async def test_pauses_double_up_to_a_bound_and_there_is_always_another_try() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    for _ in range(12):
        await backoff.pause(AWAY)
    assert slept.pauses_s[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert slept.pauses_s[-1] == LAST_S


async def test_pauses_are_spread_by_chance_between_a_half_and_the_whole() -> None:
    slept = Slept()
    await Backoff(sleep=slept, random_share=lambda: 0.0).pause(AWAY)
    assert slept.pauses_s == [FIRST_S / 2]


async def test_no_pause_is_longer_than_what_waits_for_it_allows() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    for _ in range(8):
        await backoff.pause(AWAY, longest_s=0.3)
    assert max(slept.pauses_s) == 0.3


async def test_after_a_success_it_starts_over() -> None:
    slept = Slept()
    backoff = Backoff(sleep=slept, random_share=lambda: 1.0)
    await backoff.pause(AWAY)
    await backoff.pause(AWAY)
    backoff.reset()
    await backoff.pause(AWAY)
    assert slept.pauses_s[-1] == FIRST_S
