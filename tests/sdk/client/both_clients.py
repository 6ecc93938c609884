"""Both clients with one interface: the async client is called from synchronous code, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from headrace.client.async_client import AsyncClient
from headrace.client.sync_client import Client


class BlockingAsyncClient:
    """An ``AsyncClient`` with the interface of ``Client``."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def __enter__(self) -> BlockingAsyncClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._each(result) if hasattr(result, "__anext__") else self._runner.run(result)

        return call

    def _each(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._runner.run(anext(items))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return

    def pass_time_until(self, condition: Callable[[], bool]) -> None:
        """Run the client's background task until the condition holds."""

        async def wait() -> None:
            async with asyncio.timeout(10):
                while not condition():
                    await asyncio.sleep(0.01)

        self._runner.run(wait())


CLIENTS = [Client, BlockingAsyncClient]

Connect = Callable[..., Any]
"""Creates a client of the stub server; the type of the fixture ``connect``."""
