"""Trainers that own their prompts, against a scripted orchestrator; with the episodes of case G24."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.client.sync_client import Client
from headrace.errors import GroupEnded, GroupIncomplete, InvalidRequest, NothingToServe
from headrace.integrations.prompts import EpisodeTokens, PromptGroup, group_sizes, roll_out
from headrace.integrations.skyrl import HeadraceGenerator
from headrace.integrations.trl_grpo import headrace_reward, rollout_func
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Segment, Task, Trajectory, Version
from headrace.wire import messages
from headrace.wire.codec import decode_head, encode
from tests.builders import make_segment, make_trajectory
from tests.sdk.batch.batches import EPISODE
from tests.sdk.client.routes import PULL, run_status
from tests.sdk.client.stub_server import StubServer, batch, ok

SUBMIT = "POST /v1/runs/guess/groups"
ACK = "POST /v1/runs/guess/batches/b/ack"
NACK = "POST /v1/runs/guess/batches/b/nack"
VERSION = "POST /v1/runs/guess/version"


def ended(*ids: str) -> messages.EmptyReply:
    reasons = [
        messages.Reason(code="group-ended", message=f"{id} was retired: failed", facts={"group": id}) for id in ids
    ]
    return messages.EmptyReply(epoch=1, reasons=reasons)


def body(*groups: list[Trajectory]) -> bytes:
    """A batch of groups ``g1``, ``g2``, ..."""
    inputs, records = [], []
    for number, members in enumerate(groups, 1):
        made = [encode(member) for member in members]
        heads = [(decode_head(record), len(record)) for record in made]
        inputs.append(GroupInput(f"g{number}", Task(environment="test:Echo", seed=number), len(made), heads))
        records += made
    head = build_head(
        batch="b", run="guess", estimator=EstimatorSpec(name="none"), version=Version(0, 3), groups=inputs
    )
    return head + b"".join(records)


def group(first: int, *rewards: list[float]) -> list[Trajectory]:
    return [make_trajectory(number=first + k, rewards=of, group="g") for k, of in enumerate(rewards)]


def task(prompt: Any) -> dict[str, Any]:
    return {"environment": "test:Echo", "example": {"prompt": prompt}}


@pytest.fixture
def served(stub: StubServer) -> StubServer:
    """A run that accepts groups ``g1`` and ``g2`` and serves two episodes of each, with rewards 1 to 3 and 4 to 9."""
    stub.on("GET /v1/runs/guess", ok(run_status(spec={"sampling": {"temperature": 1.0}, "max_staleness": 0})))
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1", "g2"])))
    stub.on(PULL, batch(body(group(1, [1.0], [2.0]), group(3, [3.0], [4.0, 5.0]))))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="b", version="0.3")))
    stub.on(NACK, ok({}))
    return stub


@pytest.fixture
def client(stub: StubServer) -> Iterator[Client]:
    with Client(stub.url, keepalive=False, poll_s=1.0) as made:
        yield made


TWICE = [PromptGroup(task("a"), 2), PromptGroup(task("b"), 2)]


# Groups ---------------------------------------------------------------------------------------------------------


def test_episodes_are_returned_in_the_order_of_the_groups(served: StubServer, client: Client) -> None:
    groups, failures = roll_out(client, "guess", TWICE)
    assert failures == {}
    assert [[sum(episode.rewards) for episode in group] for group in groups] == [[1.0, 2.0], [3.0, 9.0]]
    submitted = served.requests_to(SUBMIT)[0].json["groups"]
    assert [(one["size"], one["task"]["example"]) for one in submitted] == [(2, {"prompt": "a"}), (2, {"prompt": "b"})]
    assert served.requests_to(PULL)[0].json["groups"] == ["g1", "g2"]
    assert len(served.requests_to(ACK)) == 1


def test_the_order_of_the_batch_does_not_matter(stub: StubServer, client: Client) -> None:
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g2", "g1"])))
    stub.on(PULL, batch(body(group(1, [1.0]), group(2, [2.0]))))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="b", version="0.3")))
    groups, _ = roll_out(client, "guess", [PromptGroup(task("a"), 1), PromptGroup(task("b"), 1)])
    assert [group[0].rewards[-1] for group in groups] == [2.0, 1.0]


def test_an_episode_is_split_at_the_policys_first_token(served: StubServer, client: Client) -> None:
    episode = roll_out(client, "guess", TWICE).episodes[1][1]  # a prompt of 6, turns of 4 at 6 and 13
    assert (len(episode.prompt_ids), len(episode.response_ids)) == (6, 11)
    assert episode.mask == [1] * 4 + [0] * 3 + [1] * 4
    assert [bool(logprob) for logprob in episode.logprobs] == [bool(sampled) for sampled in episode.mask]
    assert {name: len(getattr(episode, name)) for name in ("mask", "logprobs", "rewards")} == {
        "mask": 11,
        "logprobs": 11,
        "rewards": 11,
    }


def test_the_reward_of_a_turn_is_at_its_last_token(served: StubServer, client: Client) -> None:
    assert roll_out(client, "guess", TWICE).episodes[1][1].rewards == [0, 0, 0, 4.0, 0, 0, 0, 0, 0, 0, 5.0]


def test_a_group_that_ends_costs_the_others_nothing_its_reason_is_returned_beside_them(
    stub: StubServer, client: Client
) -> None:
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1", "g3", "g2"])))
    stub.on(PULL, ok(ended("g3")), batch(body(group(1, [1.0], [2.0]), group(3, [3.0]))))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="b", version="0.3")))
    rolled = roll_out(client, "guess", [*TWICE, PromptGroup(task("c"), 2)])
    assert [[sum(episode.rewards) for episode in group] for group in rolled.episodes] == [[1.0, 2.0], [], [3.0]]
    assert rolled.failures == {
        1: "g3 was retired: failed",
        2: "Group g2 has 1 of the 2 requested episodes.",
    }
    assert [pull.json["groups"] for pull in stub.requests_to(PULL)] == [["g1", "g3", "g2"], ["g1", "g2"]]
    assert len(stub.requests_to(ACK)) == 1


def test_a_pull_of_groups_names_those_that_ended_and_those_that_are_left(stub: StubServer, client: Client) -> None:
    stub.on(PULL, ok(ended("g2")))
    with pytest.raises(GroupEnded, match="g2 was retired: failed") as error:
        client.pull("guess", groups=["g1", "g2", "g3"])
    assert error.value.extra["ended"] == {"g2": "g2 was retired: failed"}
    assert error.value.extra["left"] == ["g1", "g3"]


def test_if_no_group_can_be_served_an_error_has_the_reasons_of_all(stub: StubServer, client: Client) -> None:
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1", "g2"])))
    stub.on(PULL, ok(ended("g2")), ok(ended("g1")))
    with pytest.raises(GroupEnded) as error:
        roll_out(client, "guess", TWICE)
    assert error.value.extra["ended"].keys() == {"g1", "g2"}


def test_the_error_at_the_timeout_has_the_ids_of_the_groups(stub: StubServer, client: Client) -> None:
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1", "g2"])))
    stub.on(PULL, ok(messages.EmptyReply(epoch=1, reasons=[])))
    with pytest.raises(NothingToServe) as error:
        roll_out(client, "guess", TWICE, timeout_s=0.0)
    assert error.value.extra["groups"] == ["g1", "g2"]


def test_an_episode_of_several_rows_is_refused(stub: StubServer, client: Client) -> None:
    two_rows = make_trajectory(segments=[make_segment(), make_segment(indices=[1], salt=1)])
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1"])))
    stub.on(PULL, batch(body([two_rows])))
    stub.on(NACK, ok({}))
    with pytest.raises(InvalidRequest, match="has several rows"):
        roll_out(client, "guess", [PromptGroup(task("a"), 1)])
    assert len(stub.requests_to(NACK)) == 1


def test_no_groups_send_no_requests(stub: StubServer, client: Client) -> None:
    assert roll_out(client, "guess", []) == ([], {})
    assert stub.requests == []


@pytest.mark.parametrize(
    ("keys", "most", "expected"),
    [
        ([], 4, []),
        (["a", "a", "b", "b"], 2, [2, 2]),
        (["a"] * 4, 2, [2, 2]),
        (["a", "b", "a"], 8, [1, 1, 1]),
        ([[{"role": "user"}], [{"role": "user"}]], 2, [2]),
    ],
)
def test_the_repetitions_of_a_prompt_are_one_group(keys: list[Any], most: int, expected: list[int]) -> None:
    assert group_sizes(keys, most) == expected


# TRL's GRPOTrainer ----------------------------------------------------------------------------------------------


class Trainer:
    """The attributes of the trainer that the function reads, as in trl 1.16."""

    num_generations = 2
    num_generations_eval = 1

    def __init__(self, step: int = 0, *, training: bool = True) -> None:
        self.state = SimpleNamespace(global_step=step)
        self.args = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)
        self.model = SimpleNamespace(training=training, named_parameters=lambda: iter([("w", "tensor")]))
        self.accelerator = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
        )


class Folder:
    """In place of a ``WeightFolder``."""

    def __init__(self) -> None:
        self.written: list[list[Any]] = []

    def write(self, tensors: Any) -> Path:
        self.written.append(list(tensors))
        return Path(f"/shared/step-{len(self.written)}")


def test_rollout_func_returns_a_completion_for_each_prompt(served: StubServer, client: Client) -> None:
    output = rollout_func(client, "guess", task)(["a", "a", "b", "b"], Trainer())
    assert {key: len(values) for key, values in output.items()} == {
        "prompt_ids": 4,
        "completion_ids": 4,
        "logprobs": 4,
        "env_mask": 4,
        "reward": 4,
    }
    assert [one["size"] for one in served.requests_to(SUBMIT)[0].json["groups"]] == [2, 2]
    assert headrace_reward(prompts=["a"], completions=["x"], reward=output["reward"]) == [1.0, 2.0, 3.0, 9.0]


def test_an_evaluation_of_the_trainer_uses_its_number_of_generations(served: StubServer, client: Client) -> None:
    with pytest.raises(GroupIncomplete, match="g1 has 2 of the 1 requested"):  # what the stub serves
        rollout_func(client, "guess", task)(["a", "b"], Trainer(training=False))
    assert [one["size"] for one in served.requests_to(SUBMIT)[0].json["groups"]] == [1, 1]


def test_the_weights_of_a_step_are_announced_before_its_groups_are_submitted(
    served: StubServer, client: Client
) -> None:
    served.on(VERSION, ok(messages.VersionReply(epoch=1, version="0.4")))
    folder: Any = Folder()
    roll = rollout_func(client, "guess", task, weights=folder)
    roll(["a", "a", "b", "b"], Trainer(0))
    roll(["a", "a", "b", "b"], Trainer(0))  # the same step: nothing new to load
    roll(["a", "a", "b", "b"], Trainer(1))
    assert folder.written == [[("w", "tensor")]] * 2
    (first, second) = served.requests_to(VERSION)
    assert first.json == {"version": "0.4", "weights": {"path": "/shared/step-1"}}
    assert second.json["weights"] == {"path": "/shared/step-2"}
    routes = [f"{request.method} {request.path}" for request in served.requests]
    assert [route for route in routes if route in (VERSION, SUBMIT)] == [VERSION, SUBMIT, SUBMIT, VERSION, SUBMIT]


def test_a_run_that_allows_staleness_is_refused(stub: StubServer, client: Client) -> None:
    stub.on("GET /v1/runs/guess", ok(run_status(spec={"max_staleness": 1})))
    with pytest.raises(InvalidRequest, match=r"max_staleness 1, .*Set max_staleness of the run to 0"):
        rollout_func(client, "guess", task)


# SkyRL ----------------------------------------------------------------------------------------------------------


def generator_input(**fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": text}] for text in "aabb"],
        "env_classes": ["echo"] * 4,
        "env_extras": [{"answer": text} for text in "aabb"],
        "sampling_params": {"temperature": 1.0},
        "trajectory_ids": [SimpleNamespace(instance_id=text, repetition_id=k % 2) for k, text in enumerate("aabb")],
        "batch_metadata": None,
    }
    return {**defaults, **fields}


def skyrl_task(name: str, extras: Any, prompt: Any) -> dict[str, Any]:
    return {"environment": f"test:{name}", "example": {**extras, "text": prompt[0]["content"]}}


def test_skyrl_gets_a_row_for_each_prompt_with_rewards_at_the_last_tokens_of_turns(
    served: StubServer, client: Client
) -> None:
    inputs = generator_input()
    output = asyncio.run(HeadraceGenerator(client, "guess", skyrl_task).generate(inputs))
    tasks = [one["task"] for one in served.requests_to(SUBMIT)[0].json["groups"]]
    assert tasks == [{"environment": "test:echo", "example": {"answer": text, "text": text}} for text in "ab"]
    per_token = ("response_ids", "loss_masks", "rewards", "rollout_logprobs")
    assert len({tuple(map(len, output[key])) for key in per_token}) == 1
    assert [sum(rewards) for rewards in output["rewards"]] == [1.0, 2.0, 3.0, 9.0]
    assert output["stop_reasons"] == ["stop"] * 4
    assert output["trajectory_ids"] == inputs["trajectory_ids"]
    assert output["rollout_metrics"] is None


def test_ids_and_extras_of_skyrl_are_optional(served: StubServer, client: Client) -> None:
    inputs = generator_input(trajectory_ids=None, env_extras=None, sampling_params=None)
    asyncio.run(HeadraceGenerator(client, "guess", lambda *_: task("x")).generate(inputs))
    assert [one["size"] for one in served.requests_to(SUBMIT)[0].json["groups"]] == [2, 2]


def test_a_temperature_of_skyrl_other_than_the_runs_is_refused(served: StubServer, client: Client) -> None:
    inputs = generator_input(sampling_params={"temperature": 0.0})
    with pytest.raises(InvalidRequest, match=r"requests temperature 0, but run 'guess' samples at 1"):
        asyncio.run(HeadraceGenerator(client, "guess", skyrl_task).generate(inputs))
    assert not served.requests_to(SUBMIT)


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"top_p": 0.5}, "requests top_p 0.5, but run 'guess' samples at 1"),
        ({"temperature": 1.0, "top_k": 20}, "requests top_k 20, but a run samples without it"),
        ({"min_p": 0.1}, "requests min_p 0.1"),
        ({"repetition_penalty": 1.1}, "requests repetition_penalty 1.1"),
    ],
)
def test_sampling_parameters_of_a_trainer_other_than_the_runs_are_refused(
    served: StubServer, client: Client, requested: dict[str, Any], message: str
) -> None:
    inputs = generator_input(sampling_params=requested)
    with pytest.raises(InvalidRequest, match=f"SkyRL {message}"):
        asyncio.run(HeadraceGenerator(client, "guess", skyrl_task).generate(inputs))
    trainer = Trainer()
    vars(trainer.args).update(requested)
    with pytest.raises(InvalidRequest, match=f"GRPOConfig {message}"):
        rollout_func(client, "guess", task)(["a", "a"], trainer)
    assert not served.requests_to(SUBMIT)


def test_values_of_a_trainer_that_change_nothing_are_accepted(served: StubServer, client: Client) -> None:
    inputs = generator_input(sampling_params={"top_k": -1, "min_p": 0.0, "top_p": 1.0, "repetition_penalty": 1.0})
    asyncio.run(HeadraceGenerator(client, "guess", skyrl_task).generate(inputs))
    assert served.requests_to(SUBMIT)


def test_episodes_with_logprobs_before_temperature_are_given_back(stub: StubServer, client: Client) -> None:
    segment = make_segment(temperature=0.7)
    stub.on("GET /v1/runs/guess", ok(run_status(spec={"sampling": {"temperature": 0.7}, "max_staleness": 0})))
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1"])))
    stub.on(PULL, batch(body([make_trajectory(segments=[segment])])))
    stub.on(NACK, ok({}))
    inputs = generator_input(
        prompts=["a"], env_classes=["echo"], env_extras=None, trajectory_ids=None, sampling_params=None
    )
    with pytest.raises(InvalidRequest, match=r"sampled at temperature 0\.7"):
        asyncio.run(HeadraceGenerator(client, "guess", lambda *_: task("x")).generate(inputs))
    assert stub.requests_to(NACK)


# G24 ------------------------------------------------------------------------------------------------------------


def g24_segments(rewards: tuple[float, ...]) -> list[Segment]:
    return [
        make_segment(spans=[(shape.start, shape.end)], length=shape.length, rewards=[reward], salt=k)
        for k, (shape, reward) in enumerate(zip(EPISODE, rewards, strict=True))
    ]


@pytest.fixture
def g24(stub: StubServer, client: Client) -> list[EpisodeTokens]:
    """The three rows of G24 as separate episodes, for a trainer that takes one row per episode."""
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1"])))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="b", version="0.3")))
    segments = g24_segments((0.5, -0.25, 2.0))
    stub.on(PULL, batch(body([make_trajectory(number=k, segments=[of]) for k, of in enumerate(segments, 1)])))
    return roll_out(client, "guess", [PromptGroup(task("a"), 3)]).episodes[0]


def test_mask_and_logprobs_are_at_each_rows_own_tokens(g24: list[EpisodeTokens]) -> None:
    for shape, episode, segment in zip(EPISODE, g24, g24_segments((0.5, -0.25, 2.0)), strict=True):
        assert len(episode.prompt_ids) == shape.start
        assert [*episode.prompt_ids, *episode.response_ids] == segment.token_ids.tolist()
        assert episode.mask == [1] * (shape.end - shape.start)
        assert episode.logprobs == segment.logprobs[shape.start : shape.end].tolist()
    assert [sum(episode.mask) for episode in g24] == [5, 20, 3]


def test_rewards_are_at_the_last_token_of_each_row_and_nowhere_else(g24: list[EpisodeTokens]) -> None:
    assert [[(k, value) for k, value in enumerate(episode.rewards) if value] for episode in g24] == [
        [(4, 0.5)],
        [(19, -0.25)],
        [(2, 2.0)],
    ]


def test_an_episode_of_three_rows_is_refused(stub: StubServer, client: Client) -> None:
    segments = [
        make_segment(spans=[(shape.start, shape.end)], length=shape.length, indices=[k], terminated=k == 2, salt=k)
        for k, shape in enumerate(EPISODE)
    ]
    stub.on(SUBMIT, ok(messages.SubmitGroupsReply(epoch=1, groups=["g1"])))
    stub.on(PULL, batch(body([make_trajectory(segments=segments)])))
    stub.on(NACK, ok({}))
    with pytest.raises(InvalidRequest, match="has several rows, but this trainer takes only one"):
        roll_out(client, "guess", [PromptGroup(task("a"), 1)])
