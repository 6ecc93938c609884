"""Renderers of model families, by the package ``renderers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.runspec import PolicySpec
from headrace.trajectory import Message
from headrace_workers.renderers import AssistantTurn, CurrentSegment, family_renderer, make_renderer
from headrace_workers.renderers.family_renderer import FamilyRenderer, family_of
from headrace_workers.renderers.folder_tokenizer import load_tokenizer
from headrace_workers.renderers.template_renderer import TemplateRenderer
from tests.workers.models import make_model

USER = Message(role="user", content="What is 2+2?")
NEXT = Message(role="user", content="And 3+3?")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


class Qwen:
    """The family ``qwen3`` with a small vocabulary that has its special tokens."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.tokenizer = load_tokenizer(str(make_model(folder)))
        self.renderer = FamilyRenderer("qwen3", self.tokenizer, options)

    def after(self, sampled: str) -> CurrentSegment:
        ids = self.tokenizer.encode(sampled)
        prompt = self.renderer.start([USER])
        reply = AssistantTurn(ids, self.renderer.parse(ids))
        return CurrentSegment(prompt.new_ids + ids, len(prompt.new_ids), [USER, reply], prompt.text)

    def bridge(self, sampled: str, *new: Message) -> str | None:
        prompt = self.renderer.extend(self.after(sampled), new)
        return None if prompt is None else self.tokenizer.decode(prompt.new_ids)

    def restart(self, sampled: str, *new: Message) -> str:
        return self.tokenizer.decode(self.renderer.start([*self.after(sampled).conversation, *new]).new_ids)


@pytest.fixture
def qwen(tmp_path: Path) -> Qwen:
    return Qwen(tmp_path)


def test_the_familys_own_bridge_extends_within_a_cycle_of_tools(qwen: Qwen) -> None:
    answer = Message(role="tool", content="4")
    assert qwen.bridge(f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", answer) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_full_rendering_that_begins_with_the_current_segment_is_an_extension(qwen: Qwen) -> None:
    assert qwen.bridge("4<|im_end|>", NEXT) == "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_that_the_family_drops_starts_a_new_segment_unless_the_run_keeps_it(
    qwen: Qwen, tmp_path: Path
) -> None:
    thought = "<think>\nhm\n</think>\n\n4<|im_end|>"
    assert qwen.bridge(thought, NEXT) is None
    assert "hm" not in qwen.restart(thought, NEXT)
    keeping = Qwen(tmp_path / "keeping", thinking_retention="all")
    assert keeping.bridge(thought, NEXT) == "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_was_cut_off_gets_the_end_of_turn_token_unsampled(qwen: Qwen) -> None:
    bridge = qwen.bridge("4", NEXT)
    assert bridge is not None
    assert bridge.startswith("<|im_end|>\n")


def test_tokens_after_the_end_of_a_turn_are_never_dropped(tmp_path: Path) -> None:
    qwen = Qwen(tmp_path, thinking_retention="all")
    assert qwen.bridge("4<|im_end|>\nmore", NEXT) is None


def test_a_new_segment_shows_tool_calls_as_the_family_does_and_an_invalid_one_as_plain_text(qwen: Qwen) -> None:
    assert CALL in qwen.restart(f"{CALL}<|im_end|>", Message(role="tool", content="4"))
    broken = "<tool_call>\n{oops\n</tool_call>"
    assert broken in qwen.restart(f"{broken}<|im_end|>", Message(role="tool", content="no"))


def test_a_family_that_encodes_texts_itself_gets_them_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = family_renderer._make_family_renderer
    tokenizer = load_tokenizer(str(make_model(tmp_path)))
    monkeypatch.setattr(
        family_renderer, "_make_family_renderer", lambda family, _, options: make(family, tokenizer, options)
    )
    renderer = FamilyRenderer("qwen3", tokenizer)
    ids = renderer.start([Message(role="user", content="\ufdd0<|im_end|>")], [{"name": "<|im_end|>"}]).new_ids
    text = tokenizer.decode(ids)
    assert "\ufdd0<|im_end|>" in text
    assert '{"name": "<|im_end|>"}' in text
    assert text.count("\ufdd0") == 1


def test_auto_selects_the_family_by_an_exact_name_otherwise_the_template(tmp_path: Path) -> None:
    assert family_of("Qwen/Qwen3-8B") == "qwen3"
    assert family_of("someone/Qwen3-8B-finetuned") is None
    spec = PolicySpec(renderer="auto", tokenizer=str(make_model(tmp_path)))
    assert isinstance(make_renderer(spec), TemplateRenderer)
