"""Python tool for any environment: in ``python:ID`` the policy of environment ID can run programs.

* A call is the first ``<python>...</python>`` or fenced block of Python in an action; its output is the observation.
* An exception in the program or an exceeded limit is an observation. After a fault of the sandbox the call is retried,
  and then the attempt fails.
* The number of calls is limited. After the last one, every action goes to the environment, with or without a program.
* A call earns ``reward``, plus ``success_reward`` or ``error_reward`` depending on the end of the program.
* Each program runs in a fresh sandbox, without state from earlier ones.
* The environment does not see the calls, and runs as it would without the tool.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from headrace.environment import Observation, Step, grade_of, make
from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace.trajectory import ContentPart, ToolCall
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_workers.environment_context import LOCAL_CONTEXT, EnvironmentContext
from headrace_workers.environments.answers import fenced_blocks
from headrace_workers.unicode_text import as_unicode

OPEN, CLOSE = "<python>", "</python>"

CALL_LANGUAGES = ("python", "py")
"""Languages of fenced blocks that count as calls."""

INSTRUCTIONS = (
    "You can run Python before you answer: write a program between <python> and </python>{fence}. You then see what it "
    "printed. Each program runs by itself, so print what you want to know. You can do this {uses} times."
)

LAST_CALL = "That was your last program: now give your final answer."


class PythonToolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the tool, from ``kwargs["python"]``.

    ``max_uses``: calls per episode. ``reward``: for each call, plus ``success_reward`` if the program exits with 0, or
    ``error_reward``. ``time_s``, ``memory_mib``: limits of a program. ``output_bytes``: limit of each of its two
    streams; of a longer one head and tail are kept. ``fences``: fenced blocks count as calls; disable it if the answer
    is a fenced block.
    """

    max_uses: int = 5
    reward: float = 0.0
    success_reward: float = 0.0
    error_reward: float = 0.0
    time_s: float = 5.0
    memory_mib: int = 256
    output_bytes: int = 4096
    fences: bool = True


class PythonTool:
    """An environment with the tool. ``python``: see ``PythonToolSettings``; other arguments are the environment's."""

    def __init__(self, environment_id: str, *, python: dict[str, Any] | None = None, **kwargs: Any) -> None:
        try:
            self._settings = msgspec.convert(python or {}, PythonToolSettings)
        except msgspec.ValidationError as error:
            known = ", ".join(PythonToolSettings.__struct_fields__)
            raise InvalidRequest(f"kwargs['python']: {error}.", hint=f"The settings are {known}.") from error
        self._environment: Any = make(environment_id, **kwargs)
        if hasattr(self._environment, "next_agent"):
            raise EnvironmentFailure(
                f"{environment_id} has several agents; the Python tool supports one.",
                kind="several-agents",
                retryable=False,
            )
        self._limits = Limits(
            wall_s=self._settings.time_s,
            memory_bytes=self._settings.memory_mib << 20,
            kept_bytes=self._settings.output_bytes,
        )
        self._is_blocking = getattr(self._environment, "blocking", True) is not False
        self.environment_context: EnvironmentContext = LOCAL_CONTEXT
        self.reads_calls = getattr(self._environment, "reads_calls", False) is True
        self.version = str(getattr(self._environment, "version", ""))
        self._uses = 0

    async def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        """Reset the environment, and append the tool's instructions."""
        if hasattr(self._environment, "environment_context"):
            self._environment.environment_context = self.environment_context
        self._uses = 0
        observation, info = await self._call(self._environment.reset, seed)
        settings = self._settings
        fence = ", or in a block that begins with ```python" if settings.fences else ""
        return _append_text(observation, INSTRUCTIONS.format(fence=fence, uses=settings.max_uses)), info

    async def step(self, action: str) -> Any:
        """Run the program in the action; without one, pass the action to the environment."""
        program = self._program(action) if self._uses < self._settings.max_uses else None
        if program is None:
            return await self._call(self._environment.step, action)
        self._uses += 1
        result = await self.environment_context.sandbox.run_code(PythonProgram(code=program), self._limits)
        return self._result_step(program, result)

    async def grade(self) -> Any:
        """Grade the environment, if it has a grade."""
        grade = grade_of(self._environment)
        return None if grade is None else await self._call(grade)

    async def close(self) -> None:
        """Close the environment."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            await self._call(close)

    def _program(self, action: str) -> str | None:
        """Find the program in an action: the one that ends first."""
        programs = []
        start = action.find(OPEN)
        end = action.find(CLOSE, start)
        if 0 <= start < end:
            programs.append((end, action[start + len(OPEN) : end]))
        blocks = fenced_blocks(action) if self._settings.fences else iter(())
        programs += [(block.end, block.content) for block in blocks if block.language in CALL_LANGUAGES][:1]
        return as_unicode(min(programs)[1]) if programs else None

    def _result_step(self, program: str, result: ExecResult) -> Step:
        settings = self._settings
        output = self._result_text(result)
        parts = {"python": settings.reward}
        if result.fault:
            parts["python_error"] = settings.error_reward
        else:
            parts["python_success"] = settings.success_reward
        call = ToolCall(
            name="python",
            arguments={"code": program},
            result=output,
            error=_end_reason(result),
            duration_s=result.wall_s,
        )
        if self._uses == settings.max_uses:
            output += LAST_CALL
        info = {"python_uses": self._uses, "tool_calls": [call], "reward_parts": parts}
        return Step(output, sum(parts.values()), False, False, info)

    def _result_text(self, result: ExecResult) -> str:
        lines = [text for stream in (result.stdout, result.stderr) if (text := stream.text.rstrip("\n"))]
        if result.fault == "limit" or result.lost:
            lines.append(f"[The program was stopped: {_end_reason(result)}]")
        elif result.signal is not None:
            lines.append(f"[The program ended by signal {result.signal}]")
        return "Code execution result: " + "\n".join(lines) + "\n"

    async def _call(self, method: Any, *arguments: Any) -> Any:
        answer = await self.environment_context.call(method, *arguments) if self._is_blocking else method(*arguments)
        return await answer if inspect.isawaitable(answer) else answer


def _end_reason(result: ExecResult) -> str:
    """The reason why a program failed; empty if it succeeded."""
    if result.lost:
        return result.lost
    if result.fault == "limit":
        return f"limit of {result.limit}"
    if result.signal is not None:
        return f"signal {result.signal}"
    return f"exit code {result.exit_code}" if result.exit_code else ""


def _append_text(observation: Any, text: str) -> Observation:
    if isinstance(observation, list):
        return [*observation, ContentPart(type="text", text=f"\n\n{text}")]
    return f"{observation}\n\n{text}"
