"""The flat arrays that estimators take, collected from trajectories.

* An agent episode is one agent's turns in one trajectory, in the order of the episode, over all its segments.
* Returns cover all turns of an agent episode; only turns of rows are counted.
* An agent episode without rows is omitted, such as that of a frozen opponent.
* A failed trajectory is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.errors import InvalidRequest
from headrace.estimators import I64, Bools, Experience
from headrace.trajectory import Task
from headrace.wire.codec import TrajectoryHead


class GroupInput(NamedTuple):
    """A group to serve. ``members``: head and record size in bytes of each; ``expected``: the requested group size."""

    id: str
    task: Task
    expected: int
    members: Sequence[tuple[TrajectoryHead, int]]


class AgentEpisodes(NamedTuple):
    """All agent episodes of some groups, and their rows. In shapes, ``episodes`` counts agent episodes.

    ``experience``: the flat turns. ``cells``: (group number, agent) by the numbers in ``experience.groups``.
    ``trajectories`` i64[episodes]: number of the trajectory; ``terminated`` bool[episodes]: the environment ended the
    episode. ``row_turns`` i64[row turns]: positions of the rows' turns in the flat arrays, row by row. The columns
    ``row_*`` i64[rows]: ``row_turn_counts``, ``row_trajectory``, ``row_segment``, ``row_tokens``, ``row_group``.
    """

    experience: Experience
    cells: list[tuple[int, str]]
    trajectories: I64
    terminated: Bools
    row_turns: I64
    row_turn_counts: I64
    row_trajectory: I64
    row_segment: I64
    row_tokens: I64
    row_group: I64


class _Row(NamedTuple):
    turns: int
    trajectory: int
    segment: int
    tokens: int
    group: int


def collect_agent_episodes(groups: Sequence[GroupInput]) -> AgentEpisodes:
    """Collect the turns of all members in flat arrays. Raises InvalidRequest for a failed or cancelled member."""
    collector = _Collector()
    for number, group in enumerate(groups):
        for head, _ in group.members:
            if head.status not in ("finished", "truncated"):
                raise InvalidRequest(
                    f"Trajectory {head.id} of group {group.id} is {head.status} and cannot be in a batch.",
                    hint="Serve the group without it, or top the group up.",
                )
            collector.add(number, head)
    return collector.finish([group.expected for group in groups])


class _Collector:
    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.trained: list[bool] = []
        self.offsets = [0]
        self.cells: dict[tuple[int, str], int] = {}
        self.cell_of: list[int] = []
        self.trajectory_of: list[int] = []
        self.terminated: list[bool] = []
        self.rows: list[_Row] = []
        self.row_turns: list[int] = []
        self.members = 0

    def add(self, group: int, head: TrajectoryHead) -> None:
        if not self._add_plain(group, head):
            self._add_any(group, head)
        self.members += 1

    def _add_plain(self, group: int, head: TrajectoryHead) -> bool:
        """Add the most common form of trajectory, one row with consecutive turns, at a third of the cost.

        Returns false for any other form.
        """
        if len(head.segments) != 1:
            return False
        (segment,) = head.segments
        turns, begin = segment.turns, len(self.rewards)
        if not segment.train or not turns or [turn.index for turn in turns] != list(range(len(turns))):
            return False
        self.rewards += [turn.reward for turn in turns]
        self.tokens += [turn.end - turn.start for turn in turns]
        end = len(self.rewards)
        self.trained += [True] * len(turns)
        self.row_turns += range(begin, end)
        self._end_agent_episode(group, segment.agent, head)
        self.rows.append(_Row(len(turns), self.members, 0, segment.length, group))
        return True

    def _end_agent_episode(self, group: int, agent: str, head: TrajectoryHead) -> None:
        self.offsets.append(len(self.rewards))
        self.cell_of.append(self.cells.setdefault((group, agent), len(self.cells)))
        self.trajectory_of.append(self.members)
        self.terminated.append(head.status == "finished")

    def _add_any(self, group: int, head: TrajectoryHead) -> None:
        # A segment in which the policy never acted has nothing to train on, and is not a row.
        learners = dict.fromkeys(segment.agent for segment in head.segments if segment.train and segment.turns)
        position: dict[int, int] = {}
        for agent in learners:
            turns = [
                (turn.index, turn.reward, turn.end - turn.start, segment.train)
                for segment in head.segments
                if segment.agent == agent
                for turn in segment.turns
            ]
            turns.sort()
            for index, reward, tokens, trained in turns:
                position[index] = len(self.rewards)
                self.rewards.append(reward)
                self.tokens.append(tokens)
                self.trained.append(trained)
            self._end_agent_episode(group, agent, head)
        for number, segment in enumerate(head.segments):
            if segment.train and segment.turns:
                self.rows.append(_Row(len(segment.turns), self.members, number, segment.length, group))
                self.row_turns.extend(position[turn.index] for turn in segment.turns)

    def finish(self, expected: Sequence[int]) -> AgentEpisodes:
        cells = list(self.cells)
        columns = np.array(self.rows, np.int64).reshape(-1, len(_Row._fields)).T.copy()
        return AgentEpisodes(
            Experience(
                rewards=np.array(self.rewards, np.float64),
                tokens=np.array(self.tokens, np.int64),
                offsets=np.array(self.offsets, np.int64),
                groups=np.array(self.cell_of, np.int64),
                trained=np.array(self.trained, np.bool_),
                expected=np.array([expected[group] for group, _ in cells], np.int64),
            ),
            cells,
            np.array(self.trajectory_of, np.int64),
            np.array(self.terminated, np.bool_),
            np.array(self.row_turns, np.int64),
            *columns,
        )
