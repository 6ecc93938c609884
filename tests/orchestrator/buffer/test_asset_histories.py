"""Random histories of the asset store against a model: promised and referenced assets stay, the rest is deleted."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.assets import AssetData, make_asset
from headrace_orchestrator.buffer.assets.check import check_assets
from headrace_orchestrator.buffer.assets.store import AssetStore

PROMISE_S = 10.0
POOL = [make_asset(bytes([number]) * (number + 1), "image/png") for number in range(4)]
ASSETS = st.sampled_from(POOL)


class Histories(RuleBasedStateMachine):
    """``promised``: deadlines of the promises; ``records``: assets of each stored record."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-assets-"))
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.promised: dict[str, float] = {}
        self.records: list[set[str]] = []
        self.start()

    def start(self) -> None:
        self.assets = AssetStore(self.folder, self.referenced, clock=lambda: self.now, promise_s=PROMISE_S)
        self.assets.open()
        self.runner.run(self.assets.measure())

    def referenced(self, names: object) -> set[str]:
        return set().union(*self.records)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.assets.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def keep(self, asset: AssetData) -> None:
        self.promised[asset.name] = self.now + PROMISE_S

    @property
    def kept(self) -> set[str]:
        promised = {name for name, deadline in self.promised.items() if deadline > self.now}
        return promised | self.referenced(())

    # Actions of workers

    @rule(asset=ASSETS)
    def send(self, asset: AssetData) -> None:
        self.runner.run(self.assets.add(asset.name, asset.data))
        self.keep(asset)

    @rule(asset=ASSETS)
    def ask(self, asset: AssetData) -> None:
        missing = self.assets.claim([asset.name])
        assert not (missing and asset.name in self.kept), "a kept asset is reported as missing"
        if not missing:
            self.keep(asset)

    @rule(assets=st.sets(ASSETS, min_size=1))
    def submit(self, assets: set[AssetData]) -> None:
        names = {asset.name for asset in assets}
        if all(map(self.assets.is_stored, names)):
            self.records.append(names)

    # Events of the service

    @rule(seconds=st.sampled_from([1.0, PROMISE_S / 2, PROMISE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def collect(self) -> None:
        self.runner.run(self.assets.collect())

    @rule(asset=ASSETS)
    def collect_while_it_comes(self, asset: AssetData) -> None:
        async def both() -> None:
            await asyncio.gather(self.assets.collect(), self.assets.add(asset.name, asset.data), self.assets.collect())

        self.runner.run(both())
        self.keep(asset)

    @precondition(lambda self: self.records)
    @rule()
    def delete_the_oldest_file(self) -> None:
        self.assets.add_candidates(self.records.pop(0))

    @rule()
    def restart(self) -> None:
        self.runner.run(self.assets.close())
        self.start()
        # Earlier promises hold until they have surely expired.
        self.now += PROMISE_S
        self.runner.run(self.assets.collect_all())

    @rule()
    def everything_expires(self) -> None:
        """In the end no unreferenced asset is left."""
        self.now += PROMISE_S
        self.runner.run(self.assets.collect())
        assert self.assets.count == len(self.referenced(()))

    @invariant()
    def kept_assets_are_stored(self) -> None:
        if not hasattr(self, "assets"):
            return
        report = check_assets(self.folder, self.kept)
        assert (report.damaged, report.missing) == ({}, []), report
        assert (report.assets, report.size_bytes) == (self.assets.count, self.assets.size_bytes)


Histories.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
