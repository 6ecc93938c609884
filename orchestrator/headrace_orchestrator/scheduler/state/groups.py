"""Episodes and groups: their states, and the events that change them.

* An illegal move raises with the history before it.
* Terminal is terminal: no state leads out of ``finished``, ``truncated``, ``failed``, ``cancelled`` or ``vanished``.
* A complete group keeps only the parts of its members that batches need; memory grows little with the stored data.
* A history keeps its last steps.

Episodes:

==========  ==========================================  ================================  =============================
state       meaning                                     moved by                          to
==========  ==========================================  ================================  =============================
queued      waits for a slot                            Dispatched                        leased
                                                        EpisodeEnded (a late result, or   finished, truncated, failed,
                                                        a quarantine, or its group is     cancelled
                                                        retired)
                                                        GroupRetired, GroupCut,           vanished (if never dispatched)
                                                        TaskQuarantined
leased      at a worker, under an attempt lease         AttemptEnded                      queued
                                                        AttemptCancelled                  cancelling
                                                        EpisodeEnded                      any terminal state
cancelling  at a worker, and being cancelled            EpisodeEnded                      any terminal state
finished    the environment ended it
truncated   a budget ended it
failed      something broke, for good
cancelled   its result is not needed any more
vanished    was never dispatched and never will be; has no trajectory record
==========  ==========================================  ================================  =============================

Groups:

========  ============================================  ================================  =============================
state     meaning                                       moved by                          to
========  ============================================  ================================  =============================
open      members are queued or at workers              EpisodeEnded, TaskQuarantined     eligible (all are over)
                                                        GroupCut
                                                        GroupRetired                      retired
eligible  complete; may be put in a batch               BatchFormed                       leased
                                                        GroupRetired                      retired
leased    in an open batch                              BatchAcked                        acked, eligible (uses remain)
                                                        BatchDissolved                    eligible
acked     its last use was acked                        GroupRetired                      retired
retired   over; its credit and bytes are given back
========  ============================================  ================================  =============================
"""

from __future__ import annotations

from typing import Literal

from headrace.errors import InternalError
from headrace.reward_precision import are_equal
from headrace.trajectory import Failure, Task, Version
from headrace_orchestrator.scheduler.events import PARTIAL, USABLE, EpisodeEnded
from headrace_orchestrator.scheduler.state.compact_ids import pack, unpack
from headrace_orchestrator.scheduler.state.evaluations import Evaluation

EpisodeState = Literal["queued", "leased", "cancelling", "finished", "truncated", "failed", "cancelled", "vanished"]
GroupState = Literal["open", "eligible", "leased", "acked", "retired"]

TERMINAL: frozenset[EpisodeState] = frozenset({"finished", "truncated", "failed", "cancelled", "vanished"})
"""States that an episode never leaves."""

AT_WORKER: frozenset[EpisodeState] = frozenset({"leased", "cancelling"})
"""States in which a worker holds an attempt."""

COMPLETE: frozenset[GroupState] = frozenset({"eligible", "leased", "acked"})
"""States of a group whose members are all over and that is not retired."""

HISTORY_STEPS = 24
"""Maximum number of steps in a history: more than an error message needs."""

_ENDS: frozenset[EpisodeState] = frozenset({"finished", "truncated", "failed", "cancelled"})
_NONE: frozenset[EpisodeState] = frozenset()

EPISODE_MOVES: dict[EpisodeState, frozenset[EpisodeState]] = {
    "queued": _ENDS | {"leased", "vanished"},
    "leased": _ENDS | {"queued", "cancelling"},
    "cancelling": _ENDS,
    "finished": _NONE,
    "truncated": _NONE,
    "failed": _NONE,
    "cancelled": _NONE,
    "vanished": _NONE,
}

GROUP_MOVES: dict[GroupState, frozenset[GroupState]] = {
    "open": frozenset({"eligible", "retired"}),
    "eligible": frozenset({"leased", "retired"}),
    "leased": frozenset({"acked", "eligible"}),
    "acked": frozenset({"retired"}),
    "retired": frozenset(),
}


class Episode:
    """A try at a task, with its latest attempt."""

    __slots__ = (
        "attempt",
        "begun",
        "by_worker",
        "deadline",
        "failure",
        "group",
        "high",
        "history",
        "id",
        "low",
        "member",
        "nonce",
        "retries_used",
        "reward_errors",
        "rewards",
        "sampling_seed",
        "state",
        "trajectory",
        "version",
        "worker",
        "workers_lost",
    )

    def __init__(self, group: Group, id: str, member: int, sampling_seed: int) -> None:
        self.group = group
        self.id = id
        self.member = member
        self.sampling_seed = sampling_seed
        self.state: EpisodeState = "queued"
        self.history: list[tuple[str, str]] = []
        #: The latest attempt's number; 0 if it was never dispatched. Its nonce and worker outlive its lease.
        self.attempt = 0
        self.nonce = ""
        self.worker = ""
        self.version: Version | None = None
        self.deadline = 0.0
        #: Soft: whether its worker has listed the latest attempt.
        self.begun = False
        #: Attempts that drew on the retry budget.
        self.retries_used = 0
        #: Attempts that were lost with workers that fell silent.
        self.workers_lost = 0
        # Fields of its ``EpisodeEnded`` event.
        self.low: Version | None = None
        self.high: Version | None = None
        self.rewards: dict[str, float] = {}
        self.reward_errors: dict[str, float] = {}
        self.trajectory = ""
        self.failure: Failure | None = None
        self.by_worker = False

    def require_move(self, to: EpisodeState, cause: str) -> None:
        """Raise InternalError, with the history, if the table does not allow a move."""
        if to not in EPISODE_MOVES[self.state]:
            history = " → ".join(f"{state} ({cause})" for state, cause in self.history)
            raise InternalError(
                f"Episode {self.id} (attempt {self.attempt}) cannot go from {self.state} to {to} by {cause}. "
                f"Its history: queued → {history}."
            )

    def move(self, to: EpisodeState, cause: str) -> None:
        """Change the state; raises as ``require_move`` does."""
        self.require_move(to, cause)
        _append_step(self.history, to, cause)
        self.state = to

    def end(self, event: EpisodeEnded) -> None:
        """Store the result."""
        self.move(event.status, "EpisodeEnded")
        self.low = event.low
        self.high = event.high or event.low
        self.rewards = event.rewards
        self.reward_errors = event.reward_errors
        self.trajectory = event.trajectory
        self.failure = event.failure
        self.by_worker = event.by_worker


def _append_step(history: list[tuple[str, str]], to: str, cause: str) -> None:
    history.append((to, cause))
    if len(history) > HISTORY_STEPS:
        del history[0]


class Group:
    """Episodes of one task whose returns are compared."""

    __slots__ = (
        "adapters",
        "added_members",
        "batch",
        "begun_at",
        "damaged",
        "dispatch_order",
        "evaluation",
        "failed_attempts",
        "first_prompt",
        "held_bytes",
        "history",
        "id",
        "kept_versions",
        "live",
        "longest_row",
        "members",
        "packed_trajectories",
        "position",
        "priority",
        "prompts_differ",
        "reason",
        "row_tokens",
        "rowless",
        "run",
        "size",
        "state",
        "submitted",
        "task",
        "usable",
        "uses",
    )

    def __init__(
        self,
        run: str,
        id: str,
        task: Task,
        position: int,
        submitted: bool,
        evaluation: Evaluation | None,
    ) -> None:
        #: The name of its run.
        self.run = run
        self.id = id
        self.task = task
        self.position = position
        self.submitted = submitted
        self.evaluation = evaluation
        #: The frozen adapters that play in it, by agent.
        self.adapters: dict[str, str] = {}
        #: Its episodes; empty once it is complete. Then ``packed_trajectories`` holds the ids of its usable
        #: trajectories, in the order of its members, and ``kept_versions`` each of their versions once.
        self.members: list[Episode] = []
        self.packed_trajectories = pack(())
        self.kept_versions: tuple[Version, ...] = ()
        self.state: GroupState = "open"
        self.history: list[tuple[str, str]] = []
        #: Members that it was admitted with, and members that were added later.
        self.size = 0
        self.added_members = 0
        #: Members that are queued or at workers; members whose trajectories may enter a batch; and members that ended
        #: without a failure and have no row.
        self.live = 0
        self.usable = 0
        self.rowless = 0
        #: Soft: attempts of its members that failed.
        self.failed_attempts = 0
        #: Place in the order of dispatch; -1 until its first member is dispatched.
        self.dispatch_order = -1
        #: Soft: when its first member was dispatched, or a later restart.
        self.begun_at = 0.0
        self.uses = 0
        #: Its priority in a prioritized draw.
        self.priority = 1.0
        self.row_tokens = 0
        self.longest_row = 0
        self.held_bytes = 0
        #: Results of members were lost in the log: it is served with the rest of them, and never topped up.
        self.damaged = False
        #: Fingerprint of the first prompt of its first member that ended, and whether that of another one differs.
        self.first_prompt = ""
        self.prompts_differ = False
        self.batch = ""
        self.reason = ""

    def require_move(self, to: GroupState, cause: str) -> None:
        """Raise InternalError, with the history, if the table does not allow a move."""
        if to not in GROUP_MOVES[self.state]:
            history = " → ".join(f"{state} ({cause})" for state, cause in self.history)
            raise InternalError(
                f"Group {self.id} cannot go from {self.state} to {to} by {cause}. Its history: open → {history}."
            )

    def move(self, to: GroupState, cause: str) -> None:
        """Change the state; raises as ``require_move`` does."""
        self.require_move(to, cause)
        _append_step(self.history, to, cause)
        self.state = to

    @property
    def only_failed(self) -> bool:
        """True if attempts of its members failed and none gave a usable record."""
        return self.failed_attempts > 0 and not self.usable

    def compare_prompt(self, first_prompt: str) -> bool:
        """Note the first prompt of a member that ended; returns True where it is the first one that differs."""
        self.first_prompt = self.first_prompt or first_prompt
        if self.prompts_differ or not first_prompt or first_prompt == self.first_prompt:
            return False
        self.prompts_differ = True
        return True

    @property
    def cut(self) -> bool:
        """True if it is served without the members that were live at its deadline."""
        return self.reason == PARTIAL

    def versions(self) -> list[Version]:
        """Versions that count for its staleness: those of its usable rows, and those that live attempts began with."""
        versions = list(self.kept_versions)
        for episode in self.members:
            if episode.state in USABLE and episode.rewards:
                if episode.low is not None:
                    versions.append(episode.low)
                if episode.high is not None:
                    versions.append(episode.high)
            elif episode.state == "leased" and episode.version is not None:
                versions.append(episode.version)
        return versions

    @property
    def trajectories(self) -> list[str]:
        """Ids of the usable trajectories of a complete group, in the order of its members."""
        return unpack(self.packed_trajectories)

    def release_members(self) -> None:
        """Drop the members of a complete group, except the parts that batches need."""
        self.kept_versions = tuple(dict.fromkeys(self.versions()))
        self.packed_trajectories = pack([episode.trajectory for episode in self._usable_members()])
        self.members = []

    def _usable_members(self) -> list[Episode]:
        """Members whose trajectories may enter a batch: they ended without a failure, and have a row."""
        return [episode for episode in self.members if episode.state in USABLE and episode.rewards]

    def has_zero_variance(self) -> bool:
        """True if each agent has rows in at least two members, all with the same rewards up to rounding errors."""
        usable = self._usable_members()
        rewards = [episode.rewards for episode in usable]
        if rewards and rewards.count(rewards[0]) == len(rewards):
            return len(rewards) > 1
        for agent in {agent for one in rewards for agent in one}:
            values = [one[agent] for one in rewards if agent in one]
            if len(values) < 2:
                return False
            errors = [episode.reward_errors.get(agent, 0.0) for episode in usable if agent in episode.rewards]
            if not are_equal(values, errors):
                return False
        return bool(usable)
