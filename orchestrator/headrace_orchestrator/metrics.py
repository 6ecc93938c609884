"""Prometheus metrics of the orchestrator.

* Every name begins with ``headrace_`` and ends with its unit; counters end in ``_total``.
* Labels are bounded: the first 100 runs, the 100 busiest policy servers, and the 100 most drawn environments and tags
  of a run have labels of their own; all others share the label ``other``.
* Gauges are read from the state when they are scraped, so they are never out of date.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.wire.messages import ServiceStatus, SubmitResult
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    AttemptEnded,
    BatchAcked,
    BatchDissolved,
    BatchFormed,
    BatchReleased,
    EpisodeEnded,
    GroupAdmitted,
    GroupRetired,
    TaskQuarantined,
)

MAX_RUN_LABELS = 100
"""Maximum number of runs with their own label: a time series costs memory for ever. The console shows all runs."""

MAX_SERVER_LABELS = 100
"""Maximum number of policy servers with their own label: those with the most requests."""

MAX_TASK_LABELS = 100
"""Maximum number of environments and tags of a run with their own label: those of which most groups were drawn."""

OTHER = "other"

STORE_HELP = {
    "sync_p50_s": "Median time of the last group commits.",
    "assets": "Stored images and large arrays.",
    "asset_bytes": "Bytes of stored images and large arrays.",
    "log_bytes": "Bytes of the log's files.",
    "trajectories": "Stored trajectories.",
    "batches_open": "Batches of all runs that are formed but not acked.",
    "unprojected_rows": "Rows of the log that listings do not have yet.",
    "projection_wal_bytes": "Bytes of the write-ahead file of the projection.",
}
"""Help text of each entry of ``ServiceStatus.store``."""

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60)
SYNC_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
REQUEST_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 60)
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
WEIGHT_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """All metrics of one process, in their own registry."""

    def __init__(self, status: Callable[[], ServiceStatus]) -> None:
        self.registry = CollectorRegistry()
        self._runs: set[str] = set()
        self._requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._verdicts: dict[str, Counter] = {}
        self._counters()
        self._histograms()
        self.registry.register(_StateCollector(status, self.run_label))

    def _counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_{name}", text, labels, registry=self.registry)

        self.episodes = counter("episodes", "Stored episode records, by status.", "run", "status")
        self.rowless = counter("rowless_episodes", "Episodes without a failure that have nothing to train on.", "run")
        self.episode_failures = counter("episode_failures", "Failed episodes, by layer.", "run", "layer")
        self.attempts_lost = counter("attempts_requeued", "Attempts that ended without a record.", "run", "reason")
        self.groups_admitted = counter("groups_admitted", "Admitted groups.", "run")
        self.groups_retired = counter("groups_retired", "Groups retired, by reason.", "run", "reason")
        self.batches = counter("batches", "Changes of batches, by event.", "run", "event")
        self.quarantined = counter("tasks_quarantined", "Tasks of which too many attempts failed.", "run")
        self.submissions = counter("submissions", "Submitted records, by verdict.", "verdict")
        self.empty_pulls = counter("empty_pulls", "Pulls that returned no batch, by reason.", "run", "reason")
        self.weight_sync_failures = counter(
            "weight_sync_failures", "Failed weight syncs of policy servers, by kind.", "run", "kind"
        )
        self.log_written = counter("log_written_bytes", "Bytes appended to the log.")
        self.log_deleted = counter("log_deleted_bytes", "Bytes of log files that retention deleted.")
        self.log_files_deleted = counter("log_deleted_files", "Log files that retention deleted.")
        self.damaged = counter("log_damaged_records", "Stored records that failed their checksum.")
        self.requests = counter("http_requests", "HTTP requests, by route template.", "method", "route", "status")

    def _histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"headrace_{name}", text, labels, buckets=buckets, registry=self.registry)

        self.pull_wait = histogram("pull_wait_seconds", "Waiting time of pulls.", WAIT_BUCKETS_S, "run")
        self.staleness = histogram("batch_staleness_versions", "Staleness of a batch.", STALENESS_BUCKETS, "run")
        self.weight_sync = histogram(
            "weight_sync_seconds", "Pause of a policy server for new weights.", WEIGHT_BUCKETS_S, "run"
        )
        self.sync = histogram("log_sync_seconds", "Time of one group commit: write and sync.", SYNC_BUCKETS_S)
        self.lag = histogram("event_loop_lag_seconds", "Delay of the event loop's timers.", LAG_BUCKETS_S)
        self.request_time = histogram("http_request_seconds", "Time to answer a request.", REQUEST_BUCKETS_S, "route")
        self.ready = Gauge("headrace_ready", "1 while requests are answered, else 0.", registry=self.registry)
        text = "1 while nothing can be stored, for example on a full disk, else 0."
        self.disk_refuses = Gauge("headrace_disk_refuses", text, registry=self.registry)

    def run_label(self, run: str) -> str:
        """The label of a run: its name, or ``other`` if the maximum number of runs have their own label."""
        if run in self._runs:
            return run
        if len(self._runs) >= MAX_RUN_LABELS:
            return OTHER
        self._runs.add(run)
        return run

    def count_request(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count an HTTP request. Its series are looked up once, since a lookup costs more than counting."""
        series = self._requests.get((method, route, status))
        if series is None:
            series = self.requests.labels(method, route, status), self.request_time.labels(route)
            self._requests[method, route, status] = series
        count, time = series
        count.inc()
        time.observe(duration_s)

    def count_submissions(self, results: Iterable[SubmitResult]) -> None:
        """Count submitted records by verdict. As for requests, series are looked up once."""
        counts: dict[str, int] = {}
        for result in results:
            counts[result.verdict] = counts.get(result.verdict, 0) + 1
        for verdict, count in counts.items():
            series = self._verdicts.get(verdict)
            if series is None:
                series = self._verdicts[verdict] = self.submissions.labels(verdict)
            series.inc(count)

    def count_events(self, events: Iterable[AnyEvent]) -> None:
        """Count the scheduler's events."""
        # Hundreds of events of a few kinds may come together, so they are added up before a counter is changed.
        for (counter, run, *labels), count in Tally(self._increments(events)).items():
            counter.labels(self.run_label(run), *labels).inc(count)

    def _increments(self, events: Iterable[AnyEvent]) -> Iterator[tuple[Counter, str] | tuple[Counter, str, str]]:
        """The counters that events increment by one: each with its run and its other label, if any."""
        for event in events:
            match event:
                case EpisodeEnded():
                    yield self.episodes, event.run, event.status
                    if event.failure is not None and event.status == "failed":
                        yield self.episode_failures, event.run, event.failure.layer
                    if event.is_rowless and not event.evaluation:
                        yield self.rowless, event.run
                case GroupAdmitted():
                    yield self.groups_admitted, event.run
                case AttemptEnded():
                    yield self.attempts_lost, event.run, event.reason
                case GroupRetired():
                    yield self.groups_retired, event.run, event.reason
                case TaskQuarantined():
                    yield self.quarantined, event.run
                case BatchFormed():
                    yield self.batches, event.run, "formed"
                case BatchAcked():
                    yield self.batches, event.run, "acked"
                case BatchReleased():
                    yield self.batches, event.run, "released"
                case BatchDissolved():
                    yield self.batches, event.run, "dissolved"
                case _:
                    pass  # gauges show the effect of the other events

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    """Gauges of the current state, computed at each scrape."""

    def __init__(self, status: Callable[[], ServiceStatus], run_label: Callable[[str], str]) -> None:
        self._status = status
        self._run_label = run_label

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())  # names depend on the state, which is not read at registration

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        status = self._status()
        yield from self._runs(status)
        yield self._selected(status)
        yield self._shares(status)
        yield from self._workers(status)
        yield from self._servers(status)
        for name, value in status.store.items():
            with_unit = f"{name[:-2]}_seconds" if name.endswith("_s") else name
            yield GaugeMetricFamily(f"headrace_store_{with_unit}", STORE_HELP[name], value=value)
        yield GaugeMetricFamily(
            "headrace_epoch_count",
            "Number that grows by one at each start on this data directory, and by more when a backup is restored.",
            value=status.epoch,
        )
        yield GaugeMetricFamily("headrace_uptime_seconds", "Time since start.", value=status.uptime_s)

    def _runs(self, status: ServiceStatus) -> Iterator[GaugeMetricFamily]:
        values: dict[tuple[str, str, str], dict[tuple[str, ...], float]] = {}

        def add(name: str, text: str, label: str, key: tuple[str, ...], value: float) -> None:
            series = values.setdefault((name, text, label), {})
            series[key] = series.get(key, 0.0) + value

        for run in status.runs:
            name = self._run_label(run.name)
            add("run_credit_groups", "Groups that may still be admitted.", "", (name,), run.credit)
            add("run_groups_in_flight", "Groups that are admitted but not retired.", "", (name,), run.in_flight)
            add("run_episodes_queued", "Episodes waiting for a slot.", "", (name,), run.queued)
            add("run_episodes_leased", "Episodes at workers.", "", (name,), run.leased)
            if run.attainable is not None:
                text = "Training episodes that the policy servers can take at a time."
                add("run_episodes_attainable", text, "", (name,), run.attainable)
            add("run_batches_open", "Batches that are formed but not acked.", "", (name,), run.batches_open)
            add("run_active", "1 while the run is active.", "", (name,), float(run.state == "active"))
            add(
                "run_learner_silent",
                "1 while the learner is silent.",
                "",
                (name,),
                float(run.learner_silent),
            )
            add("run_learner_waiting", "1 while a pull waits.", "", (name,), float(run.learner_waiting))
            for state in ("open", "eligible", "leased"):
                add("run_groups", "Groups, by state.", "state", (name, state), getattr(run.groups, state))
            for state, count in run.servers.items():
                add("run_policy_servers", "Policy servers, by state.", "state", (name, state), count)
            for reason in run.reasons:
                add("run_empty_reason", "1 for each reason for which a pull waits.", "reason", (name, reason.code), 1.0)
        for (name, text, label), series in values.items():
            family = GaugeMetricFamily(f"headrace_{name}", text, labels=["run", *([label] if label else [])])
            for key, value in series.items():
                family.add_metric(list(key), value)
            yield family

    def _selected(self, status: ServiceStatus) -> CounterMetricFamily:
        counts: Tally[tuple[str, str]] = Tally()
        for run in status.runs:
            for rule, count in run.selected.items():
                counts[self._run_label(run.name), rule] += count
        text = "Actions of the selection rules, by rule: groups put in batches, made eligible, topped up."
        family = CounterMetricFamily("headrace_selected", text, labels=["run", "rule"])
        for key, count in counts.items():
            family.add_metric(list(key), count)
        return family

    def _shares(self, status: ServiceStatus) -> CounterMetricFamily:
        """Groups of each environment and tag: the share drawn beside the share trained on."""
        counts: Tally[tuple[str, str, str, str]] = Tally()
        for run in status.runs:
            busiest = sorted(run.shares, key=lambda share: -share.drawn)
            for place, share in enumerate(busiest):
                key = (self._run_label(run.name), share.kind, share.name if place < MAX_TASK_LABELS else OTHER)
                counts[*key, "drawn"] += share.drawn
                counts[*key, "trained"] += share.trained
        text = "Groups of each kind of task: drawn, and trained on for the first time."
        family = CounterMetricFamily("headrace_task_groups", text, labels=["run", "kind", "name", "state"])
        for labels, count in counts.items():
            family.add_metric(list(labels), count)
        return family

    def _workers(self, status: ServiceStatus) -> Iterator[GaugeMetricFamily]:
        slots: dict[str, float] = {}
        leased: dict[str, float] = {}
        workers: dict[str, float] = {}
        silent: dict[str, float] = {}
        spelled: dict[str, float] = {}
        for worker in status.workers:
            pool, present = worker.pool, not worker.silent
            slots[pool] = slots.get(pool, 0.0) + worker.slots * present
            leased[pool] = leased.get(pool, 0.0) + worker.leased * present
            workers[pool] = workers.get(pool, 0.0) + present
            silent[pool] = silent.get(pool, 0.0) + worker.silent
            spelled[pool] = spelled.get(pool, 0.0) + worker.stats.get("control_tokens", 0.0)
        for name, text, series in (
            ("pool_slots", "Slots of the workers of a pool, without silent ones.", slots),
            ("pool_slots_leased", "Slots that run an episode, without those of silent workers.", leased),
            ("pool_workers", "Workers of a pool, without silent ones.", workers),
            ("pool_workers_silent", "Workers of a pool that sent nothing for a lease term.", silent),
            ("pool_control_tokens", "Control tokens that environments spelled to a pool's workers.", spelled),
        ):
            family = GaugeMetricFamily(f"headrace_{name}", text, labels=["pool"])
            for pool, value in series.items():
                family.add_metric([pool], value)
            yield family

    def _servers(self, status: ServiceStatus) -> Iterator[GaugeMetricFamily]:
        """Requests of the current workers to each policy server, and the failed ones."""
        requests: Tally[str] = Tally()
        counts: dict[str, Tally[str]] = {"policy_requests": requests, "policy_failures": Tally()}
        for worker in status.workers:
            for name, value in worker.stats.items():
                kind, _, server = name.partition(" ")
                if kind in counts:
                    counts[kind][server] += int(value)
        labels = {server for server, _ in requests.most_common(MAX_SERVER_LABELS)}
        for kind, text in (
            ("policy_requests", "Requests of the current workers to a policy server."),
            ("policy_failures", "Requests of the current workers that a policy server failed."),
        ):
            series: Tally[str] = Tally()
            for server, count in counts[kind].items():
                series[server if server in labels else OTHER] += count
            family = GaugeMetricFamily(f"headrace_{kind}", text, labels=["server"])
            for server, count in series.items():
                family.add_metric([server], count)
            yield family
