"""What a renderer is: messages to prompt tokens, sampled tokens to text.

* The next prompt extends the last one exactly: ``extend`` gives only the ids to append.
* What was sampled is never encoded again; text made from it is for reading.
* Where a sampled turn lacks its end-of-turn token, the bridge adds it, unsampled.
* A renderer of text shows the text that stands for an image; an image without one it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.errors import InfrastructureFailure
from headrace.trajectory import ContentPart, Message, Tokenizer


class Renderer(Protocol):
    """Turns messages into tokens. Stateless; one object serves all episodes of a worker."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What the ids mean."""
        ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a turn when the policy samples one."""
        ...

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt of a segment, generation prompt included."""
        ...

    def extend(self, previous_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """The ids to append to ``previous_ids`` (which end with a sampled turn) so that they form the next prompt."""
        ...

    def parse(self, sampled_ids: Sequence[int]) -> str:
        """The action text of a sampled turn, without its end-of-turn token."""
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
