"""What a renderer is: messages to prompt tokens, sampled tokens to text.

* The next prompt extends the last one exactly: ``extend`` gives only the ids to append.
* Where no exact extension exists ``extend`` gives None, and the conversation goes on in a new segment.
* What was sampled is never encoded again within its segment; text made from it is for reading.
* Where a sampled turn lacks its end-of-turn token, the bridge adds it, unsampled.
* A renderer of text shows the text that stands for an image; an image without one it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.environment import Action
from headrace.errors import InfrastructureFailure
from headrace.trajectory import ContentPart, Message, Tokenizer

Tools = Sequence[Mapping[str, Any]]
"""Functions that the policy may call, each as a JSON schema in the form of OpenAI's ``tools``."""


class SampledTurn(msgspec.Struct, frozen=True):
    """A sampled turn in a conversation. ``token_ids`` int[n] as sampled; ``text``: all that they say, whatever part of
    it the environment was given."""

    token_ids: Sequence[int]
    text: str


ConversationItem = Message | SampledTurn
"""One item of a conversation: a message, or what the policy sampled."""


class Prompt(NamedTuple):
    """The input of the next turn.

    ``new_ids`` int[n]: the ids to append to the current segment; at the start of a segment, all ids. ``text``: the
    renderer's own note, passed back to it in ``CurrentSegment``. ``images``: names of the assets shown, in order; each
    has one token ``image_token_id`` among ``new_ids``.
    """

    new_ids: list[int]
    text: str = ""
    images: Sequence[str] = ()


class CurrentSegment(NamedTuple):
    """A segment that ends with a sampled turn.

    ``token_ids`` int[n], of which those from ``turn_start`` on were sampled last. ``conversation`` is what they stand
    for, the last item a SampledTurn. ``text`` is that of the Prompt that this turn answered.
    """

    token_ids: Sequence[int]
    turn_start: int
    conversation: Sequence[ConversationItem]
    text: str
    tools: Tools = ()


class Renderer(Protocol):
    """Turns messages into tokens. Stateless; one object serves all episodes of a run."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What the ids mean."""
        ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a turn when the policy samples one."""
        ...

    @property
    def image_token_id(self) -> int | None:
        """The id that stands for an image in a prompt that is sent; None: it reads text only."""
        ...

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        """The first prompt of a segment, generation prompt included. Raises InfrastructureFailure."""
        ...

    def extend(self, standing: CurrentSegment, new_messages: Sequence[Message]) -> Prompt | None:
        """The prompt that extends what stands by ``new_messages``; None if what stands would have to change for it.
        Raises InfrastructureFailure."""
        ...

    def parse(self, sampled_ids: Sequence[int]) -> str:
        """All the text of a sampled turn, without its end-of-turn token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids for a turn of which the server gave the text alone, end-of-turn token included. They are for reading:
        nothing is ever trained on them."""
        ...

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        """A sampled turn taken apart; ``text`` is the part of its text that the environment is given."""
        ...


def text_of(message: Message) -> str:
    """The text of a message: its content, or the texts of its parts joined without anything between them. Raises
    InfrastructureFailure ``image-without-text``."""
    if isinstance(message.content, str):
        return message.content
    return "".join(map(_part_text, message.content))


def _part_text(part: ContentPart) -> str:
    if part.type == "image" and not part.text:
        raise InfrastructureFailure(
            "The environment shows an image, and the run's renderer reads text only.",
            hint="Give the image a text that stands for it (headrace.Image(..., text=...)), or use a renderer and a "
            "policy that see images.",
            kind="image-without-text",
            retryable=False,
        )
    return part.text
