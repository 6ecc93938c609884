"""Assets on disk and over HTTP: promises, references, damage."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.assets import AssetData, make_asset
from headrace.errors import CorruptAsset, InvalidAsset, StoreError, UnknownAsset
from headrace.store.asset_files import asset_path
from headrace.trajectory import ContentPart, Message
from headrace.wire import messages
from headrace.wire.asset_bodies import unpack_assets
from headrace_orchestrator.buffer.assets import files as asset_files
from headrace_orchestrator.buffer.assets.check import check_assets
from headrace_orchestrator.buffer.assets.files import AssetFiles
from headrace_orchestrator.buffer.assets.store import AssetStore
from tests.orchestrator.serving import Api, orchestrator, record_for, submission

ONE, TWO, THREE = (make_asset(bytes([value]) * 1000, "image/png") for value in range(3))
PROMISE_S = 10.0


class StoreUnderTest:
    """An asset store with a manual clock, and references that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.referenced: set[str] = set()
        self.assets = AssetStore(
            folder, lambda names: self.referenced.intersection(names), clock=lambda: self.now, promise_s=PROMISE_S
        )

    def files(self) -> set[str]:
        return {path.name for path in self.assets.folder.glob("??/*")}


@asynccontextmanager
async def store_at(folder: Path) -> AsyncIterator[StoreUnderTest]:
    store = StoreUnderTest(folder)
    store.assets.open()
    try:
        yield store
    finally:
        await store.assets.close()


async def test_an_asset_is_stored_once_under_its_name_and_read_back(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        await asyncio.gather(*(store.assets.add(ONE.name, ONE.data) for _ in range(8)))
        await store.assets.add(TWO.name, TWO.data)
        assert await store.assets.read(ONE.name) == ONE.data
        assert store.files() == {ONE.name, TWO.name}
        assert (store.assets.count, store.assets.size_bytes) == (2, 2000)
    async with store_at(tmp_path) as store:
        await store.assets.add(THREE.name, THREE.data)
        await store.assets.measure()
        assert (store.assets.count, store.assets.size_bytes) == (3, 3000)
        await store.assets.measure()
        assert (store.assets.count, store.assets.size_bytes) == (3, 3000)
        assert store.assets.claim([ONE.name, "0" * 64]) == ["0" * 64]


async def test_bytes_that_do_not_match_their_name_are_refused(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        for name, data in ((ONE.name, TWO.data), ("../owner", b"x"), (ONE.name.upper(), ONE.data), (ONE.name, b"")):
            with pytest.raises(InvalidAsset):
                await store.assets.add(name, data)
        assert store.assets.claim([ONE.name, "../owner"]) == [ONE.name, "../owner"]
        assert not store.files()


async def test_a_promise_keeps_an_asset_until_its_deadline(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        await store.assets.add(ONE.name, ONE.data)
        store.now = 9.0
        assert await store.assets.collect() == 0
        assert store.assets.claim([ONE.name]) == []  # renews the promise
        store.now = 18.9
        assert await store.assets.collect() == 0
        store.now = 19.0
        assert await store.assets.collect() == 1
        assert not store.files()
        assert (store.assets.count, store.assets.size_bytes) == (0, 0)
        assert not store.assets.is_stored(ONE.name)


async def test_a_referenced_asset_stays_until_it_is_a_candidate_without_references(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        await store.assets.add(ONE.name, ONE.data)
        store.referenced = {ONE.name}
        store.now = 100.0
        assert await store.assets.collect() == 0
        store.referenced.clear()
        assert await store.assets.collect() == 0  # it is not a candidate
        store.assets.add_candidates([ONE.name])
        assert await store.assets.collect() == 1


async def test_an_asset_that_is_being_deleted_does_not_count_as_stored_and_can_be_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(tmp_path) as store:
        await store.assets.measure()
        await store.assets.add(ONE.name, ONE.data)
        store.now = 100.0
        decided, go_on = threading.Event(), threading.Event()
        delete = AssetFiles.delete

        def delete_later(files: AssetFiles, names: Sequence[str]) -> list[str]:
            decided.set()
            assert go_on.wait(10)
            return delete(files, names)

        monkeypatch.setattr(AssetFiles, "delete", delete_later)
        collecting = asyncio.create_task(store.assets.collect())
        assert await asyncio.to_thread(decided.wait, 10)
        assert store.files() == {ONE.name}  # the file still exists, but does not count as stored
        assert store.assets.claim([ONE.name]) == [ONE.name]
        adding = asyncio.create_task(store.assets.add(ONE.name, ONE.data))
        go_on.set()
        assert await collecting == 1
        await adding
        assert await store.assets.read(ONE.name) == ONE.data
        assert store.assets.is_stored(ONE.name)
        assert (store.assets.count, store.assets.size_bytes) == (1, 1000)


async def test_an_asset_that_is_being_written_does_not_count_as_stored(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        adding = asyncio.create_task(store.assets.add(ONE.name, ONE.data))
        while not asset_path(tmp_path, ONE.name).exists() and not adding.done():
            assert store.assets.claim([ONE.name]) == [ONE.name]
            await asyncio.sleep(0)
        await adding
        assert store.assets.claim([ONE.name]) == []


async def test_unreferenced_assets_of_an_earlier_service_are_found_after_the_next_start(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        for asset in (ONE, TWO):
            await store.assets.add(asset.name, asset.data)
        (tmp_path / "new" / THREE.name).write_bytes(b"half")
    async with store_at(tmp_path) as store:
        assert not list((tmp_path / "new").iterdir())
        store.referenced = {TWO.name}
        assert store.assets.claim([ONE.name]) == []
        await store.assets.collect_all()
        assert store.files() == {ONE.name, TWO.name}  # ONE is promised, TWO is referenced
        store.now = PROMISE_S
        await store.assets.collect()
        assert store.files() == {TWO.name}


async def test_a_failed_write_is_reported_to_all_senders_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(tmp_path) as store:
        refuse = True

        def sync(descriptor: int) -> None:
            if refuse:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(asset_files.os, "fsync", sync)
        errors = await asyncio.gather(
            *(store.assets.add(asset.name, asset.data) for asset in (ONE, TWO, ONE)), return_exceptions=True
        )
        assert [type(error) for error in errors] == [StoreError] * 3
        assert "No space left" in str(errors[0])
        assert not store.files()
        assert store.assets.claim([ONE.name]) == [ONE.name]
        refuse = False
        await store.assets.add(ONE.name, ONE.data)
        assert store.assets.is_stored(ONE.name)
        assert (store.assets.count, store.assets.size_bytes) == (1, 1000)


async def test_a_damaged_asset_is_named_and_asked_for_again(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        await store.assets.add(ONE.name, ONE.data)
        asset_path(tmp_path, ONE.name).write_bytes(b"other")
        with pytest.raises(CorruptAsset, match=ONE.name):
            await store.assets.read(ONE.name)
        assert store.assets.claim([ONE.name]) == [ONE.name]
        await store.assets.add(ONE.name, ONE.data)
        assert await store.assets.read(ONE.name) == ONE.data
        assert store.assets.count == 1
        with pytest.raises(UnknownAsset):
            await store.assets.read(TWO.name)


async def test_a_check_lists_what_is_damaged_missing_and_unreferenced(tmp_path: Path) -> None:
    async with store_at(tmp_path) as store:
        for asset in (ONE, TWO):
            await store.assets.add(asset.name, asset.data)
    sizes: list[int] = []
    report = check_assets(tmp_path, {ONE.name, THREE.name}, sizes.append)
    assert report == (2, 2000, {}, [THREE.name], [TWO.name])
    assert sizes == [1000, 1000]
    asset_path(tmp_path, ONE.name).write_bytes(b"other")
    report = check_assets(tmp_path, {ONE.name, TWO.name})
    assert list(report.damaged) == [ONE.name]
    assert (report.missing, report.unreferenced) == ([], [])


# Over HTTP


def showing(*assets: AssetData) -> dict[str, Any]:
    """Fields of a trajectory that refers to these assets."""
    parts = [ContentPart(type="image", asset=asset.name) for asset in assets]
    return {"messages": [Message(role="user", content=parts)], "assets": [asset.entry for asset in assets]}


async def claim(api: Api, *assets: AssetData) -> list[str]:
    names = [asset.name for asset in assets]
    return list((await api.ask("POST", "/v1/worker/assets", {"names": names}))["missing"])


async def send(api: Api, asset: AssetData, *, status: int = 200) -> Any:
    return await api.ask("PUT", f"/v1/assets/{asset.name}", asset.data, status=status)


async def fetch(api: Api, name: str) -> bytes:
    async with api.session.get(f"/v1/assets/{name}") as answer:
        assert answer.status == 200, await answer.read()
        return await answer.read()


async def submit_one(api: Api, *assets: AssetData) -> messages.SubmitResult:
    (attempt,) = await api.lease(free=1)
    (result,) = await api.submit(submission([(attempt, record_for(attempt, **showing(*assets)))]))
    return result


async def test_a_record_is_stored_only_with_all_its_assets(data_dir: Path) -> None:
    async with orchestrator(data_dir) as api:
        await api.create_run()
        (attempt,) = await api.lease(free=1)
        body = submission([(attempt, record_for(attempt, **showing(ONE, TWO)))])
        assert await claim(api, ONE, TWO) == [ONE.name, TWO.name]
        await send(api, ONE)
        (result,) = await api.submit(body)
        assert result.verdict == "assets-missing"
        assert result.problem is not None
        assert (result.problem["code"], result.problem["assets"]) == ("assets-missing", [TWO.name])
        assert await claim(api, ONE, TWO) == [TWO.name]
        await send(api, TWO)
        assert [result.verdict for result in await api.submit(body)] == ["accepted"]
        assert [result.verdict for result in await api.submit(body)] == ["duplicate"]
        assert await fetch(api, ONE.name) == ONE.data
        store = (await api.ask("GET", "/v1/status"))["store"]
        assert (store["assets"], store["asset_bytes"]) == (2, 2000)
        async with api.session.get("/metrics") as answer:
            metrics = await answer.text()
        assert "headrace_store_assets 2.0" in metrics
        assert "headrace_store_asset_bytes 2000.0" in metrics


async def test_G07_a_record_keeps_its_assets_before_the_projection_knows_of_it(  # noqa: N802
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_orchestrator.service.lifecycle.PROJECT_EVERY_S", 1000.0)
    async with orchestrator(data_dir, asset_promise_s=0.5) as api:
        await api.create_run()
        await send(api, ONE)
        assert (await submit_one(api, ONE)).verdict == "accepted"
        for number in range(200, 203):  # each is deleted when its promise expires, as ONE would be without a reference
            passing = make_asset(bytes([number]), "image/png")
            await send(api, passing)
            async with asyncio.timeout(10):
                while (await api.ask("GET", "/v1/status"))["store"]["assets"] > 1:
                    await asyncio.sleep(0.01)
        assert await fetch(api, ONE.name) == ONE.data


async def test_assets_are_read_without_a_service(data_dir: Path) -> None:
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await send(api, ONE)
        await submit_one(api, ONE)
    data = headrace.open(data_dir)
    (trajectory,) = data.trajectories()
    assert [data.asset(asset.name) for asset in trajectory.assets] == [ONE.data]
    asset_path(data_dir / "assets", ONE.name).write_bytes(b"other")
    with pytest.raises(CorruptAsset, match=ONE.name):
        data.asset(ONE.name)


async def test_assets_over_http_are_refused_and_missed_by_name(data_dir: Path) -> None:
    async with orchestrator(data_dir) as api:
        await api.ask("PUT", f"/v1/assets/{ONE.name}", TWO.data, status=422)
        await api.ask("GET", f"/v1/assets/{ONE.name}", status=404)
        await api.ask("GET", "/v1/assets/epoch", status=404)
        await send(api, ONE)
        asset_path(data_dir / "assets", ONE.name).write_bytes(b"other")
        problem = await api.ask("GET", f"/v1/assets/{ONE.name}", status=500)
        assert (problem["code"], problem["asset"]) == ("corrupt-asset", ONE.name)
        await api.ask("POST", "/v1/worker/assets", {"names": [ONE.name] * 5000}, status=400)


async def test_a_response_holds_several_assets_up_to_its_maximum_size(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_orchestrator.service.service.ASSETS_BYTES", 2500)
    async with orchestrator(data_dir) as api:
        for asset in (ONE, TWO, THREE):
            await send(api, asset)
        names = [ONE.name, "0" * 64, TWO.name, THREE.name]
        async with api.session.post("/v1/assets", json={"names": names}) as answer:
            items = unpack_assets(await answer.read())
        assert [bytes(item) if isinstance(item, memoryview) else item.code for item in items] == [
            ONE.data,
            "unknown-asset",
            TWO.data,
        ]


async def test_references_survive_a_restart_and_a_lost_projection(data_dir: Path) -> None:
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await send(api, ONE)
        await send(api, TWO)
        assert (await submit_one(api, ONE)).verdict == "accepted"
    for name in os.listdir(data_dir):
        if name.startswith("projection"):
            (data_dir / name).unlink()
    async with orchestrator(data_dir, asset_promise_s=0.05) as api:
        async with asyncio.timeout(10):
            while asset_path(data_dir / "assets", TWO.name).exists():
                await asyncio.sleep(0.01)
        assert await fetch(api, ONE.name) == ONE.data
        await api.ask("GET", f"/v1/assets/{TWO.name}", status=404)
