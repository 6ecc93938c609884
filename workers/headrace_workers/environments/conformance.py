"""Checks that an environment keeps the protocol; for environment authors, and for our own.

::

    from headrace_workers.environments.conformance import check_environment

    def test_my_environment_keeps_the_protocol():
        assert check_environment(MyEnvironment) == []

What is checked, each under the name that a problem carries:

* ``reset-returns``: a pair of observation and info (a dict each for several agents).
* ``step-returns``: five values of the right types; the reward and its parts are finite numbers. Both: text is Unicode.
* ``seed-fixes-all``: same seed, same actions, same episode, on a fresh instance and on a used one; but for the
  durations of tool calls.
* ``global-generators``: neither ``random`` nor ``numpy.random`` is seeded or drawn from.
* ``fresh-objects``: what was returned does not change afterwards, and is not returned again.
* ``own-state``: two instances played side by side give the episodes that each gives alone.
* ``next-agent``: the agent that is due is one of ``agents``, and None at the end.
* ``raises``: nothing is raised while an episode runs.
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
from headrace.errors import RequestError
from headrace.trajectory import ContentPart
from headrace_workers.environment_context import LOCAL_CONTEXT
from headrace_workers.renderers.tool_calls import taken_apart

DEFAULT_ACTIONS = (r"\boxed{1}", r"\boxed{2}", r"\boxed{1 1}", r"\boxed{2 1}", "hello", "")
"""Actions that some environment understands; an author gives those that lead far into an episode of theirs."""


class ProtocolViolation(NamedTuple):
    """One way in which the environment breaks the protocol."""

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


class _Broken(Exception):
    def __init__(self, check: str, message: str) -> None:
        super().__init__(message)
        self.problem = ProtocolViolation(check, message)


def check_environment(
    factory: Callable[[], Any],
    *,
    actions: Sequence[str] = DEFAULT_ACTIONS,
    seeds: Sequence[int] = (0, 1, 2),
    max_steps: int = 32,
) -> list[ProtocolViolation]:
    """All problems found, each once; an empty list means that the environment keeps the protocol.

    ``factory`` makes a fresh environment. For each seed and each action in ``actions`` an episode is played that
    starts at that action and goes round the list, ``max_steps`` long at most. Call it outside a running event loop:
    coroutines of the environment are run in a loop of its own.
    """
    found: dict[ProtocolViolation, None] = {}
    with asyncio.Runner() as runner:
        for seed in seeds:
            for start in range(len(actions)):
                plan = [actions[(start + step) % len(actions)] for step in range(max_steps)]
                for problem in _check_plan(_Player(factory, runner), seed, plan):
                    found.setdefault(problem)
    return list(found)


class _Player:
    """Plays episodes and keeps what was returned as it was at that moment."""

    def __init__(self, factory: Callable[[], Any], runner: asyncio.Runner) -> None:
        self._factory = factory
        self._runner = runner

    def make(self) -> Any:
        environment = self._factory()
        if hasattr(environment, "environment_context"):
            environment.environment_context = LOCAL_CONTEXT
        return environment

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = method(*arguments)
            if inspect.isawaitable(result):
                result = self._runner.run(_awaited(result))
        except (Exception, SystemExit) as error:
            given = ", ".join(map(repr, arguments))
            raise _Broken("raises", f"{method.__name__}({given}) raised {error!r}") from error
        return result

    def play(self, environment: Any, seed: int, plan: Sequence[str]) -> list[Any]:
        """One episode: what reset and each step returned, copied at once."""
        return list(self.steps(environment, seed, plan))

    def steps(self, environment: Any, seed: int, plan: Sequence[str]) -> Any:
        several = hasattr(environment, "agents")
        returned = [self.call(environment.reset, seed)]
        _check_reset(returned[0], several)
        copies = [copy.deepcopy(returned[0])]
        yield copies[0]
        for action in plan:
            if several:
                _check_due(environment, ended=False)
            given = taken_apart(action) if getattr(environment, "reads_calls", False) is True else action
            returned.append(self.call(environment.step, given))
            _check_step(returned[-1], several)
            copies.append(copy.deepcopy(returned[-1]))
            yield _without_durations(copies[-1])
            if _ended(returned[-1], several):
                if several:
                    _check_due(environment, ended=True)
                break
        _check_fresh(returned, copies)


def _without_durations(step: tuple[Any, ...]) -> tuple[Any, ...]:
    """A step without how long its tool calls took, which no seed fixes."""
    info = step[4]
    if not info.get("tool_calls"):
        return step
    calls = [msgspec.structs.replace(call, duration_s=0.0) for call in info["tool_calls"]]
    return (*step[:4], {**info, "tool_calls": calls})


async def _awaited(value: Any) -> Any:
    return await value


def _check_plan(player: _Player, seed: int, plan: Sequence[str]) -> list[ProtocolViolation]:
    try:
        return _problems(player, seed, plan)
    except _Broken as broken:
        return [broken.problem]


def _problems(player: _Player, seed: int, plan: Sequence[str]) -> list[ProtocolViolation]:
    problems = []
    before = _generator_state()
    environment = player.make()
    alone = player.play(environment, seed, plan)
    if _generator_state() != before:
        problems.append(
            ProtocolViolation("global-generators", "a module-wide random generator was seeded or drawn from")
        )
    if player.play(environment, seed, plan) != alone:
        problems.append(
            ProtocolViolation("seed-fixes-all", "the same instance, reset with the same seed, played differently")
        )
    with _other_generators():
        if player.play(player.make(), seed, plan) != alone:
            problems.append(
                ProtocolViolation("seed-fixes-all", "a fresh instance with the same seed played differently")
            )
    beside = [player.steps(player.make(), seed, plan), player.steps(player.make(), seed, plan)]
    for expected in alone:
        if any(next(episode, None) != expected for episode in beside):
            problems.append(ProtocolViolation("own-state", "two instances played side by side influence each other"))
            break
    return problems


def _check_reset(returned: Any, several: bool) -> None:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise _Broken("reset-returns", f"reset returned {_short(returned)}, not (observation, info)")
    observation, info = returned
    _check_observation("reset-returns", observation, several)
    if not isinstance(info, dict):
        raise _Broken("reset-returns", f"info is {_short(info)}, not a dict")


def _check_step(returned: Any, several: bool) -> None:
    name = "step-returns"
    if not (isinstance(returned, tuple) and len(returned) == 5):
        raise _Broken(name, f"step returned {_short(returned)}, not (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = returned
    _check_observation(name, observation, several)
    if not isinstance(info, dict):
        raise _Broken(name, f"info is {_short(info)}, not a dict")
    for value in _values(reward, several, name):
        if not _is_number(value):
            raise _Broken(name, f"the reward {_short(value)} is not a finite number")
    for its in info.values() if several else (info,):
        _check_parts(name, its)
    for flag in (*_values(terminated, several, name), *_values(truncated, several, name)):
        if not isinstance(flag, bool):
            raise _Broken(name, f"the flag {_short(flag)} is not a bool")


def _check_parts(check: str, info: Any) -> None:
    parts = info.get("reward_parts", {}) if isinstance(info, dict) else {}
    if not isinstance(parts, dict):
        raise _Broken(check, f"reward_parts is {_short(parts)}, not a dict of named numbers")
    for name, value in parts.items():
        if not isinstance(name, str) or not _is_number(value):
            raise _Broken(check, f"the reward part {_short(name)} is {_short(value)}, not a finite number")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _check_observation(check: str, observation: Any, several: bool) -> None:
    for value in _values(observation, several, check):
        parts = isinstance(value, list) and all(isinstance(part, ContentPart | Image) for part in value)
        if not (isinstance(value, str) or parts):
            raise _Broken(check, f"the observation {_short(value)} is neither text nor a list of ContentPart and Image")
        for part in value if parts else (value,):
            if isinstance(part, Image):
                _check_image(check, part)
            text = part if isinstance(part, str) else part.text
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise _Broken(check, f"the text {_short(text)} holds half a character (a lone surrogate)") from error


def _check_image(check: str, image: Image) -> None:
    try:
        image.encoded()
    except RequestError as error:
        raise _Broken(check, f"an image of the observation cannot be stored: {error}") from error


def _values(value: Any, several: bool, check: str) -> list[Any]:
    if not several:
        return [value]
    if not isinstance(value, dict):
        raise _Broken(check, f"{_short(value)} is not a dict by agent")
    return list(value.values())


def _check_due(environment: Any, *, ended: bool) -> None:
    due = environment.next_agent()
    if ended and due is not None:
        raise _Broken("next-agent", f"{due!r} is due after the end; it must be None")
    if not ended and due not in environment.agents:
        raise _Broken("next-agent", f"{due!r} is due but is not one of {environment.agents}")


def _ended(returned: Any, several: bool) -> bool:
    _, _, terminated, truncated, _ = returned
    if several:
        return all(terminated.values()) or all(truncated.values())
    return bool(terminated or truncated)


def _check_fresh(returned: list[Any], copies: list[Any]) -> None:
    for position, (now, then) in enumerate(zip(returned, copies, strict=True)):
        if now != then:
            where = "reset" if position == 0 else f"step {position}"
            raise _Broken("fresh-objects", f"what {where} returned was changed afterwards")
    seen: set[int] = set()
    for values in returned:
        own = {id(part) for part in values if isinstance(part, list | dict)}
        if own & seen:
            raise _Broken("fresh-objects", "the same list or dict was returned twice")
        seen |= own


def _generator_state() -> tuple[Any, bytes]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), msgspec.json.encode([name, np.asarray(keys).tolist(), *rest])


@contextmanager
def _other_generators() -> Iterator[None]:
    """Other states of the global generators, so that a hidden dependence shows; put back afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(0x5EED)
    np.random.seed(0x5EED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
