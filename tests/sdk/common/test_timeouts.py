"""Timeouts in tasks that are being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from headrace.common.timeouts import _timeout, timeout

Kind = Callable[[float], AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("kind", [timeout, _timeout])
async def test_in_a_task_that_is_being_cancelled_timeout_error_is_raised_when_the_time_is_over(kind: Kind) -> None:
    begun, actions = asyncio.Event(), list[str]()

    async def cleans_up() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            try:
                async with kind(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                actions.append("killed")

    task = asyncio.create_task(cleans_up())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert actions == ["killed"]


@pytest.mark.parametrize("kind", [timeout, _timeout])
async def test_a_cancellation_from_elsewhere_stays_a_cancelled_error(kind: Kind) -> None:
    begun = asyncio.Event()

    async def waits() -> None:
        async with kind(1000):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("kind", [timeout, _timeout])
async def test_a_timeout_of_a_task_that_is_not_cancelled_is_raised_once(kind: Kind) -> None:
    with pytest.raises(TimeoutError):
        async with kind(0):
            await asyncio.Event().wait()
    async with kind(1000):
        await asyncio.sleep(0)
