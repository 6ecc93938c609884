"""Episodes and groups: their states, and who may move them.

* An illegal move raises with the history of what led there.
* Terminal is terminal: no state leads out of ``finished``, ``truncated``, ``failed``, ``cancelled`` or ``vanished``.
* Of the members of a complete group only what batches are made of is kept; memory grows little with what is stored.
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
cancelling  at a worker that is told to stop            EpisodeEnded                      any terminal state
finished    the environment ended it
truncated   a budget ended it
failed      something broke, for good
cancelled   nobody wanted it any more
vanished    was never dispatched and never will be; has no record
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

from typing import TYPE_CHECKING, Literal

from headrace.errors import InternalError
from headrace.trajectory import Failure, Task, Version
from headrace_orchestrator.scheduler.events import PARTIAL
from headrace_orchestrator.scheduler.state.compact_ids import pack, unpack

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.events import EpisodeEnded
    from headrace_orchestrator.scheduler.state.evaluations import Evaluation
    from headrace_orchestrator.scheduler.state.run import Run

EpisodeState = Literal["queued", "leased", "cancelling", "finished", "truncated", "failed", "cancelled", "vanished"]
GroupState = Literal["open", "eligible", "leased", "acked", "retired"]

TERMINAL: frozenset[EpisodeState] = frozenset({"finished", "truncated", "failed", "cancelled", "vanished"})
"""States that an episode never leaves."""

USABLE: frozenset[EpisodeState] = frozenset({"finished", "truncated"})
"""States whose records enter batches."""

AT_WORKER: frozenset[EpisodeState] = frozenset({"leased", "cancelling"})
"""States in which a worker holds an attempt."""

COMPLETE: frozenset[GroupState] = frozenset({"eligible", "leased", "acked"})
"""States of a group whose members are all over and that is not retired."""

HISTORY_STEPS = 24
"""Steps of a history that are kept: more than an error message needs."""

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
    """One try at a task, with its latest attempt."""

    __slots__ = (
        "attempt",
        "deadline",
        "draws",
        "failure",
        "group",
        "high",
        "history",
        "id",
        "losses",
        "low",
        "member",
        "nonce",
        "rewards",
        "sampling_seed",
        "state",
        "trajectory",
        "version",
        "worker",
        "worker_wrote",
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
        #: Attempts that drew on the retry budget.
        self.draws = 0
        #: Attempts that went with workers that fell silent.
        self.losses = 0
        # What the terminal record said.
        self.low: Version | None = None
        self.high: Version | None = None
        self.rewards: dict[str, float] = {}
        self.trajectory = ""
        self.failure: Failure | None = None
        self.worker_wrote = False

    def require(self, to: EpisodeState, cause: str) -> None:
        """Raise InternalError, with the history, where the table does not allow a move."""
        if to not in EPISODE_MOVES[self.state]:
            history = " → ".join(f"{state} ({cause})" for state, cause in self.history)
            raise InternalError(
                f"Episode {self.id} (attempt {self.attempt}) cannot go from {self.state} to {to} by {cause}. "
                f"Its history: queued → {history}."
            )

    def move(self, to: EpisodeState, cause: str) -> None:
        """Change the state; raises as ``require`` does."""
        self.require(to, cause)
        _append_step(self.history, to, cause)
        self.state = to

    def end(self, event: EpisodeEnded) -> None:
        """Take its terminal record."""
        self.move(event.status, "EpisodeEnded")
        self.low = event.low
        self.high = event.high or event.low
        self.rewards = event.rewards
        self.trajectory = event.trajectory
        self.failure = event.failure
        self.worker_wrote = event.by_worker


def _append_step(history: list[tuple[str, str]], to: str, cause: str) -> None:
    history.append((to, cause))
    if len(history) > HISTORY_STEPS:
        del history[0]


class Group:
    """Episodes of one task whose returns are compared."""

    __slots__ = (
        "adapters",
        "batch",
        "damaged",
        "evaluation",
        "extra",
        "held_bytes",
        "history",
        "id",
        "kept",
        "live",
        "longest_row",
        "members",
        "order",
        "position",
        "priority",
        "reason",
        "records",
        "row_tokens",
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
        run: Run,
        id: str,
        task: Task,
        position: int,
        submitted: bool,
        evaluation: Evaluation | None,
    ) -> None:
        self.run = run
        self.id = id
        self.task = task
        self.position = position
        self.submitted = submitted
        self.evaluation = evaluation
        #: The frozen adapters that play in it, by agent.
        self.adapters: dict[str, str] = {}
        #: Its episodes; none once it is complete. Then ``records`` packs the ids of its usable trajectories, in the
        #: order of its members, and ``kept`` are their versions, each once.
        self.members: list[Episode] = []
        self.records = pack(())
        self.kept: tuple[Version, ...] = ()
        self.state: GroupState = "open"
        self.history: list[tuple[str, str]] = []
        #: Members that it was admitted with; ``extra`` counts those that were added.
        self.size = 0
        self.extra = 0
        #: Members that are queued or at workers, and members whose records may enter a batch.
        self.live = 0
        self.usable = 0
        #: Place in the order of dispatch; -1 until its first member is dispatched.
        self.order = -1
        self.uses = 0
        #: What a prioritized draw goes by.
        self.priority = 1.0
        self.row_tokens = 0
        self.longest_row = 0
        self.held_bytes = 0
        #: Records of members were lost in the log: it is served with what is left of it, and never topped up.
        self.damaged = False
        self.batch = ""
        self.reason = ""

    def require(self, to: GroupState, cause: str) -> None:
        """Raise InternalError, with the history, where the table does not allow a move."""
        if to not in GROUP_MOVES[self.state]:
            history = " → ".join(f"{state} ({cause})" for state, cause in self.history)
            raise InternalError(
                f"Group {self.id} cannot go from {self.state} to {to} by {cause}. Its history: open → {history}."
            )

    def move(self, to: GroupState, cause: str) -> None:
        """Change the state; raises as ``require`` does."""
        self.require(to, cause)
        _append_step(self.history, to, cause)
        if self.evaluation is None:
            self.run.states[self.state] -= 1
            self.run.states[to] += 1
        self.state = to

    @property
    def cut(self) -> bool:
        """Whether it is served without the members that were live at its deadline."""
        return self.reason == PARTIAL

    def versions(self) -> list[Version]:
        """Versions that count for its staleness: those of its usable rows, and those that live attempts began with."""
        found = list(self.kept)
        for episode in self.members:
            if episode.state in USABLE:
                if episode.low is not None:
                    found.append(episode.low)
                if episode.high is not None:
                    found.append(episode.high)
            elif episode.state == "leased" and episode.version is not None:
                found.append(episode.version)
        return found

    @property
    def trajectories(self) -> list[str]:
        """Ids of the usable trajectories of a complete group, in the order of its members."""
        return unpack(self.records)

    def put_away(self) -> None:
        """Let the members of a complete group go; what batches are made of is kept."""
        self.kept = tuple(dict.fromkeys(self.versions()))
        self.records = pack([episode.trajectory for episode in self.members if episode.state in USABLE])
        self.members = []

    def zero_variance(self) -> bool:
        """Whether at least two usable members have the same rewards, agent by agent."""
        rewards = [episode.rewards for episode in self.members if episode.state in USABLE]
        return len(rewards) > 1 and all(other == rewards[0] for other in rewards[1:])
