"""Checks of how an answer ends: by a token, by a string, at the end of the context, by its client."""

from __future__ import annotations

import asyncio

from headrace.wire import policy_server
from headrace_workers.policy_check.findings import Failed, Skipped
from headrace_workers.policy_check.target import Subject, cut, values_of

ABORT_TOKENS = 2000
"""Tokens of the request that is given up: more than are sampled until then."""

ABORT_POLLS = 200
"""How often an abandoned request may still show as running, with ABORT_PAUSE_S in between: ten seconds."""

ABORT_PAUSE_S = 0.05

_RUNNING = "vllm:num_requests_running{"


async def stop_token(subject: Subject) -> str:
    tokens, _ = values_of(await subject.sample())
    at = len(tokens) // 2
    stop = tokens[at]
    choice = await subject.sample(stop_token_ids=[stop])
    expected = tokens[: tokens.index(stop) + 1]
    if choice.token_ids != expected or choice.finish_reason != "stop":
        raise Failed(
            f"asked to stop at id {stop} the server gave {cut(choice.token_ids or [])} ({choice.finish_reason}), not "
            f"{cut(expected)}",
            "The server must respect `stop_token_ids`, and give the stop token with the ids.",
        )
    return "the answer ends with the stop token, which is among its ids"


async def stop_string(subject: Subject) -> str:
    tokens, _ = values_of(await subject.sample())
    pieces = (subject.decode([token]).strip() for token in tokens[1:])
    # The text of a special token is no text to most engines.
    stop = next(
        (piece[:2] for piece in pieces if piece.isascii() and piece.isprintable() and piece[:1] not in "<["), ""
    )
    if not stop:
        raise Skipped("the greedy answer has no text to stop at")
    choice = await subject.sample(stop=[stop])
    ids, _ = values_of(choice)
    if stop not in subject.decode(ids) or choice.finish_reason != "stop":
        raise Failed(
            f"asked to stop at {stop!r} the server gave {subject.decode(ids)!r} ({choice.finish_reason})",
            "The server must respect `stop`, and give all ids that it sampled.",
        )
    after = subject.decode(ids).partition(stop)[2]
    return f"ids end with the stop string{f' and {after!r} after it, which stands in the next prompt' if after else ''}"


async def context(subject: Subject) -> str:
    longest = await _longest(subject)
    if longest is None:
        raise Skipped("the server does not say how long a context it takes")
    prompt = (subject.prompt * (longest // len(subject.prompt) + 1))[: longest + 1]
    refused = await subject.server.post(policy_server.COMPLETIONS, prompt=prompt, max_tokens=1)
    if refused.status == 200:
        raise Failed(
            f"a prompt of {len(prompt)} tokens was answered, and {longest} is the most: something cut it",
            "Truncation of prompts must be off, for a cut prompt is another one than is stored.",
        )
    return f"{longest} tokens; a longer prompt is refused. Set limits.max_context_tokens to it, or lower"


async def _longest(subject: Subject) -> int | None:
    """Most tokens of prompt and answer, if the server says so."""
    answer = await subject.server.get(policy_server.MODELS)
    cards = answer.read(policy_server.ModelList).data if answer.status == 200 else []
    return next((card.max_model_len for card in cards if card.id == subject.server.model), None)


async def abort(subject: Subject) -> str:
    """A request whose client goes away ends at the engine."""
    before = await _running(subject)
    if before is None:
        raise Skipped("the server has no /metrics that count running requests")
    room = (await _longest(subject) or ABORT_TOKENS) - len(subject.prompt)
    fields = {"max_tokens": min(room, ABORT_TOKENS), "ignore_eos": True, "temperature": 1.0}
    request = asyncio.create_task(subject.server.sample(subject.prompt, **fields))
    while not request.done() and (await _running(subject) or 0) <= before:
        await asyncio.sleep(ABORT_PAUSE_S)
    request.cancel()
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    if isinstance(outcome, Failed):
        raise outcome
    if not isinstance(outcome, asyncio.CancelledError):
        raise Skipped("the request ended before it could be given up")
    for _ in range(ABORT_POLLS):
        if (await _running(subject) or 0) <= before:
            return "a request whose client goes away ends at the engine"
        await asyncio.sleep(ABORT_PAUSE_S)
    raise Failed(
        f"a request still runs {ABORT_POLLS * ABORT_PAUSE_S:g} s after its client went away",
        "The server must stop what nobody waits for; a proxy in between may keep the connection open.",
    )


async def _running(subject: Subject) -> float | None:
    answer = await subject.server.get("/metrics")
    if answer.status != 200:
        return None
    lines = [line for line in answer.body.decode(errors="replace").splitlines() if line.startswith(_RUNNING)]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None
