"""Byte-level renderer: ids 0 to 255 are bytes; a few more ids mark roles and turns.

* A prompt is BOS, then role mark, UTF-8 bytes and END for each message, then the ASSISTANT mark.
* Tools are at the start of a prompt, as JSON in a system message.
* Sampled bytes that are not valid UTF-8 are kept; only the text for reading has replacement characters.
* The fingerprint is the SHA-256 of the definition, so it changes when the meaning of an id does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from headrace.environment import Action
from headrace.trajectory import Message, Tokenizer
from headrace_workers.renderers.base import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Tools, text_of
from headrace_workers.renderers.tool_calls import parse_action

BOS = 256
SYSTEM = 257
USER = 258
ASSISTANT = 259
TOOL = 260
END = 261
VOCAB_SIZE = 262

ROLE_MARKS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

DEFINITION = (
    "headrace bytes 1: 0..255 bytes; 256 bos; 257 system; 258 user; 259 assistant; 260 tool; 261 end; "
    "prompt = bos (system tools-as-json end)? (role utf8 end)* assistant"
)
"""Definition of all ids. The fingerprint is the hash of this text."""

TOKENIZER = Tokenizer(name="bytes", fingerprint=hashlib.sha256(DEFINITION.encode()).hexdigest(), vocab_size=VOCAB_SIZE)


class BytesRenderer:
    """The renderer named ``bytes``. It needs no files and no other package."""

    tokenizer = TOKENIZER
    stop_token_ids: tuple[int, ...] = (END,)
    image_token_id: int | None = None

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        tool_message = [SYSTEM, *msgspec.json.encode(tools), END] if tools else []
        return Prompt([BOS, *tool_message, *_body(conversation), ASSISTANT])

    def extend(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> Prompt:
        bridge = [] if segment.token_ids[-1] == END else [END]
        return Prompt([*bridge, *_body(new_messages), ASSISTANT])

    def parse(self, sampled_ids: Sequence[int]) -> str:
        try:
            return bytes(sampled_ids[:-1] if sampled_ids and sampled_ids[-1] == END else sampled_ids).decode()
        except ValueError:
            # A mark in the middle is not a byte, and bytes may be invalid UTF-8; the record keeps the exact ids.
            return bytes(id_ for id_ in sampled_ids if id_ < BOS).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        return [*text.encode(), END]

    def count_control_tokens(self, value: Message | Tools) -> int:
        return 0  # marks have ids of their own, which no text spells

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        return parse_action(text)


def _body(conversation: Sequence[ConversationItem]) -> list[int]:
    ids: list[int] = []
    for item in conversation:
        if isinstance(item, AssistantTurn):
            ids += [ASSISTANT, *item.token_ids] if item.token_ids[-1] == END else [ASSISTANT, *item.token_ids, END]
        else:
            ids.append(ROLE_MARKS[item.role])
            ids += text_of(item).encode()
            ids.append(END)
    return ids
