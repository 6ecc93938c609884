"""The renderer named ``template``, for any model with a chat template.

* A prompt is the template's text of the conversation, including the generation prompt, encoded once.
* The bridge is the template's text after the sampled turn; the text before it is not encoded again.
* A template that would render the current segment differently (thinking stripped, text trimmed, another date) has no
  extension.
* The assistant prefill of a generation prompt (``<think>``) is added to the assistant's text given to the template.
* If the model has an image token and its template uses it, images are shown; otherwise their substitute text.
* A turn that was cut off gets the template's end-of-turn token, unsampled.
* Text from outside is separated (see ``control_tokens``) before the template sees it.
* Content is text or a list of parts, as the template of each role reads it.
* A message that the template drops without an error is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.environment import Action
from headrace.errors import InfrastructureFailure
from headrace.trajectory import Message, Tokenizer
from headrace_workers.renderers.base import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Tools
from headrace_workers.renderers.chat_template import ChatTemplate, TemplateMessage
from headrace_workers.renderers.control_tokens import ControlTokens
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
        self._reads_parts = self._probe_content()
        self._rewrites: set[str] = set()
        """Roles whose text the template shows in another form, such as JSON."""
        self._prefill, self._end, turn_ids = self._probe_template()
        self._control_tokens = ControlTokens(tokenizer, turn_ids)
        self.image_token_id = self._image_token()
        self._stops: dict[int, str] = {tokenizer.added_tokens[self._end]: self._end} if self._end else {}
        self._stops |= {id_: tokenizer.decode([id_]) for id_ in tokenizer.eos_token_ids if id_ not in self._stops}
        self.stop_token_ids: Sequence[int] = tuple(self._stops)
        self._ids_of_stops = {text: tokenizer.encode(text) for text in self._stops.values()}

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        messages = list(map(self._to_message, conversation))
        text = self._render(messages, tools)
        self._check_shown(text, messages, 0, tools)
        return Prompt(self._control_tokens.encode(text), text, self._images(conversation))

    def extend(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        reply = segment.conversation[-1]
        assert isinstance(reply, AssistantTurn)
        messages = list(map(self._to_message, [*segment.conversation, *new_messages]))
        text = self._render(messages, segment.tools)
        segment_text = segment.text + self._separated(reply)
        if not text.startswith(segment_text):
            return None
        bridge = text[len(segment_text) :]
        self._check_shown(bridge, messages, len(segment.conversation), segment.tools)
        end = self._stops.get(reply.token_ids[-1])
        if end is not None and bridge.startswith(end):
            return Prompt(self._encode_after(end, bridge.removeprefix(end)), text, self._images(new_messages))
        if not bridge.startswith(self._end) or (end is not None and not self._end):
            return None
        return Prompt(self._encode_inside(bridge), text, self._images(new_messages))

    def encode(self, text: str) -> list[int]:
        return [*self._control_tokens.encode(self._control_tokens.separate_action(text)), *self.stop_token_ids[:1]]

    def count_control_tokens(self, value: Message | Tools) -> int:
        return self._control_tokens.count(value)

    def parse(self, sampled_ids: Sequence[int]) -> str:
        has_end = bool(sampled_ids) and sampled_ids[-1] in self._stops
        return self._tokenizer.decode(sampled_ids[:-1] if has_end else sampled_ids)

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        return parse_action(text, self._prefill)

    def _render(self, messages: Sequence[TemplateMessage], tools: Tools) -> str:
        return self._template.render(messages, self._control_tokens.separate_json(tools), generation_prompt=True)

    def _to_message(self, item: ConversationItem) -> TemplateMessage:
        if isinstance(item, AssistantTurn):
            return self._message("assistant", self._prefill + self._separated(item))
        if self.image_token_id is None or isinstance(item.content, str):
            return self._message(item.role, self._control_tokens.separate_text(item))
        separated = self._control_tokens.separate_parts(item)
        parts = [{"type": "image"} if part.type == "image" else _text_part(part.text) for part in separated]
        return {"role": item.role, "content": parts}

    def _message(self, role: str, text: str) -> TemplateMessage:
        return {"role": role, "content": [_text_part(text)] if role in self._reads_parts else text}

    def _check_shown(self, text: str, messages: list[TemplateMessage], first: int, tools: Tools) -> None:
        """Check that ``text`` shows the messages from ``first`` on. Raises InfrastructureFailure
        ``message-not-shown``."""
        end = 0
        for index, message in enumerate(messages[first:], first):
            role = message["role"]
            found = _end_of(text, message["content"], end)
            end = end if found is None else found
            if found is not None or role in self._rewrites:
                continue
            probe = [*messages[:index], self._message(role, PROBE_TEXT), *messages[index + 1 :]]
            if PROBE_TEXT not in self._render(probe, tools):
                raise InfrastructureFailure(
                    f"The chat template shows nothing of message {index} of the conversation, of role {role!r}.",
                    hint="Let the environment use roles, and an order of messages, that the model's template shows, or "
                    "give the model another template.",
                    kind="message-not-shown",
                    retryable=False,
                )
            self._rewrites.add(role)

    def _separated(self, turn: AssistantTurn) -> str:
        return self._control_tokens.separate_turn(turn, self._stops)

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
            return self._control_tokens.encode(text)  # it begins with the end-of-turn token, which is never split
        return self._encode_after(next(iter(self._stops.values())), text)

    def _encode_after(self, mark: str, text: str) -> list[int]:
        """Encode a text that follows the text of a stop token: alone, some tokenizers would put a space before it."""
        before = self._ids_of_stops[mark]
        ids = self._control_tokens.encode(mark + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._control_tokens.encode(text)

    def _probe_content(self) -> frozenset[str]:
        """Find the roles whose content the template reads as a list of parts."""
        parts: set[str] = set()
        probes = {
            "user": ((), ("system",)),
            "assistant": (("user",), ("system", "user")),
            "system": ((),),
            "tool": (("user", "assistant"),),
        }
        for role, all_before in probes.items():
            forms = [
                form for form in (False, True) if any(self._shows(role, before, parts, form) for before in all_before)
            ]
            if forms == [True] or (not forms and "user" in parts):
                parts.add(role)
        return frozenset(parts)

    def _shows(self, role: str, before: Sequence[str], roles_of_parts: Collection[str], as_parts: bool) -> bool:
        """Return True if the template shows a text of a role after messages of others, in this form."""
        after = () if role in ("user", "tool") else ("user",)
        conversation = [
            {"role": name, "content": [_text_part(text)] if reads_parts else text}
            for name, text, reads_parts in (
                *((name, "u", name in roles_of_parts) for name in before),
                (role, PROBE_TEXT, as_parts),
                *((name, "u", name in roles_of_parts) for name in after),
            )
        ]
        try:
            return PROBE_TEXT in self._template.render(conversation, generation_prompt=False)
        except InfrastructureFailure:
            return False

    def _probe_template(self) -> tuple[str, str, list[int]]:
        """Find the assistant prefill of a generation prompt, the end-of-turn token, and the ids of a conversation; each
        is empty if absent from the template."""
        user, system = self._message("user", "u"), self._message("system", "s")
        for before in ([user], [system, user]):
            try:
                prompt = self._template.render(before, generation_prompt=True)
                rendered = self._template.render(
                    [*before, self._message("assistant", PROBE_TEXT), user], generation_prompt=False
                )
            except InfrastructureFailure:
                continue  # a template may refuse this conversation but accept those of the environment
            head, separator, rest = rendered.partition(PROBE_TEXT)
            if separator:
                ends = [mark for mark in self._tokenizer.added_tokens if rest.startswith(mark)]
                prefill = prompt.removeprefix(head) if prompt.startswith(head) else ""
                return prefill, max(ends, key=len, default=""), self._tokenizer.encode(rendered)
        return "", "", []


def _end_of(text: str, content: str | Sequence[Mapping[str, str]], start: int) -> int | None:
    """Find the texts of a content in ``text``, one after the other; None if one of them is missing."""
    for part in [content] if isinstance(content, str) else [part.get("text", "") for part in content]:
        shown = part.strip()
        at = text.find(shown, start)
        if at < 0:
            return None
        start = at + len(shown)
    return start


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
