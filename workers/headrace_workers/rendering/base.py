"""What a renderer is: messages to prompt tokens, sampled tokens to text.

* The next prompt extends the last one exactly: ``extend`` gives only the ids to append.
* What was sampled is never encoded again; text made from it is for reading.
* Where a sampled turn lacks its end-of-turn token, the bridge adds it, unsampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.trajectory import Message, Tokenizer


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
    """The text of a message: its content, or its text parts joined without anything between them."""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)
