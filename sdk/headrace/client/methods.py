"""Methods of both clients that run one operation each. Every operation is declared once per client.

* A method has the signature and the docstring of its operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from headrace.client.operations import Operations
from headrace.client.requests import Operation

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    operation: Callable[Concatenate[Operations, P], Operation[T]],
) -> Callable[Concatenate[BlockingMethods, P], T]:
    """A blocking method that runs the operation."""

    def method(self: BlockingMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(self._operations, *args, **kwargs))

    return _documented(method, operation)


def awaitable(
    operation: Callable[Concatenate[Operations, P], Operation[T]],
) -> Callable[Concatenate[AsyncMethods, P], Coroutine[Any, Any, T]]:
    """An ``async`` method that runs the operation."""

    async def method(self: AsyncMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(self._operations, *args, **kwargs))

    return _documented(method, operation)


M = TypeVar("M", bound=Callable[..., Any])


def _documented(method: M, operation: Callable[..., Any]) -> M:
    """Copy name, docstring and signature of the operation, with the result type in place of the operation's."""
    functools.update_wrapper(method, operation)
    signature = inspect.signature(operation)
    returned = str(signature.return_annotation).removeprefix("Operation[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return method


class BlockingMethods:
    """The operations as methods of ``Client``."""

    _operations: Operations

    def _run(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    create_run = blocking(Operations.create_run)
    runs = blocking(Operations.runs)
    run = blocking(Operations.run)
    close_run = blocking(Operations.close_run)
    status = blocking(Operations.status)
    drain_worker = blocking(Operations.drain_worker)

    ack = blocking(Operations.ack)
    nack = blocking(Operations.nack)
    doing = blocking(Operations.doing)

    announce = blocking(Operations.announce)
    rewind = blocking(Operations.rewind)
    hold = blocking(Operations.hold)

    servers = blocking(Operations.servers)
    add_server = blocking(Operations.add_server)
    drain_server = blocking(Operations.drain_server)
    remove_server = blocking(Operations.remove_server)

    submit_groups = blocking(Operations.submit_groups)
    set_priorities = blocking(Operations.set_priorities)
    evaluate = blocking(Operations.evaluate)
    evaluation = blocking(Operations.evaluation)

    trajectory = blocking(Operations.trajectory)
    asset = blocking(Operations.asset)
    advantages = blocking(Operations.advantages)


class AsyncMethods:
    """The operations as methods of ``AsyncClient``."""

    _operations: Operations

    async def _run(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    create_run = awaitable(Operations.create_run)
    runs = awaitable(Operations.runs)
    run = awaitable(Operations.run)
    close_run = awaitable(Operations.close_run)
    status = awaitable(Operations.status)
    drain_worker = awaitable(Operations.drain_worker)

    ack = awaitable(Operations.ack)
    nack = awaitable(Operations.nack)
    doing = awaitable(Operations.doing)

    announce = awaitable(Operations.announce)
    rewind = awaitable(Operations.rewind)
    hold = awaitable(Operations.hold)

    servers = awaitable(Operations.servers)
    add_server = awaitable(Operations.add_server)
    drain_server = awaitable(Operations.drain_server)
    remove_server = awaitable(Operations.remove_server)

    submit_groups = awaitable(Operations.submit_groups)
    set_priorities = awaitable(Operations.set_priorities)
    evaluate = awaitable(Operations.evaluate)
    evaluation = awaitable(Operations.evaluation)

    trajectory = awaitable(Operations.trajectory)
    asset = awaitable(Operations.asset)
    advantages = awaitable(Operations.advantages)
