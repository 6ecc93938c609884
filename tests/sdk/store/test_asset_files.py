"""The files of stored assets."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.assets import make_asset
from headrace.errors import CorruptAsset, UnknownAsset
from headrace.store.asset_files import asset_path, read_asset, verify_asset


def test_an_asset_is_read_only_if_its_bytes_match_its_name(tmp_path: Path) -> None:
    asset = make_asset(b"pixels", "image/png")
    path = asset_path(tmp_path, asset.name)
    path.parent.mkdir()
    path.write_bytes(asset.data)
    assert read_asset(tmp_path, asset.name) == asset.data
    assert verify_asset(tmp_path, asset.name) == 6
    path.write_bytes(b"pixelz")
    for read in (read_asset, verify_asset):
        with pytest.raises(CorruptAsset, match=asset.name):
            read(tmp_path, asset.name)
        with pytest.raises(UnknownAsset, match="is not stored"):
            read(tmp_path, "0" * 64)
    with pytest.raises(UnknownAsset):
        read_asset(tmp_path, "../../etc/passwd")


def test_an_asset_is_stored_as_its_name_in_a_folder_named_by_the_first_two_letters(tmp_path: Path) -> None:
    name = make_asset(b"pixels", "image/png").name
    assert asset_path(tmp_path, name) == tmp_path / name[:2] / name
