"""Operations on stored trajectories and their assets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.assets import check_asset
from headrace.client.operations.retries import RetryingOperations
from headrace.client.requests import ApiCall, Operation, json_reader, request
from headrace.client.responses import checked_asset, read_asset, read_assets, read_trajectory
from headrace.errors import HeadraceError
from headrace.trajectory import Trajectory
from headrace.wire import messages

PAGE = 200
"""Trajectories on one page of a listing."""


class TrajectoryOperations(RetryingOperations):
    def page(self, run: str, filters: Mapping[str, Any], limit: int, before: str) -> Operation[messages.TrajectoryList]:
        query = {**filters, "limit": limit, "before": before or None}
        listing = request("GET", "runs", run, "trajectories", query=query)
        return self.call(ApiCall(request=listing, read=json_reader(messages.TrajectoryList)))

    def trajectory(self, trajectory: str) -> Operation[Trajectory]:
        """A stored trajectory. Raises UnknownTrajectory."""
        return self.call(ApiCall(request=request("GET", "trajectories", trajectory), read=read_trajectory))

    def asset(self, name: str) -> Operation[memoryview]:
        """The bytes of an image or a large array, checked against its name. Raises UnknownAsset, CorruptAsset."""
        asset = yield from self.call(ApiCall(request=request("GET", "assets", name), read=read_asset))
        check_asset(name, asset)
        return asset

    def assets(self, names: Sequence[str]) -> Operation[dict[str, memoryview | HeadraceError]]:
        """Fetch assets by name, with the error in place of each that failed."""
        assets: dict[str, memoryview | HeadraceError] = {}
        remaining = list(dict.fromkeys(names))
        while remaining:
            body = messages.AssetsRequest(names=remaining[: messages.MAX_ASSET_NAMES])
            items = yield from self.call(ApiCall(request=request("POST", "assets", body=body), read=read_assets))
            for name, item in zip(body.names, items, strict=False):
                assets[name] = checked_asset(name, item)
            remaining = remaining[len(items) :]
        return assets

    def advantages(self, trajectory: str) -> Operation[messages.TrajectoryAdvantages]:
        """The advantages of a trajectory's turns in the batch that it was last frozen into.

        Raises UnknownTrajectory, and UnknownBatch while it is not in a batch.
        """
        return self.get(messages.TrajectoryAdvantages, "trajectories", trajectory, "advantages")
