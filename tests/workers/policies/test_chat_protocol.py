"""Servers that are asked by messages: with token ids they may train, with text alone they may be evaluated."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.errors import NonFiniteValue, PolicyFailure
from headrace.runspec import SamplingSpec
from headrace.trajectory import Message, Trajectory, VersionRun
from headrace.validation import validate
from headrace_workers.policies import Sample, SampleRequest, one_version
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER
from tests.workers.engine import Engine, completion, serving
from tests.workers.fakes import FIRST, Turns, assignment, play
from tests.workers.policies.test_one_server import REQUEST, client

ASKED = msgspec.structs.replace(
    REQUEST,
    messages=[Message(role="system", content="Be brief."), Message(role="user", content="Hello?")],
    tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}],
    sampling_spec=SamplingSpec(structured_outputs={"json": {"type": "object"}}),
)
RENDERED = [BOS, 1, 2, 3]


def with_ids(engine: Engine, body: dict[str, Any]) -> Any:
    return completion([66, 261], [-0.5, -0.25], prompt_token_ids=RENDERED)


def text_alone(engine: Engine, body: dict[str, Any]) -> Any:
    return completion(None, None, text="Hello!")


async def test_a_chat_server_gets_messages_and_returns_the_prompt_that_it_rendered() -> None:
    async with serving(with_ids, chat=True) as engine, client(engine) as policy:
        sample = await policy.sample(ASKED)
    (body,) = engine.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["tools"], body["tool_choice"]) == (ASKED.tools, "none")
    assert (body["logprobs"], body["return_token_ids"]) == (True, True)
    assert (sample.token_ids, sample.logprobs, sample.prompt) == ([66, 261], [-0.5, -0.25], RENDERED)
    assert sample.versions == [VersionRun(2, 0, 1)]


@pytest.mark.parametrize("answer", [text_alone, lambda engine, body: completion([66], [-0.5])])
async def test_for_training_a_chat_server_must_give_the_ids_of_prompt_and_answer(answer: Any) -> None:
    async with serving(answer, chat=True) as engine, client(engine) as policy:
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(ASKED)
    assert (caught.value.kind, caught.value.retryable) == ("no-token-ids", False)


async def test_an_evaluation_accepts_text_also_from_a_server_that_reports_no_version() -> None:
    async with serving(text_alone, chat=True) as engine, client(engine) as policy:
        engine.version = 404
        sample = await policy.sample(msgspec.structs.replace(ASKED, accepts_text=True))
    assert (sample.text, list(sample.token_ids)) == ("Hello!", [])


# Episodes


def prompts_of(record: Trajectory) -> list[list[int]]:
    return [segment.token_ids[segment.sampled == 0].tolist() for segment in record.segments]


class Rendering:
    """A server that renders messages in its own way: like ours, with a mark of its own at the end."""

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.requests: list[SampleRequest] = []

    def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        seen = [*request.prompt, 7]
        if self.forgets and len(self.requests) > 1:
            seen = [BOS, 9, 7]
        versions = one_version(2, FIRST)
        return Sample(token_ids=[65, END], logprobs=[-0.5] * 2, finish_reason="stop", versions=versions, prompt=seen)


async def test_the_prompt_that_the_server_reports_is_recorded() -> None:
    policy = Rendering()
    record = await play(policy, Turns)
    (segment,) = record.segments
    first = policy.requests[0].prompt
    assert segment.token_ids[: len(first) + 3].tolist() == [*first, 7, 65, END]
    assert segment.token_ids[segment.turns[1].start - 1] == 7
    said = [(message.role, message.content) for message in policy.requests[1].messages]
    assert said == [("user", "obs 0"), ("assistant", "A"), ("user", "obs 1")]


async def test_a_prompt_that_does_not_extend_the_segment_starts_a_new_one() -> None:
    record = await play(Rendering(forgets=True), Turns)
    assert len(record.segments) == 3
    assert [segment.token_ids.tolist() for segment in record.segments[1:]] == [[BOS, 9, 7, 65, END]] * 2


def says(request: SampleRequest) -> Sample:
    assert request.accepts_text
    return Sample(token_ids=[], logprobs=[], finish_reason="stop", versions=[], text="Aye")


async def test_ids_encoded_from_text_are_marked_and_valid_only_in_an_evaluation() -> None:
    policy = type("Text", (), {"sample": staticmethod(says)})()
    record = await play(policy, Turns, asked=assignment(evaluation="ev", pinned_version="0.7"))
    (segment,) = record.segments
    assert (record.status, segment.sampling.logprobs) == ("finished", "none")
    sampled = segment.token_ids[segment.sampled == 1].tolist()
    assert sampled == [*b"Aye", END] * 3
    np.testing.assert_array_equal(segment.logprobs, 0)
    assert prompts_of(record)[0][:2] == [BOS, USER]
    assert ASSISTANT in prompts_of(record)[0]
    provenance = msgspec.structs.replace(record.provenance, evaluation="")
    with pytest.raises(NonFiniteValue, match="encoded from its text"):
        validate(msgspec.structs.replace(record, provenance=provenance))
