"""Byte-level renderer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InfrastructureFailure
from headrace.runspec import PolicySpec
from headrace.trajectory import ContentPart, Message
from headrace_workers.renderers import AssistantTurn, BytesRenderer, CurrentSegment, make_renderer
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, SYSTEM, TOOL, USER, VOCAB_SIZE

RENDERER = BytesRenderer()
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=TEXT), max_size=4
)
SAMPLED = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)


def test_a_prompt_is_bos_then_role_mark_bytes_and_end_for_each_message_then_the_assistant_mark() -> None:
    messages = [
        Message(role="system", content="a"),
        Message(role="user", content="é"),
        Message(role="tool", content=""),
    ]
    assert RENDERER.start(messages).new_ids == [
        *(BOS, SYSTEM, ord("a"), END),
        *(USER, 0xC3, 0xA9, END),
        *(TOOL, END, ASSISTANT),
    ]


def test_text_parts_are_joined() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert RENDERER.start([Message(role="user", content=parts)]).new_ids == [
        BOS,
        USER,
        ord("a"),
        ord("b"),
        END,
        ASSISTANT,
    ]


def test_a_text_only_renderer_shows_an_images_substitute_text_and_refuses_an_image_without_one() -> None:
    parts = [ContentPart(type="image", asset="0" * 64, text="b")]
    assert RENDERER.start([Message(role="user", content=parts)]).new_ids == [BOS, USER, ord("b"), END, ASSISTANT]
    with pytest.raises(InfrastructureFailure, match="supports text only"):
        RENDERER.start([Message(role="user", content=[ContentPart(type="image", asset="0" * 64)])])


def extend(standing: list[int], new_messages: list[Message]) -> list[int]:
    return RENDERER.extend(CurrentSegment(standing, 0, [], ""), new_messages).new_ids


@given(before=MESSAGES, sampled=SAMPLED, after=MESSAGES)
def test_the_next_prompt_extends_the_last_one_exactly(
    before: list[Message], sampled: list[int], after: list[Message]
) -> None:
    standing = RENDERER.start(before).new_ids + sampled
    kept = list(standing)
    new = extend(standing, after)
    assert standing == kept
    assert (standing + new)[: len(standing)] == kept
    assert new[-1] == ASSISTANT


def test_if_a_sampled_turn_lacks_its_end_of_turn_token_the_bridge_adds_it_unsampled() -> None:
    assert extend([BOS, ASSISTANT, 65], [])[:1] == [END]
    assert extend([BOS, ASSISTANT, 65, END], []) == [ASSISTANT]


@given(before=MESSAGES, sampled=SAMPLED, after=MESSAGES)
def test_a_new_segment_keeps_the_ids_that_were_sampled_before(
    before: list[Message], sampled: list[int], after: list[Message]
) -> None:
    reply = AssistantTurn(sampled, RENDERER.parse(sampled))
    standing = RENDERER.start(before).new_ids + sampled
    assert RENDERER.start([*before, reply, *after]).new_ids == standing + extend(standing, after)


@given(SAMPLED)
def test_sampled_bytes_that_are_not_valid_utf_8_are_kept_and_only_the_text_has_replacement_characters(
    sampled: list[int],
) -> None:
    text = RENDERER.parse(sampled)
    body = sampled[:-1] if sampled[-1] == END else sampled
    assert text == bytes(id_ for id_ in body if id_ < 256).decode(errors="replace")
    text.encode()


@given(TEXT)
def test_an_encoded_text_decodes_to_itself(text: str) -> None:
    assert RENDERER.parse([*text.encode(), END]) == text


def test_the_fingerprint_is_fixed() -> None:
    assert make_renderer(PolicySpec()).tokenizer.fingerprint == RENDERER.tokenizer.fingerprint
    assert len(RENDERER.tokenizer.fingerprint) == 64
    assert RENDERER.tokenizer.vocab_size == VOCAB_SIZE
