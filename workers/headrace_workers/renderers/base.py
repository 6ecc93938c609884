"""Renderer interface: messages to prompt tokens, sampled tokens to text.

* The next prompt extends the last one exactly: ``extend`` returns only the ids to append.
* Without an exact extension, ``extend`` returns None, and the conversation continues in a new segment.
* Sampled tokens are never encoded again within their segment; the text decoded from them is only for reading.
* If a sampled turn lacks its end-of-turn token, the bridge adds it, unsampled.
* A text-only renderer shows an image's substitute text, and refuses an image without one.
* Text from outside never becomes a control token, unless its part says ``control_tokens``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.environment import Action
from headrace.errors import InfrastructureFailure
from headrace.trajectory import ContentPart, Message, Tokenizer

Tools = Sequence[Mapping[str, Any]]
"""Functions that the policy can call, each as a JSON schema in the form of OpenAI's ``tools``."""


class AssistantTurn(msgspec.Struct, frozen=True):
    """A sampled turn of a conversation. ``token_ids`` int[n] as sampled; ``text``: their full text, of which the
    environment may have received only a part."""

    token_ids: Sequence[int]
    text: str


ConversationItem = Message | AssistantTurn
"""An item of a conversation: a message or a sampled turn."""


class Prompt(NamedTuple):
    """The prompt of the next turn.

    ``new_ids`` int[n]: the ids to append to the current segment; at the start of a segment, all ids. ``text``: a note
    of the renderer, which it gets back in ``CurrentSegment``. ``images``: names of the assets shown, in order; each
    has one token ``image_token_id`` among ``new_ids``.
    """

    new_ids: list[int]
    text: str = ""
    images: Sequence[str] = ()


class CurrentSegment(NamedTuple):
    """The current segment of a conversation. It ends with a sampled turn.

    ``token_ids`` int[n]; those from ``turn_start`` on are the last sampled turn. ``conversation`` is the conversation
    that they encode; its last item is an AssistantTurn. ``text`` is the ``text`` of that turn's Prompt.
    """

    token_ids: Sequence[int]
    turn_start: int
    conversation: Sequence[ConversationItem]
    text: str
    tools: Tools = ()


class Renderer(Protocol):
    """Converts messages to tokens. Stateless; one object serves all episodes of a run."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that defines the ids."""
        ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a turn when the policy samples one."""
        ...

    @property
    def image_token_id(self) -> int | None:
        """Id of the placeholder of an image in a prompt; None if the renderer supports text only."""
        ...

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        """Make the first prompt of a segment, including the generation prompt. Raises InfrastructureFailure."""
        ...

    def extend(self, segment: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        """Make the prompt that extends the segment by ``new_messages``; None if the segment's tokens would have to
        change. Raises InfrastructureFailure."""
        ...

    def parse(self, sampled_ids: Sequence[int]) -> str:
        """Decode a sampled turn to its full text, without its end-of-turn token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a turn for which the server returned only text, including the end-of-turn token. The ids are for
        reading and are never used in training."""
        ...

    def count_control_tokens(self, value: Message | Tools) -> int:
        """Count the control tokens that a message or tools spell, and that are encoded as text."""
        ...

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        """Parse a sampled turn into an action. ``text`` is the part of its text that the environment receives."""
        ...


def text_of(message: Message) -> str:
    """Return the text of a message: its content, or the texts of its parts joined without a separator. Raises
    InfrastructureFailure ``image-without-text``."""
    if isinstance(message.content, str):
        return message.content
    return "".join(map(part_text, message.content))


def part_text(part: ContentPart) -> str:
    """Return the text of a part, that is the substitute text of an image. Raises InfrastructureFailure
    ``image-without-text``."""
    if part.type == "image" and not part.text:
        raise InfrastructureFailure(
            "The environment shows an image, but the run's renderer supports text only.",
            hint="Give the image a substitute text (headrace.Image(..., text=...)), or use a renderer and a policy "
            "that support images.",
            kind="image-without-text",
            retryable=False,
        )
    return part.text
