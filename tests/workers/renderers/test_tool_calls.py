"""Parsing of actions into calls, content and thinking, for environments that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Action, Call
from headrace.trajectory import Message
from headrace_workers.environments.conformance import check_environment
from headrace_workers.renderers.family_renderer import FamilyRenderer
from headrace_workers.renderers.folder_tokenizer import load_tokenizer
from headrace_workers.renderers.tool_calls import parse_action
from tests.workers.fakes import Script, Turns, play, say
from tests.workers.models import make_model

ADD = '{"name": "add", "arguments": {"a": 2}}'
CALL = f"<tool_call>\n{ADD}\n</tool_call>"


def test_thinking_is_the_text_before_its_end_tag_and_content_follows_up_to_the_first_call() -> None:
    action = parse_action(f"<think>\nhm\n</think>\n\nI add.\n{CALL}\n{CALL}")
    assert (action.reasoning, action.content) == ("hm", "I add.")
    assert action.calls == [Call(name="add", arguments={"a": 2}, text=ADD)] * 2
    assert parse_action("hm\n</think>\n\n4", "<think>\n").reasoning == "hm"
    assert parse_action("hm", "<think>\n") == "hm"
    assert (parse_action("hm", "<think>\n").reasoning, parse_action("hm", "<think>\n").content) == ("hm", "")
    assert parse_action("4").content == "4"


@pytest.mark.parametrize(
    ("block", "error", "name"),
    [
        ("<tool_call>{", "the call is not closed", ""),
        ("<tool_call>{oops}</tool_call>", "the call is not JSON: ", ""),
        ("<tool_call>[]</tool_call>", "the call names no function", ""),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "the arguments are not a JSON object", "add"),
    ],
)
def test_a_call_that_cannot_be_parsed_is_kept_with_its_text_and_an_error(block: str, error: str, name: str) -> None:
    first, second = parse_action(f"{CALL}\n{block}").calls
    assert (first.name, first.error) == ("add", "")
    assert second.error.startswith(error)
    assert (second.name, second.arguments) == (name, {})
    assert second.text in block


@given(st.text(alphabet='<>/ntolcak_{}" ', max_size=40) | st.text(max_size=40))
def test_an_action_equals_its_text(text: str) -> None:
    assert parse_action(text) == text
    assert parse_action(text, "<think>\n") == text


def test_a_family_parses_calls_by_its_own_rules_also_in_text_cut_at_a_stop_string(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_model(tmp_path)))
    renderer = FamilyRenderer("qwen3", tokenizer)
    said = f"<think>\nhm\n</think>\n\nI add.\n{CALL}"
    action = renderer.action(tokenizer.encode(f"{said}<|im_end|>"), said)
    assert (action, action.reasoning.strip(), action.content.strip()) == (said, "hm", "I add.")
    assert action.calls == [Call(name="add", arguments={"a": 2}, text=ADD)]
    cut = said.partition("<tool_call>")[0]
    assert renderer.action(tokenizer.encode(said), cut).calls == []
    broken = "<tool_call>\n{oops\n</tool_call>"
    (call,) = renderer.action(tokenizer.encode(broken), broken).calls
    assert (call.text, call.error) == ("{oops", "the call cannot be read: invalid_json")


class Calculator(Turns):
    """Environment that keeps the actions it receives."""

    reads_calls = True
    given: list[Any]

    def __init__(self) -> None:
        super().__init__(last=1)
        self.given = []

    def reset(self, seed: int | None = None) -> Any:
        self.turn = 0
        return super().reset(seed)

    def step(self, action: str) -> Any:
        self.given.append(action)
        assert isinstance(action, Action)
        return super().step(action)


async def test_an_environment_that_reads_calls_gets_an_action_and_the_record_keeps_its_text() -> None:
    environment = Calculator()
    record = await play(Script(say(f"I add.\n{CALL}")), lambda: environment)
    (action,) = environment.given
    assert action.calls == [Call(name="add", arguments={"a": 2}, text=ADD)]
    assert record.messages[1] == Message(role="assistant", content=f"I add.\n{CALL}", agent="agent", turn=0)
    assert type(record.messages[1].content) is str


async def test_any_other_environment_gets_plain_text() -> None:
    class Plain(Turns):
        def step(self, action: str) -> Any:
            assert type(action) is str
            return super().step(action)

    assert (await play(Script(say(CALL)), lambda: Plain(last=1))).status == "finished"


def test_the_conformance_check_passes_parsed_actions_to_an_environment_that_reads_calls() -> None:
    assert check_environment(Calculator, actions=["hello"], max_steps=2) == []
