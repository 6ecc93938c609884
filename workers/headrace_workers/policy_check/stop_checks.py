"""Checks of the end of answers: by a token, by a string, by the context length, by the client."""

from __future__ import annotations

import asyncio

from headrace.wire import policy_server
from headrace_workers.policy_check.findings import CheckFailed, CheckSkipped
from headrace_workers.policy_check.target import CheckTarget, cut, ids_and_logprobs

ABORT_TOKENS = 2000
"""Tokens of the request that is aborted: more than are sampled before the abort."""

ABORT_POLLS = 200
"""Polls at which an aborted request may still show as running, ABORT_PAUSE_S apart: ten seconds."""

ABORT_PAUSE_S = 0.05

_RUNNING = "vllm:num_requests_running{"


async def stop_token(subject: CheckTarget) -> str:

    tokens, _ = ids_and_logprobs(await subject.sample())
    at = len(tokens) // 2
    stop = tokens[at]
    choice = await subject.sample(stop_token_ids=[stop])
    expected = tokens[: tokens.index(stop) + 1]
    if choice.token_ids != expected or choice.finish_reason != "stop":
        raise CheckFailed(
            f"with the stop token {stop} the server returned {cut(choice.token_ids or [])} ({choice.finish_reason}), "
            f"not {cut(expected)}",
            "The server must respect `stop_token_ids`, and return the stop token with the ids.",
        )
    return "the answer ends with the stop token, which is among its ids"


async def stop_string(subject: CheckTarget) -> str:

    tokens, _ = ids_and_logprobs(await subject.sample())
    pieces = (subject.decode([token]).strip() for token in tokens[1:])
    # Most engines return no text for a special token.
    stop = next(
        (piece[:2] for piece in pieces if piece.isascii() and piece.isprintable() and piece[:1] not in "<["), ""
    )
    if not stop:
        raise CheckSkipped("the greedy answer has no text for a stop string")
    choice = await subject.sample(stop=[stop])
    ids, _ = ids_and_logprobs(choice)
    if stop not in subject.decode(ids) or choice.finish_reason != "stop":
        raise CheckFailed(
            f"with the stop string {stop!r} the server returned {subject.decode(ids)!r} ({choice.finish_reason})",
            "The server must respect `stop`, and return all ids that it sampled.",
        )
    after = subject.decode(ids).partition(stop)[2]
    return f"ids end with the stop string{f' and {after!r}, which remains in the next prompt' if after else ''}"


async def context(subject: CheckTarget) -> str:
    """Check that a prompt longer than the context is refused, not truncated."""
    context_length = await _context_length(subject)
    if context_length is None:
        raise CheckSkipped("the server does not report its context length")
    prompt = (subject.prompt * (context_length // len(subject.prompt) + 1))[: context_length + 1]
    refused = await subject.server.post(policy_server.COMPLETIONS, prompt=prompt, max_tokens=1)
    if refused.status == 200:
        raise CheckFailed(
            f"a prompt of {len(prompt)} tokens was answered, but the limit is {context_length}: it was truncated",
            "Disable the truncation of prompts: a truncated prompt differs from the stored one.",
        )
    return f"{context_length} tokens; a longer prompt is refused. Set limits.max_context_tokens to it, or lower"


async def _context_length(subject: CheckTarget) -> int | None:
    """The server's limit on tokens of prompt and answer, if it reports one."""
    answer = await subject.server.get(policy_server.MODELS)
    cards = answer.read(policy_server.ModelList).data if answer.status == 200 else []
    return next((card.max_model_len for card in cards if card.id == subject.server.model), None)


async def abort(subject: CheckTarget) -> str:
    """Check that the engine ends a request whose client disconnects."""
    before = await _running(subject)
    if before is None:
        raise CheckSkipped("the server has no /metrics route with the number of running requests")
    room = (await _context_length(subject) or ABORT_TOKENS) - len(subject.prompt)
    fields = {"max_tokens": min(room, ABORT_TOKENS), "ignore_eos": True, "temperature": 1.0}
    request = asyncio.create_task(subject.server.sample(subject.prompt, **fields))
    while not request.done() and (await _running(subject) or 0) <= before:
        await asyncio.sleep(ABORT_PAUSE_S)
    request.cancel()
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    if isinstance(outcome, CheckFailed):
        raise outcome
    if not isinstance(outcome, asyncio.CancelledError):
        raise CheckSkipped("the request ended before it could be aborted")
    for _ in range(ABORT_POLLS):
        if (await _running(subject) or 0) <= before:
            return "a request ends at the engine when its client disconnects"
        await asyncio.sleep(ABORT_PAUSE_S)
    raise CheckFailed(
        f"a request still runs {ABORT_POLLS * ABORT_PAUSE_S:g} s after its client disconnected",
        "The server must stop abandoned requests; a proxy may be keeping the connection open.",
    )


async def _running(subject: CheckTarget) -> float | None:
    answer = await subject.server.get("/metrics")
    if answer.status != 200:
        return None
    lines = [line for line in answer.body.decode(errors="replace").splitlines() if line.startswith(_RUNNING)]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None
