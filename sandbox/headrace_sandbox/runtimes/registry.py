"""Runtimes by name: those that come with Headrace, and others by the entry points ``headrace.runtimes``.

* A name that nobody has is refused, with the names that there are.
* ``process`` isolates nothing, and is made only where ``allow_unsafe`` says so.
* A runtime that fails its self-test is refused with the evidence; nothing weaker takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from importlib.metadata import entry_points

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.runtimes.base import Runtime
from headrace_sandbox.runtimes.self_test import self_test, self_test_failed

GROUP = "headrace.runtimes"

UNSAFE = "process"
"""The runtime that isolates nothing."""

DEFAULT = "bubblewrap" if sys.platform == "linux" else "wasm"
"""Where none is named. It is never exchanged for another because it fails."""

MAKE_S = 20.0
"""For a runtime to be made; it may ask programs for their versions, and starts nothing that lives on."""


def runtime_names() -> list[str]:
    """The names of all runtimes, usable here or not."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def make_runtime(name: str, *, allow_unsafe: bool = False) -> Runtime:
    """A runtime. Raises SandboxFailure ``unknown-runtime``, ``unsafe``, or why it cannot be used here."""
    if name == UNSAFE and not allow_unsafe:
        raise SandboxFailure(
            f"The runtime {name} isolates nothing: programs run as this user, with its files and its network.",
            hint="Choose another, or allow it with allow_unsafe=True (--allow-unsafe).",
            kind="unsafe",
            retryable=False,
        )
    for point in entry_points(group=GROUP, name=name):
        try:
            made: Runtime = point.load()()
        except ImportError as error:
            raise SandboxFailure(
                f"The runtime {name} cannot be loaded: {error}.", kind="runtime-missing", retryable=False
            ) from error
        return made
    raise SandboxFailure(
        f"There is no runtime {name!r}.",
        hint=f"There are {', '.join(runtime_names())}.",
        kind="unknown-runtime",
        retryable=False,
    )


async def ready_runtime(
    name: str, *, allow_unsafe: bool = False, say: Callable[[str], None] = lambda _: None
) -> Runtime:
    """A runtime that passed its self-test just now. ``say`` is told what takes long. Raises SandboxFailure as
    ``make_runtime`` does, or ``self-test-failed`` with the evidence."""
    runtime = await made_in_time(name, allow_unsafe=allow_unsafe)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runtime.close)
        try:
            tried = await self_test(runtime, say)
        except SandboxFailure as failure:
            raise self_test_failed(name, failure.detail, failure.hint) from failure
        if not tried.passed:
            raise self_test_failed(name, f"does not hold: {'; '.join(tried.missing)}", tried.hint)
        stack.pop_all()
    return runtime


async def made_in_time(name: str, *, allow_unsafe: bool) -> Runtime:
    """A runtime, made in a thread: what asks programs for their versions does not hold up the event loop, and what
    hangs does not even hold up the end of this process. Raises SandboxFailure."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Runtime] = loop.create_future()

    def settle(runtime: Runtime | None, error: Exception | None) -> None:
        if made.done():
            return
        if error is not None:
            made.set_exception(error)
        elif runtime is not None:
            made.set_result(runtime)

    def make() -> None:
        runtime, failure = None, None
        try:
            runtime = make_runtime(name, allow_unsafe=allow_unsafe)
        except Exception as error:  # noqa: BLE001 - handed over
            failure = error
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(settle, runtime, failure)

    threading.Thread(target=make, daemon=True, name=f"make-{name}").start()
    try:
        async with timeout(MAKE_S):
            return await made
    except TimeoutError:
        raise self_test_failed(name, f"it was not made within {MAKE_S:g} s") from None
