"""The environment driver: builds, resets, steps and grades one environment, each within its deadline.

* A blocking environment runs on a thread; one that declares ``blocking = False`` runs in the event loop; coroutines
  are awaited there. One that declares ``own_process = True`` runs in a separate process.
* Every exception of an environment becomes an EnvironmentFailure that names the place, the error and its last frames,
  including KeyboardInterrupt, SystemExit and a CancelledError that it raises itself.
* The next agent is determined, and images are copied, where the step ran, within its deadline.
* A call that exceeds its deadline is a failure of the environment, even if it returns later.
* An environment with an ``environment_context`` gets the episode's sandbox and threads; time spent waiting for them
  does not count as working time.

A thread costs about 30 µs of CPU time per call, and 50 to 100 µs of latency (measured on two cores). An environment
whose calls take microseconds should therefore declare ``blocking = False``. One that may sleep, do I/O or compute for
more than about a millisecond should not: while it runs in the event loop, it blocks every other episode of the worker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.common.timeouts import timeout
from headrace.environment import grade_of, make
from headrace.errors import EnvironmentFailure, EpisodeFailure, UnknownEnvironment
from headrace.trajectory import Task
from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.episode import environment_adapter
from headrace_workers.episode.environment_adapter import AGENT, EnvironmentAnswer
from headrace_workers.episode.environment_processes import EnvironmentProcesses, OwnProcessEnvironment
from headrace_workers.episode.environment_threads import CallAbandonedError, EnvironmentThreads
from headrace_workers.episode.error_text import describe_error
from headrace_workers.episode.worker_context import WorkerContext
from headrace_workers.sandboxes import EpisodeSandbox

MakeEnvironment = Callable[..., Any]


class EnvironmentKinds:
    """The environments that run in the event loop or in a separate process, by id; learned from the first instance of
    each id."""

    def __init__(self) -> None:
        self.inline: set[str] = set()
        """Ids of environments that run in the event loop."""
        self.own_process: dict[str, str] = {}
        """Versions of environments that run in separate processes, by id."""

    def learn(self, environment_id: str, environment: Any) -> None:
        if getattr(environment, "own_process", False) is True:
            self.own_process[environment_id] = str(getattr(environment, "version", ""))
        if getattr(environment, "blocking", True) is False:
            self.inline.add(environment_id)


class EnvironmentDriver:
    """An environment of one episode. Times are in seconds, by the injected monotonic ``clock``."""

    def __init__(
        self,
        task: Task,
        *,
        timeout_s: float,
        threads: EnvironmentThreads,
        kinds: EnvironmentKinds,
        clock: Callable[[], float],
        sandbox: EpisodeSandbox,
        calls: BoundedCalls,
        processes: EnvironmentProcesses,
        make_environment: MakeEnvironment = make,
    ) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._threads = threads
        self._kinds = kinds
        self._clock = clock
        self._processes = processes
        self._make = make_environment
        self._steps = sandbox.steps
        self._context = WorkerContext(sandbox, threads, calls, timeout_s)
        self._inline = task.environment in kinds.inline
        self._environment: Any = None
        self._hangs = False
        self.next_agent: str | None = AGENT
        """The agent that acts next; None at the end."""
        self.agents: list[str] | None = None
        """All agents of a multi-agent environment; None for a single agent."""
        self.reads_calls = False
        """True if the environment receives parsed actions."""
        self.version = ""
        """The environment's own ``version``, if it has one."""
        self.environment_s = 0.0
        """Working time of all calls so far."""
        self.waiting_s = 0.0
        """Time that calls have waited for a thread or a sandbox."""
        self.last_s = 0.0
        """Working time of the last call."""

    async def reset(self, timeout_s: float) -> EnvironmentAnswer:
        """Build and reset the environment, together within the deadline. Raises EnvironmentFailure."""
        result = await self._call("reset", self._build_and_reset, min(timeout_s, self._timeout_s))
        return self._check("reset", result, environment_adapter.read_reset, environment_adapter.read_reset_by_agent)

    async def step(self, action: str, timeout_s: float) -> EnvironmentAnswer:
        """Step with the action of the next agent. Raises EnvironmentFailure."""
        environment = self._environment
        result = await self._call(
            "step", lambda: self._with_next_agent(environment.step(action)), min(timeout_s, self._timeout_s)
        )
        return self._check("step", result, environment_adapter.read_step, environment_adapter.read_step_by_agent)

    async def grade(self, timeout_s: float) -> EnvironmentAnswer:
        """Ask for the grade of the state that a limit cut off; without rewards if the environment gives none. Raises
        EnvironmentFailure."""
        result = await self._call("grade", self._ask_for_grade, min(timeout_s, self._timeout_s))
        answer = result if self.agents is None else (result, self.next_agent)
        return self._check("grade", answer, environment_adapter.read_grade, environment_adapter.read_grade_by_agent)

    async def close(self) -> None:
        """Call the environment's ``close``, if it exists, unless the environment hangs. Raises EnvironmentFailure."""
        try:
            close = getattr(self._environment, "close", None)
        except BaseException as error:
            raise self._raised("close", error) from error
        if close is not None and not self._hangs and not self._context.hangs:
            await self._call("close", close, self._timeout_s)

    def _build_and_reset(self) -> Any:
        task = self._task
        kwargs = task.kwargs if task.example is None else {**task.kwargs, "example": task.example}
        if task.environment in self._kinds.own_process:
            return self._in_own_process(kwargs)
        environment = self._environment = self._make(task.environment, **kwargs)
        if getattr(environment, "next_agent", None) is not None:
            self.agents = [str(name) for name in environment.agents]
        if hasattr(environment, "environment_context"):
            environment.environment_context = self._context
        self.reads_calls = getattr(environment, "reads_calls", False) is True
        self.version = str(getattr(environment, "version", ""))
        if not self._inline:
            self._kinds.learn(task.environment, environment)
            self._inline = task.environment in self._kinds.inline
            if task.environment in self._kinds.own_process:
                return self._in_own_process(kwargs)
        return self._with_next_agent(environment.reset(task.seed))

    def _ask_for_grade(self) -> Any:
        grade = grade_of(self._environment)
        return None if grade is None else grade()

    def _in_own_process(self, kwargs: dict[str, Any]) -> Awaitable[Any]:
        environment = self._environment = OwnProcessEnvironment(
            self._processes, self._task.environment, kwargs, steps=self._steps, timeout_s=self._timeout_s
        )
        self.version = self._kinds.own_process[self._task.environment]
        return environment.reset(self._task.seed)

    def _with_next_agent(self, answer: Any) -> Any:
        """Add the agent that acts next to the answer of a multi-agent environment."""
        if not isinstance(answer, tuple) and inspect.isawaitable(answer):
            return answer if self.agents is None else self._await_with_next_agent(answer)
        answer = environment_adapter.name_images(answer)
        return answer if self.agents is None else (answer, self._environment.next_agent())

    async def _await_with_next_agent(self, answer: Awaitable[Any]) -> Any:
        return await answer, self._environment.next_agent()

    def _check(
        self,
        place: str,
        result: Any,
        read: Callable[[Any], EnvironmentAnswer],
        read_by_agent: Callable[[Any, list[str]], EnvironmentAnswer],
    ) -> EnvironmentAnswer:
        """Check and copy an answer. An exception of its objects is a failure of the environment."""
        try:
            if self.agents is None:
                return read(result)
            answer, next_agent = result
            checked = read_by_agent(answer, self.agents)
            if next_agent is not None and next_agent not in self.agents:
                raise EnvironmentFailure(
                    f"next_agent named {next_agent!r}; the environment's agents are {self.agents}.",
                    kind="unknown-agent",
                    retryable=False,
                )
        except EpisodeFailure:
            raise
        except BaseException as error:
            raise self._raised(place, error) from error
        self.next_agent = next_agent
        return checked

    async def _call(self, method: str, call: Callable[[], Any], timeout_s: float) -> Any:
        self.last_s = 0.0
        try:
            if self._inline:
                started_at = self._clock()
                try:
                    result = call()
                finally:
                    self.last_s = self._clock() - started_at
            else:
                result = await self._on_thread(call, timeout_s)
            if not isinstance(result, tuple) and inspect.isawaitable(result):
                result = await self._await(result, timeout_s)
        except CallAbandonedError:
            self.last_s = timeout_s
            raise self._timeout_failure(method, timeout_s) from None
        except EpisodeFailure:
            raise
        except UnknownEnvironment as error:
            kind = "unknown-environment"
            raise EnvironmentFailure(error.detail, hint=error.hint, kind=kind, retryable=False) from error
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            raise self._raised(method if self._environment is not None else "constructor", error) from error
        finally:
            self.environment_s += self.last_s
        if self.last_s > timeout_s:
            raise self._timeout_failure(method, timeout_s)
        return result

    async def _on_thread(self, call: Callable[[], Any], timeout_s: float) -> Any:
        try:
            outcome = await self._threads.run(call, timeout_s)
        except (CallAbandonedError, asyncio.CancelledError):
            self._hangs = True
            raise
        self.last_s = outcome.working_s
        self.waiting_s += outcome.waiting_s
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    async def _await(self, result: Awaitable[Any], timeout_s: float) -> Any:
        started_at = self._clock()
        deadline = timeout(timeout_s)
        try:
            async with deadline:
                self._context.begin(deadline)
                return await result
        except TimeoutError:
            if deadline.expired():
                raise CallAbandonedError from None
            raise
        finally:
            waited_s = self._context.take_waited_s()
            self.waiting_s += waited_s
            self.last_s += self._clock() - started_at - waited_s

    def _raised(self, place: str, error: BaseException) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{place} of {self._task.environment} raised {describe_error(error)}",
            kind=f"{place}-raised",
            retryable=True,
        )

    def _timeout_failure(self, method: str, timeout_s: float) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{method} of {self._task.environment} did not return within {timeout_s:g} s.",
            hint="Raise limits.environment_timeout_s if the call needs longer. Set own_process if it may never return.",
            kind="environment-timeout",
            retryable=True,
        )


def _is_being_cancelled() -> bool:
    """Return True if the worker cancels this episode, False if the environment raised CancelledError itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
