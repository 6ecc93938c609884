"""Whatever a policy can write is an action that can be judged: no text of it becomes a fault of the worker, of the
environment or of the record."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Action, make
from headrace.environment import Step
from headrace.runspec import LimitSpec, SamplingSpec
from headrace.trajectory import Message, ToolCall
from headrace.wire.codec import decode, encode
from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.environment_context import LOCAL_CONTEXT
from headrace_workers.policies import Sample
from headrace_workers.renderers import AssistantTurn, BytesRenderer, CurrentSegment, Renderer
from headrace_workers.renderers.tool_calls import parse_action
from tests.workers.fakes import Script, Turns, assignment, play, say
from tests.workers.renderers.families import call_text, family_renderers
from tests.workers.renderers.test_renderer_properties import AWKWARD, case_of

VALUES = [
    "[" * 980,
    '{"a":' * 980,
    "[" * 120 + "]" * 120,
    "9" * 5000,
    "-" + "9" * 4000,
    "1e999",
    "NaN",
    "-Infinity",
    r'"\ud83d"',
    r'"\ud83d\ude00"',
    r'"\u0000"',
    "\x00",
    "\u202e\u2066",
    '{"a": 1, "a": {"a": 2}}',
    "null",
    "[]",
    '"' + "x" * 3000 + '"',
]
"""JSON that is too deep, too wide, not a number, not text, ambiguous, or no JSON."""

VALUES_OF_FAMILIES = [VALUES[0], VALUES[3], *VALUES[5:9], "\x00\u202e"]
"""A choice of them: there are many families."""

CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": VALUE}}</tool_call>',
    '<tool_call>{"name": VALUE, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": VALUE}</tool_call>',
    "<tool_call>VALUE</tool_call>",
    "<tool_call>VALUE",
]

WORDS = [
    "</think>",
    "<think>",
    r"\boxed{",
    "}",
    "```python\n",
    "\n```",
    "<python>",
    "</python>",
    "<|im_end|>",
    "\\frac{1}{",
]

HOSTILE = st.lists(
    st.sampled_from(VALUES)
    | st.sampled_from(WORDS)
    | st.builds(lambda call, value: call.replace("VALUE", value), st.sampled_from(CALLS), st.sampled_from(VALUES))
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20),
    min_size=1,
    max_size=6,
).map("".join)
"""Text that a tokenizer can decode: any text without lone surrogates."""

ASK = Message(role="user", content="Ask.")
NEXT = Message(role="user", content="Next.")


def check(action: Action, text: str) -> None:
    """An action keeps its text, and each call of it can be stored or says why it cannot be read."""
    assert action == text
    for call in action.calls:
        assert call.name or call.error
        stored = ToolCall(name=call.name, arguments=call.arguments, result=call.text, error=call.error)
        assert msgspec.json.encode([stored.name, stored.result])
        assert json.dumps(stored.arguments, allow_nan=False).encode()


@settings(max_examples=200, deadline=None)
@given(HOSTILE)
def test_no_text_raises_in_the_parser_of_calls(text: str) -> None:
    check(parse_action(text), text)
    check(parse_action(text, "<think>\n"), text)


@pytest.mark.parametrize("value", ["[" * 980, r'"\ud83d"', "NaN", "1e999", "9" * 5000, "[" * 80 + "]" * 80])
def test_a_call_with_a_value_that_no_tool_can_use_is_kept_with_an_error(value: str) -> None:
    (call,) = parse_action(CALLS[0].replace("VALUE", value)).calls
    assert call.error
    assert (call.arguments, value in call.text) == ({}, True)


def test_a_pair_of_surrogates_and_a_nesting_of_64_levels_are_fine() -> None:
    (call,) = parse_action(CALLS[0].replace("VALUE", r'"\ud83d\ude00"')).calls
    assert (call.arguments, call.error) == ({"a": "😀"}, "")
    (call,) = parse_action(CALLS[0].replace("VALUE", "[" * 63 + "]" * 63)).calls
    assert call.error == ""


def play_turn(renderer: Renderer, ids: list[int]) -> None:
    """Parse a sampled turn, show it again, and continue after it."""
    text = renderer.parse(ids)
    check(renderer.action(ids, text), text)
    turn = AssistantTurn(ids, text)
    prompt = renderer.start([ASK])
    renderer.extend(CurrentSegment(prompt.new_ids + ids, len(prompt.new_ids), [ASK, turn], prompt.text), [NEXT])
    renderer.start([ASK, turn, NEXT])


FAMILY_NAMES = sorted(family_renderers()[1])

QUADRATIC = {"deepseek-v4"}
"""Families whose parser takes quadratic time: the fuzz test leaves long values out."""


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_no_turn_raises_in_the_parser_or_the_renderer_of_a_family(name: str) -> None:
    tokenizer, renderers = family_renderers()
    renderer = renderers[name]
    call = call_text(renderer, tokenizer, "add", {"a": "VALUE", "b": "VALUE"})
    for value in VALUES_OF_FAMILIES:
        value = value[:300] if name in QUADRATIC else value
        for text in (call.replace('"VALUE"', value), call.replace("VALUE", value), call.partition("VALUE")[0] + value):
            play_turn(renderer, tokenizer.encode(text))


@pytest.mark.parametrize("name", ["bytes", *AWKWARD])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_turn_raises_in_another_renderer(name: str, data: st.DataObject) -> None:
    case = case_of(name)
    play_turn(case.renderer, case.encode(data.draw(HOSTILE.filter(bool))) + list(case.renderer.stop_token_ids[:1]))


class SharedCalls:
    """A context whose bounded calls share their processes, with short deadlines."""

    def __init__(self, calls: BoundedCalls) -> None:
        self._calls = calls
        self.sandbox = LOCAL_CONTEXT.sandbox
        self.call = LOCAL_CONTEXT.call

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        limit_s = time_s if function.endswith("is_readable") else 0.3
        return await self._calls.call(function, *arguments, time_s=limit_s, memory_bytes=memory_bytes)


@pytest.fixture
async def calls() -> AsyncIterator[BoundedCalls]:
    calls = BoundedCalls()
    yield calls
    await calls.close()


ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "math:Arithmetic-v0": {},
    "math:Rows-v0": {"example": {"problem": "p", "answer": r"\sqrt{2}"}},
    "game:GuessTheNumber-v0": {},
    "game:Nim-v0": {},
    "rg:coin_flip": {},
    "rg:n_queens": {},
}

JUDGED = [
    *(rf"\boxed{{{value}}}" for value in VALUES if len(value) < 2000),
    rf"\boxed{{{'9' * 5000}}}",
    r"\boxed{1e999999999}",
    r"\boxed{9**9**9**9}",
    r"\boxed{" * 5000,
    r"\boxed{\frac{1}{0}}",
    "\ud83d",
    "x" * 1_000_000,
    "",
]


@pytest.mark.component("reasoning-gym")
@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_every_built_in_environment_judges_what_a_policy_can_write(name: str, calls: BoundedCalls) -> None:
    environment: Any = make(name, **ENVIRONMENTS[name])
    if hasattr(environment, "environment_context"):
        environment.environment_context = SharedCalls(calls)
    for action in JUDGED:
        await _maybe(environment.reset(3))
        step = await _maybe(environment.step(action))
        assert len(step) == 5


async def _maybe(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


WIDE: dict[str, Any] = {"sampling": SamplingSpec(max_tokens=1 << 20), "limits": LimitSpec(max_context_tokens=1 << 24)}
"""A run whose budgets no text of these tests uses up."""


class Echo(Turns):
    """A tool that repeats what the policy wrote, and what its calls said."""

    reads_calls = True

    def step(self, action: str) -> Any:
        assert isinstance(action, Action)
        decoded = [_lenient(call.text) for call in action.calls]
        calls = [
            ToolCall(name=call.name or "?", arguments={"a": value}, result=_shown(value), error=call.error)
            for call, value in zip(action.calls, decoded, strict=True)
        ]
        observation, reward, *flags, _ = super().step(action)
        text = "".join(call.result for call in calls)
        return Step(f"{observation} {action} {text}", reward, *flags, {"said": str(action), "tool_calls": calls})


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)[:1000]
    except RecursionError:
        return "…"


def _lenient(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(HOSTILE, min_size=2, max_size=2))
async def test_an_episode_of_hostile_turns_ends_with_a_record_that_can_be_stored_and_shown(texts: list[str]) -> None:
    record = await play(Script(*map(say, texts)), lambda: Echo(last=2), **WIDE)
    assert (record.status, record.failure) == ("finished", None)
    assert decode(encode(record)).messages == record.messages
    assert msgspec.json.decode(msgspec.json.encode(record.messages + record.infos))


async def test_a_lone_surrogate_that_a_tool_repeats_is_replaced_and_named() -> None:
    record = await play(Script(say(CALLS[0].replace("VALUE", r'"\ud83d"'))), lambda: Echo(last=1))
    assert record.status == "finished"
    assert "\ufffd" in str(record.messages[-1].content)
    assert record.infos[-1]["dropped"] == ["tool_calls (lone surrogates)", "observation (lone surrogates)"]


async def test_a_server_of_text_may_answer_with_a_lone_surrogate() -> None:
    sample = Sample(token_ids=[], logprobs=[], finish_reason="stop", versions=[], text="half \ud83d")
    record = await play(Script(sample), lambda: Turns(last=1), asked=assignment(evaluation="e"))
    assert (record.status, record.messages[1].content) == ("finished", "half \ufffd")


def test_the_bytes_renderer_reads_any_ids() -> None:
    renderer = BytesRenderer()
    for ids in ([0], [255, 254], [256, 257], [240, 159], [0, 261]):
        play_turn(renderer, ids)
