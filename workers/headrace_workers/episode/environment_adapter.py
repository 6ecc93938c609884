"""The environment adapter: checks and copies everything that an environment returns.

* A step is a snapshot: later changes of the environment to its objects change nothing that was stored.
* A reward is a finite number between -1e100 and 1e100; anything else is a failure of the environment, never a score.
* Infos keep their JSON-able part within bounds; omitted parts are named in the info under ``dropped``.
* An observation is text, or parts of text and images; anything else is refused, with its type in the message.
* An image is copied and named at once, so that the environment may reuse its buffer for the next image.
* An observation larger than any context is refused, not truncated.
* Text that is not Unicode is stored with U+FFFD for each lone surrogate, and named in the info under ``dropped``: a
  policy can write half a character as an escape in JSON, and a tool can repeat it.

Keys of an info with their own field in the record, which are not repeated in ``infos``: ``reward_parts``
(named floats), ``tool_calls`` (a list of ``ToolCall``), ``history`` (a list of ``{"role", "content"}`` that replaces
all that the agent has seen, including the new observation: a history edit, which starts a new segment).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.assets import AssetData, Image
from headrace.errors import EnvironmentFailure, RequestError
from headrace.trajectory import ContentPart, Message, ToolCall
from headrace.validation import MAX_REWARD
from headrace_workers.episode.json_copies import json_part
from headrace_workers.unicode_text import as_unicode, is_unicode

AGENT = "agent"
"""Name of the agent in a single-agent environment."""

ROLES = ("system", "user", "assistant", "tool")
"""Roles that a message of a history may have."""

RECORD_KEYS = frozenset({"reward_parts", "tool_calls", "history"})
"""Keys of an info that have their own field in the record."""

MAX_OBSERVATION = 16 << 20
"""Most characters of one observation or history: some four million tokens."""

MAX_PARTS = 10_000
"""Most parts of one observation, messages of one history, and tool calls of one turn."""

MAX_IMAGE_BYTES = 64 << 20
"""Most bytes of one image: an uncompressed photograph. A screenshot has some 8 MB."""

Content = str | list[ContentPart]
"""An observation as stored: images by the names of their assets."""


class NamedImage(NamedTuple):
    """A copied image with its name."""

    asset: AssetData
    text: str


class EnvironmentAnswer(msgspec.Struct, frozen=True):
    """An answer of an environment, by agent, with its images. After a reset only observations, history and info are
    set; after a grade, only rewards, their parts and info."""

    observations: dict[str, Content]
    rewards: dict[str, float]
    reward_parts: dict[str, dict[str, float]]
    terminated: dict[str, bool]
    truncated: dict[str, bool]
    tool_calls: dict[str, list[ToolCall]]
    history: dict[str, list[Message]]
    info: dict[str, Any]
    assets: list[AssetData]


def name_images(answer: Any) -> Any:
    """Copy and name the images in the result of ``reset`` or ``step``. Call it where the environment runs, since a
    large image takes milliseconds; an invalid image is reported later, when the result is read."""
    if not isinstance(answer, tuple) or not answer:
        return answer
    observation = answer[0]
    if isinstance(observation, dict):
        return ({agent: _name_images_in(value) for agent, value in observation.items()}, *answer[1:])
    with_names = _name_images_in(observation)
    return answer if with_names is observation else (with_names, *answer[1:])


def _name_images_in(observation: Any) -> Any:
    if not isinstance(observation, list) or not any(isinstance(part, Image) for part in observation):
        return observation
    return [_name_image(part) if isinstance(part, Image) else part for part in observation]


def _name_image(image: Image) -> Image | NamedImage:
    try:
        return NamedImage(image.encoded(), image.text)
    except RequestError:
        return image


def read_reset(result: Any) -> EnvironmentAnswer:
    """Check and copy what ``reset`` of a single-agent environment returned."""
    observation, info = _unpack(result, 2, "reset", "(observation, info)")
    copier = _ObservationCopier()
    _, _, history, kept = _single_info(info, copier)
    observations = {AGENT: copier.observation(observation)}
    return EnvironmentAnswer(observations, {}, {}, {}, {}, {}, history, copier.noted(kept), copier.assets)


def read_step(result: Any) -> EnvironmentAnswer:
    """Check and copy what ``step`` of a single-agent environment returned."""
    observation, reward, terminated, truncated, info = _unpack(
        result, 5, "step", "(observation, reward, terminated, truncated, info)"
    )
    copier = _ObservationCopier()
    parts, calls, history, kept = _single_info(info, copier)
    observations = {AGENT: copier.observation(observation)}
    return EnvironmentAnswer(
        observations,
        {AGENT: check_reward(reward, "The reward")},
        parts,
        {AGENT: _flag(terminated, "terminated")},
        {AGENT: _flag(truncated, "truncated")},
        calls,
        history,
        copier.noted(kept),
        copier.assets,
    )


def read_reset_by_agent(result: Any, agents: list[str]) -> EnvironmentAnswer:
    """Check and copy what ``reset`` of a multi-agent environment returned."""
    observations, info = _unpack(result, 2, "reset", "(observations, info), both by agent")
    copier = _ObservationCopier()
    _, _, history, kept = _info_by_agent(info, agents, copier)
    copied = _observations(observations, agents, copier)
    return EnvironmentAnswer(copied, {}, {}, {}, {}, {}, history, copier.noted(kept), copier.assets)


def read_step_by_agent(result: Any, agents: list[str]) -> EnvironmentAnswer:
    """Check and copy what ``step`` of a multi-agent environment returned."""
    observations, rewards, terminated, truncated, info = _unpack(
        result, 5, "step", "(observations, rewards, terminated, truncated, info), each by agent"
    )
    copier = _ObservationCopier()
    parts, calls, history, kept = _info_by_agent(info, agents, copier)
    copied = _observations(observations, agents, copier)
    return EnvironmentAnswer(
        copied,
        {name: check_reward(value, f"The reward of {name}") for name, value in _by_agent(rewards, "rewards", agents)},
        parts,
        {name: _flag(value, "terminated") for name, value in _by_agent(terminated, "terminated", agents)},
        {name: _flag(value, "truncated") for name, value in _by_agent(truncated, "truncated", agents)},
        calls,
        history,
        copier.noted(kept),
        copier.assets,
    )


def read_grade(result: Any) -> EnvironmentAnswer:
    """Check and copy what ``grade`` of a single-agent environment returned."""
    reward, info = _reward_and_info(result)
    if reward is None:
        return _no_grade()
    parts, _, _, kept = _single_info(info, _ObservationCopier())
    value = check_reward(reward, "The grade")
    return _grade({AGENT: value}, parts or {AGENT: {"grade": value}}, kept)


def read_grade_by_agent(result: Any, agents: list[str]) -> EnvironmentAnswer:
    """Check and copy what ``grade`` of a multi-agent environment returned."""
    rewards, info = _reward_and_info(result)
    if rewards is None:
        return _no_grade()
    parts, _, _, kept = _info_by_agent(info, agents, _ObservationCopier())
    values = {name: check_reward(value, f"The grade of {name}") for name, value in _by_agent(rewards, "grade", agents)}
    return _grade(values, {name: parts.get(name, {"grade": value}) for name, value in values.items()}, kept)


def _reward_and_info(result: Any) -> Any:
    return _unpack(result, 2, "grade", "(reward, info)") if isinstance(result, tuple) else (result, {})


def _grade(rewards: dict[str, float], parts: dict[str, dict[str, float]], info: dict[str, Any]) -> EnvironmentAnswer:
    return EnvironmentAnswer({}, rewards, parts, {}, {}, {}, {}, info, [])


def _no_grade() -> EnvironmentAnswer:
    return _grade({}, {}, {})


def tools_of(info: dict[str, Any], agent: str, agents: list[str] | None) -> list[dict[str, Any]]:
    """The functions that an agent may call, listed under ``tools`` in the info of a reset (with several agents, under
    its name). Raises EnvironmentFailure ``tools-type``."""
    own = info if agents is None else info.get(agent)
    tools = own.get("tools", []) if isinstance(own, dict) else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _broken("tools-type", "info['tools'] is not a list of JSON schemas of functions.")
    return tools


def check_reward(value: Any, subject: str) -> float:
    """Check a reward and return it as a float. Raises EnvironmentFailure ``reward-not-a-number``, ``reward-not-finite``
    or ``reward-out-of-range``."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise _broken("reward-not-a-number", f"{subject} is {value!r} ({type(value).__name__}), not a number.")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise _broken("reward-not-finite", f"{subject} is {value}, which is not finite.")
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise _broken("reward-out-of-range", f"{subject} is {value}, beyond ±{MAX_REWARD:g}.")
    return float(value)


def _broken(kind: str, detail: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        detail, hint="Fix the environment; the episode is not scored.", kind=kind, retryable=False
    )


def _unpack(result: Any, size: int, method: str, shape: str) -> Any:
    if not isinstance(result, tuple) or len(result) != size:
        actual = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise _broken(f"{method}-shape", f"{method} returned {actual}, not a tuple {shape}.")
    return result


def _flag(value: Any, what: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _broken("flag-not-a-bool", f"{what} is {value!r} ({type(value).__name__}), not a bool.")


class _ObservationCopier:
    """Copies the texts of one answer; ``assets`` are the images of its observations."""

    def __init__(self) -> None:
        self.assets: list[AssetData] = []
        self._replaced: dict[str, None] = {}

    def noted(self, info: dict[str, Any]) -> dict[str, Any]:
        """Name the texts that were replaced under ``dropped`` in a copied info, and return it."""
        if self._replaced:
            notes = [f"{subject} (lone surrogates)" for subject in self._replaced]
            dropped = info.get("dropped")
            info["dropped"] = [*(dropped if isinstance(dropped, list) else ()), *notes]
        return info

    def text(self, value: str, subject: str) -> str:
        if is_unicode(value):
            return value
        self._replaced[subject] = None
        return as_unicode(value)

    def observation(self, value: Any) -> Content:
        if isinstance(value, str):
            _check_size(len(value))
            return self.text(value, "observation")
        if isinstance(value, list):
            _check_count(len(value), "An observation", "parts")
            parts = [self._part(part) for part in value]
            _check_size(_size(parts))
            return parts
        raise _broken(
            "observation-type", f"An observation is {type(value).__name__}, not text or a list of content parts."
        )

    def _part(self, value: Any) -> ContentPart:
        if isinstance(value, NamedImage):
            return self._image(value)
        if isinstance(value, Image):
            return self._image(NamedImage(self._encoded(value), value.text))
        if not isinstance(value, ContentPart):
            raise _broken("observation-type", f"A part of an observation is {type(value).__name__}, not a ContentPart.")
        if value.type != "text":
            raise _broken(
                "observation-image", "A ContentPart of an observation names an image; use headrace.Image instead."
            )
        text = self.text(value.text, "observation")
        return value if text is value.text else ContentPart(type="text", text=text)

    def _encoded(self, image: Image) -> AssetData:
        try:
            return image.encoded()
        except RequestError as error:
            raise _broken("observation-image", str(error)) from error

    def _image(self, image: NamedImage) -> ContentPart:
        size_bytes = len(image.asset.data)
        if size_bytes > MAX_IMAGE_BYTES:
            raise _broken("observation-too-large", f"An image has {size_bytes} bytes; the limit is {MAX_IMAGE_BYTES}.")
        self.assets.append(image.asset)
        return ContentPart(type="image", asset=image.asset.name, text=self.text(image.text, "observation"))


def _check_size(characters: int) -> None:
    if characters > MAX_OBSERVATION:
        raise _broken(
            "observation-too-large", f"An observation has {characters} characters; the limit is {MAX_OBSERVATION}."
        )


def _check_count(count: int, subject: str, items: str) -> None:
    if count > MAX_PARTS:
        raise _broken("observation-too-large", f"{subject} has {count} {items}; the limit is {MAX_PARTS}.")


def _by_agent(value: Any, what: str, agents: list[str]) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise _broken("step-shape", f"{what} is {type(value).__name__}, not a dict by agent.")
    for name in value:
        if name not in agents:
            raise _broken("unknown-agent", f"{what} names {name!r}; the environment's agents are {agents}.")
    return list(value.items())


def _observations(value: Any, agents: list[str], copier: _ObservationCopier) -> dict[str, Content]:
    return {name: copier.observation(item) for name, item in _by_agent(value, "observations", agents)}


_ByAgent = tuple[dict[str, dict[str, float]], dict[str, list[ToolCall]], dict[str, list[Message]], dict[str, Any]]


def _single_info(info: Any, copier: _ObservationCopier) -> _ByAgent:
    if type(info) is dict and not info:
        return {}, {}, {}, {}
    parts, calls, history = _record_fields(info, AGENT, copier)
    kept = json_part({key: value for key, value in info.items() if key not in RECORD_KEYS})
    return (
        {AGENT: parts} if parts else {},
        {AGENT: calls} if calls else {},
        {AGENT: history} if history is not None else {},
        kept,
    )


def _info_by_agent(info: Any, agents: list[str], copier: _ObservationCopier) -> _ByAgent:
    """Split the info of a multi-agent environment: the value under an agent's name belongs to that agent."""
    if not isinstance(info, dict):
        raise _broken("info-type", f"info is {type(info).__name__}, not a dict.")
    parts: dict[str, dict[str, float]] = {}
    calls: dict[str, list[ToolCall]] = {}
    history: dict[str, list[Message]] = {}
    rest: dict[Any, Any] = {}
    for name, value in info.items():
        if name not in agents or not isinstance(value, dict):
            rest[name] = value
            continue
        its_parts, its_calls, its_history = _record_fields(value, name, copier)
        if its_parts:
            parts[name] = its_parts
        if its_calls:
            calls[name] = its_calls
        if its_history is not None:
            history[name] = its_history
        rest[name] = {key: item for key, item in value.items() if key not in RECORD_KEYS}
    return parts, calls, history, json_part(rest)


def _record_fields(
    info: Any, agent: str, copier: _ObservationCopier
) -> tuple[dict[str, float], list[ToolCall], list[Message] | None]:
    if not isinstance(info, dict):
        raise _broken("info-type", f"info is {type(info).__name__}, not a dict.")
    return (
        _reward_parts(info.get("reward_parts", {})),
        [_tool_call(call, copier) for call in _list(info.get("tool_calls", []), "tool_calls")],
        _history(info["history"], agent, copier) if "history" in info else None,
    )


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _broken("info-type", f"info[{what!r}] is {type(value).__name__}, not a list.")
    _check_count(len(value), f"info[{what!r}]", "items")
    return value


def _reward_parts(parts: Any) -> dict[str, float]:
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise _broken("reward-parts-type", "info['reward_parts'] is not a dict of named numbers.")
    return {as_unicode(name): check_reward(value, f"The reward part {name!r}") for name, value in parts.items()}


def _tool_call(call: Any, copier: _ObservationCopier) -> ToolCall:
    if not isinstance(call, ToolCall):
        raise _broken("tool-call-type", f"A tool call is {type(call).__name__}, not a ToolCall.")
    if not (
        isinstance(call.arguments, dict)
        and all(isinstance(text, str) for text in (call.name, call.result, call.error))
        and isinstance(call.duration_s, int | float)
        and math.isfinite(call.duration_s)
    ):
        raise _broken("tool-call-type", "A field of a ToolCall has another type than the class states.")
    _check_size(len(call.name) + len(call.result) + len(call.error))
    return ToolCall(
        name=copier.text(call.name, "tool_calls"),
        arguments=json_part(call.arguments),
        result=copier.text(call.result, "tool_calls"),
        error=copier.text(call.error, "tool_calls"),
        duration_s=call.duration_s,
    )


def _history(value: Any, agent: str, copier: _ObservationCopier) -> list[Message]:
    messages = [_message(item, agent, copier) for item in _list(value, "history")]
    _check_size(sum(_size(message.content) for message in messages))
    return messages


def _size(content: Content) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _message(item: Any, agent: str, copier: _ObservationCopier) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ROLES or "content" not in item:
        raise _broken("history-type", "A message of info['history'] is not a dict with a known role and a content.")
    return Message(role=item["role"], content=copier.observation(item["content"]), agent=agent)
