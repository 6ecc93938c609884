"""The runtimes by name: Headrace's own and others, from the entry points ``headrace.runtimes``.

* An unknown name is refused, with a list of the known names.
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
"""The runtime where none is named. It is never replaced by another if it fails."""

MAKE_S = 20.0
"""Deadline for making a runtime, which may ask programs for their versions, and starts no lasting process."""


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
            runtime: Runtime = point.load()()
        except ImportError as error:
            raise SandboxFailure(
                f"The runtime {name} cannot be loaded: {error}.", kind="runtime-missing", retryable=False
            ) from error
        return runtime
    raise SandboxFailure(
        f"The runtime {name!r} does not exist.",
        hint=f"The runtimes are {', '.join(runtime_names())}.",
        kind="unknown-runtime",
        retryable=False,
    )


async def ready_runtime(
    name: str, *, allow_unsafe: bool = False, say: Callable[[str], None] = lambda _: None
) -> Runtime:
    """A runtime that passed its self-test just now. ``say`` is called before slow steps. Raises SandboxFailure as
    ``make_runtime`` does, or ``self-test-failed`` with the evidence."""
    runtime = await make_runtime_in_time(name, allow_unsafe=allow_unsafe)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runtime.close)
        try:
            tested = await self_test(runtime, say)
        except SandboxFailure as failure:
            raise self_test_failed(name, failure.detail, failure.hint) from failure
        if not tested.passed:
            raise self_test_failed(name, f"does not hold: {'; '.join(tested.missing)}", tested.hint)
        stack.pop_all()
    return runtime


async def make_runtime_in_time(name: str, *, allow_unsafe: bool) -> Runtime:
    """A runtime, made in a thread: a slow one does not block the event loop, and one that hangs does not block the end
    of this process. Raises SandboxFailure."""
    loop = asyncio.get_running_loop()
    pending: asyncio.Future[Runtime] = loop.create_future()

    def settle(runtime: Runtime | None, error: Exception | None) -> None:
        if pending.done():
            return
        if error is not None:
            pending.set_exception(error)
        elif runtime is not None:
            pending.set_result(runtime)

    def make() -> None:
        runtime, failure = None, None
        try:
            runtime = make_runtime(name, allow_unsafe=allow_unsafe)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            failure = error
        with contextlib.suppress(RuntimeError):  # the caller no longer waits
            loop.call_soon_threadsafe(settle, runtime, failure)

    threading.Thread(target=make, daemon=True, name=f"make-{name}").start()
    try:
        async with timeout(MAKE_S):
            return await pending
    except TimeoutError:
        raise self_test_failed(name, f"it was not made within {MAKE_S:g} s") from None
