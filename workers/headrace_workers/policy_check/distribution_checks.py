"""The check that a server samples from the policy's own distribution on every route.

* Answers are sampled through the worker's own client, as in an episode, and compared with their reported logprobs.
* Defaults of a model folder's ``generation_config.json`` are named, so that a server which applies them is understood.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.errors import EpisodeFailure
from headrace.trajectory import Message, Sampling
from headrace_workers.policies import SampleRequest, check_sample
from headrace_workers.policies.base import part_seed
from headrace_workers.policies.protocols import PROTOCOLS, ProtocolName
from headrace_workers.policy_check.findings import CheckFailed
from headrace_workers.policy_check.sampled_distribution import Deviation, ProbedAnswer, find_deviation
from headrace_workers.policy_check.target import ABSENT, CheckTarget

OPEN_QUESTION = Message(role="user", content="Write the first line of a story.")
"""A question with many good answers."""

ANSWERS = 640
"""Answers on each route: enough to notice that 5 % of the probability is never sampled."""

ANSWER_TOKENS = 8

CONCURRENCY = 32

_DISABLED = 403


async def sampling(subject: CheckTarget) -> str:
    """Check that the answers of each route are distributed as their logprobs say."""
    routes = [name for name in PROTOCOLS if await _has_route(subject, name)]
    texts, distinct = [], set()
    for name in routes:
        answers = await _answers(subject, name)
        if answers is None:
            texts.append(name)
            continue
        deviation = find_deviation(answers, tests=len(PROTOCOLS))
        if deviation is not None:
            raise CheckFailed(_observation(name, deviation), _remedy(subject))
        distinct |= {(name, *answer.token_ids) for answer in answers}
    compared = " and ".join(name for name in routes if name not in texts)
    without = f"; {' and '.join(texts)} returns no ids" if texts else ""
    defaults = f"; {_defaults(subject)} does not apply" if subject.sampling_defaults else ""
    return f"{ANSWERS} answers by {compared} ({len(distinct)} different) follow their logprobs{without}{defaults}"


async def _has_route(subject: CheckTarget, name: ProtocolName) -> bool:
    return (await subject.server.post(PROTOCOLS[name].path)).status not in {*ABSENT, _DISABLED}


async def _answers(subject: CheckTarget, name: ProtocolName) -> list[ProbedAnswer] | None:
    """Answers at temperature 1 without filters, each with its own seed; None if the route returns no ids."""
    prompt = subject.renderer.start([OPEN_QUESTION]).new_ids
    policy, room = subject.policies.at([subject.server.address], protocol=name), asyncio.Semaphore(CONCURRENCY)

    async def answer(number: int) -> ProbedAnswer:
        async with room:
            request = _request(subject, prompt, name, number)
            sample = await policy.sample(request)
            check_sample(sample, request.vocab_size, ANSWER_TOKENS)
            return ProbedAnswer(sample.token_ids, sample.logprobs)

    tasks = [asyncio.create_task(answer(number)) for number in range(1, ANSWERS + 1)]
    try:
        return await asyncio.gather(*tasks)
    except EpisodeFailure as failure:
        if failure.kind in ("no-token-ids", "no-logprobs") and name == "chat":
            return None
        raise CheckFailed(f"{name}: {failure.kind}: {failure.detail}", failure.hint) from failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _request(subject: CheckTarget, prompt: Sequence[int], name: str, number: int) -> SampleRequest:
    return SampleRequest(
        id=f"check-{name}-{number}",
        group="check",
        episode=f"check-{number}",
        model=subject.server.model,
        prompt=prompt,
        messages=[OPEN_QUESTION],
        sampling=Sampling(seed=part_seed(1, number)),
        max_tokens=ANSWER_TOKENS,
        stop=(),
        stop_token_ids=subject.renderer.stop_token_ids,
        timeout_s=120.0,
        vocab_size=subject.renderer.tokenizer.vocab_size,
    )


def _observation(name: str, deviation: Deviation) -> str:
    tokens = "first token" if deviation.length == 1 else f"first {deviation.length} tokens"
    return (
        f"by {name}, {deviation.drawn} of {deviation.total} answers have one of {deviation.size} {tokens} with the "
        f"probability {deviation.reported:.3g} together: temperature 1 without filters was requested, but not used"
    )


def _remedy(subject: CheckTarget) -> str:
    cause = f" They may be those of {_defaults(subject)}." if subject.sampling_defaults else ""
    return (
        "Remove what replaces the sampling parameters of requests (temperature, top_p, top_k, min_p, penalties, "
        f"logit_bias), such as a proxy or settings of the server.{cause}"
    )


def _defaults(subject: CheckTarget) -> str:
    values = ", ".join(f"{name} {value}" for name, value in subject.sampling_defaults.items())
    return f"the model's generation_config.json ({values})"
