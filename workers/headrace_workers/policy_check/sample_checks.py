"""Checks of samples: ids, log-probabilities, seeds.

* The server scores its samples again, and both log-probabilities must agree.
"""

from __future__ import annotations

import math

from headrace.wire import policy_server
from headrace_workers.policy_check.findings import CheckFailed, CheckSkipped
from headrace_workers.policy_check.target import (
    IDS,
    LOGPROBS,
    MISMATCH,
    TOKENS,
    CheckTarget,
    count_tokens,
    cut,
    ids_and_logprobs,
)


async def ids(subject: CheckTarget) -> str:
    """Check that the server returns sampled ids, all in the vocabulary, and does not change the prompt."""
    choice = await subject.sample()
    if choice.token_ids is None:
        raise CheckFailed("the answer has no token_ids", IDS)
    if not choice.token_ids:
        raise CheckFailed("no token was sampled", "The model may end its turn at once: look at the prompt.")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != subject.prompt:
        raise CheckFailed(
            f"{len(subject.prompt)} prompt ids were sent, but the server reports {len(choice.prompt_token_ids)} others",
            "Remove everything between here and the engine that changes prompts.",
        )
    outside = [id_ for id_ in choice.token_ids if not 0 <= id_ < subject.renderer.tokenizer.vocab_size]
    if outside:
        raise CheckFailed(f"id {outside[0]} was sampled, which the tokenizer does not have", MISMATCH)
    echo = "the prompt's ids are returned" if choice.prompt_token_ids is not None else "the prompt is not returned"
    return f"{count_tokens(choice.token_ids)} sampled; {echo}"


async def logprobs(subject: CheckTarget) -> str:
    """Check that each sampled token has a finite logprob of at most 0."""
    choice = await subject.sample(temperature=1.0, seed=1)
    tokens, values = choice.token_ids or [], choice.logprobs.token_logprobs if choice.logprobs else None
    if values is None:
        raise CheckFailed("the answer has no logprobs", LOGPROBS)
    if len(values) != len(tokens):
        raise CheckFailed(f"{count_tokens(tokens)} sampled, but {len(values)} logprobs", LOGPROBS)
    for position, value in enumerate(values):
        if value is None or not math.isfinite(value) or value > 0 or value <= policy_server.CLAMPED_LOGPROB:
            raise CheckFailed(
                f"the logprob at position {position} is {value}", "Look for NaN in the weights, or a broken kernel."
            )
    return f"{len(values)} finite ones, none above 0"


async def scores(subject: CheckTarget) -> str:
    """Check that sampled tokens have the same log-probabilities when they are scored as a prompt."""
    choice = await subject.sample(temperature=1.0, seed=1)
    sampled, values = ids_and_logprobs(choice)
    tokens = [*subject.prompt, *sampled]
    again = (await subject.server.sample(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    if again.prompt_logprobs is None:
        raise CheckSkipped("the server returns no prompt_logprobs")
    scored = again.prompt_logprobs[len(subject.prompt) :]
    differences = []
    for position, (token, value, entry) in enumerate(zip(sampled, values, scored, strict=True)):
        score = entry.get(token) if entry is not None else None
        if score is None or score.logprob is None:
            raise CheckFailed(f"the sampled token at position {position} has no prompt logprob", LOGPROBS)
        differences.append(abs(score.logprob - value))
    worst = max(differences)
    average = sum(differences) / len(differences)
    observed = f"sampled and scored logprobs differ by {worst:.2g} at most, {average:.2g} on average"
    if worst > subject.tolerance:
        raise CheckFailed(
            f"{observed}; {subject.tolerance:g} is allowed",
            "Serve in float32 or bfloat16 without a quantized KV cache, and with raw logprobs (--logprobs-mode "
            "raw_logprobs); reset the prefix cache after new weights. --tolerance allows more.",
        )
    return observed


async def greedy(subject: CheckTarget) -> str:

    first, again = [await subject.sample() for _ in range(2)]
    if first.token_ids != again.token_ids:
        raise CheckFailed(
            f"the same greedy request returned {cut(first.token_ids or [])}, then {cut(again.token_ids or [])}",
            "Check for a load balancer over servers with different weights; otherwise the kernels round differently.",
        )
    return f"the same {count_tokens(first.token_ids or [])} twice"


async def seeds(subject: CheckTarget) -> str:

    drawn = [(await subject.sample(temperature=1.0, seed=seed)).token_ids for seed in (7, 7, 8, 9)]
    if drawn[0] != drawn[1]:
        raise CheckFailed("the same seed gave different tokens", "The server must respect `seed` of a request.")
    if drawn[0] == drawn[2] == drawn[3]:
        return "the same tokens for every seed: either the policy is certain of them, or seeds are ignored"
    return "the same seed gives the same tokens, another seed gives others"


async def several(subject: CheckTarget) -> str:

    choices = await subject.server.sample(subject.prompt, max_tokens=TOKENS, temperature=1.0, seed=3, n=3)
    if len(choices) != 3:
        raise CheckFailed(f"n = 3 returned {len(choices)} answers", "The server must respect `n`.")
    for choice in choices:
        ids_and_logprobs(choice)
    return "n = 3 returns three answers, each with its ids and logprobs"
