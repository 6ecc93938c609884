"""The state of one run, and what can be asked of it. ``taking`` is how events change it.

What is soft (deadlines, what the learner does) is marked; a replay gives it a fresh start.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from headrace.runspec import RunSpec
from headrace.trajectory import Failure, Task, Version
from headrace.wire.messages import Weights
from headrace_orchestrator.scheduler.state.admission.bounds import Bounds
from headrace_orchestrator.scheduler.state.admission.concurrency_cap import ConcurrencyCap
from headrace_orchestrator.scheduler.state.admission.failure_backoff import FailureBackoff
from headrace_orchestrator.scheduler.state.admission.ledger import Ledger
from headrace_orchestrator.scheduler.state.admission.task_sources import source_of, task_key
from headrace_orchestrator.scheduler.state.batches import Batch, Closed, Sessions
from headrace_orchestrator.scheduler.state.eligible.draw_weights import even, weigher
from headrace_orchestrator.scheduler.state.eligible.eligible_index import EligibleIndex
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, Filter, kinds_of
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import Episode, Group
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.scheduler.state.versions import Versions, span_of

REMEMBERED = 4096
"""Closed batches and ended submitted groups that are remembered, so that a late repeat gets a typed answer."""

ADMIT_AHEAD = 1024
"""Queued episodes from which on admission waits although there is credit: more than any worker asks for at once, and
few enough to be admitted without holding up anybody."""

REMEMBERED_EVALUATIONS = 256
"""Evaluations whose lines are kept in memory; the records of older ones are in the store."""

REMEMBERED_LINES = 65_536
"""Episodes of these evaluations: a few dozen megabytes, in memory and in every control state."""

REPLACED_BATCHES = 3
"""Zero-variance groups that are replaced for one batch unless the run says how many: so many batches of them. A policy
that solves or fails all of its tasks is then served what there is, and not starved."""

RECENT_REWARDS = 256
"""Terminal records that the mean reward looks back on."""

RECENT_ATTEMPTS = 16
"""Ends of attempts that "the policy is failing" looks back on."""


class Learner:
    """What is known of a learner; soft."""

    __slots__ = ("doing", "said_at", "waiting_until")

    def __init__(self) -> None:
        self.doing = ""
        self.said_at = 0.0
        self.waiting_until = 0.0


class Run:
    """One run."""

    def __init__(self, spec: RunSpec, bounds: Bounds, episodes: dict[str, Episode]) -> None:
        self.spec = spec
        #: Episodes of all runs by id, of the groups that are not complete.
        self.episodes = episodes
        #: The spec as plain values.
        self.given: dict[str, Any] = spec.model_dump(mode="json")
        self.name = spec.name
        self.capabilities = spec.needed_capabilities
        self.source = source_of(spec)
        self.own_source = spec.source != "learner"
        self.kinds = kinds_of(spec)
        self.closed = False
        self.versions = Versions()
        self.policy_servers = PolicyServersState(spec.policy.endpoints)
        self.ledger = Ledger(spec, bounds)
        #: Position of the next group of the run's own source.
        self.position = 0
        #: Groups that were admitted, of whatever source.
        self.admitted = 0
        #: Groups in flight, and retired ones of which a worker still holds attempts.
        self.groups: dict[str, Group] = {}
        #: Those of them that are open, in order of admission.
        self.open_groups: dict[str, Group] = {}
        #: Groups that someone must decide on; empty between commands.
        self.due: dict[str, Group] = {}
        #: Queued episodes, first to go first. What is queued no longer is skipped, and dropped at the next dispatch.
        self.queue: deque[Episode] = deque()
        self.evaluation_queue: deque[Episode] = deque()
        self.queued = 0
        self.evaluation_queued = 0
        self.leased = 0
        self.evaluation_leased = 0
        #: The eligible groups that a plain pull may take, and those that only a pull by name may.
        self.eligible = EligibleIndex(spec.max_staleness, weigher(spec.selection))
        self.apart = EligibleIndex(spec.max_staleness, even)
        #: Groups by state, evaluations left out; of the retired ones only ``retired`` below tells.
        self.states: Counter[str] = Counter()
        #: Open groups that a plain pull may take once they are complete.
        self.open = 0
        self.next_order = 0
        self.batches: dict[str, Batch] = {}
        self.closed_batches: dict[str, Closed] = {}
        #: Also numbers the draws: a batch is drawn with numbers of its own.
        self.batches_formed = 0
        self.batches_acked = 0
        #: Groups that were put in batches, by rules that had a part in it; see ``wire.RunStatus``.
        self.selected: Counter[str] = Counter()
        #: By learner, of those that leased batches.
        self.sessions: dict[str, Sessions] = {}
        self.evaluations: dict[str, Evaluation] = {}
        #: Evaluations that are not over.
        self.active_evaluations: dict[str, Evaluation] = {}
        #: Why submitted groups ended, by id.
        self.submitted_ends: dict[str, str] = {}
        #: Of those that ended by a failure: the last one, in words.
        self.submitted_failures: dict[str, str] = {}
        self.retired: Counter[str] = Counter()
        self.stale_since_batch = 0
        #: Zero-variance groups that a plain pull goes without since the last batch, and tokens of their rows.
        self.zero_variance_since_batch = 0
        self.zero_variance_tokens = 0
        #: Groups that were retired since the last batch was formed as a row of theirs fits into no bin.
        self.too_long_since_batch = 0
        #: Groups that went stale since the last one that became eligible.
        self.stale_in_row = 0
        self.ends: Counter[str] = Counter()
        self.rewards: deque[float] = deque(maxlen=RECENT_REWARDS)
        #: Layers of the last attempts' failures; empty where there was none.
        self.recent: deque[Failure | None] = deque(maxlen=RECENT_ATTEMPTS)
        #: Stories of the tasks that killed attempts, by task key, and those that may kill no more.
        self.kills: dict[bytes, list[str]] = {}
        self.quarantined: dict[bytes, Task] = {}
        #: Soft: until when groups of which a member has ended wait for the others, earliest first.
        self.waiting: dict[str, float] = {}
        #: Soft: there may be more to retire than one command does; the next tick goes on.
        self.retiring = False
        #: Soft.
        self.failure_backoff = FailureBackoff()
        self.concurrency_cap = ConcurrencyCap()
        self.learners: dict[str, Learner] = {}

    # Questions ------------------------------------------------------------------------------------------------

    @property
    def outdated(self) -> bool:
        """Whether what the policy servers hold is so old that what is sampled with it is stale at once."""
        if self.policy_servers.target is None:
            return False
        behind = self.versions.distance(self.policy_servers.held)
        return behind is None or behind > self.spec.max_staleness

    @property
    def evaluation_ready(self) -> int:
        """Queued episodes of evaluations whose version is served. Those of a version that is yet to be loaded wait."""
        if all(evaluation.version == self.policy_servers.held for evaluation in self.active_evaluations.values()):
            return self.evaluation_queued
        return sum(episode.state == "queued" and self.is_ready(episode) for episode in self.evaluation_queue)

    def is_ready(self, episode: Episode) -> bool:
        """Whether a policy server can play an episode of an evaluation."""
        policy_servers, evaluation = self.policy_servers, episode.group.evaluation
        return policy_servers.target is None or evaluation is None or evaluation.version == policy_servers.held

    def plain(self, group: Group) -> bool:
        """Whether a pull that names no groups may take it: in a run with tasks of its own, not the submitted ones."""
        return not (group.evaluation is not None or (group.submitted and self.own_source))

    def upcoming(self) -> tuple[int, Task] | None:
        """Position and task of the next group of the run's own source, quarantined ones skipped; None at its end."""
        position = self.position
        task = self.source.task(position)
        while task is not None and self.quarantined and task_key(task) in self.quarantined:
            position += 1
            task = self.source.task(position)
        return None if task is None else (position, task)

    @property
    def admits(self) -> bool:
        """Whether credit, bytes and queue let another group in."""
        return self._wants and not self.ledger.bounds.full

    @property
    def _wants(self) -> bool:
        return self.queued < ADMIT_AHEAD and not self.closed and self.ledger.free > 0 and not self.ledger.own_full

    @property
    def held_back(self) -> bool:
        """Whether it would admit, but for a bound that it shares, or did not yet since that let go."""
        return self.ledger.bounds.exist and self._wants and self.upcoming() is not None

    @property
    def exhausted(self) -> bool:
        """Whether a fixed list is at its end."""
        return self.spec.source == "list" and self.upcoming() is None

    @property
    def done(self) -> bool:
        """Whether nothing will ever be served."""
        return self.over(EVERYTHING)

    def over(self, filter: Filter) -> bool:
        """Whether nothing that fits will ever be served: closed, or a list at its end with too little left."""
        if self.closed:
            return True
        if not self.exhausted or self.open or self.batches:
            return False
        return not self.eligible.count(filter) or not self.spec.partial_batches

    def is_quarantined(self, task: Task) -> bool:
        return bool(self.quarantined) and task_key(task) in self.quarantined

    def out_of_bound(self, group: Group) -> str:
        """``rewound`` or ``stale`` where its versions do not allow it to be served; else nothing."""
        return self.versions.left_behind(span_of(group.versions()), self.spec.max_staleness)

    def top_up_due(self, group: Group) -> bool:
        """Whether a fresh member has to take the place of one that failed for good."""
        return (
            group.live + group.usable < group.size
            and not group.cut
            and group.extra < group.size
            and self.spec.short_groups == "top_up"
            and group.evaluation is None
            and not self.closed
            and not self.is_quarantined(group.task)
        )

    def dropped(self, group: Group) -> str:
        """Why a group is retired instead of waited for and served; else nothing."""
        if not group.live and not group.usable:
            return "failed"
        if self.too_long(group):
            return "row-too-long"
        if self.spec.short_groups == "drop" and group.live + group.usable < group.size and not group.damaged:
            return "incomplete"
        if self.replaces and not group.live and group.zero_variance():
            return "zero-variance"
        return ""

    def waits_for_rest(self, group: Group) -> bool:
        """Whether an open group has members to serve and waits for others."""
        return bool(
            group.state == "open" and group.usable and group.live and not group.cut and group.evaluation is None
        )

    def wait_for_rest(self, group: Group, now: float) -> None:
        """Set the deadline of a group of which a member has ended."""
        if self.spec.partial_after_s is not None and self.waits_for_rest(group):
            self.waiting.setdefault(group.id, now + self.spec.partial_after_s)

    def too_long(self, group: Group) -> bool:
        """Whether a row of the group fits into no bin."""
        return self.spec.bin_tokens is not None and group.longest_row > self.spec.bin_tokens

    @property
    def replaces(self) -> bool:
        """Whether a zero-variance group is not served now: never, or only so many for one batch."""
        if self.spec.zero_variance == "replace":
            return self.zero_variance_since_batch < self.max_replaced
        return self.spec.zero_variance == "drop"

    @property
    def max_replaced(self) -> int:
        """Zero-variance groups that are replaced for one batch."""
        given = self.spec.max_replaced
        return REPLACED_BATCHES * self.ledger.batch_groups if given is None else given

    def announce(self, version: Version, fork: Version | None, weights: Weights | None = None) -> None:
        """Take a version, and see what it leaves behind."""
        self.versions.announce(version, fork)
        self.policy_servers.announced(version, fork is not None, weights)
        self.eligible.turn_to(self.versions)
        self.apart.turn_to(self.versions)

    def held_batches(self) -> list[Batch]:
        """Open batches of groups that a plain pull may take."""
        return [batch for batch in self.batches.values() if self.plain(batch.groups[0])]


def remember(memory: dict[str, Any], key: str, value: Any, limit: int = REMEMBERED) -> None:
    """Put into a memory of bounded length; the oldest is forgotten first."""
    memory[key] = value
    if len(memory) > limit:
        del memory[next(iter(memory))]
