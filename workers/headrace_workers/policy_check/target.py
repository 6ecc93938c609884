"""What is checked, and what several checks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.trajectory import Message
from headrace.wire import policy_server
from headrace_workers.policies import PolicySource
from headrace_workers.policy_check.findings import Failed
from headrace_workers.policy_check.requests import Server
from headrace_workers.renderers import Renderer

TOKENS = 24
"""Tokens of a sample: enough for a difference to show, and quick on a CPU."""

QUESTION = Message(role="user", content="Count from one to ten, in words.")
MORE = Message(role="user", content="Grüße 🙂! Go on.")

ABSENT = frozenset({404, 405, 501})
"""How a server answers on a route that it does not have."""

MISMATCH = (
    "Give --tokenizer the folder or name of the model that the server serves; after a fine-tune, the tokenizer that "
    "was saved with it."
)
IDS = "The server must take and give token ids (`return_token_ids`): vLLM 0.10.2 or later, no proxy that strips them."
LOGPROBS = "The server must give the logprob of each sampled token and of no other (`logprobs: 0`)."


@dataclass(kw_only=True)
class Subject:
    """What is checked. ``encode`` and ``decode`` are the tokenizer's; ``tolerance`` is the largest difference between
    two log-probabilities of a token that passes."""

    server: Server
    renderer: Renderer
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    policies: PolicySource
    tolerance: float

    @property
    def prompt(self) -> list[int]:
        """A first prompt."""
        return self.renderer.start([QUESTION]).new_ids

    async def sample(self, **fields: object) -> policy_server.CompletionChoice:
        """A sample of at most TOKENS tokens after the first prompt; greedy unless told otherwise. Raises Failed."""
        request = {"max_tokens": TOKENS, "temperature": 0.0, **fields}
        return (await self.server.sample(self.prompt, **request))[0]


def values_of(choice: policy_server.CompletionChoice) -> tuple[list[int], list[float]]:
    """Ids and logprobs of an answer. Raises Failed where there are not as many."""
    tokens = choice.token_ids or []
    values = choice.logprobs.token_logprobs if choice.logprobs and choice.logprobs.token_logprobs else []
    known = [value for value in values if value is not None]
    if not tokens or len(known) != len(tokens):
        raise Failed(f"{counted(tokens)} sampled, but {len(known)} logprobs", LOGPROBS)
    return tokens, known


def counted(tokens: Sequence[int]) -> str:
    """How many there are, in words."""
    return f"{len(tokens)} token" if len(tokens) == 1 else f"{len(tokens)} tokens"


def cut(tokens: Sequence[int]) -> str:
    """The first ids, for a message."""
    return str(list(tokens[:12])).removesuffix("]") + (", …]" if len(tokens) > 12 else "]")
