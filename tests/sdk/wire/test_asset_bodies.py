"""Several assets in one body."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest, UnknownAsset
from headrace.wire.asset_bodies import pack_assets, unpack_assets


def test_a_body_holds_several_assets_or_the_error_in_place_of_one() -> None:
    missing = UnknownAsset("Not here.", asset="x")
    items = unpack_assets(pack_assets([b"a" * 65, missing, b"", b"b"]))
    assert [bytes(item) for item in (items[0], items[2], items[3]) if isinstance(item, memoryview)] == [
        b"a" * 65,
        b"",
        b"b",
    ]
    assert isinstance(items[1], UnknownAsset)


def test_a_truncated_body_is_refused() -> None:
    whole = pack_assets([b"a" * 65])
    for cut in (0, 3, 20, len(whole) - 64):
        with pytest.raises(InvalidRequest):
            unpack_assets(whole[:cut])
