"""Assets: names, arrays and images."""

from __future__ import annotations

import contextlib
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Image
from headrace.assets import ARRAY_MEDIA_TYPE, check_asset, decode_array, encode_array, make_asset
from headrace.errors import CorruptAsset, InvalidAsset, WrongDtype, WrongShape

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
def test_an_array_decodes_to_the_encoded_one_as_a_read_only_view(kind: str, shape: list[int], transposed: bool) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 101).astype(kind).reshape(shape)
    array = array.T if transposed else array
    asset = encode_array(array)
    decoded = decode_array(asset.data)
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    assert np.array_equal(decoded, array)
    assert not decoded.flags.writeable
    assert asset == encode_array(array.copy())


def test_only_arrays_of_numbers_are_assets_so_that_nothing_is_unpickled() -> None:
    for array in (np.array([object()]), np.array(["x"]), np.zeros(1, [("a", "<i4")])):
        with pytest.raises(WrongDtype, match="cannot be an asset"):
            encode_array(array)


def test_damaged_bytes_raise_invalid_asset_and_no_other_error() -> None:
    good = encode_array(PIXELS).data
    for cut in range(len(good)):
        with pytest.raises(InvalidAsset):
            decode_array(good[:cut])
    for position in range(len(good)):
        for value in (0, 0x2D, 0x39, 0xFF):
            bad = bytearray(good)
            bad[position] = value
            with contextlib.suppress(InvalidAsset):
                decode_array(bad)  # it may still be an array; the name is what detects changed bytes


def test_routed_experts_are_encoded_as_an_array() -> None:
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


def test_images_with_equal_content_are_equal() -> None:
    assert Image(data=PIXELS) == Image(data=PIXELS.copy())
    assert Image(data=PIXELS) != Image(data=PIXELS, text="a board")
    assert Image(data=PIXELS) != Image(data=PIXELS + 1)
