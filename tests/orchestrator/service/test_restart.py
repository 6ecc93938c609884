"""State that survives the end of the process, graceful or not."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.errors import PortInUse
from headrace.server.auth import is_loopback
from headrace.trajectory import Provenance
from headrace.wire import messages
from headrace_orchestrator.buffer.log import log
from headrace_orchestrator.service.batches import bodies
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.serving import Api, Process, orchestrator, record_for, submission, until


async def test_nothing_acknowledged_is_lost_when_the_process_is_killed(process: Process):
    accepted: set[str] = set()
    runs = 0
    for killed in range(3):
        url = process.start(log_file_bytes=60_000)  # so that some kills happen during a change of files
        async with aiohttp.ClientSession(url) as session:
            api = Api(session)
            if not killed:
                await api.create_run(group_size=1, batch_size=2000)
            epoch = (await api.ask("GET", "/v1/status"))["epoch"]
            assert epoch == killed + 1
            listed = await stored_episodes(api)
            assert accepted <= listed

            async def worker(name: str, api: Api = api) -> None:
                while True:
                    attempts = await api.lease(name, free=8)
                    if not attempts:
                        return
                    body = submission((a, record_for(a, provenance=Provenance(worker=name))) for a in attempts)
                    results = await api.submit(body, worker=name)
                    accepted.update(result.episode for result in results if result.verdict == "accepted")

            submitting = [asyncio.create_task(worker(f"worker-{killed}-{number}")) for number in range(4)]
            goal = len(accepted) + 150
            await until(lambda goal=goal: reached(accepted, goal), deadline_s=60)
            process.kill()
            outcomes = await asyncio.gather(*submitting, return_exceptions=True)
            assert all(isinstance(outcome, aiohttp.ClientError) for outcome in outcomes), outcomes
        runs += 1

    url = process.start()
    async with aiohttp.ClientSession(url) as session:
        assert accepted <= await stored_episodes(Api(session))
    assert runs == 3
    assert len(accepted) >= 450


async def test_a_batch_is_the_same_bytes_after_a_restart(process: Process):
    async with aiohttp.ClientSession(process.start()) as session:
        api = Api(session)
        await api.create_run()
        await api.play(free=8)
        leased, _ = await api.pull_raw(request="leased")
        acked = await api.pull(request="acked")
        assert isinstance(acked, Batch)
        await api.ack(acked, "0.1")
        process.kill()

    async with aiohttp.ClientSession(process.start()) as session:
        api = Api(session)
        again, headers = await api.pull_raw(request="leased")
        assert again == leased
        assert headers[messages.HEADER_GENERATION] == "1"
        assert float(headers[messages.HEADER_LEASE_S]) == 300
        other, headers = await api.pull_raw(session="two")
        assert other == leased
        assert headers[messages.HEADER_GENERATION] == "2"
        assert (await api.ack(acked, "0.2", status=409))["code"] == "batch-already-acked"
        assert (await api.ask("GET", "/v1/runs/run"))["version"] == "0.1"


async def test_an_attempt_continues_over_a_restart(process: Process):
    async with aiohttp.ClientSession(process.start()) as session:
        api = Api(session)
        await api.create_run()
        attempts = await api.lease(free=4)
        process.kill()
    async with aiohttp.ClientSession(process.start()) as session:
        api = Api(session)
        results = await api.submit(submission((a, record_for(a)) for a in attempts))
        assert {result.verdict for result in results} == {"accepted"}
        assert isinstance(await api.pull(), Batch)


async def test_sigterm_is_graceful(process: Process):
    url = process.start()
    async with aiohttp.ClientSession(url) as session:
        api = Api(session)
        await api.create_run()
        pulling = asyncio.create_task(api.pull(wait_s=60))
        leasing = asyncio.create_task(api.ask("POST", "/v1/worker/lease", lease_of("other"), status=503))
        await until(lambda: waits(api))
        process.signal(signal.SIGTERM)
        empty = await pulling
        assert isinstance(empty, messages.EmptyReply)
        assert [reason.code for reason in empty.reasons] == ["draining"]
        assert (await leasing)["phase"] == "draining"
    assert await asyncio.to_thread(process.wait) == 0
    assert not (process.data / "address").exists()

    async with aiohttp.ClientSession(process.start()) as session:
        assert [run["name"] for run in await Api(session).ask("GET", "/v1/runs")] == ["run"]
    process.signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait) == 0


async def test_a_port_in_use_is_refused_with_advice(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir) as api:
        port = api.session._base_url.port  # type: ignore[union-attr]
        with pytest.raises(PortInUse, match=str(port)) as caught:
            async with orchestrator(tmp_path / "other", port=port):
                pass
        assert "--port" in caught.value.hint
    # The refused orchestrator has released its data directory.
    async with orchestrator(tmp_path / "other"):
        pass


async def test_a_data_directory_of_another_orchestrator_is_refused(process: Process):
    process.start()
    owner = int((process.data / "owner").read_text().split('"pid": ')[1].split(",")[0])
    assert owner != os.getpid()
    with pytest.raises(Exception, match=str(owner)) as caught:
        async with orchestrator(process.data):
            pass
    assert type(caught.value).__name__ == "DataDirectoryInUse"


async def test_the_address_is_in_the_data_directory(data_dir: Path):
    async with orchestrator(data_dir) as api:
        assert (data_dir / "address").read_text().strip() == str(api.session._base_url).rstrip("/")


async def test_a_damaged_record_costs_only_itself_over_a_restart(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=2, batch_size=2)
        attempts = await api.play(free=4)
        stored = await stored_episodes(api)
    flip_record(data_dir, attempts[1].episode)
    async with orchestrator(data_dir) as api:
        left = (await api.ask("GET", "/v1/runs/run"))["episodes"]["finished"]
        assert left == len(stored) - 1
        batch = await api.pull()
        assert isinstance(batch, Batch)
        batch.verify()
        async with api.session.get("/metrics") as answer:
            assert "headrace_log_damaged_records_total 1.0" in await answer.text()
        # The episode is still leased: it is granted again once the worker reports that it holds nothing.
        assert attempts[1].episode in {a.episode for a in await api.lease(free=8, holding=[])}


async def test_a_record_that_is_damaged_later_is_left_out_of_its_batch(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempts = await api.play(free=4)
        flip_record(data_dir, attempts[0].episode)
        batch = await api.pull()
        assert isinstance(batch, Batch)
        batch.verify()
        assert batch.manifest.counts.trajectories == 3
        listed = await api.ask("GET", "/v1/runs/run/trajectories")
        damaged = next(line for line in listed["trajectories"] if line["episode"] == attempts[0].episode)
        problem = await api.ask("GET", f"/v1/trajectories/{damaged['id']}", status=500)
        assert problem["code"] == "corrupt-record"
        assert problem["file"] == "00000001.log"


@pytest.mark.parametrize("whole", [True, False])
async def test_a_frozen_batch_that_is_damaged_later_is_dissolved_and_the_rest_is_served_in_the_same_pull(
    data_dir: Path, whole: bool
):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=2, batch_size=4, max_staleness=3)
        attempts = await api.play(free=4)
        before, _ = await api.pull_raw(request="r")
    lost = [a for a in attempts if (whole and a.group == attempts[0].group) or a is attempts[0]]
    async with orchestrator(data_dir) as api:
        for attempt in lost:  # after the log was read
            flip_record(data_dir, attempt.episode)
        await api.play(free=8)
        body, headers = await api.pull_raw(request="r")
        batch = Batch.parse(body)
        batch.verify()
        assert batch.id != Batch.parse(before).id
        episodes = {trajectory.episode for trajectory in batch.trajectories}
        assert episodes.isdisjoint(a.episode for a in lost)
        assert (attempts[0].group in {group.id for group in batch.manifest.groups}) is not whole
        assert (await api.pull_raw(request="r"))[0] == body
        await api.ask("POST", f"/v1/runs/run/batches/{Batch.parse(before).id}/ack", ack_of(headers), status=409)
        async with api.session.get("/metrics") as answer:
            assert f"headrace_log_damaged_records_total {1.0 + len(lost)}" in await answer.text()
        await api.ask("POST", f"/v1/runs/run/batches/{batch.id}/ack", ack_of(headers))


async def test_a_frozen_batch_whose_record_was_lost_in_the_log_does_not_block_its_run(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=2, max_staleness=3)
        attempts = await api.play(free=2)
        before, _ = await api.pull_raw(request="r")
    flip_record(data_dir, attempts[0].episode)
    async with orchestrator(data_dir) as api:
        await api.play(free=4)
        body, _ = await api.pull_raw(request="r")
        batch = Batch.parse(body)
        batch.verify()
        assert batch.id != Batch.parse(before).id
        assert (await api.pull_raw(request="r"))[0] == body


async def test_a_damaged_batch_that_is_streamed_is_dissolved_for_the_next_pull(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    monkeypatch.setattr(bodies, "CHUNK_BYTES", 1)
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=2, max_staleness=3)
        attempts = await api.play(free=4)
        before = Batch.parse((await api.pull_raw(request="r"))[0])
        episode = before.trajectories[-1].episode
        assert episode in {a.episode for a in attempts}
        flip_record(data_dir, episode)
        with pytest.raises(aiohttp.ClientError):
            await api.pull_raw(request="r")
        batch = Batch.parse((await api.pull_raw(request="r"))[0])
        batch.verify()
        assert batch.id != before.id
        assert episode not in {trajectory.episode for trajectory in batch.trajectories}


async def test_a_failing_disk_makes_the_service_not_ready_until_it_works_again(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(log, "FIRST_RETRY_S", 0.01)
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempts = await api.lease(free=1)
        waiting = asyncio.create_task(api.session.post("/v1/worker/lease", data=msgspec.json.encode(lease_of("w"))))
        pulling = asyncio.create_task(api.session.post("/v1/runs/run/pull", data=PULL))
        await until(lambda: waits(api))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse)
            body = submission([(attempts[0], record_for(attempts[0]))])
            problem = await api.ask("POST", "/v1/worker/submit?worker=worker-1", body, status=507)
            assert "Input/output error" in problem["detail"]
            problem = await api.ask("GET", "/readyz", status=503)
            assert problem["phase"] == "input/output error"
            await api.ask("GET", "/healthz")
            # Waiting requests fail, and new ones do not wait.
            assert {(await waiting).status, (await pulling).status} <= {503, 507}
            await api.ask("POST", "/v1/worker/lease", lease_of("w"), status=503)
            await api.ask("POST", "/v1/runs", {"name": "other"}, status=503)
        await until(lambda: ready(api))
        assert [result.verdict for result in await api.submit(body)] == ["duplicate"]
        assert [file.name for file in sorted((data_dir / "log").iterdir())] == ["00000001.log", "00000002.log"]
    async with orchestrator(data_dir) as api:
        assert [result.verdict for result in await api.submit(body)] == ["duplicate"]
        assert len((await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]) == 1


def test_settings_give_an_address_that_clients_can_use():
    from headrace_orchestrator.settings import Address

    assert Address("0.0.0.0", 80).url == "http://127.0.0.1:80"
    assert Address("::", 80).url == "http://[::1]:80"
    assert not is_loopback("not an address")


def lease_of(worker: str) -> messages.LeaseRequest:
    return messages.LeaseRequest(worker=worker, pool="empty", slots=1, free=1, wait_s=60)


def ack_of(headers: Any) -> messages.AckRequest:
    return messages.AckRequest(learner="learner", session="one", generation=int(headers[messages.HEADER_GENERATION]))


async def ready(api: Api) -> bool:
    async with api.session.get("/readyz") as answer:
        return answer.status == 200


PULL = msgspec.json.encode({"learner": "learner", "session": "one", "request": "r", "wait_s": 60})


async def waits(api: Api) -> bool:
    status = await api.ask("GET", "/v1/status")
    return bool(status["runs"][0]["learner_waiting"]) and bool(status["workers"])


async def reached(accepted: set[str], goal: int) -> bool:
    return len(accepted) >= goal


async def stored_episodes(api: Api) -> set[str]:
    found: set[str] = set()
    before = ""
    while True:
        page = await api.ask("GET", f"/v1/runs/run/trajectories?limit=1000{before}")
        found |= {line["episode"] for line in page["trajectories"]}
        if not page.get("next"):
            return found
        before = f"&before={page['next']}"


def flip_record(data: Path, episode: str) -> None:
    """Damage the stored trajectory of an episode."""
    file = data / "log" / "00000001.log"
    raw = file.read_bytes()
    frame = next(
        at
        for at in range(0, len(raw), 64)
        if raw[at : at + 8] == b"HRLOGFRM" and raw[at + 8] == 3 and episode.encode() in raw[at : at + 1024]
    )
    flip(file, frame + 64 + 32)


@pytest.mark.parametrize("how", ["deleted", "renamed"])
async def test_a_log_file_that_is_removed_while_it_is_written_costs_its_records_and_nothing_later(
    data_dir: Path, how: str
):
    async with orchestrator(data_dir) as api:
        await api.create_run(max_staleness=8)
        await api.play(free=4)
        held = await api.pull()
        assert isinstance(held, Batch)
        (file,) = (data_dir / "log").glob("*.log")
        if how == "deleted":
            file.unlink()
        else:
            file.rename(file.with_name("1.log.old"))
        # It is unknown whether this is stored, so it is not acknowledged.
        request = messages.LeaseRequest(worker="worker-1", slots=64, free=4, wait_s=0.0)
        problem = await api.ask("POST", "/v1/worker/lease", request, status=507)
        assert "deleted or renamed" in problem["detail"]

        async def it_goes_on() -> bool:
            return (await api.session.get("/readyz")).status == 200

        await until(it_goes_on, deadline_s=30)
        await api.ack(held)
        attempts = await api.lease(free=4, holding=[])
        await api.submit(submission((attempt, record_for(attempt)) for attempt in attempts))
        later = {attempt.episode for attempt in attempts}
    async with orchestrator(data_dir) as api:
        assert later
        assert later <= await stored_episodes(api)
        # All decisions are kept: the run, and the ack of the batch.
        assert (await api.ack(held, "0.1", status=409))["code"] == "batch-already-acked"
