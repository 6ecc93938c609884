"""The environment protocol, and the registry of environments by id.

* An environment has ``reset(seed)`` and ``step(action)``; either may be a coroutine.
* The seed given to ``reset`` determines the environment completely: same seed, same actions, same episode.
* Each environment has its own random generator; no global generator is seeded or used.
* ``grade()`` is optional: it is called once, when a limit of the run ends an episode, and grades the state reached.
* A reward is a finite float. If both terminated and truncated are true, the episode is terminated.
* Other packages register environments by the entry point group ``headrace.environments``.
* An id ``family:*`` registers a whole family: the text after the colon is the factory's first argument.

The protocol is that of Gymnasium and GEM, so that their environments work unchanged::

    class Echo:
        def reset(self, seed=None):
            return "Say hello.", {}

        def step(self, action):
            return "", float(action == "hello"), True, False, {}

    headrace.register("example:Echo", Echo)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import msgspec

from headrace.assets import Image
from headrace.common.registry import installed
from headrace.errors import HeadraceError, InvalidRequest, SetupError, UnknownEnvironment
from headrace.trajectory import ContentPart

Observation = str | list[ContentPart | Image]
"""Text, or a list of text parts and images."""

ENTRY_POINT_GROUP = "headrace.environments"
"""Each entry point of this group names an environment factory; the entry point's name is the id."""


class Step(NamedTuple):
    """The result of ``step``; a plain 5-tuple is also accepted.

    ``info["reward_parts"]`` may explain the reward by a dict of named floats. ``info["tool_calls"]`` may list
    :class:`headrace.trajectory.ToolCall`.
    """

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


Grade = float | tuple[float, dict[str, Any]] | None
"""The result of ``grade``: a reward, or a pair of reward and info; None to leave the rewards as they are. The reward is
added to that of the agent's last turn. With several agents, both are dicts by agent."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A function call in an action. ``text`` is its original text; ``error`` says why it cannot be parsed, if so."""

    name: str = ""
    arguments: dict[str, Any] = {}
    text: str
    error: str = ""


class Action(str):
    """A parsed action, for an environment with ``reads_calls = True``.

    The string is the text of the action, which consists of ``reasoning``, then ``content``, then ``calls``.
    """

    content: str
    reasoning: str
    calls: list[Call]

    def __new__(cls, text: str, *, content: str, reasoning: str = "", calls: Sequence[Call] = ()) -> Action:
        action = super().__new__(cls, text)
        action.content, action.reasoning, action.calls = content, reasoning, list(calls)
        return action


@runtime_checkable
class Environment(Protocol):
    """A single-agent environment. ``close()`` and ``grade() -> Grade`` are optional; either may be a coroutine.

    ``info["tools"]`` of ``reset`` may list JSON schemas of functions that the policy may call. The renderer shows them
    to the policy, and a call is part of the action's text. With ``reads_calls = True`` on the class an action is an
    :class:`Action`, which has the parsed calls.
    """

    def reset(
        self, seed: int | None = None
    ) -> tuple[Observation, dict[str, Any]] | Awaitable[tuple[Observation, dict[str, Any]]]: ...

    def step(
        self, action: str
    ) -> (
        tuple[Observation, float, bool, bool, dict[str, Any]]
        | Awaitable[tuple[Observation, float, bool, bool, dict[str, Any]]]
    ): ...


@runtime_checkable
class MultiAgentEnvironment(Protocol):
    """Several agents that act in turn.

    * ``agents`` are the names of all agents, fixed for the episode; ``next_agent()`` is the next to act, None at the
      end.
    * ``reset`` returns the first observation of each agent; ``step(action)`` takes the next agent's action.
    * ``step`` returns five dicts by agent. A reward for an agent that did not act belongs to that agent's last turn, or
      to its first turn if it has none yet. An observation for an agent is added to its next prompt.
    * ``grade()`` is optional, and returns rewards by agent, or a pair of rewards and infos, both by agent.
    """

    agents: list[str]

    def next_agent(self) -> str | None: ...

    def reset(self, seed: int | None = None) -> tuple[dict[str, Observation], dict[str, Any]]: ...

    def step(
        self, action: str
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]: ...


def grade_of(environment: Any) -> Callable[[], Any] | None:
    """The environment's ``grade``; None if it has none. A method of this name that needs arguments is something
    else."""
    grade = getattr(environment, "grade", None)
    if not callable(grade):
        return None
    try:
        inspect.signature(grade).bind()
    except (TypeError, ValueError):
        return None
    return cast("Callable[[], Any]", grade)


EnvironmentFactory = Callable[..., Environment | MultiAgentEnvironment]

_registry: dict[str, EnvironmentFactory | str] = {}


def register(environment_id: str, factory: EnvironmentFactory | str) -> None:
    """Register a factory (a class, a callable, or ``"module:name"``) under an id such as ``"game:Nim"``."""
    if not isinstance(environment_id, str) or not environment_id.strip() or not environment_id.isprintable():
        raise InvalidRequest(
            f"The environment id {environment_id!r} is not a name.",
            hint="Choose a text such as 'game:Nim', on one line.",
        )
    if environment_id in _registry:
        raise InvalidRequest(f"Environment {environment_id!r} is already registered.", hint="Choose another id.")
    _registry[environment_id] = factory


def registered() -> list[str]:
    """All ids that ``make`` knows, including those of installed packages."""
    return sorted({*_registry, *installed(ENTRY_POINT_GROUP)})


def make(environment_id: str, /, **kwargs: Any) -> Environment | MultiAgentEnvironment:
    """Create the environment with that id. Raises UnknownEnvironment, and SetupError for an entry point that cannot be
    loaded; errors of its constructor pass through."""
    family, _, name = environment_id.partition(":")
    factory = _find(environment_id)
    if factory is None and (of_family := _find(f"{family}:*")) is not None:
        return of_family(name, **kwargs)
    if factory is None:
        near = [known for known in registered() if known.split(":")[0] == family]
        raise UnknownEnvironment(
            f"No environment {environment_id!r}.",
            hint=f"Known here: {', '.join(near or registered()) or 'none'}. Others are registered by `--import`, or by "
            f"the entry point group {ENTRY_POINT_GROUP!r}; is their package installed where the worker runs?",
            environment=environment_id,
        )
    return factory(**kwargs)


def _load(point: EntryPoint) -> EnvironmentFactory:
    """Load the factory that an entry point names. Raises SetupError, which names the entry point."""
    try:
        factory = point.load()
    except HeadraceError:
        raise  # it says what is missing
    except (Exception, SystemExit) as error:
        raise SetupError(
            f"The environment {point.name!r} cannot be loaded: its entry point {point.value!r} raised "
            f"{type(error).__name__}: {error}.",
            hint=f"Correct the entry point of the group {ENTRY_POINT_GROUP!r}; install its package where this runs.",
        ) from error
    if not callable(factory):
        raise SetupError(
            f"The environment {point.name!r} is a {type(factory).__name__}, which cannot be called.",
            hint=f"Its entry point {point.value!r} has to name a class or a function that returns an environment.",
        )
    return cast("EnvironmentFactory", factory)


def _find(key: str) -> EnvironmentFactory | None:
    factory = _registry.get(key)
    if factory is None and key in (points := installed(ENTRY_POINT_GROUP)):
        factory = _load(points[key])
    if isinstance(factory, str):
        module, _, name = factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
    return cast("EnvironmentFactory | None", factory)
