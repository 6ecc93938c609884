"""Reasons of an empty answer to a pull: all that hold now, the most specific first.

* An empty answer always has a reason: a sentence, with its counts in ``facts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from headrace.wire.messages import Reason
from headrace_orchestrator.scheduler.queries.selection import awaited_group
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.scheduler.state.batches import OpenBatch
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter, kind_of
from headrace_orchestrator.scheduler.state.groups import AT_WORKER
from headrace_orchestrator.scheduler.state.run import NOT_TRAINED, PROMPT_TOO_LONG, Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

FAILING_SHARE = 0.5
"""Share of failures in one layer among the last attempts, from which the layer is reported as failing."""

MIN_FAILURES = 4
"""Minimum number of failures in a layer that is reported as failing."""

MAX_MESSAGE = 400
"""Limit on characters of a failure's message in a reason. The record has the whole message."""

LOST_WORKERS, LOST_WITHIN_S = 2, 300.0
"""Workers that are reported as lost, from this number of them in so many seconds: a restart of one is usual."""

NAMED_SHARDS = 8
"""Maximum number of missing shards that a message names."""

NAMED_SERVERS = 8
"""Maximum number of policy servers that a message names."""


def empty_reasons(
    state: SchedulerState, run: Run, now: float, awaited: list[str] | None = None, filter: GroupFilter = EVERYTHING
) -> tuple[list[Reason], bool]:
    """The reasons why a pull is not served, and True if it never will be."""
    if run.closed:
        return [Reason(code="closed", message=f"Run {run.name} was closed.")], True
    if awaited is not None:
        ended = [_end(run, id) for id in awaited if id in run.submitted_ends]
        if ended:
            return ended, True
    elif run.done_for(filter):
        return [*_finished(run, filter), *_rowless(run), *_prompts_differ(run)], True
    reasons = [
        *run.policy_servers.reasons,
        *_blocked(run, awaited),
        *_filtered(run, filter),
        *_starved(state, run, now),
    ]
    if awaited is None:
        reasons += _oldest_group(state, run, filter, now)
    if awaited is None and run.exhausted:
        reasons += _finished(run, filter)
    if not reasons or run.ledger.unfinished or run.evaluation_leased:
        reasons.append(_collecting(run, awaited, filter))
    return reasons, False


def _end(run: Run, id: str) -> Reason:
    """The reason why an awaited group will not be served."""
    reason, failure = run.submitted_ends[id], run.submitted_failures.get(id, "")
    message = f"Group {id} was retired ({reason}) and will not be served."
    facts = {"group": id, "reason": reason}
    if failure:
        message += f" Its last failure: {failure}"
        facts["failure"] = failure
    return Reason(code="group-ended", message=message, facts=facts)


def _finished(run: Run, filter: GroupFilter) -> list[Reason]:
    left, need = run.eligible.count(filter), run.ledger.batch_groups
    if not left:
        return [Reason(code="tasks-exhausted", message="tasks exhausted", facts={"groups_left": 0})]
    facts = {"groups_left": left, "batch_groups": need}
    if run.open or run.batches:
        return [Reason(code="tasks-exhausted", message="tasks exhausted", facts=facts)]
    message = f"{_count(left, 'group')} left, batch needs {need}, tasks exhausted"
    return [Reason(code="groups-left", message=message, facts=facts)]


def _blocked(run: Run, awaited: list[str] | None) -> Iterator[Reason]:
    """Reasons that stop admission, or hold eligible groups back."""
    held = [batch for batch in run.batches_for_any_pull() if batch.leased]
    if run.estimator_failure:
        yield Reason(code="estimator-failing", message=run.estimator_failure, facts={"name": run.spec.estimator.name})
    if run.selection_failure and awaited is None:
        facts = {"name": run.spec.selection.order}
        yield Reason(code="selection-rule-failing", message=run.selection_failure, facts=facts)
    yield from _held_batches(run, held) if awaited is None else _awaited_in_batches(run, awaited)
    yield from _missing_shards(run)
    yield from _byte_bound(run)
    yield from _shared_bounds(run.ledger.bounds)
    if not run.has_own_source and not run.open and not len(run.eligible) and not held and awaited is None:
        yield Reason(code="no-tasks", message="No groups are submitted.", facts={})


def _awaited_in_batches(run: Run, awaited: list[str]) -> Iterator[Reason]:
    for id in awaited:
        if batch := run.groups[id].batch:
            yield Reason(
                code="batches-held",
                message=f"Group {id} is in batch {batch}, which is held unacked.",
                facts={"group": id, "batch": batch},
            )


def _held_batches(run: Run, held: list[OpenBatch]) -> Iterator[Reason]:
    bound = run.spec.max_staleness
    if len(held) > bound:
        more = f"To hold {len(held) + 1}, max_staleness must be at least {len(held)}; it is {bound}."
    elif held and not run.open and not run.ledger.free:
        more = "Nothing more is admitted before an ack, or before the groups that are ready are taken or go stale."
    else:
        return
    yield Reason(
        code="batches-held",
        message=f"{_count(len(held), 'batch', 'batches')} held unacked. {more}",
        facts={"held": len(held), "max_staleness": bound, "needed": len(held)},
    )


def _oldest_group(state: SchedulerState, run: Run, filter: GroupFilter, now: float) -> Iterator[Reason]:
    """A reason that names the group which a batch waits for rather than let it go stale."""
    ready = run.eligible.count(filter)
    group = awaited_group(run, filter) if ready >= run.ledger.batch_groups else None
    if group is None:
        return
    at_workers = [episode.worker for episode in group.members if episode.state in AT_WORKER]
    running_s = now - group.begun_at
    yield Reason(
        code="oldest-group",
        message=(
            f"{_count(ready, 'group')} ready. The next batch waits for group {group.id} (task {group.task.id} of "
            f"{group.task.environment}), which would go stale otherwise: it began {running_s:.1f} s ago, and has "
            f"{_count(len(at_workers), 'episode')} at workers, {group.live - len(at_workers)} queued."
            f"{_silent_workers(state, run, at_workers, now)}"
        ),
        facts={
            "group": group.id,
            "task": group.task.id,
            "environment": group.task.environment,
            "running_s": running_s,
            "leased": len(at_workers),
            "queued": group.live - len(at_workers),
            "ready": ready,
        },
    )


def _silent_workers(state: SchedulerState, run: Run, names: list[str], now: float) -> str:
    """A sentence on the workers that are late with their heartbeat, if any."""
    silent = {name: now - state.workers.by_name[name].seen for name in names}
    late = [f"{name} ({s:.0f} s)" for name, s in silent.items() if s > run.spec.attempt_lease_s / 2]
    return f" No message came from {', '.join(late)}: its attempts are queued again when their leases end." * bool(late)


def _missing_shards(run: Run) -> Iterator[Reason]:
    for batch in run.batches.values():
        if batch.leased and batch.missing:
            shards = name_shards(batch.missing, batch.shards)
            yield Reason(
                code="shards-not-fetched",
                message=f"Batch {batch.id} waits for learner {batch.learner!r}: {shards} not fetched.",
                facts={"batch": batch.id, "learner": batch.learner, "missing": batch.missing, "shards": batch.shards},
            )


def _byte_bound(run: Run) -> Iterator[Reason]:
    held, reserved, bound = run.ledger.held_bytes, run.ledger.reserved_bytes, run.spec.max_bytes
    if run.ledger.own_full:
        yield Reason(
            code="byte-bound",
            message=(
                f"Groups in flight hold {held} bytes and {reserved} more are reserved; the bound is {bound}. "
                "Admission stops until groups retire."
            ),
            facts={"held_bytes": held, "reserved_bytes": reserved, "max_bytes": bound},
        )


def _shared_bounds(bounds: SharedBounds) -> Iterator[Reason]:
    """Reasons of shared bounds that stop admission."""
    held, stored, reserved = bounds.held_bytes, bounds.disk_bytes, bounds.reserved_bytes
    if bounds.held_full:
        yield Reason(
            code="service-byte-bound",
            message=(
                f"Groups in flight of all runs hold {held} bytes and {reserved} more are reserved; the bound of the "
                f"service is {bounds.max_held_bytes}. Admission stops until groups retire."
            ),
            facts={"held_bytes": held, "reserved_bytes": reserved, "max_held_bytes": bounds.max_held_bytes},
        )
    if bounds.disk_full:
        yield Reason(
            code="disk-bound",
            message=(
                f"{stored} bytes are stored and {reserved} more are reserved; the bound of the disk is "
                f"{bounds.max_disk_bytes}. Admission stops until retention deletes files: give it a rule that keeps "
                "less, or raise the bound."
            ),
            facts={"disk_bytes": stored, "reserved_bytes": reserved, "max_disk_bytes": bounds.max_disk_bytes},
        )


def name_shards(missing: list[int], of: int) -> str:
    """The missing shards, as the beginning of a sentence that ends in "not fetched"."""
    named = ", ".join(map(str, missing[:NAMED_SHARDS]))
    more = f" and {len(missing) - NAMED_SHARDS} more" if len(missing) > NAMED_SHARDS else ""
    return f"shard{'s' if len(missing) > 1 else ''} {named}{more} of {of} {'were' if len(missing) > 1 else 'was'}"


def _filtered(run: Run, filter: GroupFilter) -> Iterator[Reason]:
    """A reason that counts the ready groups and batches that do not fit the filter."""
    if filter == EVERYTHING:
        return
    others = len(run.eligible) - run.eligible.count(filter)
    batches = sum(
        not batch.leased and not all(filter.fits(kind_of(group.task)) for group in batch.groups)
        for batch in run.batches_for_any_pull()
    )
    if others or batches:
        counts = [(others, "group", "groups"), (batches, "released batch", "released batches")]
        ready = " and ".join(_count(number, one, many) for number, one, many in counts if number)
        yield Reason(
            code="filtered",
            message=f"The groups that are ready do not fit this pull ({filter}): {ready}.",
            facts={"groups": others, "batches": batches},
        )


def _starved(state: SchedulerState, run: Run, now: float) -> Iterator[Reason]:
    """Reasons that keep admitted groups from becoming complete."""
    yield from _no_workers(state, run, now)
    yield from _lost_workers(run, now)
    yield from _saturated(run)
    yield from _failing(run, now)
    yield from _evaluation_hold(run, now)
    yield from _outdated(run)
    yield from _stale(run)
    yield from _zero_variance(run)
    yield from _too_long(run)
    yield from _rowless(run)
    yield from _prompts_differ(run)
    if number := len(run.quarantined):
        message = f"{_count(number, 'task')} quarantined: too many attempts of each failed."
        yield Reason(code="quarantined", message=message, facts={"tasks": number})


def _no_workers(state: SchedulerState, run: Run, now: float) -> Iterator[Reason]:
    queued = run.queued + run.evaluation_queued
    pool = run.spec.pool
    live = state.workers.live(pool, now)
    fit = [worker for worker in live if run.capabilities <= worker.capabilities]
    if queued and not fit:
        silent = sum(worker.pool == pool for worker in state.workers.by_name.values()) - len(live)
        offer = f" that offer {sorted(run.capabilities)}" if live else f" ({silent} silent)" if silent else ""
        yield Reason(
            code="no-workers",
            message=f"no workers in pool {pool!r}{offer}: {_count(queued, 'episode')} queued",
            facts={"pool": pool, "queued": queued, "workers": len(live), **({"silent": silent} if silent else {})},
        )
    elif queued and all(worker.name in state.workers.draining for worker in fit):
        yield Reason(
            code="draining",
            message=f"all {_count(len(fit), 'worker')} in pool {pool!r} drain: {_count(queued, 'episode')} queued",
            facts={"pool": pool, "queued": queued, "workers": len(fit)},
        )


def _lost_workers(run: Run, now: float) -> Iterator[Reason]:
    """A reason that counts the workers which were lost with attempts of the run, as to an environment that ends its
    process."""
    lost = [attempt for attempt in run.lost_attempts if now - attempt.at <= LOST_WITHIN_S]
    workers = len({attempt.worker for attempt in lost})
    if workers < LOST_WORKERS:
        return
    ((environment, attempts),) = Counter(attempt.environment for attempt in lost).most_common(1)
    yield Reason(
        code="workers-lost",
        message=(
            f"In the last {LOST_WITHIN_S / 60:.0f} minutes {workers} workers were lost, with "
            f"{_count(attempts, 'attempt')} of {environment}. Does it end its process? An episode fails for good when "
            f"it has lost more than {run.max_lost_workers} workers."
        ),
        facts={"workers": workers, "attempts": len(lost), "environment": environment},
    )


def _saturated(run: Run) -> Iterator[Reason]:
    slots = run.concurrency_cap.slots
    if run.queued and not run.concurrency_cap.room(run.leased):
        yield Reason(
            code="policy-saturated",
            message=(
                f"By their metrics the policy servers take {_count(slots or 0, 'episode')} at a time: "
                f"{run.leased} at workers, {run.queued} queued."
            ),
            facts={"attainable": slots, "leased": run.leased, "queued": run.queued},
        )


def _evaluation_hold(run: Run, now: float) -> Iterator[Reason]:
    unfinished = [evaluation for evaluation in run.active_evaluations.values() if evaluation.left]
    if unfinished and run.evaluation_leased:
        longest = max(unfinished, key=lambda evaluation: evaluation.hold_s(now))
        yield Reason(
            code="evaluation-hold",
            message=(
                f"Evaluation {longest.id} of version {longest.version} runs: {longest.left} of {longest.wanted} "
                f"episodes are not over; it ends in {longest.hold_s(now):.0f} s at the latest."
            ),
            facts={"evaluation": longest.id, "left": longest.left, "hold_s": longest.hold_s(now)},
        )


def _outdated(run: Run) -> Iterator[Reason]:
    """A reason that names the version of each policy server, if none of them could be served. Where the service loads
    the weights, the progress of the load is the reason."""
    servers, bound = run.policy_servers, run.spec.max_staleness
    if not run.outdated or servers.target is not None:
        return
    versions = {address: str(version) for address, version in servers.served_by_address.items()}
    named = ", ".join(f"{address} serves {version}" for address, version in islice(versions.items(), NAMED_SERVERS))
    more = f", and {len(versions) - NAMED_SERVERS} more" if len(versions) > NAMED_SERVERS else ""
    yield Reason(
        code="policy-outdated",
        message=(
            f"No policy server has a version that may be trained on: {named}{more}; the run is at "
            f"{run.versions.now}, and max_staleness is {bound}. Load the weights of a version before its ack, or ack "
            "with `weights`. Until then one attempt at a time is made."
        ),
        facts={"version": str(run.versions.now), "max_staleness": bound, "servers": versions},
    )


def _stale(run: Run) -> Iterator[Reason]:
    if stale := run.stale_since_batch:
        yield Reason(
            code="all-stale",
            message=(
                f"{_count(stale, 'group')} went stale since the last batch: more than "
                f"{_count(run.spec.max_staleness, 'version')} behind {run.versions.now}."
            ),
            facts={"stale": stale, "max_staleness": run.spec.max_staleness},
        )


def _zero_variance(run: Run) -> Iterator[Reason]:
    """A reason that counts the zero-variance groups kept from the next batch."""
    if number := run.zero_variance_since_batch:
        if run.spec.zero_variance == "drop":
            effect = "were dropped; the batch will be smaller by them."
        else:
            effect = f"were replaced; after {run.max_replaced} such groups are served as they are."
        message = f"Since the last batch {_count(number, 'group')} whose returns are all equal {effect}"
        yield Reason(code="zero-variance", message=message, facts={"groups": number})


def _too_long(run: Run) -> Iterator[Reason]:
    """A reason that counts groups that fit into no bin. If all are too long, the run never has a batch."""
    if number := run.too_long_since_batch:
        yield Reason(
            code="row-too-long",
            message=(
                f"Since the last batch {_count(number, 'group')} had a row longer than {run.spec.bin_tokens} tokens, "
                "which fits into no bin. Give the run larger bins, or a lower max_context_tokens."
            ),
            facts={"groups": number, "bin_tokens": run.spec.bin_tokens},
        )


def _rowless(run: Run) -> Iterator[Reason]:
    """A reason that counts the episodes without a row. If all are, the run never has a batch."""
    if number := run.rowless_since_batch.total():
        causes = ", and ".join(
            f"in {count} {_ROWLESS_CAUSES[cause].format(limit=run.spec.limits.max_context_tokens)}"
            for cause, count in sorted(run.rowless_since_batch.items())
        )
        yield Reason(
            code="no-rows",
            message=f"Since the last batch {_count(number, 'episode')} had nothing to train on: {causes}.",
            facts={"episodes": number, **run.rowless_since_batch},
        )


def _prompts_differ(run: Run) -> Iterator[Reason]:
    """A reason that names the environments whose seed does not fix the task."""
    for environment, number in run.prompts_differ_since_batch.items():
        effect = "They were retired, because their members cannot be compared."
        if not run.compares_members:
            effect = "They are served, since the estimator does not compare their members."
        yield Reason(
            code="prompts-differ",
            message=(
                f"Since the last batch {_count(number, 'group')} of {environment} had members with different first "
                f"prompts for the same seed. {effect} Let reset(seed) alone determine the episode, or set "
                "first_prompts = 'any' in the run spec."
            ),
            facts={"environment": environment, "groups": number},
        )


_ROWLESS_CAUSES = {
    PROMPT_TOO_LONG: "the first prompt is longer than the context (max_context_tokens is {limit})",
    NOT_TRAINED: "no agent that is trained had a turn",
}


def _failing(run: Run, now: float) -> Iterator[Reason]:
    """A reason that names the layer in which most of the last attempts failed, if they are many."""
    layers = Counter(failure.layer for failure in run.recent_failures if failure is not None)
    if not layers:
        return
    ((layer, failed),) = layers.most_common(1)
    if failed < max(MIN_FAILURES, FAILING_SHARE * len(run.recent_failures)):
        return
    last = next(failure for failure in reversed(run.recent_failures) if failure is not None and failure.layer == layer)
    backoff = ""
    if run.failure_backoff.since is not None:
        backoff = f" Retrying with single attempts; next in {max(0.0, run.failure_backoff.next_try - now):.1f} s."
    yield Reason(
        code=f"{layer}-failing",
        message=(
            f"The {layer} is failing: {failed} of the last {len(run.recent_failures)} attempts failed there, "
            f"the last with {last.kind}: {_shortened(last.message)}{backoff}"
        ),
        facts={"failed": failed, "of": len(run.recent_failures), "kind": last.kind},
    )


def _collecting(run: Run, awaited: list[str] | None, filter: GroupFilter) -> Reason:
    leased = run.leased + run.evaluation_leased
    queued = run.queued + run.evaluation_queued
    if awaited is not None:
        ready = sum(run.groups[id].state == "eligible" for id in awaited)
        need = len(awaited)
    else:
        ready, need = run.eligible.count(filter), run.ledger.batch_groups
    # More groups than a batch needs are ready if no learner pulls.
    surplus = f"{ready} groups ready, a batch needs {need}"
    progress = surplus if ready > need else f"{ready} of {_count(need, 'group')} ready"
    return Reason(
        code="collecting",
        message=f"{progress}; {_count(leased, 'episode')} at workers, {queued} queued.",
        facts={"ready": ready, "batch_groups": need, "leased": leased, "queued": queued},
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _shortened(message: str) -> str:
    """The first part of a message on one line: a failure may quote whatever a policy wrote."""
    text = " ".join(message[: 2 * MAX_MESSAGE].split())
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1]}…"
