"""The server over real HTTP, and the contract of its module."""

import asyncio
import json
import subprocess

import aiohttp
import numpy as np
import pytest

from headrace_workers.renderers.bytes_renderer import END, VOCAB_SIZE
from headrace_workers.tiny_policy.model import SIZE, neutral_weights
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.sampler import SamplerSettings
from tests.workers.tiny_policy import prompts
from tests.workers.tiny_policy.conftest import COMMAND

GUESSING = prompts.guessing([10, 40])


async def load(api, weights: np.ndarray, version: str) -> tuple[int, dict]:
    async with api.session.post(
        f"{api.address}/weights", data=weights.astype("<f8").tobytes(), headers={"X-Weight-Version": version}
    ) as response:
        return response.status, await response.json()


async def test_completions_take_prompt_token_ids_and_give_token_ids_log_probabilities_and_weight_versions(api):
    status, answer = await api.complete(GUESSING, seed=5, stop_token_ids=[END])
    expected, version = TinyPolicy().generate(GUESSING, SamplerSettings(max_tokens=64, stop_token_ids=[END]), seed=5)
    made = expected[0]
    choice = answer["choices"][0]
    assert status == 200
    assert choice["token_ids"] == made.token_ids
    assert choice["prompt_token_ids"] == GUESSING
    assert choice["logprobs"]["token_logprobs"] == made.logprobs
    assert choice["text"] == made.text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", END)
    assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": len(made.token_ids)}]
    assert answer["usage"] == {
        "prompt_tokens": len(GUESSING),
        "completion_tokens": len(made.token_ids),
        "total_tokens": len(GUESSING) + len(made.token_ids),
    }


async def test_the_generate_route_returns_the_same_in_its_own_format(api):
    _, answer = await api.complete(GUESSING, seed=5, stop_token_ids=[END])
    completion = answer["choices"][0]
    sampling = {"max_tokens": 64, "seed": 5, "stop_token_ids": [END], "logprobs": 0}
    status, generated = await api.post(
        "/inference/v1/generate", {"model": "policy", "token_ids": GUESSING, "sampling_params": sampling}
    )
    choice = generated["choices"][0]
    assert status == 200
    for name in ("token_ids", "finish_reason", "stop_reason", "weight_versions"):
        assert choice[name] == completion[name]
    content = choice["logprobs"]["content"]
    assert [item["token_id"] for item in content] == completion["token_ids"]
    assert [item["logprob"] for item in content] == completion["logprobs"]["token_logprobs"]
    assert generated["prompt_token_ids"] is None
    assert (await api.post("/inference/v1/generate", {}))[0] == 400


async def test_tokens_and_offsets_spell_the_text(api):
    _, answer = await api.complete(GUESSING, seed=5)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["top_logprobs"] is None
    assert choice["stop_reason"] is None


async def test_ids_and_log_probabilities_are_returned_only_on_request(api):
    _, answer = await api.complete(GUESSING, logprobs=None, return_token_ids=None)
    choice = answer["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], choice["prompt_token_ids"]) == (None, None, None)
    assert choice["text"].startswith("\\boxed{")


async def test_the_first_of_n_answers_is_the_answer_of_that_seed_and_a_seed_repeats(api):
    _, four = await api.complete(GUESSING, n=4, seed=7)
    _, one = await api.complete(GUESSING, seed=7)
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert four["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
    assert (await api.complete(GUESSING, n=4, seed=7))[1]["choices"] == four["choices"]


async def test_max_tokens_and_stop_strings_end_ids_and_text_together(api):
    _, short = await api.complete(GUESSING, seed=7, max_tokens=3)
    assert short["choices"][0]["text"] == "\\bo"
    assert short["choices"][0]["token_ids"] == [*b"\\bo"]
    assert short["choices"][0]["finish_reason"] == "length"
    _, stopped = await api.complete(GUESSING, seed=7, stop="xed")
    assert stopped["choices"][0]["text"] == "\\bo"
    assert stopped["choices"][0]["token_ids"] == [*b"\\boxed"]
    assert stopped["choices"][0]["stop_reason"] == "xed"


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"prompt": [1, VOCAB_SIZE]}, 400, "vocabulary"),
        ({"prompt": "text"}, 400, "token ids"),
        ({"prompt": [[1], [2]]}, 400, "token ids"),
        ({"model": "another"}, 404, "does not exist"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"min_p": 2}, 400, "min_p"),
        ({"min_tokens": 3}, 400, "does not support"),
        ({"repetition_penalty": 1.1}, 400, "does not support"),
        ({"presence_penalty": 0.5}, 400, "does not support"),
        ({"frequency_penalty": 0.5}, 400, "does not support"),
        ({"logit_bias": {"5": 3.0}}, 400, "does not support"),
        ({"bad_words": ["a"]}, 400, "does not support"),
        ({"structured_outputs": {"regex": "a"}}, 400, "does not support"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"n": 0}, 400, "n:"),
        ({"stream": True}, 400, "stream"),
        ({"seed": "x"}, 400, "seed"),
    ],
)
async def test_errors_have_vllms_shape(api, fields, status, word):
    answered, body = await api.complete(**{"prompt": GUESSING, **fields})
    assert answered == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert word in body["error"]["message"]


async def test_an_unknown_route_and_an_unreadable_body_are_errors(api):
    assert (await api.get("/nowhere"))[0] == 404
    async with api.session.post(f"{api.address}/v1/completions", data=b"{") as response:
        assert response.status == 400


async def test_all_weights_are_replaced_and_only_then_their_version_is_confirmed(api):
    assert await api.get("/weight_info") == (200, {"weight_version": "0.0"})
    weights = np.random.default_rng(0).normal(size=SIZE)
    assert await load(api, weights, "0.1") == (200, {"weight_version": "0.1"})
    try:
        assert await api.get("/weight_info") == (200, {"weight_version": "0.1"})
        _, answer = await api.complete(GUESSING)
        assert answer["choices"][0]["weight_versions"][0]["version"] == "0.1"
        async with api.session.get(f"{api.address}/weights") as response:
            assert response.headers["X-Weight-Version"] == "0.1"
            assert np.array_equal(np.frombuffer(await response.read(), "<f8"), weights)
        bad = weights.copy()
        bad[0] = np.nan
        for wrong, version in ((weights[:3], "0.2"), (bad, "0.2"), (weights, "latest"), (weights, "")):
            status, body = await load(api, wrong, version)
            assert (status, body["error"]["code"]) == (400, 400)
            assert await api.get("/weight_info") == (200, {"weight_version": "0.1"})
    finally:
        await load(api, neutral_weights(), "0.0")


async def test_the_server_reports_its_version_and_model(api):
    assert (await api.get("/health"))[0] == 200
    assert "version" in (await api.get("/version"))[1]
    models = (await api.get("/v1/models"))[1]
    assert [model["id"] for model in models["data"]] == ["policy"]


async def test_a_client_that_disconnects_ends_its_request(api):
    await api.misbehave(slow_s=60)
    asking = asyncio.create_task(api.complete(GUESSING))
    await api.until_running(1)
    asking.cancel()
    await asyncio.wait([asking])
    await api.until_running(0)


async def test_an_engine_that_does_not_notice_a_disconnected_client_continues_to_generate(api):
    await api.misbehave(slow_s=0.5, keep_generating=True)
    asking = asyncio.create_task(api.complete(GUESSING))
    await api.until_running(1)
    asking.cancel()
    await asyncio.wait([asking])
    assert await api.running() == 1
    await api.until_running(0)


async def test_two_live_requests_never_share_an_id(api):
    await api.misbehave(slow_s=60)
    headers = {"X-Request-Id": "e1-1-0-1"}
    body = {"prompt": GUESSING}
    first = asyncio.create_task(api.post("/v1/completions", body, headers=headers))
    await api.until_running(1)
    status, answer = await api.post("/v1/completions", body, headers=headers)
    assert status == 400
    assert "already running" in answer["error"]["message"]
    first.cancel()
    await asyncio.wait([first])
    await api.until_running(0)
    await api.misbehave()
    status, answer = await api.post("/v1/completions", body, headers=headers)
    assert (status, answer["id"]) == (200, "cmpl-e1-1-0-1")


async def test_flags_set_how_it_misbehaves_from_the_start():
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--model", "other", "--fail-every", "2", stdout=asyncio.subprocess.PIPE
    )
    try:
        address = json.loads(await process.stdout.readline())["address"]
        async with aiohttp.ClientSession() as session:
            statuses = []
            for _ in range(4):
                body = {"model": "other", "prompt": GUESSING}
                async with session.post(f"{address}/v1/completions", json=body) as response:
                    statuses.append(response.status)
        assert statuses == [200, 500, 200, 500]
    finally:
        process.terminate()
        await process.wait()


def test_a_port_in_use_is_reported_in_one_line(server):
    port = server.rsplit(":", 1)[1]
    done = subprocess.run([*COMMAND[:-1], port], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
