"""The renderer named ``template``: any model with a chat template.

* A prompt is the template's text of the conversation, generation prompt included, encoded once.
* The bridge is the text that the template puts after the sampled turn, and nothing before it is encoded again.
* A template that would show what stands in another way (thinking stripped, text trimmed, another date) gives no
  extension.
* What a generation prompt begins for the assistant (``<think>``) is part of what the template is told it said.
* Where the model has a token for an image and its template shows it, images are shown; else the text in their place.
* A turn that was cut off gets the template's end-of-turn token, unsampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.environment import Action
from headrace.errors import InfrastructureFailure
from headrace.trajectory import Message, Tokenizer
from headrace_workers.renderers.base import ConversationItem, CurrentSegment, Prompt, SampledTurn, Tools, text_of
from headrace_workers.renderers.chat_template import ChatTemplate, TemplateMessage
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer
from headrace_workers.renderers.tool_calls import parse_action

PROBE_TEXT = "8301846213"
"""What an assistant says while a template is looked at: no template changes digits."""


class TemplateRenderer:
    """Renders by a tokenizer's chat template. ``options`` are variables of the template."""

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        options: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises InfrastructureFailure ``no-chat-template`` or ``template-unreadable``."""
        options = dict(options or {})
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.templates, tokenizer.special_tokens | options, now)
        self.tokenizer = Tokenizer(
            name=tokenizer.name_or_path,
            fingerprint=tokenizer.fingerprint("template", options),
            vocab_size=tokenizer.vocab_size,
        )
        self._prefill, self._end = self._probe_template()
        self.image_token_id = self._image_token()
        self._stops: dict[int, str] = {tokenizer.added_tokens[self._end]: self._end} if self._end else {}
        self._stops |= {id_: tokenizer.decode([id_]) for id_ in tokenizer.eos_token_ids if id_ not in self._stops}
        self.stop_token_ids: Sequence[int] = tuple(self._stops)

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        text = self._text(conversation, tools)
        return Prompt(self._tokenizer.encode(text), text, self._images(conversation))

    def extend(self, standing: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        reply = standing.conversation[-1]
        assert isinstance(reply, SampledTurn)
        text = self._text([*standing.conversation, *new_messages], standing.tools)
        said = standing.text + reply.text
        if not text.startswith(said):
            return None
        bridge = text[len(said) :]
        end = self._stops.get(reply.token_ids[-1])
        if end is not None and bridge.startswith(end):
            return Prompt(self._encode_after(end, bridge.removeprefix(end)), text, self._images(new_messages))
        if not bridge.startswith(self._end) or (end is not None and not self._end):
            return None
        return Prompt(self._encode_inside(bridge), text, self._images(new_messages))

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), *self.stop_token_ids[:1]]

    def parse(self, sampled_ids: Sequence[int]) -> str:
        ended = bool(sampled_ids) and sampled_ids[-1] in self._stops
        return self._tokenizer.decode(sampled_ids[:-1] if ended else sampled_ids)

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        return parse_action(text, self._prefill)

    def _text(self, conversation: Sequence[ConversationItem], tools: Tools) -> str:
        return self._template.render([self._to_message(item) for item in conversation], tools, generation_prompt=True)

    def _to_message(self, item: ConversationItem) -> TemplateMessage:
        if isinstance(item, SampledTurn):
            return {"role": "assistant", "content": self._prefill + item.text}
        if self.image_token_id is None or isinstance(item.content, str):
            return {"role": item.role, "content": text_of(item)}
        parts = [{"type": "image"} if part.type == "image" else _text_part(part.text) for part in item.content]
        return {"role": item.role, "content": parts}

    def _images(self, conversation: Sequence[ConversationItem]) -> list[str]:
        """The assets that a policy sees as images."""
        if self.image_token_id is None:
            return []
        contents = [item.content for item in conversation if isinstance(item, Message)]
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        return [part.asset for part in parts if part.type == "image"]

    def _image_token(self) -> int | None:
        """The model's token for an image, if its template shows an image as one."""
        token = self._tokenizer.image_token_id
        if token is None:
            return None
        message = {"role": "user", "content": [{"type": "image"}, _text_part("u")]}
        try:
            shown = self._tokenizer.encode(self._template.render([message], generation_prompt=True))
        except InfrastructureFailure:
            return None  # it takes text only
        return token if shown.count(token) == 1 else None

    def _encode_inside(self, text: str) -> list[int]:
        """The ids of a text in the middle of a conversation."""
        if self._end or not self._stops:
            return self._tokenizer.encode(text)  # it begins with the token that ends a turn, which no encoding joins
        return self._encode_after(next(iter(self._stops.values())), text)

    def _encode_after(self, mark: str, text: str) -> list[int]:
        """The ids of a text that follows a special token: alone, some tokenizers would put a space before it."""
        before = self._tokenizer.encode(mark)
        ids = self._tokenizer.encode(mark + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._tokenizer.encode(text)

    def _probe_template(self) -> tuple[str, str]:
        """What a generation prompt begins for the assistant, and the token that ends an assistant's turn; empty where
        the template shows no such thing."""
        for before in ([_USER], [_SYSTEM, _USER]):
            try:
                asked = self._template.render(before, generation_prompt=True)
                shown = self._template.render(
                    [*before, {"role": "assistant", "content": PROBE_TEXT}, _USER], generation_prompt=False
                )
            except InfrastructureFailure:
                continue  # a template that refuses this conversation may take those of the environment
            head, found, rest = shown.partition(PROBE_TEXT)
            if found:
                ends = [mark for mark in self._tokenizer.added_tokens if rest.startswith(mark)]
                return asked.removeprefix(head) if asked.startswith(head) else "", max(ends, key=len, default="")
        return "", ""


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_SYSTEM = {"role": "system", "content": "s"}
_USER = {"role": "user", "content": "u"}
