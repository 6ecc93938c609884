"""Attempts of an episode with a single agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environment import Step
from headrace.errors import PolicyFailure
from headrace.trajectory import Task, ToolCall, VersionRun
from headrace.validation import validate
from headrace_workers.episode import EpisodeRun, turn_seed
from headrace_workers.policies import Sample, one_version
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, SYSTEM, USER
from headrace_workers.renderers.folder_tokenizer import load_tokenizer
from tests.workers.fakes import FIRST, Clock, OneTurn, Script, Turns, assignment, failure_of, plan, play, say, tools
from tests.workers.models import STRIPS_THINKING, make_model


async def test_a_finished_episode_has_exact_tokens_rewards_messages_and_infos() -> None:
    policy = Script(say("a"), say("bc", end=False))
    record = await play(policy, lambda: Turns(last=2))
    validate(record)
    (segment,) = record.segments
    prompt = [BOS, USER, *b"obs 0", END, ASSISTANT]
    bridge = [USER, *b"obs 1", END, ASSISTANT]
    assert segment.token_ids.tolist() == [*prompt, ord("a"), END, *bridge, *b"bc"]
    assert policy.requests[1].prompt == [*prompt, ord("a"), END, *bridge]
    assert [(turn.start, turn.end, turn.reward, turn.terminated) for turn in segment.turns] == [
        (9, 11, 1.0, False),
        (19, 21, 2.0, True),
    ]
    assert segment.logprobs[segment.sampled == 1].tolist() == [-0.5] * 4
    assert [(m.role, m.content, m.turn) for m in record.messages] == [
        ("user", "obs 0", -1),
        ("assistant", "a", 0),
        ("user", "obs 1", -1),
        ("assistant", "bc", 1),
        ("user", "obs 2", -1),
    ]
    assert record.infos == [{"turn": 0}, {"turn": 1}, {"turn": 2}]
    assert (record.status, record.stop_reason, record.failure) == ("finished", "terminated", None)


async def test_terminated_wins_over_truncated() -> None:
    record = await play(Script(say("x")), lambda: Turns(last=1))
    validate(record)
    assert record.status == "finished"
    assert [(turn.terminated, turn.truncated) for turn in record.segments[0].turns] == [(True, False)]


async def test_on_truncation_the_last_observation_is_appended_unsampled() -> None:
    record = await play(Script(say("x")), lambda: Turns(last=1, truncate=True))
    validate(record)
    assert (record.status, record.stop_reason) == ("truncated", "environment_truncated")
    segment = record.segments[0]
    tail = [USER, *b"obs 1", END, ASSISTANT]
    assert segment.token_ids.tolist()[segment.turns[0].end :] == tail
    assert not segment.sampled[segment.turns[0].end :].any()
    assert segment.turns[0].truncated
    assert segment.versions == [VersionRun(len(segment.token_ids), 0, 1)]


async def test_the_budget_of_turns_truncates() -> None:
    record = await play(Script(say("x")), lambda: Turns(last=9), limits={"max_turns": 2})
    validate(record)
    assert (record.status, record.stop_reason) == ("truncated", "max_turns")
    assert [turn.truncated for turn in record.segments[0].turns] == [False, True]


async def test_an_over_long_prompt_is_a_truncation_and_is_never_sent() -> None:
    policy = Script(say("x"))
    record = await play(policy, lambda: Turns(last=9), limits={"max_context_tokens": 21})
    validate(record)
    assert (record.status, record.stop_reason) == ("truncated", "max_tokens")
    assert [len(request.prompt) for request in policy.requests] == [9, 19]
    assert record.segments[0].token_ids.tolist()[:9] == [BOS, USER, *b"obs 0", END, ASSISTANT]


async def test_the_first_prompt_may_be_over_long_already() -> None:
    record = await play(Script(say("x")), Turns, limits={"max_context_tokens": 5})
    validate(record)
    assert (record.status, record.stop_reason, record.segments) == ("truncated", "max_tokens", [])


async def test_a_prompt_too_long_for_the_engine_truncates_the_episode() -> None:
    overflow = PolicyFailure("Too long.", kind="context-overflow", retryable=False)
    record = await play(Script(say("x"), overflow), lambda: Turns(last=9))
    validate(record)
    assert (record.status, record.stop_reason, record.failure) == ("truncated", "max_tokens", None)
    (turn,) = record.segments[0].turns
    assert turn.truncated
    assert turn.end == len(record.segments[0].token_ids)  # what did not fit was never asked about


async def test_a_prompt_that_cannot_extend_the_segment_starts_a_new_one(tmp_path: Path) -> None:
    model = make_model(tmp_path, STRIPS_THINKING)
    tokenizer = load_tokenizer(str(model))

    def sample(text: str) -> Sample:
        ids = tokenizer.encode(text)
        return Sample(
            token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop", versions=one_version(len(ids), FIRST)
        )

    policy = Script(*(sample(text) for text in ("hm\n</think>\n\nA<|im_end|>", "B<|im_end|>", "C<|im_end|>")))
    record = await play(policy, Turns, policy={"renderer": "template", "tokenizer": str(model)})
    validate(record)
    first, second = record.segments
    assert [[turn.index for turn in segment.turns] for segment in (first, second)] == [[0], [1, 2]]
    assert tokenizer.decode(first.token_ids.tolist()).endswith("<think>\nhm\n</think>\n\nA<|im_end|>")
    assert [list(request.prompt) for request in policy.requests] == [
        first.token_ids.tolist()[: first.turns[0].start],
        *(second.token_ids.tolist()[: turn.start] for turn in second.turns),
    ]
    assert tokenizer.decode(policy.requests[1].prompt) == (
        "<|im_start|>user\nobs 0<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nobs 1<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


async def test_tools_that_the_reset_lists_are_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "lookup"}}]

    class Helped(Turns):
        def __init__(self, tools: Any = tools) -> None:
            super().__init__(last=2)
            self.tools = tools

        def reset(self, seed: int | None = None) -> Any:
            return "obs 0", {"tools": self.tools}

    policy = Script(say("x"))
    record = await play(policy, Helped)
    assert policy.requests[0].prompt[:2] == [BOS, SYSTEM]
    assert json.loads(bytes(policy.requests[0].prompt[2 : policy.requests[0].prompt.index(END)])) == tools
    assert len(record.segments) == 1
    assert record.infos[0] == {"tools": tools}
    broken = await play(Script(say("x")), lambda: Helped(tools=["lookup"]))
    assert failure_of(broken) == ("environment", "tools-type", False)


async def test_sampled_tokens_are_limited_by_the_room_in_the_context() -> None:
    policy = Script(say("x"))
    await play(policy, OneTurn, limits={"max_context_tokens": 24}, sampling={"max_tokens": 512})
    assert policy.requests[0].max_tokens == 24 - len(policy.requests[0].prompt)


async def test_working_time_is_sampling_and_environment_time_and_its_budget_truncates() -> None:
    clock = Clock()

    def slow(request: Any) -> Any:
        clock.now += 4.0
        return say("x")

    class SlowTurns(Turns):
        def step(self, action: str) -> Any:
            clock.now += 1.0
            return super().step(action)

    record = await play(Script(slow), lambda: SlowTurns(last=9), clock=clock, limits={"working_time_s": 9.0})
    validate(record)
    assert (record.status, record.stop_reason) == ("truncated", "working_time")
    assert (record.timing.working_s, record.timing.policy_s, record.timing.environment_s) == (10.0, 8.0, 2.0)
    assert [turn.policy_s for turn in record.segments[0].turns] == [4.0, 4.0]


async def test_waiting_does_not_count_as_working_time() -> None:
    clock = Clock()

    def waits(request: Any) -> Any:
        clock.now += 5.0
        sample = say("x")
        return type(sample)(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason="stop",
            versions=sample.versions,
            waiting_s=4.0,
        )

    record = await play(Script(waits), OneTurn, clock=clock, limits={"working_time_s": 2.0})
    assert (record.status, record.timing.working_s, record.timing.waiting_s) == ("finished", 1.0, 4.0)
    assert record.timing.wall_s == 5.0


async def test_the_wall_clock_deadline_is_a_failure_of_the_infrastructure() -> None:
    clock = Clock()

    def slow(request: Any) -> Any:
        clock.now += 100.0
        return say("x")

    record = await play(Script(slow), lambda: Turns(last=9), clock=clock, limits={"episode_timeout_s": 60})
    assert failure_of(record) == ("infrastructure", "episode-timeout", True)


async def test_the_seed_of_a_turn_follows_from_the_episode_and_the_turn() -> None:
    policy = Script(say("x"))
    await play(policy, Turns)
    seeds = [request.sampling.seed for request in policy.requests]
    assert seeds == [turn_seed(7, 0), turn_seed(7, 1), turn_seed(7, 2)]
    assert len(set(seeds)) == 3
    assert turn_seed(7, 0) == 6717824153675289882  # the same on every worker and in every release


async def test_each_turn_has_its_own_request_id() -> None:
    policy = Script(say("x"))
    await play(policy, Turns, asked=assignment(attempt=4))
    assert [request.id for request in policy.requests] == [f"{assignment().episode}-4-{turn}" for turn in range(3)]


async def test_the_temperature_is_the_runs_or_the_evaluations() -> None:
    policy = Script(say("x"))
    await play(policy, OneTurn, sampling={"temperature": 0.7})
    record = await play(policy, OneTurn, asked=assignment(temperature=0.0, evaluation="e"))
    assert [request.sampling.temperature for request in policy.requests] == [0.7, 0.0]
    assert record.segments[0].sampling.temperature == 0.0
    assert record.provenance.evaluation == "e"


async def test_a_turn_that_the_pinned_version_did_not_answer_ends_the_episode_cancelled() -> None:
    record = await play(
        Script(say("x", versions=[VersionRun(1, 0, 4), VersionRun(2, 0, 5)])),
        OneTurn,
        asked=assignment(pinned_version="0.4"),
    )
    validate(record)
    assert (record.status, record.stop_reason) == ("cancelled", "cancelled")
    assert record.failure is not None
    assert record.failure.kind == "version-not-pinned"
    assert "0.5" in record.failure.message
    pinned = await play(Script(say("x")), OneTurn, asked=assignment(pinned_version="0.1"))
    assert pinned.status == "finished"


async def test_version_runs_are_joined_over_turns_and_include_the_prompt() -> None:
    answers = [
        say("a"),
        say("b", versions=[VersionRun(1, 0, 1), VersionRun(2, 0, 2)]),
        say("c", versions=[VersionRun(2, 0, 2)]),
    ]
    record = await play(Script(*answers), Turns)
    validate(record)
    segment = record.segments[0]
    assert segment.versions == [VersionRun(segment.turns[1].start + 1, 0, 1), VersionRun(len(segment.token_ids), 0, 2)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 261), min_size=1, max_size=6), min_size=1, max_size=5))
async def test_each_prompt_extends_the_tokens_before_it_for_any_sample(turns: list[list[int]]) -> None:
    def sample(ids: list[int]) -> Any:
        base = say("x" * (len(ids) - 1))
        return type(base)(token_ids=ids, logprobs=base.logprobs, finish_reason="stop", versions=base.versions)

    policy = Script(*(sample(ids) for ids in turns))
    record = await play(policy, lambda: Turns(last=len(turns)))
    validate(record)
    tokens = record.segments[0].token_ids.tolist()
    for request, turn in zip(policy.requests, record.segments[0].turns, strict=True):
        assert list(request.prompt) == tokens[: turn.start]
        assert tokens[turn.start : turn.end] == turns[turn.index]


async def test_the_environment_gets_seed_kwargs_and_example_and_is_closed() -> None:
    calls: list[Any] = []

    class Notes(OneTurn):
        version = "7"

        def __init__(self, **kwargs: Any) -> None:
            calls.append(kwargs)

        def reset(self, seed: int | None = None) -> Any:
            calls.append(seed)
            return super().reset(seed)

        def close(self) -> None:
            calls.append("closed")

    asked = assignment(task=Task(environment="n", seed=5, kwargs={"a": 1}, example={"q": 2}))
    its_tools = tools(Script(say("x")), Notes)
    episode = EpisodeRun(its_tools, asked, plan())
    record = await episode.run()
    await episode.close()
    its_tools.threads.close()
    assert calls == [{"a": 1, "example": {"q": 2}}, 5, "closed"]
    assert record.provenance.environment_version == "7"


async def test_reward_parts_and_tool_calls_are_on_the_turn() -> None:
    call = ToolCall(name="search", arguments={"q": "x"}, result="found")

    class Uses(OneTurn):
        def step(self, action: str) -> Any:
            return Step("", 1.0, True, False, {"reward_parts": {"format": 0.25}, "tool_calls": [call], "kept": 1})

    record = await play(Script(say("x")), Uses)
    turn = record.segments[0].turns[0]
    assert (turn.reward_parts, turn.tool_calls) == ({"format": 0.25}, [call])
    assert record.infos[1] == {"kept": 1}


async def test_a_history_edit_starts_a_new_segment() -> None:
    class Edits(Turns):
        def step(self, action: str) -> Any:
            step = Step(*super().step(action))
            history = [{"role": "system", "content": "short"}, {"role": "user", "content": step.observation}]
            return step._replace(info={"history": history}) if self.turn == 1 else step

    record = await play(Script(say("x")), Edits)
    validate(record)
    assert [[turn.index for turn in segment.turns] for segment in record.segments] == [[0], [1, 2]]
    assert bytes(record.segments[1].token_ids[2:7].tolist()) == b"short"
