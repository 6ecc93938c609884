"""Batches for tests of layouts, and the episodes of case G24."""

from __future__ import annotations

from typing import NamedTuple

from headrace.batch.batch import Batch, Row
from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Segment, Task, Trajectory, Version
from headrace.wire.codec import decode_head, encode
from tests.builders import make_segment, make_trajectory


def rows_of(trajectories: list[Trajectory], *, name: str) -> list[Row]:
    return list(batch_of(trajectories, name=name).rows)


def batch_of(trajectories: list[Trajectory], *, name: str, version: Version = Version(0, 0)) -> Batch:  # noqa: B008
    return Batch.parse(body_of(trajectories, name=name, version=version))


def body_of(trajectories: list[Trajectory], *, name: str, version: Version = Version(0, 0)) -> bytes:  # noqa: B008
    records = [encode(trajectory) for trajectory in trajectories]
    members = [(decode_head(record), len(record)) for record in records]
    group = GroupInput("g", Task(environment="test:Echo", seed=0), len(members), members)
    spec = EstimatorSpec(name=name, eps=0.0, ddof=0)  # type: ignore[arg-type]
    head = build_head(batch="b", run="run", estimator=spec, version=version, groups=[group])
    return head + b"".join(records)


class Shape(NamedTuple):
    length: int
    start: int
    end: int


EPISODE = (Shape(45, 40, 45), Shape(30, 10, 30), Shape(203, 200, 203))
SIBLING = Shape(9, 2, 9)


def g24_trajectories(rewards: tuple[float, float, float], sibling_reward: float) -> list[Trajectory]:
    segments: list[Segment] = [
        make_segment(
            spans=[(shape.start, shape.end)],
            length=shape.length,
            rewards=[reward],
            indices=[k],
            terminated=k == 2,
            salt=k,
        )
        for k, (shape, reward) in enumerate(zip(EPISODE, rewards, strict=True))
    ]
    sibling = make_segment(
        spans=[(SIBLING.start, SIBLING.end)], length=SIBLING.length, rewards=[sibling_reward], salt=5
    )
    return [make_trajectory(number=1, segments=segments), make_trajectory(number=2, segments=[sibling])]


def g24_rows(rewards: tuple[float, float, float], sibling_reward: float, *, name: str) -> list[Row]:
    return rows_of(g24_trajectories(rewards, sibling_reward), name=name)
