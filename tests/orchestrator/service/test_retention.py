"""Retention in a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.batch.batch import Batch
from headrace.errors import StoreError
from headrace.wire import messages
from headrace_orchestrator.buffer.retention_rules import RetentionRules
from headrace_orchestrator.service.storage import retention as retaining
from headrace_orchestrator.service.storage.store import Store
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.serving import Api, orchestrator, until

SMALL = {"log_file_bytes": 40_000, "retention": RetentionRules(trajectories=20)}
"""Settings under which a file holds some dozen records."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaining, "RETAIN_EVERY_S", 0.02)


def files(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "log").glob("*.log"))


async def train(api: Api, batches: int) -> list[str]:
    """Play, pull and ack; returns the trajectories in order."""
    found: list[str] = []
    for _ in range(batches):
        await api.play(free=4)
        batch = await api.pull()
        assert isinstance(batch, Batch)
        found += batch.manifest.trajectories
        await api.ack(batch)
    return found


async def listed(api: Api) -> set[str]:
    page = await api.ask("GET", "/v1/runs/run/trajectories?limit=500")
    return {item["id"] for item in page["trajectories"]}


async def test_old_files_are_deleted_and_their_entries_leave_the_projection(data_dir: Path) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        stored = await train(api, 30)

        async def old_ones_are_gone() -> bool:
            return "00000001.log" not in files(data_dir) and stored[0] not in await listed(api)

        await until(old_ones_are_gone)
        left = await listed(api)
        assert left == set(stored[-len(left) :])
        assert 20 <= len(left) < 120
        await api.ask("GET", f"/v1/trajectories/{stored[0]}", status=404)
        await api.ask("GET", f"/v1/trajectories/{stored[-1]}/advantages")
    async with orchestrator(data_dir) as api:  # without retention
        assert await listed(api) <= left
        assert len(await train(api, 1)) == 4


async def test_a_file_that_an_open_batch_needs_is_not_deleted(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Mock()
    monkeypatch.setattr(retaining, "log", told)
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run(max_staleness=3)
        await api.play(free=4)
        body, headers = await api.pull_raw(request="held")
        held = Batch.parse(body, generation=int(headers[messages.HEADER_GENERATION]))
        await train(api, 30)
        assert len(files(data_dir)) > 4
        assert "00000001.log" in files(data_dir)

        async def it_is_said() -> bool:
            return bool(told.warning.called)

        await until(it_is_said)
        [call] = told.warning.call_args_list
        assert call.kwargs == {"number": 1, "run": "run", "needed_by": f"batch {held.manifest.batch}"}
        assert (await api.pull_raw(request="held"))[0] == body
        await api.ack(held)

        async def it_goes() -> bool:
            return "00000001.log" not in files(data_dir)

        await until(it_goes)


async def test_a_start_may_need_the_last_two_control_states(data_dir: Path) -> None:
    keep_nothing = {**SMALL, "retention": RetentionRules(trajectories=0)}
    async with orchestrator(data_dir, **keep_nothing) as api:
        await api.create_run()
        await train(api, 30)

        async def the_rest_is_gone() -> bool:
            return len(files(data_dir)) == 2

        await until(the_rest_is_gone)
    newest = data_dir / "log" / files(data_dir)[-1]
    for offset in range(64, newest.stat().st_size, 64):  # the state, in both copies
        flip(newest, offset)
    async with orchestrator(data_dir) as api:
        assert (await api.ask("GET", "/v1/runs/run"))["name"] == "run"


async def test_by_age_a_file_is_sealed_in_time_to_be_deleted(data_dir: Path) -> None:
    async with orchestrator(data_dir, retention=RetentionRules(age_s=0.2)) as api:
        await api.create_run()
        await train(api, 1)

        async def it_is_gone() -> bool:
            return not await listed(api)

        await until(it_is_gone, deadline_s=30)
        assert (await api.ask("GET", "/v1/runs/run"))["name"] == "run"


async def test_entries_of_a_file_that_is_missing_at_a_start_are_removed(data_dir: Path) -> None:
    async with orchestrator(data_dir, log_file_bytes=40_000) as api:
        await api.create_run()
        stored = await train(api, 20)
    (data_dir / "log" / "00000001.log").unlink()  # as after a crash right behind the deletion
    async with orchestrator(data_dir) as api:

        async def it_is_forgotten() -> bool:
            return stored[0] not in await listed(api)

        await until(it_is_forgotten)
        assert stored[-1] in await listed(api)


async def test_a_deletion_that_a_failing_disk_interrupts_is_completed_later(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([True, True])
    forget = Store.forget_files

    async def refuse_first(store: Store, numbers: Any) -> list[str]:
        if next(refusals, False):
            raise StoreError("No space left.", hint="")
        return await forget(store, numbers)

    monkeypatch.setattr(Store, "forget_files", refuse_first)
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        stored = await train(api, 30)

        async def it_is_forgotten() -> bool:
            return stored[0] not in await listed(api)

        await until(it_is_forgotten)
        assert not next(refusals, False)


async def test_at_the_bound_of_the_disk_admission_stops_and_a_pull_reports_it(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended data counts at once, without a step of retention."""
    monkeypatch.setattr(retaining, "RETAIN_EVERY_S", 3600.0)
    async with orchestrator(data_dir, max_disk_bytes=60_000) as api:
        await api.create_run(batch_size=16, group_size=1, max_staleness=8)

        async def nothing_is_admitted() -> list[str]:
            played = await api.play(free=4)
            reply = await api.pull()
            if isinstance(reply, Batch):
                await api.ack(reply)
                return []
            codes = [reason.code for reason in reply.reasons]
            return codes if "disk-bound" in codes and not played else []

        assert await until(nothing_is_admitted)
        assert 50_000 < sum(path.stat().st_size for path in (data_dir / "log").iterdir()) < 70_000


async def test_files_in_use_do_not_make_an_idle_log_grow(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[None] = []
    step = retaining.RetentionLoop.step

    async def count(loop: retaining.RetentionLoop) -> list[int]:
        steps.append(None)
        return await step(loop)

    monkeypatch.setattr(retaining.RetentionLoop, "step", count)
    async with orchestrator(data_dir, retention=RetentionRules(age_s=0.1)) as api:
        await api.create_run()
        await api.play(free=4)  # never pulled

        async def much_later() -> bool:
            return len(steps) > 100

        await until(much_later, deadline_s=60)
        assert len(files(data_dir)) < 6
        assert isinstance(await api.pull(), Batch)


async def test_a_foreign_file_is_named_and_blocks_retention_only_while_it_exists(
    data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        odd = data_dir / "log" / "copy of 00000001.log"
        odd.write_bytes(b"")
        told = ""

        async def it_is_named() -> bool:
            nonlocal told
            told += capfd.readouterr().out
            return odd.name in told

        await until(it_is_named)
        await train(api, 30)
        assert "00000001.log" in files(data_dir)
        odd.unlink()

        async def old_ones_go() -> bool:
            return "00000001.log" not in files(data_dir)

        await until(old_ones_go)
    assert (told + capfd.readouterr().out).count("retention failed") == 1
