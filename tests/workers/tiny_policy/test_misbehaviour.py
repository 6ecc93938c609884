"""Each fault setting causes only the fault that it names; the worker's own client reports each lie (G09, G11)."""

import asyncio
import json
import math
import time

import pytest

from headrace.errors import InvalidRequest, PolicyFailure
from headrace.trajectory import Sampling as TrajectorySampling
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies.base import SampleRequest
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER, VOCAB_SIZE
from headrace_workers.tiny_policy.faults import LIES, FaultInjector, FaultSettings
from tests.workers.tiny_policy import prompts

GUESSING = prompts.guessing()


def faults(count: int, **settings) -> list:
    misbehaving = FaultInjector(FaultSettings(**settings))
    return [misbehaving.next_fault() for _ in range(count)]


def test_without_settings_the_answers_are_correct():
    assert {(fault.fail, fault.wait_s, fault.lie) for fault in faults(20)} == {(False, 0.0, "")}


def test_failures_and_stalls_are_counted():
    assert [fault.fail for fault in faults(6, fail_next=2)] == [True, True, False, False, False, False]
    assert [fault.fail for fault in faults(6, fail_every=3)] == [False, False, True, False, False, True]
    assert [fault.wait_s for fault in faults(4, stall_every=2, stall_s=7, slow_s=1)] == [1, 8, 1, 8]
    assert [fault.wait_s for fault in faults(3, stall_next=1, stall_s=7)] == [7, 0, 0]


def test_lies_begin_after_honest_answers_and_end():
    told = [fault.lie for fault in faults(5, lie="bad-id", lie_after=1, lie_times=2)]
    assert told == ["", "bad-id", "bad-id", "", ""]
    assert [fault.lie for fault in faults(3, lie="bad-id")] == ["bad-id"] * 3
    assert [fault.lie for fault in faults(4, lie="bad-id", lie_times=1, fail_every=2)] == ["bad-id", "", "", ""]


def test_new_settings_replace_all_old_ones_and_restart_their_counts():
    misbehaving = FaultInjector(FaultSettings(fail_next=1))
    misbehaving.next_fault()
    misbehaving.set(FaultSettings(fail_next=1))
    assert misbehaving.next_fault().fail
    misbehaving.set(FaultSettings(slow_s=1.0))
    assert misbehaving.next_fault() == (False, 1.0, "")


def test_an_unknown_lie_is_refused():
    with pytest.raises(InvalidRequest, match="nan-logprob"):
        FaultInjector(FaultSettings(lie="white"))


async def test_unknown_settings_are_refused(api):
    status, body = await api.post("/misbehave", {"slow": 1})
    assert status == 400
    assert "slow" in body["error"]["message"]
    assert (await api.get("/misbehave"))[1]["lie"] == ""


LOGPROB_LIES = {
    "nan-logprob": math.isnan,
    "null-logprob": lambda value: value is None,
    "infinite-logprob": lambda value: value == -math.inf,
    "positive-logprob": lambda value: value == 0.3,
    "huge-logprob": lambda value: value == -1e308,
}


@pytest.mark.parametrize("lie", LOGPROB_LIES)
async def test_a_lie_about_a_log_probability_sits_at_position_4(api, lie):
    _, honest = await api.complete(GUESSING, seed=1)
    await api.misbehave(lie=lie)
    async with api.session.post(
        f"{api.address}/v1/completions",
        json={"prompt": GUESSING, "seed": 1, "max_tokens": 64, "logprobs": 0, "return_token_ids": True},
    ) as response:
        told = json.loads(await response.read())
    theirs = told["choices"][0]["logprobs"]["token_logprobs"]
    ours = honest["choices"][0]["logprobs"]["token_logprobs"]
    assert LOGPROB_LIES[lie](theirs.pop(4))
    ours.pop(4)
    assert theirs == ours
    assert told["choices"][0]["token_ids"] == honest["choices"][0]["token_ids"]


async def false_answer(api, lie: str, **fields) -> dict:
    await api.misbehave(lie=lie)
    return (await api.complete(GUESSING, seed=1, **fields))[1]["choices"][0]


async def test_lies_about_lengths_ids_and_versions(api):
    assert (await false_answer(api, "no-token-ids"))["token_ids"] is None
    assert (await false_answer(api, "no-logprobs"))["logprobs"] is None
    assert (await false_answer(api, "no-versions"))["weight_versions"] is None
    assert (await false_answer(api, "wrong-version"))["weight_versions"][0]["version"] == "0.1"
    assert (await false_answer(api, "unreadable-version"))["weight_versions"][0]["version"] == "latest"
    assert (await false_answer(api, "other-prompt"))["prompt_token_ids"] == [0]
    assert (await false_answer(api, "bad-id"))["token_ids"][4] == VOCAB_SIZE
    assert (await false_answer(api, "no-tokens"))["token_ids"] == []
    for lie, more in (("short-logprobs", -1), ("long-logprobs", 1)):
        choice = await false_answer(api, lie)
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) + more


async def test_negative_zeros_are_true(api):
    honest = await false_answer(api, "")
    choice = await false_answer(api, "negative-zeros")
    signs = [math.copysign(1, value) for value in choice["logprobs"]["token_logprobs"]]
    assert set(signs) == {-1.0}
    assert choice["logprobs"] == honest["logprobs"]


@pytest.mark.parametrize(
    ("lie", "max_tokens", "text", "ids", "logprobs", "finish"),
    [
        ("", 64, "7", b"7</a>", 5, "stop"),
        ("stop-overrun", 64, "7", b"7</a>\n\nX", 8, "stop"),
        ("stop-overrun-short-logprobs", 64, "7", b"7</a>\n\nX", 7, "stop"),
        ("", 4, "7</a", b"7</a", 4, "length"),
    ],
)
async def test_a_stop_string_ends_the_text_but_not_the_token_ids(api, lie, max_tokens, text, ids, logprobs, finish):
    await api.misbehave(lie=lie, reply="7</a>\n\nX")
    _, answer = await api.complete(GUESSING, stop=["</a>"], max_tokens=max_tokens)
    choice = answer["choices"][0]
    assert choice["text"] == text
    assert choice["token_ids"] == list(ids)
    assert choice["logprobs"]["token_logprobs"] == [0.0] * logprobs
    assert choice["finish_reason"] == finish


async def test_a_failure_has_the_configured_status(api):
    await api.misbehave(fail_next=1, fail_status=503)
    status, body = await api.complete(GUESSING)
    assert (status, body["error"]["code"]) == (503, 503)
    assert (await api.complete(GUESSING))[0] == 200


async def test_a_stalled_request_is_answered_later(api):
    await api.misbehave(stall_next=1, stall_s=60)
    stalled = asyncio.create_task(api.complete(GUESSING))
    await api.until_running(1)
    assert (await api.complete(GUESSING))[0] == 200
    assert not stalled.done()
    stalled.cancel()
    await asyncio.wait([stalled])
    await api.misbehave(stall_next=1, stall_s=0.01)
    assert (await api.complete(GUESSING))[0] == 200


KINDS = {
    "no-token-ids": "no-token-ids",
    "no-logprobs": "no-logprobs",
    "nan-logprob": "logprob-nan",
    "null-logprob": "logprob-missing",
    "infinite-logprob": "logprob-infinite",
    "positive-logprob": "logprob-positive",
    "huge-logprob": "logprob-out-of-range",
    "short-logprobs": "logprobs-too-few",
    "long-logprobs": "logprobs-too-many",
    "made-up-logprob": "logprob-missing",
    "too-many-tokens": "too-many-tokens",
    "garbage": "unreadable-response",
    "cut-short": "unreadable-response",
    "bad-id": "token-out-of-range",
    "no-tokens": "empty-sample",
    "unreadable-version": "unknown-version",
    "other-prompt": "prompt-changed",
    "stop-overrun-short-logprobs": "logprobs-too-few",
}
"""Failure kinds of the lies that the worker's client detects. The others are true, or need a second source."""


@pytest.mark.parametrize("lie", ["", *LIES])
async def test_the_workers_client_reports_each_lie_by_its_own_kind(api, lie):
    await api.misbehave(lie=lie, reply="7</a>\n\nX" if lie.startswith("stop-overrun") else None)
    policies = ServedPolicies(default_endpoints=[api.address], clock=time.monotonic)
    request = SampleRequest(
        group="g",
        episode="e",
        id="e-1-0",
        model="policy",
        prompt=GUESSING,
        sampling=TrajectorySampling(seed=1),
        max_tokens=64,
        stop=["</a>"],
        stop_token_ids=[END],
        timeout_s=20.0,
        vocab_size=VOCAB_SIZE,
    )
    kind = None
    try:
        await policies.at([]).sample(request)
    except PolicyFailure as failure:
        kind = failure.kind
    finally:
        await policies.close()
    assert kind == KINDS.get(lie)


def test_the_answers_of_a_script_are_given_turn_by_turn_and_the_last_one_repeats():
    told = FaultSettings(script=["one", "two"], reply="never")
    first = [BOS, USER, 104, END, ASSISTANT]
    second = [*first, 111, END, USER, 104, END, ASSISTANT]
    third = [*second, 111, END, USER, 104, END, ASSISTANT]
    assert [told.reply_to(prompt) for prompt in (first, second, third)] == ["one", "two", "two"]
    assert FaultSettings(reply="this").reply_to(second) == "this"
