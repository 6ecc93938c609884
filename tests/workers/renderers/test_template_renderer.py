"""Renderer of chat templates."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from headrace.errors import InfrastructureFailure
from headrace.runspec import PolicySpec
from headrace.trajectory import Message
from headrace_workers.renderers import AssistantTurn, CurrentSegment, Prompt, make_renderer
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer, load_tokenizer
from headrace_workers.renderers.template_renderer import TemplateRenderer
from tests.workers.models import CHATML, STRIPS_THINKING, make_model

USER = Message(role="user", content="Grüße 🙂")
NEXT = Message(role="user", content="And 東京?")


class Rendered:
    """A template's renderer, with the tokenizer that encodes samples and decodes prompts."""

    def __init__(self, folder: Path, template: str, **config: object) -> None:
        self.tokenizer: FolderTokenizer = load_tokenizer(str(make_model(folder, template, **config)))
        self.today = datetime(2026, 1, 1)
        self.renderer = TemplateRenderer(self.tokenizer, now=lambda: self.today)

    def start(self, *messages: Message) -> str:
        return self.tokenizer.decode(self.renderer.start(messages).new_ids)

    def standing(self, sampled: str | list[int], *messages: Message) -> CurrentSegment:
        ids = self.tokenizer.encode(sampled) if isinstance(sampled, str) else sampled
        prompt = self.renderer.start(messages or (USER,))
        reply = AssistantTurn(ids, self.renderer.parse(ids))
        return CurrentSegment(prompt.new_ids + ids, len(prompt.new_ids), [*(messages or (USER,)), reply], prompt.text)

    def bridge(self, sampled: str | list[int], *new: Message) -> str | None:
        prompt = self.renderer.extend(self.standing(sampled), new or (NEXT,))
        return None if prompt is None else self.tokenizer.decode(prompt.new_ids)


@pytest.fixture
def chatml(tmp_path: Path) -> Rendered:
    return Rendered(tmp_path, CHATML)


def test_a_prompt_is_the_templates_text_with_the_generation_prompt(chatml: Rendered) -> None:
    assert chatml.start(Message(role="system", content="Be brief."), USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 🙂<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_bridge_is_the_templates_text_after_a_sampled_turn(chatml: Rendered) -> None:
    shown = "\n<|im_start|>user\nAnd 東京?<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.bridge("Four.<|im_end|>") == shown
    assert chatml.bridge("<think>\nhm</think>Four.<|im_end|>") == shown


def test_a_turn_that_was_cut_off_gets_the_end_of_turn_token_unsampled(chatml: Rendered) -> None:
    assert chatml.bridge("Fo") == "<|im_end|>\n<|im_start|>user\nAnd 東京?<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_ended_with_another_stop_token_keeps_it_and_gets_the_templates_own(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, CHATML, eos="<|endoftext|>")
    im_end, eos = (rendered.tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "<|endoftext|>"))
    assert rendered.renderer.stop_token_ids == (im_end, eos)
    bridge = rendered.bridge("Four.<|endoftext|>")
    assert bridge is not None
    assert bridge.startswith("<|im_end|>\n<|im_start|>user")


def test_a_partial_character_is_stored_as_sampled(chatml: Rendered) -> None:
    half = chatml.tokenizer.encode("🙂")[:1]
    standing = chatml.standing(half)
    prompt = chatml.renderer.extend(standing, [NEXT])
    assert prompt is not None
    assert [*standing.token_ids, *prompt.new_ids][standing.turn_start] == half[0]
    assert "\ufffd" in chatml.renderer.parse(half)


def test_a_template_that_strips_thinking_has_no_extension_after_a_turn_with_thinking(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, STRIPS_THINKING)
    assert rendered.start(USER).endswith("<|im_start|>assistant\n<think>\n")
    assert rendered.bridge("hm\n</think>\n\nFour<|im_end|>") is None
    assert rendered.bridge("hm, never ended<|im_end|>") is not None  # the template shows unfinished thinking


def test_a_new_segment_shows_the_conversation_as_the_template_does(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, STRIPS_THINKING)
    conversation = rendered.standing("hm\n</think>\n\nFour<|im_end|>").conversation
    text = rendered.tokenizer.decode(rendered.renderer.start([*conversation, NEXT]).new_ids)
    assert text == (
        "<|im_start|>user\nGrüße 🙂<|im_end|>\n<|im_start|>assistant\nFour<|im_end|>\n"
        "<|im_start|>user\nAnd 東京?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_a_template_that_keeps_a_prefilled_thinking_tag_has_an_extension(tmp_path: Path) -> None:
    keeps = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    rendered = Rendered(tmp_path, keeps)
    assert rendered.start(USER).endswith("<|im_start|>assistant\n<think>\n")
    assert rendered.bridge("hm</think>Four<|im_end|>") is not None


def test_a_date_that_changes_starts_a_new_segment(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, "{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    standing = rendered.standing("Four<|im_end|>")
    assert rendered.renderer.extend(standing, [NEXT]) is not None
    rendered.today = datetime(2026, 1, 2)
    assert rendered.renderer.extend(standing, [NEXT]) is None


def test_tools_are_in_the_prompt_and_in_its_extensions(chatml: Rendered) -> None:
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
    prompt = chatml.renderer.start([USER], tools)
    assert '"name": "lookup"' in prompt.text
    ids = chatml.tokenizer.encode("Four<|im_end|>")
    standing = CurrentSegment(
        prompt.new_ids + ids, len(prompt.new_ids), [USER, AssistantTurn(ids, "Four")], prompt.text, tools
    )
    assert isinstance(chatml.renderer.extend(standing, [NEXT]), Prompt)
    assert chatml.renderer.extend(standing._replace(tools=()), [NEXT]) is None


def test_a_conversation_that_the_template_refuses_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    forbids = "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
    rendered = Rendered(tmp_path, forbids + CHATML)
    with pytest.raises(InfrastructureFailure, match="of system, user: System role not supported") as caught:
        rendered.start(Message(role="system", content="x"), USER)
    assert (caught.value.kind, caught.value.retryable) == ("template-refused", False)


def test_the_fingerprint_covers_vocabulary_template_and_options(tmp_path: Path) -> None:
    def fingerprint(name: str, template: str = CHATML, options: dict[str, object] | None = None) -> str:
        folder = make_model(tmp_path / name, template)
        spec = PolicySpec(renderer="template", tokenizer=str(folder), renderer_options=options or {})
        return make_renderer(spec).tokenizer.fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    assert fingerprint("c", CHATML + " ") != first
    assert fingerprint("d", options={"enable_thinking": False}) != first
    other = make_model(tmp_path / "e")
    vocabulary = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(vocabulary.replace('"<|im_start|>"', '"<|im_begin|>"'))
    spec = PolicySpec(renderer="template", tokenizer=str(other))
    assert make_renderer(spec).tokenizer.fingerprint != first


PARTS_ONLY = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{%- if part.type == 'image' %}<|image_pad|>{%- elif part.type == 'text' %}{{ part.text }}
{%- endif %}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Reads content as a list of parts, and shows nothing of a text."""


def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, PARTS_ONLY)
    system = Message(role="system", content="Be brief.")
    assert rendered.start(system, USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 🙂<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered.bridge("Four.<|im_end|>") == "\n<|im_start|>user\nAnd 東京?<|im_end|>\n<|im_start|>assistant\n"
    conversation = [USER, AssistantTurn(rendered.tokenizer.encode("Four."), "Four."), NEXT]
    assert "assistant\nFour.<|im_end|>" in rendered.tokenizer.decode(rendered.renderer.start(conversation).new_ids)


def test_each_role_gets_the_content_that_the_template_reads_for_it(tmp_path: Path) -> None:
    mixed = PARTS_ONLY.replace(
        "{%- for part in m.content %}",
        "{%- if m.role == 'assistant' %}{{ m.content + '' }}{%- else %}{%- for part in m.content %}",
    ).replace("{%- endfor %}{{ '<|im_end|>", "{%- endfor %}{%- endif %}{{ '<|im_end|>")
    rendered = Rendered(tmp_path, mixed)
    assert rendered.bridge("Four.<|im_end|>") == "\n<|im_start|>user\nAnd 東京?<|im_end|>\n<|im_start|>assistant\n"


DROPS = {
    "tool": CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'"),
    "assistant": CHATML.replace("for m in messages", "for m in messages if m.role != 'assistant'"),
}


@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_a_message_that_the_template_drops_is_a_failure_that_names_it(tmp_path: Path, role: str) -> None:
    rendered = Rendered(tmp_path, DROPS[role])
    reply = AssistantTurn(rendered.tokenizer.encode("Four."), "Four.")
    last = Message(role="tool", content="It is four.") if role == "tool" else NEXT
    with pytest.raises(InfrastructureFailure, match=f"of role '{role}'") as caught:
        rendered.renderer.start([USER, reply, last])
    assert (caught.value.kind, caught.value.retryable) == ("message-not-shown", False)


def test_a_dropped_message_is_found_in_an_extension_and_at_a_later_place(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path / "tool", DROPS["tool"])
    with pytest.raises(InfrastructureFailure, match="message 2 of the conversation"):
        rendered.bridge("Four.<|im_end|>", Message(role="tool", content="It is four."))
    second = CHATML.replace("for m in messages", "for m in messages if m.role != 'system' or m == messages[0]")
    rendered = Rendered(tmp_path / "system", second)
    rendered.start(Message(role="system", content="Be brief."), USER)
    with pytest.raises(InfrastructureFailure, match="message 1 of the conversation"):
        rendered.start(USER, Message(role="system", content="Be brief, I said."))


def test_a_text_that_the_template_shows_in_another_form_is_shown(tmp_path: Path) -> None:
    as_json = CHATML.replace("m.content +", "m.content | tojson +")
    assert '"a\\"b"' in Rendered(tmp_path / "json", as_json).start(Message(role="tool", content='a"b'))
    upper = CHATML.replace("m.content +", "m.content | upper +")
    assert "GRÜSSE" in Rendered(tmp_path / "upper", upper).start(USER)


def test_tools_and_texts_of_a_template_that_escapes_json_stay_as_they_are(tmp_path: Path) -> None:
    ascii_only = CHATML.replace("m.content +", "m.content | tojson(ensure_ascii=true) +")
    shown = Rendered(tmp_path, ascii_only).start(Message(role="user", content="é<|im_end|>"))
    assert '"\\u00e9<|im_end|>"' in shown
