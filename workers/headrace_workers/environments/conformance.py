"""Conformance checks of an environment against the protocol, for its author's tests.

::

    from headrace_workers.environments.conformance import check_environment

    def test_my_environment_keeps_the_protocol():
        assert check_environment(MyEnvironment) == []

The checks, by the name in a violation:

* ``reset-returns``: a pair of observation and info (a dict each for several agents).
* ``step-returns``: five values of the right types; the reward and its parts are finite numbers. Both: text is Unicode.
* ``grade-returns``: a reward that is a finite number, a pair of reward and info (a dict each for several agents), or
  None, after the first turn and after the last one before the end.
* ``seed-fixes-all``: same seed, same actions, same episode and grade, on a fresh instance and on a used one, except
  for the durations of tool calls.
* ``global-generators``: neither ``random`` nor ``numpy.random`` is seeded or drawn from.
* ``fresh-objects``: a returned object does not change afterwards, and is not returned again.
* ``own-state``: two instances played in alternation give the same episodes as each alone.
* ``next-agent``: the next agent is one of ``agents``, and None at the end.
* ``raises``: nothing is raised while an episode runs.
* ``returns``: each call returns, and does not end its process. Only ``headrace env check`` can find this.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.assets import Image
from headrace.environment import grade_of
from headrace.errors import RequestError
from headrace.trajectory import ContentPart
from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.environment_context import EnvironmentContext, LocalContext
from headrace_workers.renderers.tool_calls import parse_action

DEFAULT_ACTIONS = (r"\boxed{1}", r"\boxed{2}", r"\boxed{1 1}", r"\boxed{2 1}", "hello", "")
"""Actions for the built-in environments. For other environments, pass actions that lead far into an episode."""


class Violation(NamedTuple):
    """A violation of the protocol by an environment."""

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


class _CheckFailed(Exception):
    def __init__(self, check: str, message: str) -> None:
        super().__init__(message)
        self.problem = Violation(check, message)


def check_environment(
    factory: Callable[[], Any],
    *,
    actions: Sequence[str] = DEFAULT_ACTIONS,
    seeds: Sequence[int] = (0, 1, 2),
    max_steps: int = 32,
    on_call: Callable[[str], None] = lambda call: None,
) -> list[Violation]:
    """Find all violations of the protocol, each once; an empty list means that the environment conforms.

    ``factory`` makes a fresh environment. For each seed and each action in ``actions``, one episode is run that starts
    with that action and cycles through the list, for at most ``max_steps`` steps. ``on_call`` gets the text of a call
    before it is made. Call this function outside a running event loop: coroutines of the environment run in a
    separate loop.
    """
    violations: dict[Violation, None] = {}
    with asyncio.Runner() as runner:
        calls = BoundedCalls()
        player = _EpisodePlayer(factory, runner, LocalContext(calls), on_call)
        try:
            for seed in seeds:
                for start in range(len(actions)):
                    plan = [actions[(start + step) % len(actions)] for step in range(max_steps)]
                    for problem in _check_plan(player, seed, plan):
                        violations.setdefault(problem)
        finally:
            runner.run(calls.close())
    return list(violations)


class _EpisodePlayer:
    """Plays episodes and copies each returned object at once."""

    def __init__(
        self,
        factory: Callable[[], Any],
        runner: asyncio.Runner,
        context: EnvironmentContext,
        on_call: Callable[[str], None],
    ) -> None:
        self._factory = factory
        self._on_call = on_call
        self._runner = runner
        self._context = context

    def make(self) -> Any:
        self._on_call("the constructor")
        environment = self._factory()
        if hasattr(environment, "environment_context"):
            environment.environment_context = self._context
        return environment

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        call = f"{method.__name__}({_short_arguments(arguments)})"
        self._on_call(call)
        try:
            result = method(*arguments)
            if inspect.isawaitable(result):
                result = self._runner.run(_await(result))
        except (Exception, SystemExit) as error:
            raise _CheckFailed("raises", f"{call} raised {_short(error)}") from error
        return result

    def steps(self, environment: Any, seed: int, plan: Sequence[str]) -> Iterator[Any]:
        """Run one episode; yield copies of the results of reset and each step."""
        several = hasattr(environment, "agents")
        returned = [self.call(environment.reset, seed)]
        _check_reset(returned[0], several)
        copies = [copy.deepcopy(returned[0])]
        yield copies[0]
        for action in plan:
            if several:
                _check_next_agent(environment, ended=False)
            argument = parse_action(action) if getattr(environment, "reads_calls", False) is True else action
            returned.append(self.call(environment.step, argument))
            _check_step(returned[-1], several)
            copies.append(copy.deepcopy(returned[-1]))
            yield _without_durations(copies[-1])
            if _is_end(returned[-1], several):
                if several:
                    _check_next_agent(environment, ended=True)
                break
        _check_fresh_objects(returned, copies)


def _without_durations(step: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy a step without the durations of its tool calls, which a seed does not determine."""
    info = step[4]
    if not info.get("tool_calls"):
        return step
    calls = [msgspec.structs.replace(call, duration_s=0.0) for call in info["tool_calls"]]
    return (*step[:4], {**info, "tool_calls": calls})


async def _await(value: Any) -> Any:
    return await value


def _check_plan(player: _EpisodePlayer, seed: int, plan: Sequence[str]) -> list[Violation]:
    try:
        return _problems(player, seed, plan)
    except _CheckFailed as failed:
        return [failed.problem]


def _problems(player: _EpisodePlayer, seed: int, plan: Sequence[str]) -> list[Violation]:
    problems = []
    before = _generator_state()
    environment = player.make()
    alone = list(player.steps(environment, seed, plan))
    if _generator_state() != before:
        problems.append(Violation("global-generators", "a module-wide random generator was seeded or drawn from"))
    if list(player.steps(environment, seed, plan)) != alone:
        problems.append(
            Violation("seed-fixes-all", "the same instance, reset with the same seed, gave another episode")
        )
    with _other_generators():
        if list(player.steps(player.make(), seed, plan)) != alone:
            problems.append(Violation("seed-fixes-all", "a fresh instance with the same seed gave another episode"))
    alternating = [player.steps(player.make(), seed, plan), player.steps(player.make(), seed, plan)]
    for expected in alone:
        if any(next(episode, None) != expected for episode in alternating):
            problems.append(Violation("own-state", "two instances played in alternation influence each other"))
            break
    return problems + _problems_of_grade(player, seed, plan, alone)


def _problems_of_grade(player: _EpisodePlayer, seed: int, plan: Sequence[str], alone: Sequence[Any]) -> list[Violation]:
    """Grade the episode after its first turn, and after the last one that did not end it."""
    environment = player.make()
    several = hasattr(environment, "agents")
    if grade_of(environment) is None:
        return []
    turns = len(alone) - 1
    open_turns = turns - 1 if turns and _is_end(alone[-1], several) else turns
    for cut in sorted({1, open_turns} - {0}) if open_turns else ():
        first, second = (_grade_after(player, seed, plan[:cut], several) for _ in range(2))
        if first != second:
            return [Violation("seed-fixes-all", "a fresh instance with the same seed gave another grade")]
    return []


def _grade_after(player: _EpisodePlayer, seed: int, plan: Sequence[str], several: bool) -> Any:
    environment = player.make()
    list(player.steps(environment, seed, plan))
    returned = player.call(environment.grade)
    _check_grade(returned, several)
    return copy.deepcopy(returned)


def _check_grade(returned: Any, several: bool) -> None:
    name = "grade-returns"
    if isinstance(returned, tuple) and len(returned) != 2:
        raise _CheckFailed(name, f"grade returned {_short(returned)}, not a reward or (reward, info)")
    reward, info = returned if isinstance(returned, tuple) else (returned, {})
    if reward is None:
        return
    for value in _values(reward, several, name):
        if not _is_number(value):
            raise _CheckFailed(name, f"the grade {_short(value)} is not a finite number")
    if not isinstance(info, dict):
        raise _CheckFailed(name, f"info is {_short(info)}, not a dict")
    for agent_info in info.values() if several else (info,):
        _check_parts(name, agent_info)


def _check_reset(returned: Any, several: bool) -> None:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise _CheckFailed("reset-returns", f"reset returned {_short(returned)}, not (observation, info)")
    observation, info = returned
    _check_observation("reset-returns", observation, several)
    if not isinstance(info, dict):
        raise _CheckFailed("reset-returns", f"info is {_short(info)}, not a dict")


def _check_step(returned: Any, several: bool) -> None:
    name = "step-returns"
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise _CheckFailed(
            name, f"step returned {_short(returned)}, not (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = returned
    _check_observation(name, observation, several)
    if not isinstance(info, dict):
        raise _CheckFailed(name, f"info is {_short(info)}, not a dict")
    for value in _values(reward, several, name):
        if not _is_number(value):
            raise _CheckFailed(name, f"the reward {_short(value)} is not a finite number")
    for agent_info in info.values() if several else (info,):
        _check_parts(name, agent_info)
    for flag in (*_values(terminated, several, name), *_values(truncated, several, name)):
        if not isinstance(flag, bool):
            raise _CheckFailed(name, f"the flag {_short(flag)} is not a bool")


def _check_parts(check: str, info: Any) -> None:
    parts = info.get("reward_parts", {}) if isinstance(info, dict) else {}
    if not isinstance(parts, dict):
        raise _CheckFailed(check, f"reward_parts is {_short(parts)}, not a dict of named numbers")
    for name, value in parts.items():
        if not isinstance(name, str) or not _is_number(value):
            raise _CheckFailed(check, f"the reward part {_short(name)} is {_short(value)}, not a finite number")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _check_observation(check: str, observation: Any, several: bool) -> None:
    for value in _values(observation, several, check):
        parts = isinstance(value, list) and all(isinstance(part, ContentPart | Image) for part in value)
        if not (isinstance(value, str) or parts):
            raise _CheckFailed(
                check, f"the observation {_short(value)} is neither text nor a list of ContentPart and Image"
            )
        for part in value if parts else (value,):
            if isinstance(part, Image):
                _check_image(check, part)
            text = part if isinstance(part, str) else part.text
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise _CheckFailed(
                    check, f"the text {_short(text)} contains half a character (a lone surrogate)"
                ) from error


def _check_image(check: str, image: Image) -> None:
    try:
        image.encoded()
    except RequestError as error:
        raise _CheckFailed(check, f"an image of the observation cannot be stored: {error}") from error


def _values(value: Any, several: bool, check: str) -> list[Any]:
    if not several:
        return [value]
    if not isinstance(value, dict):
        raise _CheckFailed(check, f"{_short(value)} is not a dict by agent")
    return list(value.values())


def _check_next_agent(environment: Any, *, ended: bool) -> None:
    agent = environment.next_agent()
    if ended and agent is not None:
        raise _CheckFailed("next-agent", f"next_agent is {agent!r} after the end; it must be None")
    if not ended and agent not in environment.agents:
        raise _CheckFailed("next-agent", f"next_agent is {agent!r}, which is not one of {environment.agents}")


def _is_end(returned: Any, several: bool) -> bool:
    _, _, terminated, truncated, _ = returned
    if several:
        return all(terminated.values()) or all(truncated.values())
    return bool(terminated or truncated)


def _check_fresh_objects(returned: list[Any], copies: list[Any]) -> None:
    for position, (now, then) in enumerate(zip(returned, copies, strict=True)):
        if now != then:
            where = "reset" if position == 0 else f"step {position}"
            raise _CheckFailed("fresh-objects", f"the result of {where} was changed afterwards")
    earlier: set[int] = set()
    for values in returned:
        objects = {id(part) for part in values if isinstance(part, list | dict)}
        if objects & earlier:
            raise _CheckFailed("fresh-objects", "the same list or dict was returned twice")
        earlier |= objects


def _generator_state() -> tuple[Any, bytes]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), msgspec.json.encode([name, np.asarray(keys).tolist(), *rest])


@contextmanager
def _other_generators() -> Iterator[None]:
    """Reseed the global generators, to expose a hidden dependence on them; restore them afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(0x5EED)
    np.random.seed(0x5EED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _short_arguments(arguments: Sequence[Any]) -> str:
    return ", ".join(map(_short, arguments))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
