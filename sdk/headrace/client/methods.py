"""Methods of both clients that need no more than one operation each: every operation is declared once for either.

* A method has the signature and the docstring of its operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from headrace.client.operations import Flows
from headrace.client.requests import Flow

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    operation: Callable[Concatenate[Flows, P], Flow[T]],
) -> Callable[Concatenate[BlockingMethods, P], T]:
    """A method that returns when the operation is over."""

    def method(self: BlockingMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(self._flows, *args, **kwargs))

    return _documented(method, operation)


def awaitable(
    operation: Callable[Concatenate[Flows, P], Flow[T]],
) -> Callable[Concatenate[AsyncMethods, P], Coroutine[Any, Any, T]]:
    """The same method for ``async`` code."""

    async def method(self: AsyncMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(self._flows, *args, **kwargs))

    return _documented(method, operation)


M = TypeVar("M", bound=Callable[..., Any])


def _documented(method: M, operation: Callable[..., Any]) -> M:
    """Name, docstring and signature of the operation, with what the method returns in place of the flow."""
    functools.update_wrapper(method, operation)
    signature = inspect.signature(operation)
    returned = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return method


class BlockingMethods:
    """The declared operations, for ``Client``."""

    _flows: Flows

    def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    # Runs

    create_run = blocking(Flows.create_run)
    runs = blocking(Flows.runs)
    run = blocking(Flows.run)
    close_run = blocking(Flows.close_run)
    status = blocking(Flows.status)
    drain_worker = blocking(Flows.drain_worker)

    # Batches

    ack = blocking(Flows.ack)
    nack = blocking(Flows.nack)

    # Versions

    announce = blocking(Flows.announce)
    rewind = blocking(Flows.rewind)
    set_priorities = blocking(Flows.set_priorities)
    doing = blocking(Flows.doing)
    hold = blocking(Flows.hold)

    # Policy servers

    servers = blocking(Flows.servers)
    add_server = blocking(Flows.add_server)
    drain_server = blocking(Flows.drain_server)
    remove_server = blocking(Flows.remove_server)

    # Groups and evaluations

    submit_groups = blocking(Flows.submit_groups)
    evaluate = blocking(Flows.evaluate)
    evaluation = blocking(Flows.evaluation)

    # Trajectories

    trajectory = blocking(Flows.trajectory)
    asset = blocking(Flows.asset)
    advantages = blocking(Flows.advantages)


class AsyncMethods:
    """The declared operations, for ``AsyncClient``."""

    _flows: Flows

    async def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    # Runs

    create_run = awaitable(Flows.create_run)
    runs = awaitable(Flows.runs)
    run = awaitable(Flows.run)
    close_run = awaitable(Flows.close_run)
    status = awaitable(Flows.status)
    drain_worker = awaitable(Flows.drain_worker)

    # Batches

    ack = awaitable(Flows.ack)
    nack = awaitable(Flows.nack)

    # Versions

    announce = awaitable(Flows.announce)
    rewind = awaitable(Flows.rewind)
    set_priorities = awaitable(Flows.set_priorities)
    doing = awaitable(Flows.doing)
    hold = awaitable(Flows.hold)

    # Policy servers

    servers = awaitable(Flows.servers)
    add_server = awaitable(Flows.add_server)
    drain_server = awaitable(Flows.drain_server)
    remove_server = awaitable(Flows.remove_server)

    # Groups and evaluations

    submit_groups = awaitable(Flows.submit_groups)
    evaluate = awaitable(Flows.evaluate)
    evaluation = awaitable(Flows.evaluation)

    # Trajectories

    trajectory = awaitable(Flows.trajectory)
    asset = awaitable(Flows.asset)
    advantages = awaitable(Flows.advantages)
