"""The metrics that Prometheus scrapes."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.trajectory import Failure
from headrace.wire import messages
from headrace_orchestrator.metrics import MAX_RUN_LABELS, MAX_SERVER_LABELS, STORE_HELP, Metrics
from tests.builders import make_failed
from tests.orchestrator.serving import Api, record_for, refusing_disk, submission, until

UNITS = ("seconds", "bytes", "versions", "groups", "episodes", "count")


async def scrape(api: Api) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name, then by labels."""
    async with api.session.get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def test_every_name_begins_with_headrace_and_counters_end_in_total(api: Api):
    await api.create_run()
    await api.play(free=4)
    async with api.session.get("/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    assert families
    for family in families:
        assert re.fullmatch(r"headrace_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_created"):
                assert sample.name.endswith("_total"), sample.name
            if family.type == "histogram":
                assert family.name.endswith(UNITS), family.name


async def test_metrics_are_served_while_the_disk_refuses_writes_and_show_it(api: Api, monkeypatch: pytest.MonkeyPatch):
    await api.create_run()
    assert (await scrape(api))["headrace_disk_refuses"][()] == 0
    with refusing_disk(monkeypatch):
        await api.ask("POST", "/v1/runs/run/close", status=507)
        samples = await scrape(api)
        assert (samples["headrace_disk_refuses"][()], samples["headrace_ready"][()]) == (1, 0)
        assert (("run", "run"),) in samples["headrace_run_active"]
        for method, path, body in (
            ("GET", "/readyz", None),
            ("GET", "/v1/status", None),
            ("GET", "/v1/runs", None),
            ("POST", "/v1/worker/lease", {"worker": "w", "slots": 1, "free": 1, "wait_s": 0}),
        ):
            assert (await api.ask(method, path, body, status=503))["phase"] == "disk full"

    async def recovered() -> bool:
        return (await scrape(api))["headrace_disk_refuses"][()] == 0

    await until(recovered)


async def test_the_metrics_count_the_events_of_a_run(api: Api):
    await api.create_run(retries={"max_attempts": 1}, short_groups="serve")
    await api.pull()
    attempts = await api.lease(free=4)
    failure = Failure(layer="sandbox", kind="gone", message="The sandbox is gone.")
    names = ("run", "group", "member", "episode", "attempt", "task")
    broken = make_failed(failure=failure, **{name: getattr(attempts[0], name) for name in names})
    records = [broken, *(record_for(attempt) for attempt in attempts[1:])]
    await api.submit(submission(zip(attempts, records, strict=True)))
    batch = await api.pull()
    await api.ack(batch, "0.1")
    samples = await scrape(api)

    run = (("run", "run"),)
    assert samples["headrace_episodes_total"][*run, ("status", "finished")] == 3
    assert samples["headrace_episodes_total"][*run, ("status", "failed")] == 1
    assert samples["headrace_episode_failures_total"][("layer", "sandbox"), *run] == 1
    assert samples["headrace_submissions_total"][(("verdict", "accepted"),)] == 4
    assert samples["headrace_batches_total"][("event", "formed"), *run] == 1
    assert samples["headrace_batches_total"][("event", "acked"), *run] == 1
    assert samples["headrace_groups_retired_total"][("reason", "acked"), *run] == 2
    assert samples["headrace_selected_total"][("rule", "fifo"), *run] == 2
    assert samples["headrace_selected_total"][("rule", "short"), *run] == 1
    kind = (("kind", "environment"), ("name", "test:Echo"), *run)
    assert samples["headrace_task_groups_total"][*kind, ("state", "trained")] == 2
    assert samples["headrace_task_groups_total"][*kind, ("state", "drawn")] > 2
    assert samples["headrace_empty_pulls_total"]
    assert samples["headrace_pull_wait_seconds_count"][run] == 2
    assert samples["headrace_batch_staleness_versions_count"][run] == 1
    assert samples["headrace_log_sync_seconds_count"][()] >= 1
    assert samples["headrace_store_trajectories"][()] == 4
    assert samples["headrace_store_log_bytes"][()] > 0
    assert {name for name in samples if name.startswith("headrace_store_")} == {
        f"headrace_store_{name.removesuffix('_s')}{'_seconds' * name.endswith('_s')}" for name in STORE_HELP
    }
    assert samples["headrace_pool_slots"][(("pool", "default"),)] == 64
    assert ("run", "run") in next(iter(samples["headrace_run_credit_groups"]))
    assert (*run, ("state", "open")) in samples["headrace_run_groups"]
    assert samples["headrace_ready"][()] == 1


async def test_requests_are_counted_by_route_template(api: Api):
    await api.create_run()
    await api.ask("GET", "/v1/runs/run")
    for number in range(5):
        await api.ask("GET", f"/scan/{number}.php", status=404)
    requests = (await scrape(api))["headrace_http_requests_total"]
    routes = {dict(labels)["route"] for labels in requests}
    assert "/v1/runs/{run}" in routes
    assert not any("php" in route for route in routes)
    assert requests[("method", "GET"), ("route", "unknown"), ("status", "404")] == 5


def test_gauges_are_read_from_the_state_when_they_are_scraped():
    epochs = iter((1, 2))
    metrics = Metrics(
        lambda: messages.ServiceStatus(epoch=next(epochs), version="0", uptime_s=0.0, runs=[], workers=[], store={})
    )
    assert "headrace_epoch_count 1.0" in metrics.exposition().decode().splitlines()
    assert "headrace_epoch_count 2.0" in metrics.exposition().decode().splitlines()


def test_labels_are_bounded():
    empty = messages.ServiceStatus(epoch=1, version="0", uptime_s=0.0, runs=[], workers=[], store={})
    metrics = Metrics(lambda: empty)
    labels = {metrics.run_label(f"run-{number}") for number in range(3 * MAX_RUN_LABELS)}
    assert len(labels) == MAX_RUN_LABELS + 1
    assert "other" in labels
    assert metrics.run_label("run-0") == "run-0"


def test_requests_to_policy_servers_and_their_failures_are_summed_over_the_workers():
    def worker(name: str, **stats: float) -> messages.WorkerStatus:
        worker_stats = {key.replace("__", " "): value for key, value in stats.items()}
        return messages.WorkerStatus(
            worker=name,
            pool="default",
            capabilities=[],
            slots=1,
            leased=0,
            seen_s=0.0,
            draining=False,
            stats=worker_stats,
        )

    workers = [
        worker("a", policy_requests__x=7.0, policy_failures__x=2.0, spool_bytes=1.0),
        worker("b", policy_requests__x=3.0, policy_failures__x=0.0, policy_requests__y=1.0, policy_failures__y=1.0),
    ]
    status = messages.ServiceStatus(epoch=1, version="0", uptime_s=0.0, runs=[], workers=workers, store={})
    lines = Metrics(lambda: status).exposition().decode().splitlines()
    for line in (
        'headrace_policy_requests{server="x"} 10.0',
        'headrace_policy_failures{server="x"} 2.0',
        'headrace_policy_requests{server="y"} 1.0',
        'headrace_policy_failures{server="y"} 1.0',
    ):
        assert line in lines


def test_policy_servers_beyond_the_busiest_share_a_label():
    stats = {f"policy_requests {number}": float(number + 1) for number in range(MAX_SERVER_LABELS + 2)}
    crowd = messages.WorkerStatus(
        worker="a", pool="default", capabilities=[], slots=1, leased=0, seen_s=0.0, draining=False, stats=stats
    )
    status = messages.ServiceStatus(epoch=1, version="0", uptime_s=0.0, runs=[], workers=[crowd], store={})
    lines = Metrics(lambda: status).exposition().decode().splitlines()
    assert 'headrace_policy_requests{server="other"} 3.0' in lines  # the sum of the two smallest, 1 and 2
    assert len([line for line in lines if line.startswith("headrace_policy_requests{")]) == MAX_SERVER_LABELS + 1


def test_control_tokens_that_environments_spelled_are_added_up_for_each_pool():
    workers = [
        messages.WorkerStatus(
            worker=name, pool=pool, capabilities=[], slots=1, leased=0, seen_s=0.0, draining=False, stats=stats
        )
        for name, pool, stats in (
            ("a", "gpu", {"control_tokens": 2.0}),
            ("b", "gpu", {"control_tokens": 3.0}),
            ("c", "cpu", {}),
        )
    ]
    status = messages.ServiceStatus(epoch=1, version="0", uptime_s=0.0, runs=[], workers=workers, store={})
    lines = Metrics(lambda: status).exposition().decode().splitlines()
    assert 'headrace_pool_control_tokens{pool="gpu"} 5.0' in lines
    assert 'headrace_pool_control_tokens{pool="cpu"} 0.0' in lines
