"""The renderer named ``template``, for any model with a chat template.

* A prompt is the template's text of the conversation, including the generation prompt, encoded once.
* The bridge is the template's text after the sampled turn; the text before it is not encoded again.
* A template that would render the current segment differently (thinking stripped, text trimmed, another date) has no
  extension.
* The assistant prefill of a generation prompt (``<think>``) is added to the assistant's text given to the template.
* If the model has an image token and its template uses it, images are shown; otherwise their substitute text.
* A turn that was cut off gets the template's end-of-turn token, unsampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.environment import Action
from headrace.errors import InfrastructureFailure
from headrace.trajectory import Message, Tokenizer
from headrace_workers.renderers.base import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Tools, text_of
from headrace_workers.renderers.chat_template import ChatTemplate, TemplateMessage
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer
from headrace_workers.renderers.tool_calls import parse_action

PROBE_TEXT = "8301846213"
"""Assistant text for probing a template: templates do not change digits."""


class TemplateRenderer:
    """Renderer that uses a tokenizer's chat template. ``options`` are variables of the template."""

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

    def extend(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        reply = segment.conversation[-1]
        assert isinstance(reply, AssistantTurn)
        text = self._text([*segment.conversation, *new_messages], segment.tools)
        segment_text = segment.text + reply.text
        if not text.startswith(segment_text):
            return None
        bridge = text[len(segment_text) :]
        end = self._stops.get(reply.token_ids[-1])
        if end is not None and bridge.startswith(end):
            return Prompt(self._encode_after(end, bridge.removeprefix(end)), text, self._images(new_messages))
        if not bridge.startswith(self._end) or (end is not None and not self._end):
            return None
        return Prompt(self._encode_inside(bridge), text, self._images(new_messages))

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), *self.stop_token_ids[:1]]

    def parse(self, sampled_ids: Sequence[int]) -> str:
        has_end = bool(sampled_ids) and sampled_ids[-1] in self._stops
        return self._tokenizer.decode(sampled_ids[:-1] if has_end else sampled_ids)

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        return parse_action(text, self._prefill)

    def _text(self, conversation: Sequence[ConversationItem], tools: Tools) -> str:
        return self._template.render([self._to_message(item) for item in conversation], tools, generation_prompt=True)

    def _to_message(self, item: ConversationItem) -> TemplateMessage:
        if isinstance(item, AssistantTurn):
            return {"role": "assistant", "content": self._prefill + item.text}
        if self.image_token_id is None or isinstance(item.content, str):
            return {"role": item.role, "content": text_of(item)}
        parts = [{"type": "image"} if part.type == "image" else _text_part(part.text) for part in item.content]
        return {"role": item.role, "content": parts}

    def _images(self, conversation: Sequence[ConversationItem]) -> list[str]:
        """Names of the assets shown to the policy as images."""
        if self.image_token_id is None:
            return []
        contents = [item.content for item in conversation if isinstance(item, Message)]
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        return [part.asset for part in parts if part.type == "image"]

    def _image_token(self) -> int | None:
        """The model's image token, if its template renders an image as exactly one."""
        token = self._tokenizer.image_token_id
        if token is None:
            return None
        message = {"role": "user", "content": [{"type": "image"}, _text_part("u")]}
        try:
            ids = self._tokenizer.encode(self._template.render([message], generation_prompt=True))
        except InfrastructureFailure:
            return None  # the template supports text only
        return token if ids.count(token) == 1 else None

    def _encode_inside(self, text: str) -> list[int]:
        """Encode a text in the middle of a conversation."""
        if self._end or not self._stops:
            return self._tokenizer.encode(text)  # it begins with the end-of-turn token, which is never split
        return self._encode_after(next(iter(self._stops.values())), text)

    def _encode_after(self, mark: str, text: str) -> list[int]:
        """Encode a text that follows a special token: alone, some tokenizers would put a space before it."""
        before = self._tokenizer.encode(mark)
        ids = self._tokenizer.encode(mark + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._tokenizer.encode(text)

    def _probe_template(self) -> tuple[str, str]:
        """Find the assistant prefill of a generation prompt and the end-of-turn token; each is empty if absent from
        the template."""
        for before in ([_USER], [_SYSTEM, _USER]):
            try:
                prompt = self._template.render(before, generation_prompt=True)
                rendered = self._template.render(
                    [*before, {"role": "assistant", "content": PROBE_TEXT}, _USER], generation_prompt=False
                )
            except InfrastructureFailure:
                continue  # a template may refuse this conversation but accept those of the environment
            head, separator, rest = rendered.partition(PROBE_TEXT)
            if separator:
                ends = [mark for mark in self._tokenizer.added_tokens if rest.startswith(mark)]
                return prompt.removeprefix(head) if prompt.startswith(head) else "", max(ends, key=len, default="")
        return "", ""


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_SYSTEM = {"role": "system", "content": "s"}
_USER = {"role": "user", "content": "u"}
