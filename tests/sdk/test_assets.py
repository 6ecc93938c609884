"""Assets: names, arrays, images, and their files."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Image
from headrace.assets import (
    ARRAY_MEDIA_TYPE,
    asset_path,
    check_asset,
    decode_array,
    encode_array,
    make_asset,
    pack_assets,
    read_asset,
    unpack_assets,
    verify_asset,
)
from headrace.errors import CorruptAsset, InvalidAsset, InvalidRequest, UnknownAsset, WrongDtype, WrongShape

KINDS = ("?", "u1", "i1", "<u2", "<i4", "<i8", ">i4", "<f2", "<f4", "<f8")
PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def test_the_name_of_an_asset_is_the_sha256_of_its_bytes() -> None:
    asset = make_asset(b"pixels", "image/png")
    assert asset.name == hashlib.sha256(b"pixels").hexdigest()
    assert (asset.entry.media_type, asset.entry.size_bytes) == ("image/png", 6)
    check_asset(asset.name, b"pixels")
    with pytest.raises(CorruptAsset, match="its 6 bytes have the SHA-256"):
        check_asset(asset.name, b"pixelz")


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), shape=st.lists(st.integers(0, 4), max_size=4), transposed=st.booleans())
def test_an_array_decodes_to_what_was_encoded(kind: str, shape: list[int], transposed: bool) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 101).astype(kind).reshape(shape)
    array = array.T if transposed else array
    asset = encode_array(array)
    found = decode_array(asset.data)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    assert not found.flags.writeable
    assert asset == encode_array(array.copy())


def test_only_numbers_are_arrays() -> None:
    for array in (np.array([object()]), np.array(["x"]), np.zeros(1, [("a", "<i4")])):
        with pytest.raises(WrongDtype, match="is no asset"):
            encode_array(array)


def test_damaged_bytes_are_no_array_and_nothing_else_is_raised() -> None:
    good = encode_array(PIXELS).data
    for cut in range(len(good)):
        with pytest.raises(InvalidAsset):
            decode_array(good[:cut])
    for position in range(len(good)):
        for value in (0, 0x2D, 0x39, 0xFF):
            bad = bytearray(good)
            bad[position] = value
            with contextlib.suppress(InvalidAsset):
                decode_array(bad)  # which may be a good one; that the bytes are the right ones is what the name is for


def test_routed_experts_travel_as_an_array_that_a_segment_names() -> None:
    experts = np.random.default_rng(1).integers(0, 128, (40, 24, 8)).astype(np.uint8)
    asset = encode_array(experts)
    assert asset.media_type == ARRAY_MEDIA_TYPE
    assert np.array_equal(decode_array(asset.data), experts)


def test_an_image_is_copied_when_it_is_encoded() -> None:
    buffer = PIXELS.copy()
    image = Image(data=buffer)
    names = []
    for value in range(3):
        buffer[:] = value
        asset = image.encoded()
        names.append(asset.name)
        buffer[:] = 99
        assert np.all(decode_array(asset.data) == value)
    assert len(set(names)) == 3


def test_an_image_is_bytes_with_a_media_type_or_pixels() -> None:
    assert Image(data=bytearray(b"x"), media_type="image/png").encoded() == make_asset(b"x", "image/png")
    assert Image(data=PIXELS[:, :, 0]).encoded().media_type == ARRAY_MEDIA_TYPE
    for image, error in (
        (Image(data=b"x"), InvalidAsset),
        (Image(data=b"x", media_type="text/html"), InvalidAsset),
        (Image(data=b"", media_type="image/png"), InvalidAsset),
        (Image(data="x", media_type="image/png"), InvalidAsset),  # type: ignore[arg-type]
        (Image(data=PIXELS, media_type="image/png"), InvalidAsset),
        (Image(data=PIXELS.astype(np.float32)), WrongDtype),  # type: ignore[arg-type]
        (Image(data=PIXELS[:, :, :2]), WrongShape),
        (Image(data=PIXELS[:0]), WrongShape),
        (Image(data=PIXELS[0, 0]), WrongShape),
    ):
        with pytest.raises(error):
            image.encoded()


def test_images_that_show_the_same_are_equal() -> None:
    assert Image(data=PIXELS) == Image(data=PIXELS.copy())
    assert Image(data=PIXELS) != Image(data=PIXELS, text="a board")
    assert Image(data=PIXELS) != Image(data=PIXELS + 1)


def test_bytes_that_are_not_those_of_their_name_are_never_given_out(tmp_path: Path) -> None:
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
        with pytest.raises(UnknownAsset, match="There is no asset"):
            read(tmp_path, "0" * 64)
    with pytest.raises(UnknownAsset):
        read_asset(tmp_path, "../../etc/passwd")


def test_several_assets_are_one_body_and_each_is_aligned_in_it() -> None:
    missing = UnknownAsset("Not here.", asset="x")
    found = unpack_assets(pack_assets([b"a" * 65, missing, b"", b"b"]))
    assert [bytes(item) for item in (found[0], found[2], found[3]) if isinstance(item, memoryview)] == [
        b"a" * 65,
        b"",
        b"b",
    ]
    assert isinstance(found[1], UnknownAsset)
    whole = pack_assets([b"a" * 65])
    for cut in (0, 3, 20, len(whole) - 64):
        with pytest.raises(InvalidRequest):
            unpack_assets(whole[:cut])
