"""The state of one run, and the queries that decisions need. The transitions in ``apply`` change it.

Soft fields (deadlines, what the learner does) are marked; a replay resets them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.errors import EstimatorFailed
from headrace.estimators import NONE, stored_estimator
from headrace.runspec import RunSpec
from headrace.trajectory import Failure, Task, Version
from headrace.wire.messages import Weights
from headrace_orchestrator.scheduler.events import EpisodeEnded
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.scheduler.state.admission.concurrency_cap import ConcurrencyCap
from headrace_orchestrator.scheduler.state.admission.failure_backoff import FailureBackoff
from headrace_orchestrator.scheduler.state.admission.failure_streak import FailureStreak
from headrace_orchestrator.scheduler.state.admission.ledger import Ledger
from headrace_orchestrator.scheduler.state.admission.task_sources import source_of, task_key
from headrace_orchestrator.scheduler.state.batches import ClosedBatch, LearnerSessions, OpenBatch
from headrace_orchestrator.scheduler.state.eligible.draw_weights import equal_weight, weight_function
from headrace_orchestrator.scheduler.state.eligible.eligible_index import EligibleIndex
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter, kinds_of
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import Episode, Group
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.scheduler.state.task_shares import TaskShares
from headrace_orchestrator.scheduler.state.versions import Versions, span_of

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED = 4096
"""Closed batches, ended submitted groups and quarantined tasks that are remembered, so that a late repeat gets a typed
answer."""

ADMIT_AHEAD = 1024
"""Queued episodes from which on admission waits although credit is left: more than any worker requests at once, and
few enough to be admitted without delaying other requests."""

PROMPT_TOO_LONG, NOT_TRAINED = "prompt-too-long", "not-trained"
"""Causes of an episode without a row: its first prompt left no room for a turn; no trained agent had a turn."""

REMEMBERED_EVALUATIONS = 256
"""Evaluations whose lines are kept in memory; the trajectories of older ones are in the store."""

REMEMBERED_REWINDS = 256
"""Rewinds whose keys are remembered, so that a repeated request opens no other lineage."""

REMEMBERED_LINES = 65_536
"""Episodes of these evaluations: a few dozen megabytes, in memory and in every control state."""

REPLACED_BATCHES = 3
"""Batches of zero-variance groups that are replaced for one batch unless the run sets a number. A policy that solves or
fails all of its tasks then gets these groups instead of starving."""

RECENT_REWARDS = 256
"""Number of latest results in the mean reward."""

MIN_UNUSABLE = 256
"""Minimum number of groups in a row of which none could be used, from which on a run is slowed down: enough that a
mixture in which every tenth task can be used is not."""

RECENT_ATTEMPTS = 16
"""Number of latest attempts that the reason "the policy is failing" considers."""


MISSED_HEARTBEATS = 3
"""Heartbeats of a learner that may be missing before it counts as silent."""

MAX_LOSSES_PER_ATTEMPT = 10
"""Lost workers that an episode survives, for each attempt of its budget: more than any spot market causes."""

REMEMBERED_LOSSES = 256
"""Latest attempts lost with their workers, for the reason that counts them: several large workers."""


class LostAttempt(NamedTuple):
    """An attempt that was lost with its worker: the time, the worker's process and the environment."""

    at: float
    worker: str
    environment: str


class LearnerActivity:
    """A learner's last report and requests; soft."""

    __slots__ = ("doing", "heard_at", "heartbeat_s", "since", "waiting_until")

    def __init__(self, now: float) -> None:
        self.doing = "waiting"
        #: When that activity began, and when the learner sent its last request.
        self.since = self.heard_at = now
        #: The interval of its heartbeats; 0 if it promised none.
        self.heartbeat_s = 0.0
        self.waiting_until = 0.0

    def begin(self, doing: str, now: float) -> None:
        """Note the learner's activity."""
        self.doing, self.since = doing, now

    def is_silent(self, batch_lease_s: float, now: float) -> bool:
        """True if nothing was heard from it for too long; one that waits for a batch keeps its connection open."""
        limit_s = MISSED_HEARTBEATS * self.heartbeat_s or batch_lease_s
        return now >= self.waiting_until and now - self.heard_at > limit_s


class Run:
    """A run."""

    def __init__(
        self, spec: RunSpec, bounds: SharedBounds, episodes: dict[str, Episode], plain_spec: dict[str, Any]
    ) -> None:
        self.spec = spec
        #: Episodes of all runs by id, of the groups that are not complete.
        self.episodes = episodes
        #: The spec as plain values, encoded as MessagePack: a tree of a large one would take a gigabyte.
        self.plain_spec = msgspec.msgpack.encode(plain_spec)
        self.name = spec.name
        self.capabilities = spec.needed_capabilities
        self.source = source_of(spec)
        self.has_own_source = spec.source != "learner"
        self.task_kinds = kinds_of(spec)
        self.closed = False
        self.versions = Versions()
        #: The versions that rewinds opened, by the keys of their requests.
        self.rewinds: dict[str, Version] = {}
        self.policy_servers = PolicyServersState(spec.policy.endpoints)
        self.ledger = Ledger(spec, bounds)
        #: Position of the next group of the run's own source.
        self.position = 0
        #: Positions of a fixed list whose groups were retired unserved although no task failed: they are drawn again.
        self.returned: dict[int, None] = {}
        #: Groups drawn and groups trained on, by kind of task.
        self.shares = TaskShares()
        #: Groups that were admitted, from any source.
        self.admitted = 0
        #: Groups in flight, and retired ones of which a worker still holds attempts.
        self.groups: dict[str, Group] = {}
        #: The open ones of them, in order of admission.
        self.open_groups: dict[str, Group] = {}
        #: Those that any pull may take and that were dispatched, in the order of dispatch.
        self.in_progress: OrderedDict[str, Group] = OrderedDict()
        #: Groups that need a decision; empty between commands.
        self.undecided: dict[str, Group] = {}
        #: Queued episodes, first to go first. Entries that are not queued any more are skipped, and dropped at the next
        #: dispatch.
        self.queue: deque[Episode] = deque()
        self.evaluation_queue: deque[Episode] = deque()
        self.queued = 0
        self.evaluation_queued = 0
        self.leased = 0
        self.evaluation_leased = 0
        #: Eligible groups that any pull may take, and those that only a pull which names them may.
        self.eligible = EligibleIndex(spec.max_staleness, weight_function(spec.selection))
        self.eligible_by_name = EligibleIndex(spec.max_staleness, equal_weight)
        #: Groups by state, without evaluations; retired ones are counted in ``retired``.
        self.group_states: Counter[str] = Counter()
        #: Open groups that any pull may take once they are complete.
        self.open = 0
        self.next_dispatch_order = 0
        self.batches: dict[str, OpenBatch] = {}
        self.closed_batches: dict[str, ClosedBatch] = {}
        #: Also numbers the draws: each batch is drawn with random numbers of its own.
        self.batches_formed = 0
        self.batches_acked = 0
        #: Groups in batches, by the rules that selected them; see ``messages.RunStatus``.
        self.selected: Counter[str] = Counter()
        #: Sessions by learner, of learners that leased batches.
        self.sessions: dict[str, LearnerSessions] = {}
        self.evaluations: dict[str, Evaluation] = {}
        #: Evaluations that are not over.
        self.active_evaluations: dict[str, Evaluation] = {}
        #: The reasons why submitted groups ended, by id.
        self.submitted_ends: dict[str, str] = {}
        #: Last failures of those that ended by a failure.
        self.submitted_failures: dict[str, str] = {}
        self.retired: Counter[str] = Counter()
        self.stale_since_batch = 0
        #: Zero-variance groups that were kept from pulls since the last batch, and tokens of their rows.
        self.zero_variance_since_batch = 0
        self.zero_variance_tokens = 0
        #: Groups that were retired since the last batch because one of their rows fits into no bin.
        self.too_long_since_batch = 0
        #: Groups that went stale since the last one that became eligible, and groups that could not be used.
        self.stale_in_row = 0
        self.unusable_in_row = 0
        #: Episodes without a failure and without a row: all, and those since the last batch by cause.
        self.rowless = 0
        self.rowless_since_batch: Counter[str] = Counter()
        #: Groups since the last batch whose members had different first prompts, by environment.
        self.prompts_differ_since_batch: Counter[str] = Counter()
        self.episode_ends: Counter[str] = Counter()
        self.rewards: deque[float] = deque(maxlen=RECENT_REWARDS)
        #: Failures of the last attempts; None for an attempt that did not fail.
        self.recent_failures: deque[Failure | None] = deque(maxlen=RECENT_ATTEMPTS)
        #: Attempts that each task killed, by task key, and the quarantined tasks: all of a list, and the latest others.
        #: A mixture does not draw an older one again.
        self.kills: dict[bytes, list[str]] = {}
        self.quarantined: dict[bytes, Task] = {}
        #: Soft: when groups of which a member has ended are cut, earliest first.
        self.cut_deadlines: dict[str, float] = {}
        #: Soft: more groups may wait to be retired than one command retires; the next tick continues.
        self.retiring = False
        #: Soft: the error of the run's estimator where it could not compute the last batch; else empty.
        self.estimator_failure = ""
        #: Soft: the error of the run's selection rule where it could not choose the last batch; else empty.
        self.selection_failure = ""
        #: Soft.
        self.lost_attempts: deque[LostAttempt] = deque(maxlen=REMEMBERED_LOSSES)
        self.failure_streak = FailureStreak()
        self.failure_backoff = FailureBackoff()
        self.concurrency_cap = ConcurrencyCap()
        self.learners: dict[str, LearnerActivity] = {}

    # Policy servers and evaluations ---------------------------------------------------------------------------

    @property
    def versions_behind(self) -> int:
        """Versions between the one that the policy servers serve and the current one."""
        behind = self.versions.distance(self.policy_servers.served)
        return self.spec.max_staleness + 1 if behind is None else behind

    @property
    def outdated(self) -> bool:
        """True if the version that the policy servers serve is so old that its samples would be stale at once."""
        return self.versions_behind > self.spec.max_staleness

    @property
    def evaluation_ready(self) -> int:
        """Queued episodes of evaluations whose version is served. Those of a version that is not loaded yet wait."""
        if all(evaluation.version == self.policy_servers.held for evaluation in self.active_evaluations.values()):
            return self.evaluation_queued
        return sum(episode.state == "queued" and self.is_ready(episode) for episode in self.evaluation_queue)

    def is_ready(self, episode: Episode) -> bool:
        """True if the policy servers hold the version of an evaluation's episode."""
        servers, evaluation = self.policy_servers, episode.group.evaluation
        return servers.target is None or evaluation is None or evaluation.version == servers.held

    def evaluation_groups(self, evaluation: Evaluation) -> list[Group]:
        """The groups of an active evaluation that are not over."""
        return [self.groups[id] for id in evaluation.groups if id in self.groups]

    # Failures -------------------------------------------------------------------------------------------------

    @property
    def has_outage(self) -> bool:
        """True if its failures since the last usable record look like an outage."""
        streak = self.failure_streak
        return streak.attempts > 0 and streak.is_outage(self.spec.group_size, self.leased + self.evaluation_leased)

    @property
    def is_slowed(self) -> bool:
        """True if it gets only single attempts."""
        return self.has_outage or self.makes_nothing_usable

    @property
    def makes_nothing_usable(self) -> bool:
        """True if its groups only go stale or would, or have nothing to train on. Where the service loads the weights,
        it knows the versions of the servers, and no attempt is needed to learn them."""
        would_go_stale = self.outdated and self.policy_servers.target is None
        return would_go_stale or self.only_goes_stale or self.only_makes_unusable

    @property
    def awaited_by_next_try(self) -> int:
        """Attempts at workers for which the next single attempt waits."""
        return self.leased + self.evaluation_leased if self.makes_nothing_usable else 0

    @property
    def only_goes_stale(self) -> bool:
        """True if more groups in a row went stale than the ledger holds twice, and than failures are remembered."""
        return self.stale_in_row > max(self.recent_failures.maxlen or 0, 2 * self.ledger.capacity)

    @property
    def max_lost_workers(self) -> int:
        """Lost workers that an episode survives."""
        return MAX_LOSSES_PER_ATTEMPT * self.spec.retries.max_attempts

    @property
    def remembered_tasks(self) -> int:
        """Tasks whose kills and quarantine are remembered."""
        return REMEMBERED + len(self.spec.tasks or ())

    @property
    def only_makes_unusable(self) -> bool:
        """True if so many groups in a row could not be used that no other will follow soon: two passes of a list."""
        tasks = 0 if self.spec.tasks is None else len(self.spec.tasks)
        return self.unusable_in_row > max(MIN_UNUSABLE, 2 * self.ledger.capacity, 2 * tasks)

    def count_prompts_differ(self, environment: str) -> None:
        """Count a group whose members had different first prompts, unless the spec allows that."""
        if self.spec.first_prompts == "same":
            self.selected["prompts_differ"] += 1
            self.prompts_differ_since_batch[environment] += 1

    @property
    def compares_members(self) -> bool:
        """True if the returns of a group's members are compared, by the estimator or by the learner itself; as by
        default if the estimator's package is gone."""
        name = self.spec.estimator.name
        try:
            return name == NONE or stored_estimator(name).compares
        except EstimatorFailed:
            return True

    def is_incomparable(self, group: Group) -> bool:
        """True if the members of the group would be compared although they had different tasks."""
        return group.prompts_differ and self.spec.first_prompts == "same" and self.compares_members

    def count_rowless(self, event: EpisodeEnded) -> None:
        """Count an episode that has nothing to train on, by its cause."""
        self.rowless += 1
        self.rowless_since_batch[NOT_TRAINED if event.turns else PROMPT_TOO_LONG] += 1

    def is_quarantined(self, task: Task) -> bool:
        """True if too many attempts of the task failed."""
        return bool(self.quarantined) and task_key(task) in self.quarantined

    # Admission ------------------------------------------------------------------------------------------------

    def next_task(self) -> tuple[int, Task] | None:
        """Position and task of the next group of the run's own source, quarantined ones skipped; None at its end."""
        for position in self.returned:
            return self.source.next_task(position, ())
        return self.source.next_task(self.position, self.quarantined)

    @property
    def admits(self) -> bool:
        """True if credit, bytes and queue let another group in."""
        return self._has_room and not self.ledger.bounds.full

    @property
    def _has_room(self) -> bool:
        return self.queued < ADMIT_AHEAD and not self.closed and self.ledger.free > 0 and not self.ledger.own_full

    @property
    def held_back(self) -> bool:
        """True if a shared bound keeps it from admitting, or kept it since its last admission."""
        return self.ledger.bounds.exist and self._has_room and self.next_task() is not None

    @property
    def exhausted(self) -> bool:
        """True if a fixed list is at its end."""
        return self.spec.source == "list" and self.next_task() is None

    @property
    def done(self) -> bool:
        """True if no group will ever be served."""
        return self.done_for(EVERYTHING)

    def done_for(self, filter: GroupFilter) -> bool:
        """True if no group that fits will ever be served: closed, or a list at its end with too few groups left."""
        if self.closed:
            return True
        if not self.exhausted or self.open or self.batches:
            return False
        return not self.eligible.count(filter) or not self.spec.partial_batches

    # Groups ---------------------------------------------------------------------------------------------------

    def is_for_any_pull(self, group: Group) -> bool:
        """True if a pull that names no groups may take it: in a run with tasks of its own, not the submitted ones."""
        return not (group.evaluation is not None or (group.submitted and self.has_own_source))

    def learner_waits(self, now: float) -> bool:
        """True if a pull waits, or did a moment ago."""
        return any(learner.waiting_until > now for learner in self.learners.values())

    @property
    def begun(self) -> int:
        """Groups that any pull may take, and that were dispatched and not retired."""
        held = sum(len(batch.groups) for batch in self.batches_for_any_pull())
        return len(self.in_progress) + len(self.eligible) + held

    def index_of(self, group: Group) -> EligibleIndex:
        """The index that holds the group while it is eligible."""
        return self.eligible if self.is_for_any_pull(group) else self.eligible_by_name

    def bound_violation(self, group: Group) -> str:
        """``rewound`` or ``stale`` if its versions do not allow it to be served; else empty."""
        return self.versions.bound_violation(span_of(group.versions()), self.spec.max_staleness)

    def behind(self, group: Group) -> int | None:
        """Versions that its oldest row is behind; None if it has none yet, or is out of bound already."""
        distances = [self.versions.distance(version) for version in group.versions()]
        known = [distance for distance in distances if distance is not None]
        if not known or len(known) < len(distances) or max(known) > self.spec.max_staleness:
            return None
        return max(known)

    def needs_top_up(self, group: Group) -> bool:
        """True if a new member has to take the place of one that failed for good, or of one without a row beside
        others with rows: where no member has a row, no other is likely to."""
        hopeless = 0 if group.usable else group.rowless
        return (
            group.live + group.usable + hopeless < group.size
            and not group.cut
            and group.added_members < group.size
            and self.spec.short_groups == "top_up"
            and group.evaluation is None
            and not self.closed
            and not self.is_quarantined(group.task)
            and not self.is_incomparable(group)
        )

    def drop_reason(self, group: Group) -> str:
        """The reason to retire a group instead of waiting for it and serving it; else empty."""
        if self.is_incomparable(group):
            return "prompts-differ"
        if not group.live and not group.usable:
            return "no-rows" if group.rowless else "failed"
        if self.is_too_long(group):
            return "row-too-long"
        if self.spec.short_groups == "drop" and group.live + group.usable < group.size and not group.damaged:
            return "incomplete"
        if self.replaces_zero_variance and not group.live and group.has_zero_variance():
            return "zero-variance"
        return ""

    def waits_for_members(self, group: Group) -> bool:
        """True if an open group has members to serve and waits for others."""
        return bool(
            group.state == "open" and group.usable and group.live and not group.cut and group.evaluation is None
        )

    def set_cut_deadline(self, group: Group, now: float) -> None:
        """Set the deadline of a group of which a member has ended."""
        if self.spec.partial_after_s is not None and self.waits_for_members(group):
            self.cut_deadlines.setdefault(group.id, now + self.spec.partial_after_s)

    def is_too_long(self, group: Group) -> bool:
        """True if a row of the group fits into no bin."""
        return self.spec.bin_tokens is not None and group.longest_row > self.spec.bin_tokens

    @property
    def replaces_zero_variance(self) -> bool:
        """True if a zero-variance group is not served now: all are dropped, or a limited number is replaced."""
        if self.spec.zero_variance == "replace":
            return self.zero_variance_since_batch < self.max_replaced
        return self.spec.zero_variance == "drop"

    @property
    def max_replaced(self) -> int:
        """Zero-variance groups that are replaced for one batch."""
        limit = self.spec.max_replaced
        return REPLACED_BATCHES * self.ledger.batch_groups if limit is None else limit

    # Versions and batches -------------------------------------------------------------------------------------

    def announce(self, version: Version, fork: Version | None, weights: Weights | None = None) -> None:
        """Make a version the current one, and set aside the eligible groups that it leaves out of bound."""
        self.versions.announce(version, fork)
        self.policy_servers.announce(version, fork is not None, weights)
        self.eligible.update_versions(self.versions)
        self.eligible_by_name.update_versions(self.versions)

    def batches_for_any_pull(self) -> list[OpenBatch]:
        """Open batches of groups that a pull which names no groups may take."""
        return [batch for batch in self.batches.values() if self.is_for_any_pull(batch.groups[0])]


def remember(memory: dict[K, V], key: K, value: V, limit: int = REMEMBERED) -> None:
    """Add to a memory of bounded length; the oldest entry is dropped first."""
    memory[key] = value
    if len(memory) > limit:
        del memory[next(iter(memory))]
