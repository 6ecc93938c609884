"""Attempts with several agents."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.trajectory import Trajectory
from headrace.validation import MAX_REWARD, validate
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER
from tests.workers.fakes import Script, play, say


class Table:
    """Plays the given moves: each is (observations, rewards, terminated, truncated, info), agents in turn."""

    blocking = False
    agents = ("ann", "bob")

    def __init__(self, *moves: Any, order: str = "", first: dict[str, str] | None = None) -> None:
        self.moves = list(moves)
        self.order = list(order or "ab" * len(moves))
        self.first = first if first is not None else {"ann": "hi ann", "bob": "hi bob"}

    def next_agent(self) -> str | None:
        if not self.order:
            return None
        return {"a": "ann", "b": "bob", "x": "eve"}[self.order[0]]

    def reset(self, seed: int | None = None) -> Any:
        return self.first, {"reset": True}

    def step(self, action: str) -> Any:
        self.order.pop(0)
        return self.moves.pop(0)


def move(
    rewards: dict[str, float] | None = None,
    observations: dict[str, str] | None = None,
    over: bool = False,
    cut: bool = False,
    info: dict[str, Any] | None = None,
) -> Any:
    flags = dict.fromkeys(("ann", "bob"), over)
    return observations or {}, rewards or {}, flags, dict.fromkeys(("ann", "bob"), cut), info or {}


def rewards_of(record: Trajectory) -> dict[str, list[float]]:
    return {agent: [turn.reward for turn in record.agent_turns(agent)] for agent in ("ann", "bob")}


def failed_with(record: Trajectory) -> str:
    validate(record)
    assert record.failure is not None
    return record.failure.kind


async def test_agents_act_in_turn_each_with_its_own_segment() -> None:
    moves = [
        move({"ann": 0.0}, {"bob": "ann moved"}),
        move({"bob": 0.0}, {"ann": "bob moved"}),
        move({"ann": 1.0, "bob": -1.0}, over=True),
    ]
    policy = Script(say("1"), say("2"), say("3"))
    record = await play(policy, lambda: Table(*moves))
    validate(record)
    ann, bob = record.segments
    assert (ann.agent, [turn.index for turn in ann.turns]) == ("ann", [0, 2])
    assert (bob.agent, [turn.index for turn in bob.turns]) == ("bob", [1])
    assert list(policy.requests[1].prompt) == [BOS, USER, *b"hi bob", END, USER, *b"ann moved", END, ASSISTANT]
    assert list(policy.requests[2].prompt)[-11:] == [USER, *b"bob moved"[:], END, ASSISTANT][-11:]
    assert rewards_of(record) == {"ann": [0.0, 1.0], "bob": [-1.0]}
    assert ann.turns[-1].terminated
    assert bob.turns[-1].terminated
    assert [message.agent for message in record.messages if message.role == "assistant"] == ["ann", "bob", "ann"]


async def test_a_late_reward_belongs_to_the_agents_last_turn_and_an_early_one_to_its_first() -> None:
    parts = {"bob": {"reward_parts": {"luck": 0.5}}}
    moves = [
        move({"ann": 0.0, "bob": 0.5}, info=parts),
        move({"bob": 1.0, "ann": 0.25}),
        move({"ann": 0.0, "bob": 2.0}, over=True),
    ]
    record = await play(Script(say("x")), lambda: Table(*moves))
    validate(record)
    assert rewards_of(record) == {"ann": [0.25, 0.0], "bob": [3.5]}
    assert record.agent_turns("bob")[0].reward_parts == {"luck": 0.5}


async def test_rewards_of_a_turn_that_add_up_beyond_the_bound_are_a_failure() -> None:
    most = MAX_REWARD
    table = Table(move({"ann": most}), move({"bob": 0.0, "ann": most}, over=True))
    assert failed_with(await play(Script(say("x"), say("y")), lambda: table)) == "reward-out-of-range"


async def test_a_reward_for_an_agent_that_never_acted_is_named_not_lost() -> None:
    record = await play(Script(say("x")), lambda: Table(move({"ann": 1.0, "bob": 2.0}, over=True)))
    validate(record)
    assert rewards_of(record) == {"ann": [1.0], "bob": []}
    assert record.infos[-1]["rewards_without_turn"] == {"bob": 2.0}


async def test_a_frozen_opponent_is_not_a_row_and_has_its_own_policy_and_temperature() -> None:
    policy = Script(say("x"))
    agents = {"bob": {"train": False, "base": "old", "temperature": 0.0}}
    moves = [move({"ann": 0.0}), move({"bob": 0.0, "ann": 1.0}, over=True)]
    record = await play(policy, lambda: Table(*moves), policy={"agents": agents, "model": "m"})
    validate(record)
    assert [(segment.agent, segment.train, segment.policy.base) for segment in record.segments] == [
        ("ann", True, "policy"),
        ("bob", False, "old"),
    ]
    assert [(request.model, request.sampling.temperature) for request in policy.requests] == [("m", 1.0), ("old", 0.0)]
    assert [segment.agent for segment in record.rows()] == ["ann"]


async def test_the_end_without_a_flag_is_an_end_by_the_environment() -> None:
    record = await play(Script(say("x")), lambda: Table(move({"ann": 1.0}), order="a"))
    validate(record)
    assert (record.status, record.segments[0].turns[0].terminated) == ("finished", True)


async def test_if_all_agents_are_truncated_so_is_the_episode_and_each_gets_its_last_observation() -> None:
    moves = [move({"ann": 0.0}), move({"bob": 0.0}, {"ann": "a!", "bob": "b!"}, cut=True)]
    record = await play(Script(say("x")), lambda: Table(*moves))
    validate(record)
    assert (record.status, record.stop_reason) == ("truncated", "environment_truncated")
    for segment, tail in zip(record.segments, (b"a!", b"b!"), strict=True):
        assert segment.turns[-1].truncated
        assert segment.token_ids.tolist()[-5:] == [USER, *tail, END, ASSISTANT]


async def test_the_budget_of_turns_counts_all_agents_together() -> None:
    moves = [move({"ann": 0.0}), move({"bob": 0.0}), move({"ann": 0.0})]
    record = await play(Script(say("x")), lambda: Table(*moves), limits={"max_turns": 2})
    validate(record)
    assert (record.stop_reason, [len(segment.turns) for segment in record.segments]) == ("max_turns", [1, 1])


async def test_an_agent_that_the_environment_does_not_have_is_a_failure() -> None:
    assert failed_with(await play(Script(say("x")), lambda: Table(order="x"))) == "unknown-agent"


async def test_a_step_without_a_reward_for_its_actor_is_a_failure() -> None:
    assert failed_with(await play(Script(say("x")), lambda: Table(move({"bob": 1.0})))) == "reward-missing"


async def test_an_agent_that_has_ended_may_not_act_again() -> None:
    ann_out = ({}, {"ann": 0.0}, {"ann": True, "bob": False}, {}, {})
    record = await play(Script(say("x")), lambda: Table(ann_out, order="aa"))
    assert failed_with(record) == "agent-has-ended"


async def test_an_environment_whose_agents_never_act_is_a_failure() -> None:
    class Empty(Table):
        def next_agent(self) -> str | None:
            return None

    assert failed_with(await play(Script(say("x")), Empty)) == "ended-before-start"


async def test_an_agent_that_was_truncated_stays_truncated_in_a_finished_episode() -> None:
    moves = [
        ({}, {"ann": 0.0}, {"ann": True}, {}, {}),
        ({}, {"bob": 0.0}, {}, {"bob": True}, {}),
    ]
    record = await play(Script(say("x")), lambda: Table(*moves))
    assert (record.status, record.stop_reason) == ("finished", "terminated")
    ends = {segment.agent: segment.turns[-1] for segment in record.segments}
    assert [(ends[name].terminated, ends[name].truncated) for name in ("ann", "bob")] == [(True, False), (False, True)]


async def test_where_only_agents_without_a_turn_terminated_the_episode_is_truncated() -> None:
    record = await play(Script(say("x")), lambda: Table(({}, {"ann": 0.0}, {"bob": True}, {"ann": True}, {})))
    assert (record.status, record.stop_reason) == ("truncated", "environment_truncated")


async def test_agents_of_the_spec_that_are_all_unknown_to_the_environment_are_a_failure() -> None:
    policy = Script(say("x"))
    agents = {"frozen": {"train": False}}
    record = await play(policy, lambda: Table(move({"ann": 1.0}, over=True)), policy={"agents": agents})
    assert failed_with(record) == "unknown-agent"
    assert record.failure is not None
    assert not record.failure.retryable
    assert "['frozen']" in record.failure.message
    assert "['ann', 'bob']" in record.failure.message
    assert policy.requests == []


@pytest.mark.parametrize("blocking", [False, True])
async def test_next_agent_is_called_on_the_thread_of_the_step_within_its_deadline(blocking: bool) -> None:
    threads: list[str] = []

    class Asks(Table):
        def next_agent(self) -> str | None:
            threads.append(threading.current_thread().name)
            if len(threads) == 2:
                raise KeyboardInterrupt
            return "ann"

    Asks.blocking = blocking
    record = await play(Script(say("x")), lambda: Asks(move({"ann": 0.0})))
    assert failed_with(record) == "step-raised"
    assert record.failure is not None
    assert record.failure.layer == "environment"
    assert threads[1] == ("environment" if blocking else threading.main_thread().name)


async def test_next_agent_is_called_after_an_awaited_step() -> None:
    class Awaited(Table):
        async def step(self, action: str) -> Any:
            return super().step(action)

    moves = [move({"ann": 0.0}), move({"bob": 1.0}, over=True)]
    record = await play(Script(say("x")), lambda: Awaited(*moves))
    assert (record.status, rewards_of(record)) == ("finished", {"ann": [0.0], "bob": [1.0]})
