"""Reads the binary answers of the service.

* A body of another kind than was asked for is an error of the service, never a decoding error.
* A damaged asset costs itself only.
"""

from __future__ import annotations

from headrace.assets import check_asset, unpack_assets
from headrace.client.requests import ApiResponse, unexpected_body
from headrace.errors import CorruptAsset, HeadraceError
from headrace.trajectory import Trajectory
from headrace.wire import codec, messages


def read_nothing(answer: ApiResponse) -> None:
    """The status says it all."""


def read_trajectory(answer: ApiResponse) -> Trajectory:
    """The trajectory in a record. Raises ServiceError."""
    if answer.media_type != messages.RECORDS_MEDIA_TYPE:
        raise unexpected_body(answer, "a trajectory record")
    return codec.decode(answer.body)


def read_asset(answer: ApiResponse) -> memoryview:
    """The bytes of an asset, unchecked. Raises ServiceError."""
    if answer.media_type != messages.ASSET_MEDIA_TYPE:
        raise unexpected_body(answer, "an asset")
    return answer.body.toreadonly()


def read_assets(answer: ApiResponse) -> list[memoryview | HeadraceError]:
    """The assets of an answer, or what is wrong with each; at least one. Raises ServiceError."""
    if answer.media_type != messages.ASSETS_MEDIA_TYPE:
        raise unexpected_body(answer, "assets")
    found = unpack_assets(answer.body)
    if not found:
        raise unexpected_body(answer, "any of the assets that were asked for")
    return found


def checked_asset(name: str, item: memoryview | HeadraceError) -> memoryview | HeadraceError:
    """An asset, or CorruptAsset in its place if it is not what its name says."""
    if isinstance(item, memoryview):
        try:
            check_asset(name, item)
        except CorruptAsset as error:
            return error
    return item
