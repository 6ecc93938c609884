"""Readers of the service's binary responses.

* A body of the wrong media type is an error of the service, never a decoding error.
* A damaged asset does not affect the others.
"""

from __future__ import annotations

from headrace.assets import check_asset
from headrace.client.requests import ApiResponse, unexpected_body
from headrace.errors import CorruptAsset, HeadraceError
from headrace.trajectory import Trajectory
from headrace.wire import codec, messages
from headrace.wire.asset_bodies import unpack_assets


def read_nothing(response: ApiResponse) -> None:
    """Ignore the body: the status is all that counts."""


def read_trajectory(response: ApiResponse) -> Trajectory:
    """The trajectory in a record. Raises ServiceError."""
    if response.media_type != messages.RECORDS_MEDIA_TYPE:
        raise unexpected_body(response, "a trajectory record")
    return codec.decode(response.body)


def read_asset(response: ApiResponse) -> memoryview:
    """The bytes of an asset, unchecked. Raises ServiceError."""
    if response.media_type != messages.ASSET_MEDIA_TYPE:
        raise unexpected_body(response, "an asset")
    return response.body.toreadonly()


def read_assets(response: ApiResponse) -> list[memoryview | HeadraceError]:
    """The assets in a response, at least one, with the error in place of each that failed. Raises ServiceError."""
    if response.media_type != messages.ASSETS_MEDIA_TYPE:
        raise unexpected_body(response, "assets")
    assets = unpack_assets(response.body)
    if not assets:
        raise unexpected_body(response, "any of the requested assets")
    return assets


def checked_asset(name: str, item: memoryview | HeadraceError) -> memoryview | HeadraceError:
    """The asset, or CorruptAsset in its place if its bytes do not match its name."""
    if isinstance(item, memoryview):
        try:
            check_asset(name, item)
        except CorruptAsset as error:
            return error
    return item
