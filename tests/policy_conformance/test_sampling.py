"""Samples of a policy server: ids, log-probabilities, seeds and ends, on both routes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy_conformance.conftest import COMPLETIONS, GENERATE, Server, ids, logprobs

BOTH = pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
CLOSE = 1e-3


@BOTH
async def test_each_sampled_token_has_an_id_and_the_policys_own_logprob(server: Server, path: str):
    choice = (await server.sample(path, seed=5))["choices"][0]
    expected = server.kind.logprobs(server.kind.folders[0], server.prompt, ids(choice))
    assert 1 <= len(ids(choice)) == len(logprobs(choice)) <= 64
    assert np.allclose(logprobs(choice), expected, atol=CLOSE)
    assert max(logprobs(choice)) <= 0


async def test_the_routes_return_the_same_for_the_same_seed(server: Server):
    first = (await server.sample(GENERATE, seed=9))["choices"][0]
    second = (await server.sample(COMPLETIONS, seed=9))["choices"][0]
    assert ids(first) == ids(second)
    assert np.allclose(logprobs(first), logprobs(second), atol=CLOSE)
    assert first["finish_reason"] == second["finish_reason"]


@BOTH
async def test_logprobs_are_those_before_temperature_and_top_p(server: Server, path: str):
    choice = (await server.sample(path, seed=5, temperature=0.5, top_p=0.9))["choices"][0]
    expected = server.kind.logprobs(server.kind.folders[0], server.prompt, ids(choice))
    assert np.allclose(logprobs(choice), expected, atol=CLOSE)


@BOTH
async def test_top_k_1_is_greedy(server: Server, path: str):
    greedy = ids((await server.sample(path, temperature=0))["choices"][0])
    assert ids((await server.sample(path, seed=5, top_k=1))["choices"][0]) == greedy


@BOTH
async def test_temperature_0_repeats_and_seeds_repeat_and_differ(server: Server, path: str):
    async def drawn(**fields: float) -> list[int]:
        return ids((await server.sample(path, **fields))["choices"][0])

    assert await drawn(temperature=0) == await drawn(temperature=0, seed=3)
    assert await drawn(seed=4) == await drawn(seed=4)
    assert len({tuple(await drawn(seed=seed)) for seed in range(8)}) > 1


@BOTH
async def test_n_answers_are_n_choices_and_the_first_is_that_of_the_seed(server: Server, path: str):
    four = (await server.sample(path, n=4, seed=7))["choices"]
    one = (await server.sample(path, seed=7))["choices"][0]
    assert [choice["index"] for choice in four] == [0, 1, 2, 3]
    assert ids(four[0]) == ids(one)
    assert len({tuple(ids(choice)) for choice in four}) > 1


@BOTH
async def test_max_tokens_ends_an_answer_with_length(server: Server, path: str):
    choice = (await server.sample(path, max_tokens=3, seed=5))["choices"][0]
    assert (len(ids(choice)), choice["finish_reason"]) == (3, "length")


@BOTH
async def test_a_stop_token_is_the_last_of_the_ids(server: Server, path: str):
    whole = (await server.sample(path, seed=5))["choices"][0]
    stop = ids(whole)[4]
    end = ids(whole).index(stop) + 1
    choice = (await server.sample(path, seed=5, stop_token_ids=[stop]))["choices"][0]
    assert ids(choice) == ids(whole)[:end]
    assert len(logprobs(choice)) == end
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@BOTH
async def test_a_stop_string_ends_with_the_token_that_completes_it(server: Server, path: str):
    for seed in range(20):
        whole = (await server.sample(path, seed=seed))["choices"][0]
        letters = [at for at, token in enumerate(ids(whole)) if ord("!") <= token <= ord("~")]
        if letters:
            break
    text = chr(ids(whole)[letters[0]])
    choice = (await server.sample(path, seed=seed, stop=[text]))["choices"][0]
    assert ids(choice) == ids(whole)[: letters[0] + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text)
    if path == COMPLETIONS:
        assert text not in choice["text"]


@BOTH
async def test_the_prompt_is_returned_on_request(server: Server, path: str):
    answer = await server.sample(path)
    echoed = answer["prompt_token_ids"] if path == GENERATE else answer["choices"][0]["prompt_token_ids"]
    assert echoed == server.prompt


async def test_ids_are_always_returned_by_the_generate_route_and_by_completions_on_request(server: Server):
    generated = await server.sample(GENERATE, seed=5)
    assert (await server.sample(GENERATE, seed=5, logprobs=None))["choices"][0]["logprobs"] is None
    _, plain = await server.post(COMPLETIONS, {"model": "policy", "prompt": server.prompt, "max_tokens": 64, "seed": 5})
    choice = plain["choices"][0]
    assert (choice.get("token_ids"), choice["logprobs"], choice.get("prompt_token_ids")) == (None, None, None)
    assert ids(generated["choices"][0])


async def test_the_logprobs_of_a_prompt_are_returned_on_request(server: Server):
    made = (await server.sample(GENERATE, seed=5))["choices"][0]
    prompt = server.prompt + ids(made)
    for path in (GENERATE, COMPLETIONS):
        answer = await server.sample(path, prompt=prompt[:-1], max_tokens=1, prompt_logprobs=0)
        told = answer["prompt_logprobs"] if path == GENERATE else answer["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        assert len(told) == len(prompt) - 1
        found = [entry[str(token)]["logprob"] for entry, token in zip(told[1:], prompt[1:-1], strict=True)]
        assert np.allclose(found[len(server.prompt) - 1 :], logprobs(made)[:-1], atol=CLOSE)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": []}, 400),
        ({"prompt": [1, -1]}, 400),
        ({"prompt": [1, 10**6]}, 400),
        ({"prompt": [1, "a"]}, 400),
        ({"prompt": [1] * 200_000}, 400),
        ({"model": "another"}, 404),
        ({"temperature": -1}, 400),
        ({"top_p": 0}, 400),
        ({"top_p": 1.5}, 400),
        ({"top_k": -2}, 400),
        ({"min_p": 1.5}, 400),
        ({"max_tokens": 0}, 400),
        ({"n": 0}, 400),
        ({"seed": "x"}, 400),
        ({"stop_token_ids": ["x"]}, 400),
        ({"logprobs": -2}, 400),
    ],
    ids=lambda value: str(value)[:30],
)
@BOTH
async def test_an_invalid_sampling_request_is_an_error_with_the_reason(
    server: Server, path: str, fields: dict, status: int
):
    answered, body = await server.ask(path, **fields)
    assert answered == status, body
    assert set(body["error"]) >= {"message", "type", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["message"]


@BOTH
async def test_an_answer_is_cut_where_the_model_has_no_more_room(server: Server, path: str):
    limit = (await server.get("/v1/models"))[1]["data"][0]["max_model_len"]
    prompt = [*server.prompt, *[97] * (limit - len(server.prompt) - 2)]
    choice = (await server.sample(path, prompt=prompt, max_tokens=limit, seed=1))["choices"][0]
    assert (len(ids(choice)), choice["finish_reason"]) == (2, "length")
    assert (await server.ask(path, prompt=[*prompt, 97, 97]))[0] == 400
    # More than the whole model takes is refused on one route, and means as much as fits on the other.
    assert (await server.ask(COMPLETIONS, prompt=prompt, max_tokens=limit + 1))[0] == 400
    assert (await server.ask(GENERATE, prompt=prompt, max_tokens=limit + 1))[0] == 200


@BOTH
async def test_a_body_that_is_not_json_is_an_error(server: Server, path: str):
    async with server.session.post(
        f"{server.kind.address}{path}", data=b"{", headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 400
        assert "error" in await response.json()
