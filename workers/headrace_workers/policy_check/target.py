"""The target of the checks, and helpers shared by several checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.trajectory import Message
from headrace.wire import policy_server
from headrace_workers.policies import PolicySource
from headrace_workers.policy_check.findings import CheckFailed
from headrace_workers.policy_check.requests import CheckedServer
from headrace_workers.renderers import Renderer

TOKENS = 24
"""Tokens of a sample: enough to show a difference, and fast on a CPU."""

QUESTION = Message(role="user", content="Count from one to ten, in words.")
MORE = Message(role="user", content="Grüße 🙂! Go on.")

ABSENT = frozenset({404, 405, 501})
"""Statuses of a route that the server does not have."""

MISMATCH = (
    "Set --tokenizer to the folder or name of the served model; for a fine-tuned model, to the tokenizer saved with it."
)
IDS = (
    "The server must accept and return token ids (`return_token_ids`): vLLM 0.10.2 or later, without a proxy that "
    "removes them."
)
LOGPROBS = "The server must return the logprobs of the sampled tokens and of no others (`logprobs: 0`)."


@dataclass(kw_only=True)
class CheckTarget:
    """The server, renderer and tokenizer to check. ``encode`` and ``decode`` are the tokenizer's; ``tolerance`` is the
    largest allowed difference between two log-probabilities of a token; ``sampling_defaults`` are the sampling
    parameters of the model's ``generation_config.json``."""

    server: CheckedServer
    renderer: Renderer
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    policies: PolicySource
    tolerance: float
    sampling_defaults: Mapping[str, object]

    @property
    def prompt(self) -> list[int]:
        """A first prompt."""
        return self.renderer.start([QUESTION]).new_ids

    async def sample(self, **fields: object) -> policy_server.CompletionChoice:
        """Sample at most TOKENS tokens after the first prompt, greedily by default. Raises CheckFailed."""
        request = {"max_tokens": TOKENS, "temperature": 0.0, **fields}
        return (await self.server.sample(self.prompt, **request))[0]


def ids_and_logprobs(choice: policy_server.CompletionChoice) -> tuple[list[int], list[float]]:
    """The ids and logprobs of an answer. Raises CheckFailed if their numbers differ."""
    tokens = choice.token_ids or []
    values = choice.logprobs.token_logprobs if choice.logprobs and choice.logprobs.token_logprobs else []
    known = [value for value in values if value is not None]
    if not tokens or len(known) != len(tokens):
        raise CheckFailed(f"{count_tokens(tokens)} sampled, but {len(known)} logprobs", LOGPROBS)
    return tokens, known


def count_tokens(tokens: Sequence[int]) -> str:
    """Format the number of tokens."""
    return f"{len(tokens)} token" if len(tokens) == 1 else f"{len(tokens)} tokens"


def cut(tokens: Sequence[int]) -> str:
    """Format the first ids."""
    return str(list(tokens[:12])).removesuffix("]") + (", …]" if len(tokens) > 12 else "]")
